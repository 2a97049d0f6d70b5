"""FP8 (e4m3) quantisation of token rows with one scale per 128 columns: the reference.

Every kernel that quantises must agree with these functions bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep.layout import FP8_BLOCK

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_fp8(x: Tensor, scale: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantises rows to e4m3 with one scale per 128 columns.

    `x ~ q * scale`, with an error of at most |x|/16 + scale * 2^-10 an element. A block of zeros
    has scale 1 and stays zero; a block with an inf or NaN becomes NaN as a whole.

    Args:
        x: [T, H], any floating dtype, H a multiple of 128.
        scale: "fp32" divides the block's largest magnitude by 448; "power_of_two" rounds that
            scale up to a power of two (the UE8M0 range), so that scaling is exact.

    Returns:
        q: [T, H] float8_e4m3fn, row-major. scales: [T, H/128] float32, row-major.

    Raises:
        ValueError: H is not a multiple of 128, or `scale` is neither of the two.
    """
    num_tokens, hidden = x.shape
    if hidden % FP8_BLOCK:
        raise ValueError(f"hidden={hidden} is not a multiple of {FP8_BLOCK}, one FP8 scale's width")
    blocks = x.float().contiguous().view(num_tokens, hidden // FP8_BLOCK, FP8_BLOCK)
    amax = blocks.abs().amax(dim=2)
    scales = (amax / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    if scale == "power_of_two":
        mantissa, exponent = torch.frexp(scales)
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
        scales = torch.where(
            scales.isfinite(), torch.ldexp(torch.ones_like(scales), exponent), scales
        )
    elif scale != "fp32":
        raise ValueError(f"scale={scale!r}; choose 'fp32' or 'power_of_two'")
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    q = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return q.view(num_tokens, hidden), scales


def dequantize_fp8(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_fp8`.

    Args:
        q: [N, H] float8_e4m3fn. scales: [N, H/128] float32. dtype: of the result.

    Returns:
        [N, H] in `dtype`.
    """
    num_rows, hidden = q.shape
    blocks = q.float().view(num_rows, hidden // FP8_BLOCK, FP8_BLOCK)
    return (blocks * scales.unsqueeze(2)).to(dtype).view(num_rows, hidden)
