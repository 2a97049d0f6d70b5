"""The plan of the CUDA backend: arrays on the device, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ep.backends.base import Plan


class CudaPlan(Plan):
    """Routing of one dispatch, in device memory of this rank; see csrc/shared/plan_layout.h.

    Args:
        topk_idx: [T, K] of this rank. offsets: of the header's parts, from `_C.plan_header`.
        destinations: ranks a token can go to at most. num_local_experts: L.
        operation: the dispatch that makes it.
    """

    def __init__(
        self,
        core: Any,
        topk_idx: Tensor,
        offsets: dict[str, int],
        destinations: int,
        num_local_experts: int,
        operation: int,
    ) -> None:
        num_tokens, num_slots = topk_idx.shape
        slots, partials = num_tokens * num_slots, num_tokens * destinations
        sizes = (offsets["total"], slots, num_tokens, partials, slots)
        source = torch.empty(sum(sizes), dtype=torch.int32, device=topk_idx.device)
        first = source.data_ptr()
        addresses = [first + 4 * sum(sizes[:i]) for i in range(len(sizes))]
        view = core.PlanView(*addresses, num_tokens, num_slots)
        self._set(num_tokens=num_tokens, num_slots=num_slots, operation=operation)
        self._set(rows=0, complete=None)
        self._set(source=source, view=view, lists=None, counts=None)
        self._set(blocks=None, valid=None)
        self._set(offsets=offsets, num_local_experts=num_local_experts)
        self._set(stream=torch.cuda.current_stream(topk_idx.device))

    def _set(self, **values: Any) -> None:
        """The base class is frozen for everybody else."""
        self.__dict__.update(values)

    def add_lists(self, core: Any, num_rank_rows: int, num_items: int) -> None:
        words = (num_rank_rows * core.RANK_ROW_BYTES + num_items * core.ITEM_BYTES) // 4
        lists = torch.empty(words, dtype=torch.int32, device=self.source.device)
        address = lists.data_ptr()
        self.view.set_lists(address, address + num_rank_rows * core.RANK_ROW_BYTES, 0)
        self._set(lists=lists)

    def set_rows(self, num_rows: int, counts: Any = None) -> None:
        self.view.rows_limit = num_rows
        self._set(rows=num_rows, counts=counts, complete=None)

    def resolve(self) -> None:
        """Waits for the counts, where they are still on their way, and raises what they tell."""
        if self.complete is not None:
            self.complete()

    @property
    def num_rows(self) -> int:
        """N, padding included; the capacity in capacity mode."""
        self.resolve()
        return self.rows

    @property
    def tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU, padding included. Synchronises in capacity mode, once."""
        self._read_header()
        return self.blocks

    @property
    def valid_tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU, padding left out. Synchronises in capacity mode, once."""
        self._read_header()
        return self.valid

    def _read_header(self) -> None:
        self.resolve()
        if self.blocks is not None:
            return
        if self.counts is not None:
            self._set(blocks=torch.tensor(self.counts.expert_rows, dtype=torch.int64))
            self._set(valid=torch.tensor(self.counts.expert_count, dtype=torch.int64))
            return
        words = self.source[: self.offsets["total"]].cpu().long()
        first, counts = self.offsets["expert_begin"], self.offsets["expert_count"]
        self._set(blocks=words[first : first + self.num_local_experts + 1].diff())
        self._set(valid=words[counts : counts + self.num_local_experts].clone())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.source.record_stream(stream)
        if self.lists is not None:
            self.lists.record_stream(stream)

    source: Tensor
    view: Any
    rows: int
    complete: Callable[[], None] | None  # finishes a plan whose counts are on their way
    counts: Any  # what the device told the host; None in capacity mode
    lists: Tensor | None
    blocks: Tensor
    valid: Tensor
    offsets: dict[str, int]
    num_local_experts: int
    stream: torch.cuda.Stream  # on which its memory was allocated
