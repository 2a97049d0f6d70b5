"""What `dispatch` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ep.backends.base import Plan
from moe_ep.events import EventOverlap


@dataclass(eq=False)
class DispatchHandle:
    """The routing of one dispatch. `combine` needs it; `dispatch` can use it again.

    It holds indices only, no communication buffer: any number may be alive.

    Attributes:
        plan: the backend's form of the routing.
        dtype, device: of the x that was dispatched.
        owner: the ExpertParallel it belongs to.
        in_flight: dispatches with this handle that no combine has followed yet.
        layer: under which statistics and profiles show it.
    """

    plan: Plan = field(repr=False)
    dtype: torch.dtype
    device: torch.device
    owner: object = field(repr=False)
    in_flight: int = 0
    layer: str | int | None = None

    @property
    def operation(self) -> int:
        """Number of the dispatch that made it, as named in error messages."""
        return self.plan.operation

    @property
    def num_tokens(self) -> int:
        """T, the tokens this rank passed."""
        return self.plan.num_tokens

    @property
    def num_rows(self) -> int:
        """N, the rows this rank received, padding included."""
        return self.plan.num_rows

    @property
    def tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU: rows of each local expert's block, padding included."""
        return self.plan.tokens_per_expert.clone()

    @property
    def valid_tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU: rows of each block that hold a token; they come first."""
        return self.plan.valid_tokens_per_expert.clone()


@dataclass(eq=False)
class DispatchResult:
    """Rows for the local experts.

    Attributes:
        tokens: [N, H] expert-major; within an expert by source rank, then token. Padding rows are
            zero. float8_e4m3fn where `dispatch(..., dequantize=False)` asked for it.
        probs: [N] the rows' `topk_weights` (fp32; fp64 in fp64 layouts), zero in padding rows;
            None if none were given.
        handle: pass it to `combine`.
        scales: [N, H/128] fp32 beside float8 tokens, else None.
        event: to wait for before the tensors are used, after `async_finish`; else empty.
    """

    tokens: Tensor
    probs: Tensor | None
    handle: DispatchHandle
    scales: Tensor | None = None
    event: EventOverlap = field(default_factory=EventOverlap)

    @property
    def tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU: rows of each local expert's block of `tokens`."""
        return self.handle.tokens_per_expert
