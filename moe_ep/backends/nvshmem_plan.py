"""The plan of the NVSHMEM backend: that of the CUDA backend for all tokens that concern this host,
and its chunks.

Legend: n hosts, m ranks of each, C tokens of a rank that move at once. Tokens of chunk c of all
hosts' ranks of this rank's rail are numbered host * C + t; see csrc/shared/rail_layout.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.backends.cuda_plan import CudaPlan


@dataclass(frozen=True)
class ChunkShape:
    """What all plans of a backend share. num_slots, destinations: of a token at most, on a host."""

    num_hosts: int
    ranks_per_host: int
    chunk_tokens: int
    num_slots: int
    destinations: int
    num_local_experts: int

    @property
    def host_tokens(self) -> int:
        """Tokens of one chunk: n * C."""
        return self.num_hosts * self.chunk_tokens

    def num_chunks(self, num_tokens: int) -> int:
        """Chunks of `num_tokens` tokens of a rank; never none."""
        return max(-(-num_tokens // self.chunk_tokens), 1)


class HostsPlan(CudaPlan):
    """Routing of one dispatch between hosts.

    Args:
        core: the module `moe_ep._C`. num_tokens, num_slots: T and K of this rank.
        offsets: of the header's parts, from `_C.plan_header`.
        room: tokens of a rank that there is symmetric memory for.
        num_chunks: that its rows move in, until counts tell.
        operation: the dispatch that makes it. stream: handle of the current one.
    """

    def __init__(
        self,
        core: Any,
        num_tokens: int,
        num_slots: int,
        shape: ChunkShape,
        offsets: dict[str, int],
        room: int,
        num_chunks: int,
        operation: int,
        stream: int,
        device: torch.device,
    ) -> None:
        self.num_tokens, self.num_slots = num_tokens, num_slots
        self.operation, self.stream = operation, stream
        self.shape, self.num_chunks = shape, num_chunks
        self.offsets = offsets
        self.has_lists = False
        self.make_room(core, room, device)

    def make_room(self, core: Any, room: int, device: torch.device) -> None:
        """Arrays for `room` tokens of each rank."""
        shape, words = self.shape, self.offsets["total"]
        chunks = shape.num_chunks(room)
        tokens = chunks * shape.host_tokens
        sizes = {
            "header": words,
            "chunk_headers": chunks * words,
            "cuts": shape.ranks_per_host * (chunks + 1),
            "row_of_slot": tokens * shape.num_slots,
            "num_partials": tokens,
            "partial_slots": tokens * shape.destinations,
            "item_of_slot": tokens * shape.num_slots,
            "expert_of_slot": self.num_tokens * shape.num_slots,
        }
        source = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        addresses, end = {}, source.data_ptr()
        for name, size in sizes.items():
            addresses[name] = end
            end += 4 * size
        self.source, self.addresses, self.room_chunks = source, addresses, chunks
        self.parts = None
        self.view = self.view_without_lists(core)

    def add_lists(self, core: Any, num_rank_rows: int, num_items: int) -> None:
        super().add_lists(core, num_rank_rows, num_items)
        first = self.lists.data_ptr() if self.lists is not None else 0
        self.list_addresses = (first, first + num_rank_rows * core.RANK_ROW_BYTES)
        self.parts = None

    def set_rows(self, num_rows: int, counts: Any = None) -> None:
        super().set_rows(num_rows, counts)
        chunks = self.room_chunks
        if counts is not None:
            chunks = self.shape.num_chunks(counts.max_tokens)
        self.num_chunks, self.parts = chunks, None

    def chunk_views(self, core: Any) -> list[Any]:
        """The plan of each chunk, as kernels of one host see it."""
        parts = self.parts
        if parts is None:
            parts = [self._chunk_view(core, chunk) for chunk in range(self.num_chunks)]
            self.parts = parts
        return parts

    def _chunk_view(self, core: Any, chunk: int) -> Any:
        shape, tokens = self.shape, chunk * self.shape.host_tokens
        width = {
            "header": 0,
            "row_of_slot": shape.num_slots,
            "num_partials": 1,
            "partial_slots": shape.destinations,
            "item_of_slot": shape.num_slots,
        }
        at = {name: self.addresses[name] + 4 * tokens * width[name] for name in _VIEW}
        at["header"] = self.addresses["chunk_headers"] + 4 * chunk * self.offsets["total"]
        view = core.PlanView(*at.values(), shape.host_tokens, shape.num_slots)
        view.set_lists(*self.list_addresses)
        view.rows_limit = self.rows
        return view

    def view_without_lists(self, core: Any) -> Any:
        """The plan of all chunks before there is a place for its lists."""
        at = [self.addresses[name] for name in _VIEW]
        tokens = self.room_chunks * self.shape.host_tokens
        return core.PlanView(*at, tokens, self.shape.num_slots)

    @property
    def status_address(self) -> int:
        """Of the NotifyStatus on which all hosts have agreed."""
        return int(self.addresses["header"] + 4 * self.offsets["status"])

    def _read_header(self) -> tuple[Tensor, Tensor]:
        """An expert's blocks, one for each host that rows come from, taken together."""
        blocks, valid = super()._read_header()
        hosts = self.shape.num_hosts
        return blocks.view(-1, hosts).sum(1), valid.view(-1, hosts).sum(1)

    shape: ChunkShape
    num_chunks: int  # that rows move in
    room_chunks: int  # that there are arrays for
    addresses: dict[str, int]
    list_addresses: tuple[int, int] = (0, 0)
    parts: list[Any] | None = None


_VIEW = ("header", "row_of_slot", "num_partials", "partial_slots", "item_of_slot")
