"""What the ranks of a GPU test do with FP8 rows."""

from __future__ import annotations

import torch
from scenarios import Case, call, make_backend
from torch import Tensor

from moe_ep.backends.base import DispatchedRows
from moe_ep.quant import quantize_fp8

TOKENS, HIDDEN = 2048, 1024


def check_values(rank: int) -> None:
    """Quantised rows equal the reference bit for bit, whatever their values."""
    case = Case(hidden=HIDDEN, local=1, top_k=1, fp8_scale="fp32")
    backend = make_backend(case)
    idx = torch.zeros(TOKENS, 1, dtype=torch.int64)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        x = _values(number).to(dtype)
        for scale in ("fp32", "power_of_two"):
            plan = backend.prepare(idx, call(), x=x, fp8_scale=scale)
            for _ in ("staged with the counts", "staged for a known routing"):
                d = backend.dispatch(plan, x, None, call(), scale)
                _check_equal(d, *quantize_fp8(x, scale))
    backend.destroy()


def _values(seed: int) -> Tensor:
    """[T, H] fp32: blocks of every magnitude with elements of every smaller one, zeros of both
    signs, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    blocks = (TOKENS, HIDDEN // 128, 1)
    largest = torch.exp2(uniform(*blocks) * 276 - 149)
    smaller = torch.exp2(-30 * uniform(*blocks[:2], 128) ** 3)
    sign = torch.where(uniform(*blocks[:2], 128) < 0.5, -1.0, 1.0)
    x = largest * smaller * sign
    x[torch.rand(x.shape, generator=generator) < 0.02] = 0.0
    x[torch.rand(x.shape, generator=generator) < 0.02] = -0.0
    x[0] = 0.0
    for token, value in enumerate((torch.inf, -torch.inf, torch.nan), start=1):
        x[token, ::2, 3 * token] = value
    return x.float().view(TOKENS, HIDDEN)


def _check_equal(d: DispatchedRows, q: Tensor, scales: Tensor) -> None:
    assert d.scales is not None
    torch.testing.assert_close(d.scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)
    found = d.rows.cpu()
    is_nan = q.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)  # whose sign does not count
    same = found.view(torch.uint8) == q.view(torch.uint8)
    assert (same | is_nan).all(), (~(same | is_nan)).nonzero()[:5]
