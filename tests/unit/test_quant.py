"""Case 30: FP8 rows and their scales."""

import pytest
import torch
from torch import Tensor

from moe_ep.quant import dequantize_fp8, quantize_fp8

SCALES = ("fp32", "power_of_two")


def samples() -> list[Tensor]:
    g = torch.Generator().manual_seed(torch.seed() % 2**32)
    x = torch.randn(64, 256, generator=g)
    spread = x * torch.logspace(-30, 30, 64).unsqueeze(1)
    within = x * torch.logspace(-6, 3, 256)
    edges = torch.tensor([448.0, 447.9, 1.0, 2.0**-9, 464.0, 240.0, 1e-3, 0.0]).repeat(1, 32)
    return [
        x,
        spread,
        within,
        edges,
        -edges,
        torch.full((1, 256), 2e38),
        torch.full((1, 256), 7e-40),
    ]


@pytest.mark.parametrize("scale", SCALES)
def test_case_30_error_bound(scale: str) -> None:
    for x in samples():
        q, scales = quantize_fp8(x, scale)
        assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and q.is_contiguous()
        assert scales.dtype == torch.float32 and scales.is_contiguous()
        assert scales.shape == (x.shape[0], x.shape[1] // 128)
        back = dequantize_fp8(q, scales, torch.float64)
        bound = x.double().abs() / 16 + scales.double().repeat_interleave(128, 1) * 2.0**-10
        assert ((back - x.double()).abs() <= bound).all()
        assert torch.equal(back.sign() * x.sign(), back.sign().abs() * x.sign().abs())


@pytest.mark.parametrize("scale", SCALES)
def test_scales_cover_the_block(scale: str) -> None:
    for x in samples():
        _, scales = quantize_fp8(x, scale)
        need = x.double().unflatten(1, (-1, 128)).abs().amax(2) / 448
        mantissa, _ = torch.frexp(scales)
        if scale == "power_of_two":
            assert (mantissa == 0.5).all()
            assert (scales.double() >= need).all()
            assert (scales.double() < 2 * need.clamp(min=2.0**-126)).all()
        else:
            assert (scales.double() >= need * (1 - 2.0**-23)).all()


def test_power_of_two_is_exact_at_its_own_values() -> None:
    """448 * 2^n needs the scale 2^n and not the next one."""
    for exponent in (-20, -1, 0, 1, 30):
        x = torch.full((1, 128), 448.0 * 2.0**exponent)
        q, scales = quantize_fp8(x, "power_of_two")
        assert scales.item() == 2.0**exponent
        assert torch.equal(dequantize_fp8(q, scales, torch.float32), x)
        _, scales = quantize_fp8(torch.nextafter(x, x * 2), "power_of_two")
        assert scales.item() == 2.0 ** (exponent + 1)


@pytest.mark.parametrize("scale", SCALES)
def test_zero_rows_stay_zero(scale: str) -> None:
    x = torch.randn(3, 256)
    x[1] = 0
    x[2, :128] = -0.0
    q, scales = quantize_fp8(x, scale)
    assert scales[1].tolist() == [1.0, 1.0] and scales[2, 0] == 1.0
    back = dequantize_fp8(q, scales, torch.bfloat16)
    assert back.dtype == torch.bfloat16 and not back[1].any() and not back[2, :128].any()
    empty, none = quantize_fp8(torch.zeros(0, 256), scale)
    assert empty.shape == (0, 256) and none.shape == (0, 2)
    assert dequantize_fp8(empty, none, torch.float32).shape == (0, 256)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_does_not_come_back_finite(scale: str, bad: float) -> None:
    x = torch.randn(2, 256)
    x[0, 5] = bad
    q, scales = quantize_fp8(x, scale)
    back = dequantize_fp8(q, scales, torch.float32)
    assert not back[0, 5].isfinite()
    assert not back[0, :128].isfinite().any()  # as documented: the block as a whole
    assert back[0, 128:].isfinite().all() and back[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    x = torch.randn(6, 256).to(dtype)
    q, scales = quantize_fp8(x)
    for strange in (x.T.contiguous().T, x.repeat_interleave(2, 1)[:, ::2], x.repeat(1, 2)[:, :256]):
        assert not strange.is_contiguous()
        other, other_scales = quantize_fp8(strange)
        assert torch.equal(other.view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(other_scales, scales)
        assert other.is_contiguous() and other_scales.is_contiguous()
    assert dequantize_fp8(q, scales, dtype).dtype == dtype


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"192.*128"):
        quantize_fp8(torch.zeros(2, 192))
    with pytest.raises(ValueError, match="half"):
        quantize_fp8(torch.zeros(2, 128), "half")
