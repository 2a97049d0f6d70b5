"""Rank rows between the ranks of a group, over any backend.

A backend whose layout has one expert per rank, given each token's distinct destination ranks,
delivers one row per (token, rank) by source rank and token: DeepEP's rank rows. A first small
backend carries headers. The one for rows is built, by all ranks together, when headers tell how
wide they are, and again for wider ones; plans keep the backend that made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import backends, env
from moe_ep.backends.base import Backend, Call, Plan
from moe_ep.errors import BrokenError, CapacityError, PeerTimeoutError
from moe_ep.handshake import handshake
from moe_ep.layout import EPLayout, Timeouts
from moe_ep.rank_rows import (
    HEADER_WORDS,
    WORD_BYTES,
    Headers,
    Outgoing,
    RowFormat,
    bad_routing,
    pack_header,
    round_up,
)

_ROOM_UNIT = 32


@dataclass(frozen=True)
class RankPlan:
    """The routing of one dispatch, and the backend that can use it."""

    owner: RankExchange = field(repr=False)  # lives as long as its plans
    backend: Backend
    plan: Plan
    format: RowFormat
    row_bytes: int  # widest row this backend can move
    device: torch.device  # where its rows are

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows


@dataclass(frozen=True)
class _RowBackend:
    backend: Backend
    row_bytes: int
    num_slots: int
    room: int  # tokens of a rank that dispatches with static rows may have
    agreed: set[RowFormat]  # static formats on which the ranks have compared notes

    def carries(self, row_bytes: int, num_slots: int, room: int) -> bool:
        return row_bytes <= self.row_bytes and num_slots <= self.num_slots and room <= self.room


class RankExchange:
    """Construction is collective, and so are all operations.

    Raises:
        BackendUnavailableError, PeerTimeoutError: as for ExpertParallel.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.operations = 0
        seconds = env.timeout_s()
        self._timeouts = (
            Timeouts() if seconds is None else Timeouts(first_s=seconds, steady_s=seconds)
        )
        self._backends: list[Backend] = []
        self._rows: dict[bool, _RowBackend] = {}  # by whether the number of rows is static
        self._control = self._build(
            WORD_BYTES * HEADER_WORDS, 1, self.size, env.backend() or "auto"
        )
        self._header_device = self.device or self._channel.device()
        everyone = torch.arange(self.size, device=self._header_device).unsqueeze(1)
        self._to_everyone = self._control.prepare(everyone, self.call("setup"))

    @property
    def device(self) -> torch.device | None:
        """Where tensors must be; None: anywhere."""
        return self._control.device

    def call(self, phase: str) -> Call:
        """The next operation."""
        if not self._backends:
            raise BrokenError(f"rank {self.rank}: {phase} after destroy()")
        self.operations += 1
        seconds = self._timeouts.first_s if self.operations < 3 else self._timeouts.steady_s
        return Call(self.operations, phase, seconds)

    def plan(self, outgoing: Outgoing, call: Call, num_sms: int) -> tuple[RankPlan, Headers | None]:
        """Where every row goes, and the headers that led to it.

        Rows of static number whose format is known need no headers, and the host does not wait.
        Ranks that differ in what is static or known then wait for different things.

        Raises:
            As `Headers.check`, on all ranks; CapacityError: more rows than `num_worst_tokens`.
            PeerTimeoutError: a peer did not come, or (rows of static number) sends other rows.
        """
        rows = self._rows.get(outgoing.num_worst_tokens > 0)
        if rows is not None and self._is_agreed(rows, outgoing):
            return self._prepare(rows, outgoing, call, num_sms), None
        read = self._send_headers(outgoing, call, num_sms)
        early = self._prepare_early(outgoing, call, num_sms)
        headers = read()
        headers.check(outgoing)
        form = outgoing.format
        assert form is not None
        room = 0
        if form.num_worst_tokens:
            room = max(-(-form.num_worst_tokens // self.size), headers.most_tokens)
        num_slots = form.num_slots(self.size)
        if rows is None or not rows.carries(form.row_bytes, num_slots, room):
            rows, early = self._grow(rows, form.row_bytes, num_slots, room), None
        if form.num_worst_tokens:
            rows.agreed.add(form)
        elif early is not None:
            return self._plan_of(rows, early, outgoing), headers
        return self._prepare(rows, outgoing, call, num_sms), headers

    def dispatch(self, to: RankPlan, rows: Tensor, call: Call, num_sms: int) -> Tensor:
        """Row t of `rows` [T, W] to every destination of token t: [N, W]."""
        to.backend.num_sms = num_sms
        with self._explained(to.format, call):
            return to.backend.dispatch(to.plan, rows, None, call).rows

    def combine(self, to: RankPlan, rows: Tensor, call: Call, num_sms: int) -> Tensor:
        """The sum of each token's rows [N, W], in rank order and fp32: [T, W]."""
        to.backend.num_sms = num_sms
        with self._explained(to.format, call):
            return to.backend.combine(to.plan, rows, call)[0]

    def refuse(self, call: Call) -> NoReturn:
        """Tells the peers of `call.error` where there is no plan to exchange rows with.

        They wait in the backend of their handle, which is not known here. It is most often the
        latest for dynamic rows; peers in another one get a PeerTimeoutError.
        """
        rows = self._rows.get(False) or self._rows.get(True)
        assert call.error is not None
        try:
            (self._control if rows is None else rows.backend).refuse(call)
        except PeerTimeoutError as error:  # what follows from the mistake is no news to this rank
            raise call.error from error

    def destroy(self) -> None:
        """Frees everything, plans included. Idempotent; does not wait for a dead peer."""
        self._rows.clear()
        _destroy(self._backends)

    def destroy_when_dropped(self) -> None:
        """Calls `destroy` when nobody holds this object any more; not at the end of the process."""
        weakref.finalize(self, _destroy, self._backends).atexit = False

    # -- internals --------------------------------------------------------------------------------

    def _build(self, row_bytes: int, num_slots: int, room: int, name: str) -> Backend:
        layout = EPLayout(
            model={
                "hidden": row_bytes // WORD_BYTES,
                "num_experts": self.size,
                "top_k": num_slots,
            },
            parallel={"expert": self.size},
            tokens_per_rank=room or None,
            dispatch={"dtype": "fp32"},
            backend=name,
            timeouts=self._timeouts.model_dump(),
        )
        channel, unavailable = handshake(
            layout, self.group, self._timeouts.first_s, backends.reasons(layout)
        )
        self._channel = channel
        backend = backends.create(layout, self.group, channel, unavailable)
        self._backends.append(backend)
        return backend

    def _grow(
        self, before: _RowBackend | None, row_bytes: int, num_slots: int, room: int
    ) -> _RowBackend:
        """A backend for rows of static number is not used for others: its memory, which a CUDA
        graph may know, then never moves."""
        if before is not None:
            row_bytes, num_slots = (
                max(row_bytes, before.row_bytes),
                max(num_slots, before.num_slots),
            )
            room = max(room, before.room)
        room = round_up(room, _ROOM_UNIT)
        backend = self._build(row_bytes, num_slots, room, self._control.name)
        rows = self._rows[room > 0] = _RowBackend(backend, row_bytes, num_slots, room, set())
        return rows

    def _is_agreed(self, rows: _RowBackend, outgoing: Outgoing) -> bool:
        form = outgoing.format
        if form is not None:
            return form in rows.agreed
        # Bad input. The peers, who are not told first, go straight to `prepare` if they know their
        # format; whether they do can only be told from the number of rows.
        known = {agreed.num_worst_tokens for agreed in rows.agreed}
        return outgoing.num_worst_tokens in known

    def _prepare(self, rows: _RowBackend, outgoing: Outgoing, call: Call, num_sms: int) -> RankPlan:
        capacity = outgoing.num_worst_tokens or None
        call = replace(call, phase="dispatch.metadata", error=outgoing.error)
        if capacity is not None and outgoing.num_tokens > rows.room:
            call.error = ValueError(
                f"x has {outgoing.num_tokens} tokens; with num_worst_tokens={capacity} a rank may "
                f"have {rows.room}: num_worst_tokens / ranks, or the most that any rank had in the "
                "first such dispatch; raise num_worst_tokens"
            )
        rows.backend.num_sms = num_sms
        slots = None
        if call.error is None and capacity is not None:
            slots = self._checked_slots(rows.backend, outgoing, call)
        elif call.error is None:
            slots = outgoing.slots  # headers have told whether they are good
        with self._explained(outgoing.format, call):
            plan = rows.backend.prepare(slots, call, capacity)
        return self._plan_of(rows, plan, outgoing)

    def _plan_of(self, rows: _RowBackend, plan: Plan, outgoing: Outgoing) -> RankPlan:
        form, slots = outgoing.format, outgoing.slots
        assert form is not None and slots is not None
        return RankPlan(self, rows.backend, plan, form, rows.row_bytes, slots.device)

    def _checked_slots(self, backend: Backend, outgoing: Outgoing, call: Call) -> Tensor | None:
        """The slots of a dispatch without headers. Bad routing becomes a bad slot where the backend
        reports those, which spares the host a wait, and `call.error` elsewhere."""
        form, slots, bad = outgoing.format, outgoing.slots, outgoing.bad_tokens()
        assert form is not None and slots is not None
        if backend.checks_indices:
            return torch.where(bad.unsqueeze(1), self.size, slots)
        if not bad.any():
            return slots
        call.error = ValueError(bad_routing(form, self.size))
        return None

    @contextmanager
    def _explained(self, form: RowFormat | None, call: Call) -> Iterator[None]:
        """Says in terms of the Buffer's arguments what a backend says of bad slots and of too many
        rows, be it at a later call."""
        try:
            yield
        except CapacityError as error:
            text = str(error).replace("dispatch.capacity", "num_worst_tokens")
            raise CapacityError(text) from None
        except ValueError as error:
            if error is call.error or form is None or not form.num_worst_tokens:
                raise
            raise ValueError(
                f"rank {self.rank}: bad input, found at {call.phase}, operation "
                f"{call.operation}: {bad_routing(form, self.size)}"
            ) from error

    def _prepare_early(self, outgoing: Outgoing, call: Call, num_sms: int) -> Plan | None:
        """Starts the exchange of counts before the headers are read: they mostly agree.

        Whatever this rank sends, its peers may count on it to take part.
        """
        rows = self._rows.get(False)
        if rows is None:
            return None
        form, slots = outgoing.format, outgoing.slots
        if form is None or form.num_slots(self.size) > rows.num_slots:
            slots = None
        if slots is None:
            slots = torch.empty(0, rows.num_slots, dtype=torch.int64, device=self.device)
        rows.backend.num_sms = num_sms
        return rows.backend.prepare(slots, replace(call, phase="dispatch.metadata"))

    def _send_headers(self, outgoing: Outgoing, call: Call, num_sms: int) -> Callable[[], Headers]:
        """Exchanges headers; calling the result waits for them."""
        device, call = self._header_device, replace(call, phase="dispatch.header")
        header = pack_header(outgoing, call.operation, self.size, device)
        self._control.num_sms = num_sms
        arrived = self._control.dispatch(self._to_everyone, header, None, call).rows
        words, ready = arrived.view(torch.int32), None
        if device.type == "cuda":
            pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
            words = pinned.copy_(words, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()

        def read() -> Headers:
            if ready is not None:
                ready.synchronize()
            self._control.check(call)  # a peer that did not come in time
            return Headers(words, self.rank, call.operation)

        return read


def _destroy(built: list[Backend]) -> None:
    while built:
        built.pop().destroy()
