"""What `dispatch` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_ep.backends.base import Plan


@dataclass(eq=False)
class DispatchHandle:
    """The routing of one dispatch. `combine` needs it; `dispatch` can use it again.

    It holds indices only, no communication buffer: any number may be alive.

    Attributes:
        operation: number of the dispatch that made it, as named in error messages.
        num_tokens: T, tokens this rank passed. num_rows: N, rows this rank received.
        tokens_per_expert: [L] int64 on the CPU, rows of each local expert's block, padding
            included. valid_tokens_per_expert: the same without padding.
    """

    plan: Plan = field(repr=False)
    operation: int
    combined: bool = False
    owner: object = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    @property
    def tokens_per_expert(self) -> Tensor:
        return self.plan.tokens_per_expert

    @property
    def valid_tokens_per_expert(self) -> Tensor:
        return self.plan.valid_tokens_per_expert


@dataclass(eq=False)
class DispatchResult:
    """Rows for the local experts.

    Attributes:
        tokens: [N, H] expert-major; within an expert by source rank, then token. Padding rows are
            zero. float8_e4m3fn where `dispatch(..., dequantize=False)` asked for it.
        probs: [N] the rows' `topk_weights` (fp32; fp64 in fp64 layouts), zero in padding rows;
            None if none were given.
        tokens_per_expert: [L] int64 on the CPU: rows of each local expert's block.
        scales: [N, H/128] fp32 beside float8 tokens, else None.
        handle: pass it to `combine`.
    """

    tokens: Tensor
    probs: Tensor | None
    tokens_per_expert: Tensor
    handle: DispatchHandle
    scales: Tensor | None = None
