"""The plan of the CUDA backend: arrays on the device, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ep.backends.base import Plan

StagedTokens = tuple[Tensor, "Tensor | None", Any]
"""What a dispatch sends, and keeps alive until it has: x [T, H], probs [T, K] fp32, and both as
`_C.DispatchTensors`."""


class CudaPlan(Plan):
    """Routing of one dispatch, in device memory of this rank; see csrc/shared/plan_layout.h.

    Args:
        communicator: `_C.Communicator`. shape: T and K of this rank.
        list_limits: rank rows and items to make room for; (0, 0): `add_lists` will.
        offsets: of the header's parts, from `_C.plan_header`.
        operation: the dispatch that makes it. stream: handle of the current one.
        int32: any such tensor on its device; `new_empty` costs the host half of `torch.empty`.
    """

    def __init__(
        self,
        communicator: Any,
        shape: tuple[int, int],
        list_limits: tuple[int, int],
        offsets: dict[str, int],
        operation: int,
        stream: int,
        int32: Tensor,
    ) -> None:
        num_tokens, num_slots = shape
        words = communicator.plan_words(num_tokens, num_slots, *list_limits)
        self.source = int32.new_empty(words)
        self.view = communicator.plan(self.source.data_ptr(), num_tokens, num_slots, *list_limits)
        self.num_tokens, self.num_slots = num_tokens, num_slots
        self.operation, self.stream = operation, stream
        self.offsets = offsets
        self.has_lists = list_limits != (0, 0)

    def add_lists(self, core: Any, num_rank_rows: int, num_items: int) -> None:
        words = (num_rank_rows * core.RANK_ROW_BYTES + num_items * core.ITEM_BYTES) // 4
        lists = self.source.new_empty(words)
        address = lists.data_ptr()
        self.view.set_lists(address, address + num_rank_rows * core.RANK_ROW_BYTES)
        self.lists, self.has_lists = lists, True

    def drop_lists(self) -> None:
        """What room there was is too small by now."""
        self.view.set_lists(0, 0)
        self.lists, self.has_lists = None, False

    def set_rows(self, num_rows: int, counts: Any = None) -> None:
        self.view.rows_limit = num_rows
        self.rows, self.counts, self.complete = num_rows, counts, None

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
        return self._read_header()[0]

    @property
    def valid_tokens_per_expert(self) -> Tensor:
        """[L] int64 on the CPU, padding left out. Synchronises in capacity mode, once."""
        return self._read_header()[1]

    def _read_header(self) -> tuple[Tensor, Tensor]:
        self.resolve()
        if self.blocks is not None and self.valid is not None:
            return self.blocks, self.valid
        if self.counts is not None:
            blocks = torch.tensor(self.counts.expert_rows, dtype=torch.int64)
            valid = torch.tensor(self.counts.expert_count, dtype=torch.int64)
        else:
            words = self.source[: self.offsets["total"]].cpu().long()
            first, counts = self.offsets["expert_begin"], self.offsets["expert_count"]
            blocks = words[first:counts].diff()
            valid = words[counts:].clone()
        self.blocks, self.valid = blocks, valid
        return blocks, valid

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.source.record_stream(stream)
        if self.lists is not None:
            self.lists.record_stream(stream)

    # The base class is frozen for everybody else. Both, or an assignment takes three times as long.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    num_tokens: int
    num_slots: int
    operation: int
    source: Tensor
    view: Any
    has_lists: bool
    offsets: dict[str, int]
    stream: int  # on which its memory was allocated
    rows: int = 0
    complete: Callable[[], None] | None = None  # finishes a plan whose counts are on their way
    staged: StagedTokens | None = None  # by `prepare`, for the dispatch that follows
    counts: Any = None  # what the device told the host; None in capacity mode
    lists: Tensor | None = None  # where they are not part of `source`
    blocks: Tensor | None = None
    valid: Tensor | None = None
