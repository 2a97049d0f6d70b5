"""Dispatch and combine as autograd functions. Each one's backward is the other's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ep.backends.base import Backend, Call, Plan


class Exchange(NamedTuple):
    """What both directions of an autograd function need beside tensors."""

    backend: Backend
    plan: Plan
    new_call: Callable[[str], Call]
    fp8_scale: str | None = None
    dequantize: bool = True


def wants_gradient(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # a generator would cost as much as all else here
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


class Dispatch(torch.autograd.Function):
    """(x [T, H], probs [T, K] or None) -> (tokens [N, H], scales or None, probs [N] or None)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, exchange: Exchange, call: Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.exchange, ctx.has_probs = exchange, probs is not None
        arrived = exchange.backend.dispatch(
            exchange.plan, x, probs, call, exchange.fp8_scale, dequantize=exchange.dequantize
        )
        if arrived.scales is not None:
            ctx.mark_non_differentiable(arrived.rows, arrived.scales)
        return arrived.rows, arrived.scales, arrived.probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_tokens: Tensor, _grad_scales: Tensor | None, grad_probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        exchange: Exchange = ctx.exchange
        grad_x, grad_weights = exchange.backend.combine(
            exchange.plan,
            grad_tokens,
            exchange.new_call("dispatch.backward"),
            values=grad_probs if ctx.has_probs else None,
        )
        return grad_x, grad_weights, None, None


class Combine(torch.autograd.Function):
    """(rows [N, H], weights [N] or None) -> out [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, exchange: Exchange, call: Call
    ) -> Tensor:
        ctx.exchange = exchange
        if weights is not None:
            ctx.save_for_backward(rows, weights)
        return exchange.backend.combine(exchange.plan, rows, call, weights=weights)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        exchange: Exchange = ctx.exchange
        call = exchange.new_call("combine.backward")
        grad_rows = exchange.backend.dispatch(exchange.plan, grad_out, None, call).rows
        saved = ctx.saved_tensors  # read once: recomputed activations can be unpacked only once
        if not saved:
            return grad_rows, None, None, None
        rows, weights = saved
        wide = grad_rows.to(weights.dtype)
        grad_weights = (wide * rows.to(weights.dtype)).sum(1)
        grad_rows = (wide * weights.unsqueeze(1)).to(rows.dtype)
        valid = exchange.plan.valid_rows(rows.device)
        if valid is not None:  # whatever padding rows and their weights hold, NaN included
            grad_rows.masked_fill_(~valid.unsqueeze(1), 0)
            grad_weights.masked_fill_(~valid, 0)
        return grad_rows, grad_weights, None, None
