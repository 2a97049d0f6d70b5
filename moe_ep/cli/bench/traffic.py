"""Bytes that a dispatch and a combine must move, counted from the routing that is timed.

Legend: T tokens of this rank, K slots of a token, H hidden, R ranks, N rows of this rank's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.layout import DTYPE_BYTES, FP8_BLOCK, EPLayout


@dataclass(frozen=True)
class Counts:
    """Of one rank's routing, in rows. A slot is a use of an expert by a token."""

    ranks: int
    tokens: int
    slots: int
    remote_slots: int  # of experts on other ranks
    destinations: int  # pairs of token and rank it goes to, this rank included
    remote_destinations: int
    arriving: int  # N without padding

    @classmethod
    def of(cls, slots_TK: Tensor, rank: int, num_ranks: int, local: int, arriving: int) -> Counts:
        """slots_TK: [T, K] ids over all R * local expert slots of the group; -1 is unused."""
        used = slots_TK >= 0
        to = torch.where(used, slots_TK // local, num_ranks)  # a column of its own for unused slots
        goes = torch.zeros(len(slots_TK), num_ranks + 1, dtype=torch.bool, device=slots_TK.device)
        goes = goes.scatter_(1, to.long(), True)[:, :num_ranks]
        own = int(goes[:, rank].sum())
        destinations = int(goes.sum())
        return cls(
            ranks=num_ranks,
            tokens=len(slots_TK),
            slots=int(used.sum()),
            remote_slots=int((used & (to != rank)).sum()),
            destinations=destinations,
            remote_destinations=destinations - own,
            arriving=arriving,
        )


@dataclass(frozen=True)
class RowBytes:
    """Of one row in each of its forms."""

    x: int  # as the caller holds it, and as combine returns it
    wire: int  # as it travels, FP8 scales included

    @classmethod
    def of(cls, layout: EPLayout) -> RowBytes:
        """FP8 layouts: of bf16 tokens."""
        hidden, dtype = layout.model.hidden, layout.dispatch.dtype
        if dtype == "fp8_e4m3":
            return cls(hidden * DTYPE_BYTES["bf16"], hidden + hidden // FP8_BLOCK * 4)
        return cls(hidden * DTYPE_BYTES[dtype], hidden * DTYPE_BYTES[dtype])


@dataclass(frozen=True)
class Traffic:
    """Bytes of one case on one rank.

    Attributes:
        payload: rows that the rank sends, one per slot, rows to itself too.
        hbm: through the memory of this rank's GPU, if every GPU holds one rank; None: not counted.
        link: that would leave the rank for another GPU.
    """

    payload: int
    hbm: int | None
    link: int

    def __add__(self, other: Traffic) -> Traffic:
        hbm = None if self.hbm is None or other.hbm is None else self.hbm + other.hbm
        return Traffic(self.payload + other.payload, hbm, self.link + other.link)


def dispatch(counts: Counts, row: RowBytes, result_bytes: int, payload_bytes: int) -> Traffic:
    """x is staged (read, written) where there are peers; each rank a token goes to reads it once;
    every expert row is written.

    Args:
        result_bytes: of a row that arrives. payload_bytes: of a row that is counted as payload.
    """
    staged = counts.tokens * (row.x + row.wire) if counts.ranks > 1 else 0
    read = counts.destinations * row.wire if counts.ranks > 1 else counts.tokens * row.x
    return Traffic(
        payload=counts.slots * payload_bytes,
        hbm=staged + read + counts.arriving * result_bytes,
        link=counts.remote_destinations * row.wire,
    )


def combine(counts: Counts, row_bytes: int, exact: bool) -> Traffic:
    """Expert rows are read, a sum per (token, rank) is written and read again where there are
    peers, and every token is written. exact: each expert row itself in place of the sums."""
    partials = counts.slots if exact else counts.destinations
    if counts.ranks == 1:
        partials = 0
    remote = counts.remote_slots if exact else counts.remote_destinations
    return Traffic(
        payload=counts.slots * row_bytes,
        hbm=(counts.arriving + 2 * partials + counts.tokens) * row_bytes,
        link=remote * row_bytes,
    )


def without_sharing(counts: Counts, row_bytes: int, payload_bytes: int) -> Traffic:
    """Of a backend that sends one row per slot through buffers of its own (reference)."""
    return Traffic(counts.slots * payload_bytes, None, counts.remote_slots * row_bytes)


def floor_us(hbm_of_ranks: list[int], device_ids: list[str], rate: float) -> float:
    """The time the busiest GPU needs for the bytes of all its ranks, at `rate` bytes a second."""
    of_device: dict[str, int] = {}
    for device, num_bytes in zip(device_ids, hbm_of_ranks, strict=True):
        of_device[device] = of_device.get(device, 0) + num_bytes
    return max(of_device.values()) / rate * 1e6
