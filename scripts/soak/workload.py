"""What both trainings do alike: uneven lengths, skewed routing, and calls of the exchange itself.

All of it is a function of the seed, the step and the rank, so that a step that is done again, or by
the undisturbed training, is the same step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SKEW_STEPS = 5  # a skew lasts so long
_MOST_TOKENS = 48  # of a rank, in a call of the exchange itself


def lengths(seed: int, step: int, rank: int, longest: int) -> Iterator[int]:
    """Bytes of a sequence that this rank uses, for one micro-batch after the other.

    Of a few lengths only: frameworks keep what they compute for each (rotary tables, say), and that
    would look like a leak until every length has been seen.
    """
    choice = random.Random(f"length {seed} {step} {rank}")
    while True:
        yield choice.choice((1, 2, longest // 3, longest // 2 + 1, longest))


def shortened(batches: Iterator, wanted: Iterator[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches [B, S], cut to the wanted lengths."""
    for (tokens, labels), length in zip(batches, wanted, strict=False):
        yield tokens[:, :length].contiguous(), labels[:, :length].contiguous()


def skew(seed: int, step: int, num_experts: int) -> Tensor:
    """[E] what is added to every router's logits: nothing, some, or all tokens to two experts."""
    number = step // _SKEW_STEPS
    generator = torch.Generator().manual_seed(seed * 1009 + number)
    if number % 3 == 0:
        return torch.zeros(num_experts)
    if number % 3 == 1:
        return 2 * torch.randn(num_experts, generator=generator)
    bias = torch.zeros(num_experts)
    bias[torch.randperm(num_experts, generator=generator)[:2]] = 100.0
    return bias


class SkewedRouters:
    """Adds a skew to the logits of routers, outside of what is trained."""

    def __init__(self, routers: list[Any], num_experts: int, device: torch.device) -> None:
        self._bias = torch.zeros(num_experts, device=device)
        for router in routers:
            router.gating = self._with_bias(router.gating)

    def set(self, bias: Tensor) -> None:
        self._bias.copy_(bias)

    def _with_bias(self, gating: Any) -> Any:
        def skewed(*args: Any, **kwargs: Any) -> Tensor:
            logits = gating(*args, **kwargs)
            return logits + self._bias.to(logits.dtype)

        return skewed


def exchange(ep: Any, seed: int, step: int, dtype: torch.dtype, device: torch.device) -> int:
    """One dispatch and combine, forward and backward, whose results are known without computing.

    Ranks have from 0 tokens up, some none; slots are unused, or name an expert twice; every third
    step all tokens go to one expert. Rows are small whole numbers, so that sums are exact.

    Returns:
        Rows that this rank sent.

    Raises:
        AssertionError: a row is lost, or wrong.
    """
    choice = random.Random(f"exchange {seed} {step} {ep.rank}")
    shape = ep.layout.model
    num_tokens = choice.choice((0, 1, choice.randint(2, _MOST_TOKENS)))
    generator = torch.Generator().manual_seed(choice.randrange(1 << 40))
    size = (num_tokens, shape.top_k)
    idx = torch.randint(-1, shape.num_experts, size, generator=generator)
    if step % 3 == 0:
        idx[:] = step % shape.num_experts
    x = torch.randint(-8, 9, (num_tokens, shape.hidden), generator=generator)
    x = x.to(device, dtype).requires_grad_()
    used = (idx >= 0).sum(1, keepdim=True).to(device, dtype)
    d = ep.dispatch(x, idx.to(device), layer="exchange")
    out = ep.combine(d.tokens, d.handle)
    # Ranks without tokens take part in the backward all the same.
    torch.autograd.backward(out, torch.ones_like(out))
    assert torch.equal(out, used * x), f"step {step}: combined rows are wrong"
    assert x.grad is not None
    assert torch.equal(x.grad, used.expand_as(x)), f"step {step}: gradients are wrong"
    return int(used.sum())
