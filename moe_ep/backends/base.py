"""What a backend is: one metadata exchange (`prepare`) and two verbs that move rows.

`dispatch` copies token rows to expert rows, `combine` sums expert rows into token rows. Each is
the other's backward, so autograd needs nothing else from a backend.

Legend of shapes: T tokens of this rank, K slots per token (top-k times expert-tensor ranks),
H hidden, R ranks of the group, L experts of one rank, N rows of this rank's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The routing of one dispatch: which row goes where. Each backend adds what it needs."""

    num_tokens: int
    num_slots: int
    num_rows: int
    tokens_per_expert: Tensor  # [L] int64 on the CPU, padding included
    valid_tokens_per_expert: Tensor  # [L] int64 on the CPU, rows that hold a token
    operation: int  # the dispatch that made it

    def valid_rows(self, device: torch.device) -> Tensor | None:
        """[N] bool: which rows hold a token. None: all do."""
        blocks, valid = self.tokens_per_expert, self.valid_tokens_per_expert
        if self.num_rows == int(valid.sum()):
            return None
        mask = torch.zeros(self.num_rows, dtype=torch.bool)
        ends = blocks.cumsum(0)
        for end, block, count in zip(ends.tolist(), blocks.tolist(), valid.tolist(), strict=True):
            mask[end - block : end - block + count] = True
        return mask.to(device)


@dataclass
class DispatchedRows:
    """Rows that arrived for the local experts, expert-major, with what came along."""

    rows: Tensor  # [N, H]; padding rows are zero
    scales: Tensor | None  # [N, H/128] fp32 where the rows are float8
    probs: Tensor | None  # [N]; zero in padding rows


@dataclass(slots=True)
class Call:
    """What an error message needs to know of the operation, and how long it may wait."""

    operation: int
    phase: str
    timeout_s: float
    error: Exception | None = None
    """Bad input found on this rank: peers are told in place of data, then it is raised."""


@dataclass(frozen=True)
class Arrivals:
    """What came to the experts of this rank in one or several dispatches, in rows."""

    tokens_per_expert: list[int]  # [L] rows that hold a token
    dispatched: list[int]  # [R] rows that each source rank sent in a dispatch
    combined: list[int]  # [R] rows that a combine returns to it


class Backend(Protocol):
    """Moves rows between the ranks of one group. All methods are collective.

    A backend takes the plans that it made itself, whatever their type.
    """

    name: str
    checks_indices: bool
    """Whether `prepare` itself reports expert ids out of range (the device finds them)."""
    num_sms: int
    """Blocks of every later kernel at most; means nothing without kernels of its own."""

    @property
    def device(self) -> torch.device | None:
        """Where tensors must be; None: anywhere."""

    def prepare(
        self,
        topk_idx: Tensor | None,
        call: Call,
        capacity: int | None = None,
        *,
        x: Tensor | None = None,
        probs: Tensor | None = None,
        fp8_scale: str | None = None,
    ) -> Plan:
        """Exchanges row counts. topk_idx: [T, K] integer ids over all R*L expert slots, -1 unused.

        topk_idx is None only together with `call.error`. With `capacity` (the layout's, where it is
        None) the result has that many rows whatever the routing, and more raise CapacityError.

        x, probs, fp8_scale: those of a `dispatch` that is sure to be the next operation, on all
        ranks; a backend may send them on their way before the counts are known.
        """

    def dispatch(
        self,
        plan: Any,
        x: Tensor,
        probs: Tensor | None,
        call: Call,
        fp8_scale: str | None = None,
        *,
        dequantize: bool = False,
    ) -> DispatchedRows:
        """Sends row t of x [T, H] (and probs [T, K]) to the expert of every used slot of t.

        With `fp8_scale` ("fp32" or "power_of_two") rows are quantised before they are sent, and
        with `dequantize` they come back in the dtype of x, without scales.
        """

    def combine(
        self,
        plan: Any,
        rows: Tensor,
        call: Call,
        weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the rows [N, H] of every token: out[t] = sum over k of weights * row, in k order.

        weights: [N] multiply the rows before the sum. values: [N] are carried to their slots.
        Accumulates in fp32 (fp64 for fp64 rows) and rounds once.

        Returns:
            out [T, H], and values [T, K] (zero in unused slots; None without `values`).
        """

    def last_wait(self) -> tuple[int, int] | None:
        """How long this rank waited in its last exchange of counts, and for whom.

        Returns:
            (nanoseconds from when this rank had sent its counts until those of the last peer had
            arrived, the rank of that peer in the group); (0, its own rank) where it was the last
            itself. A device reports it without being waited for: it is of the last exchange that
            has got that far. None: nothing has been exchanged yet, or the backend can't tell.
        """

    def check(self, call: Call) -> None:
        """Raises what a device has reported so far; does not wait for it."""

    def rows_wait(self) -> tuple[int, int] | None:
        """As `last_wait`, of the last exchange of rows. None: the backend can't tell."""

    def tally(self, plan: Any) -> Tensor:
        """Integers that tell what arrives with a plan, for `arrivals`; the host waits for nothing.

        Tallies of several dispatches may be added up.
        """

    def arrivals(self, tally: Tensor) -> Arrivals:
        """What a sum of tallies means. Waits for the device that holds it."""

    def refuse(self, call: Call) -> NoReturn:
        """Tells the peers of `call.error`, where there is nothing to exchange, and raises it."""

    def destroy(self) -> None:
        """Frees what the backend owns; idempotent, never waits for a dead peer."""
