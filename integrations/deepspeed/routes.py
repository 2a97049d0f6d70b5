"""The gate's decision as (token, slot) pairs, from any supported release of DeepSpeed."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch import Tensor, nn


@dataclass
class Routes:
    """Where one rank's tokens go.

    Attributes:
        topk_idx: [T, K] int64 expert ids; -1 in routes that capacity or `used_token` cancelled.
        weights: [T, K] fp32 gate values, differentiable.
        l_aux: the balance loss. exp_counts: [E] tokens each expert was chosen for.
    """

    topk_idx: Tensor
    weights: Tensor
    l_aux: Tensor
    exp_counts: Tensor


def names_routes(gate: nn.Module) -> bool:
    """Whether the gate can name its routes; older ones return dense [T, E, capacity] masks."""
    return "sparse_routes" in inspect.signature(type(gate).forward).parameters


def decide(gate: Any, tokens: Tensor, used_token: Tensor | None, sparse: bool) -> Routes:
    """Asks the gate. Not collective: nothing about sizes has to be agreed on.

    Args:
        gate: DeepSpeed's TopKGate, or a module with its interface.
        tokens: [T, H]. used_token: [T], zero where a token is not to be routed; or None.
        sparse: `names_routes(gate)`.
    """
    num_tokens = tokens.shape[0]
    if num_tokens == 0:
        return _no_tokens(gate, tokens)
    with _own_tokens_only(gate, num_tokens):
        answer = gate(tokens, used_token, True, False) if sparse else gate(tokens, used_token)
    if len(answer) == 4:
        l_aux, combine_weights, dispatch_mask, exp_counts = answer
        topk_idx, weights = _from_masks(combine_weights, dispatch_mask, gate.k)
    else:
        l_aux, _, _, indices, _, gates, exp_counts = answer
        topk_idx, weights = indices.t().long(), gates.t()
    return Routes(topk_idx, weights, l_aux, exp_counts)


def _no_tokens(gate: Any, tokens: Tensor) -> Routes:
    """Of a rank without tokens: means over no tokens would be NaN.

    The gate's parameters stay in the graph, so that they get a zero gradient like everyone's.
    """
    logits = nn.functional.linear(tokens.float(), gate.wg.weight.float())
    return Routes(
        topk_idx=tokens.new_empty(0, gate.k, dtype=torch.int64),
        weights=logits[:, : gate.k],
        l_aux=logits.sum(),
        exp_counts=tokens.new_zeros(logits.shape[1], dtype=torch.int64),
    )


def _from_masks(combine_weights: Tensor, dispatch_mask: Tensor, top_k: int) -> tuple:
    """[T, E, C] weights and mask to [T, K] indices, in the order of experts, and weights."""
    chosen = dispatch_mask.any(dim=2)
    # A stable sort puts the chosen experts first and keeps their order.
    experts = torch.sort(chosen.logical_not().to(torch.uint8), dim=1, stable=True).indices
    experts = experts[:, :top_k]
    topk_idx = torch.where(chosen.gather(1, experts), experts, -1)
    return topk_idx, combine_weights.sum(dim=2).gather(1, experts)


@contextlib.contextmanager
def _own_tokens_only(gate: Any, num_tokens: int) -> Iterator[None]:
    """Lets DeepSpeed's gate decide for this rank alone, whatever the other ranks hold.

    Stock buffers have room for the same number of rows per expert on every rank, and without
    dropping the gate finds that number with an all-reduce. Rows here need no common number. Gates
    also refuse a capacity beyond the number of tokens; such a capacity drops nothing.
    """
    if not isinstance(gate, TopKGate):
        yield
        return
    changed = {
        "ep_group": None,
        "min_capacity": min(gate.min_capacity, num_tokens),
        "drop_tokens": gate.drop_tokens and _capacity(gate, num_tokens) < num_tokens,
    }
    if gate.k > 2 and not changed["drop_tokens"]:
        # Releases before 0.17 can't do top-k without dropping; room for all tokens is the same.
        changed |= {"min_capacity": num_tokens, "drop_tokens": True}
        changed |= {"capacity_factor": 0.0, "eval_capacity_factor": 0.0}
    saved = {name: getattr(gate, name) for name in changed}
    gate.__dict__.update(changed)
    try:
        yield
    finally:
        gate.__dict__.update(saved)


def _capacity(gate: TopKGate, num_tokens: int) -> float:
    """Rows an expert takes from this rank, rounded as the gate itself rounds."""
    factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
    share = (num_tokens / gate.wg.out_features) * torch.tensor(factor * gate.k)
    return max(math.ceil(share.item()), gate.min_capacity)
