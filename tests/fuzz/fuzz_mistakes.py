"""Calls of dispatch and combine with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ep import DispatchResult, ExpertParallel

_AGAIN = ("again tokens", "again weights", "again both")
OF_A_HANDLE = (*_AGAIN, "rows", "rows dtype", "row weights", "no tensor")
"""Mistakes beside a handle; all others are of a dispatch with a new routing."""


def is_dispatch(mistake: str) -> bool:
    """Beside a handle: of a dispatch; else of a combine."""
    return mistake in _AGAIN


def dispatch_with(
    mistake: str, ep: ExpertParallel, x: Tensor, idx: Tensor, weights: Tensor
) -> Callable[[], object]:
    model = ep.layout.model
    wrong: dict[str, tuple[Any, Any, Any]] = {
        "": (x, idx, weights),
        "hidden": (torch.cat([x, x], 1), idx, weights),
        "dtype": (x.long(), idx, weights),
        "ids": (x, torch.full_like(idx, model.num_experts), weights),
        "id dtype": (x, idx.float(), weights),
        "slots": (x, idx.repeat(1, model.top_k + 1), weights),
        "tokens": (x, idx[:-1], weights),
        "weights": (x, idx, torch.cat([weights, weights], 1)),
        "nothing": (x, None, weights),
    }
    given = wrong[mistake]
    return lambda: ep.dispatch(*given)


def beside_handle_with(
    mistake: str,
    ep: ExpertParallel,
    result: DispatchResult,
    x: Tensor,
    idx: Tensor,
    weights: Tensor | None,
    bad: bool,
) -> Callable[[], object]:
    """bad: this rank makes the mistake; else its call is the right one."""
    handle, rows = result.handle, result.tokens.detach()
    probs = None if result.probs is None else result.probs.detach()
    if mistake == "again weights" and weights is None:
        mistake = "again tokens"
    if mistake == "row weights" and probs is None:
        mistake = "rows"
    if not bad:
        if is_dispatch(mistake):
            return lambda: ep.dispatch(x, handle=handle, topk_weights=weights)
        return lambda: ep.combine(rows, handle, probs)
    more = torch.cat([x, x]) if len(x) else x.new_ones(1, x.shape[1])
    wide = None if weights is None else torch.cat([weights, weights], 1)
    actions: dict[str, Callable[[], object]] = {
        "again tokens": lambda: ep.dispatch(more, handle=handle, topk_weights=weights),
        "again weights": lambda: ep.dispatch(x, handle=handle, topk_weights=wide),
        "again both": lambda: ep.dispatch(x, idx, weights, handle=handle),
        "rows": lambda: ep.combine(torch.cat([rows, rows[:1], x[:1], more]), handle, probs),
        "rows dtype": lambda: ep.combine(rows.long(), handle, probs),
        "row weights": lambda: ep.combine(rows, handle, probs.unsqueeze(1)),  # type: ignore[union-attr]
        "no tensor": lambda: ep.combine([1.0], handle, probs),  # type: ignore[call-overload]
    }
    return actions[mistake]
