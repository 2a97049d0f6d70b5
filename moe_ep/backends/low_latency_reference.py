"""Low-latency mode over torch.distributed point-to-point messages: any device and process group.

All messages of an operation are posted when it is sent, into memory of their own, so that hooks may
come in any order; the receiving half waits for them and unpacks. As no rank knows then how much
arrives, the rows of a dispatch travel in messages of the largest size. Legend of shapes: see
low_latency_base.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round
from moe_ep.backends.low_latency_base import (
    CombineInputs,
    Outgoing,
    Receive,
    Result,
    Shape,
    block_timeout,
    new_result,
)
from moe_ep.errors import BrokenError
from moe_ep.quant import quantize_fp8

_EXPONENT_SHIFT = 23  # of an fp32
_POLL_S = 1e-4


@dataclass
class ReferenceLowLatencyPlan:
    """Where rows came from and went.

    sent: per destination rank, the slots (token*K + k) in the order they were sent. places: per
    source rank, the received rows' indices in the flat [L*N] result; known once received.
    """

    sent: list[Tensor]
    places: list[Tensor] | None = None


class ReferenceLowLatencyBackend:
    """See `moe_ep.backends.low_latency_base.LowLatencyBackend`."""

    name = "reference"
    num_sms = 0

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.size = channel.rank, channel.size
        self._destroyed = False

    @property
    def device(self) -> torch.device | None:
        return None

    def check(self, call: Call) -> None:
        if self._destroyed:
            raise BrokenError(f"rank {self.rank}: {call.phase} after destroy()")

    def round_trip_us(self, peer: int, rounds: int, call: Call) -> float | None:
        return None

    def destroy(self) -> None:
        self._destroyed = True

    # -- dispatch ---------------------------------------------------------------------------------

    def dispatch(
        self, shape: Shape, tag: int, outgoing: Outgoing | None, call: Call, at_once: bool
    ) -> tuple[Result, ReferenceLowLatencyPlan, Receive]:
        self.check(call)
        outgoing = outgoing or _nothing(shape)
        device = outgoing.x.device
        order, counts = _sorted_slots(outgoing.topk_idx, shape.num_experts)
        per_rank = counts.view(self.size, -1)
        sent = list(order.split(per_rank.sum(1).tolist()))
        columns = _columns(outgoing, shape)
        arriving = {}
        with Round(self._channel, call, f"{call.phase} of {tag} {shape}") as exchange:
            for peer in range(self.size):
                slots = sent[peer]
                tokens = slots // shape.num_slots
                leaving = [per_rank[peer], *(column[tokens] for column in columns), slots]
                if peer == self.rank:
                    arriving[peer] = leaving
                    continue
                leaving[1:] = [_padded(block, self._most_rows(shape)) for block in leaving[1:]]
                arriving[peer] = [torch.empty_like(message) for message in leaving]
                for message, place in zip(leaving, arriving[peer], strict=True):
                    exchange.recv(peer, place)
                    exchange.send(peer, message)
        result = new_result(shape, self.size, outgoing.pack_scales, device)
        plan = ReferenceLowLatencyPlan(sent)

        def receive() -> None:
            started = _begin(exchange)
            exchange.finish()
            matrix = torch.stack([arriving[rank][0] for rank in range(self.size)], 1)  # [L, R]
            begins = matrix.cumsum(1) - matrix
            result.layout_range.copy_(begins << 32 | matrix)
            result.count.copy_(matrix.sum(1))
            plan.places = [
                _places(matrix[:, rank], begins[:, rank], shape.num_rows(self.size))
                for rank in range(self.size)
            ]
            for rank, places in enumerate(plan.places):
                blocks = [message[: len(places)] for message in arriving[rank][1:]]
                _unpack(result, places, blocks, shape, outgoing.pack_scales)
            _add(outgoing.recv_stats, result.count)
            self._add_waiting(outgoing.wait_stats, started)

        if call.error is not None:
            receive()  # raises it
        return result, plan, receive

    # -- combine ----------------------------------------------------------------------------------

    def combine(
        self,
        shape: Shape,
        tag: int,
        plan: ReferenceLowLatencyPlan,
        inputs: CombineInputs | None,
        call: Call,
        at_once: bool,
    ) -> Receive:
        self.check(call)
        assert plan.places is not None
        if inputs is not None and inputs.block_signals is not None:
            call.error = self._wait_for_blocks(plan, inputs, inputs.block_signals, call)
        inputs = inputs or _zeros(shape, self.size)
        flat = inputs.x.reshape(-1, shape.hidden)
        with Round(self._channel, call, f"{call.phase} of {tag} {shape}") as exchange:
            returned = {self.rank: flat[plan.places[self.rank]]}
            for peer in exchange.peers():
                returned[peer] = flat.new_empty(len(plan.sent[peer]), shape.hidden)
                exchange.recv(peer, returned[peer])
                exchange.send(peer, flat[plan.places[peer]])

        def receive() -> None:
            started = _begin(exchange)
            exchange.finish()
            num_tokens = len(inputs.out)
            slots = flat.new_zeros(num_tokens * shape.num_slots, shape.hidden)
            for peer, rows in returned.items():
                slots[plan.sent[peer]] = rows
            rows = slots.view(num_tokens, shape.num_slots, shape.hidden)
            inputs.out.copy_(_weighted_sum(rows, inputs.topk_idx >= 0, inputs.topk_weights))
            self._add_waiting(inputs.wait_stats, started)

        if call.error is not None:
            receive()  # raises it
        return receive

    def refuse(self, shape: Shape | None, tag: int, call: Call) -> NoReturn:
        """Where all ranks do, they can go on; else everything stops."""
        self.check(call)
        assert call.error is not None
        Round(self._channel, call, f"{call.phase} refused").finish()
        raise call.error

    def combine_buffer(self, shape: Shape, plan: Any, device: torch.device) -> Tensor:
        local, rows = shape.num_experts // self.size, shape.num_rows(self.size)
        return torch.empty(local, rows, shape.hidden, dtype=torch.bfloat16, device=device)

    def _wait_for_blocks(
        self, plan: ReferenceLowLatencyPlan, inputs: CombineInputs, signals: Tensor, call: Call
    ) -> Exception | None:
        """Waits until all blocks that hold rows are ready; otherwise what to raise."""
        assert plan.places is not None
        num_rows, blocks = inputs.x.shape[1], signals.shape[1]
        awaited = torch.cat(plan.places) // (num_rows // blocks)  # row // N is its expert
        deadline = time.monotonic() + call.timeout_s
        while True:
            seen = signals.reshape(-1)[awaited]
            late = (seen < inputs.signal_value).nonzero()
            if len(late) == 0:
                return None
            if time.monotonic() > deadline:
                expert, block = divmod(int(awaited[late[0, 0]]), blocks)
                return block_timeout(self.rank, call.timeout_s, expert, block, call.operation)
            time.sleep(_POLL_S)

    def _most_rows(self, shape: Shape) -> int:
        """Of one rank for another: no expert gets more than Tmax, no token has more than K."""
        return shape.max_tokens * min(shape.num_slots, shape.num_experts // self.size)

    def _add_waiting(self, stats: Tensor | None, started: float) -> None:
        """Messages are waited for together: every peer gets the whole time."""
        if stats is None:
            return
        waited = int((time.monotonic() - started) * 1e9)
        others = torch.full_like(stats, waited)
        others[self.rank] = 0
        stats += others


def _begin(exchange: Round) -> float:
    """The time-out counts from when somebody waits."""
    started = time.monotonic()
    exchange.deadline = started + exchange.call.timeout_s
    return started


def _padded(block: Tensor, num_rows: int) -> Tensor:
    return torch.cat([block, block.new_zeros(num_rows - len(block), *block.shape[1:])])


def _nothing(shape: Shape) -> Outgoing:
    x = torch.empty(0, shape.hidden, dtype=torch.bfloat16)
    scale = "fp32" if shape.fp8 else None
    return Outgoing(x, torch.empty(0, shape.num_slots, dtype=torch.int64), scale)


def _zeros(shape: Shape, num_ranks: int) -> CombineInputs:
    local = shape.num_experts // num_ranks
    x = torch.zeros(local, shape.num_rows(num_ranks), shape.hidden, dtype=torch.bfloat16)
    none = torch.empty(0, shape.num_slots)
    return CombineInputs(x, none, none, torch.empty(0, shape.hidden))


def _sorted_slots(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Used slots (int64, token*K + k) by expert, then token; rows per expert [E] int64."""
    experts = topk_idx.reshape(-1).long()
    counts = torch.bincount(experts[experts >= 0], minlength=num_experts)
    order = torch.argsort(experts, stable=True)
    return order[len(order) - int(counts.sum()) :], counts


def _columns(outgoing: Outgoing, shape: Shape) -> list[Tensor]:
    """What travels of each token: its row, and its scales."""
    if outgoing.scale is None:
        return [outgoing.x.contiguous()]
    q, scales = quantize_fp8(outgoing.x, outgoing.scale)
    return [q.view(torch.uint8), scales]


def _places(counts: Tensor, begins: Tensor, num_rows: int) -> Tensor:
    """Flat places [L*N] of one source's rows, which come sorted by local expert.

    counts, begins: [L] rows of that source and where they begin within the expert.
    """
    experts = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    index = torch.arange(len(experts), device=counts.device)
    within = index - (counts.cumsum(0) - counts)[experts]
    return experts * num_rows + begins[experts] + within


def _unpack(
    result: Result, places: Tensor, block: list[Tensor], shape: Shape, pack_scales: bool
) -> None:
    """block: rows, scales where they are FP8, slots; of one source rank."""
    rows, slots = block[0], block[-1]
    flat = result.rows.view(-1, shape.hidden)
    (flat.view(torch.uint8) if shape.fp8 else flat)[places] = rows
    result.src_info.view(-1)[places] = (slots // shape.num_slots).int()
    if result.scales is None:
        return
    scales = block[1]
    if pack_scales:
        exponents = (scales.view(torch.int32) >> _EXPONENT_SHIFT).to(torch.uint8)
        scales = exponents.view(torch.int32)
    expert, position = places // result.rows.shape[1], places % result.rows.shape[1]
    result.scales[expert, position] = scales


def _weighted_sum(rows: Tensor, used: Tensor, weights: Tensor) -> Tensor:
    """rows: [T, K, H] bf16. used: [T, K] bool. weights: [T, K] fp32. Returns [T, H] fp32."""
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
    for k in range(rows.shape[1]):
        term = rows[:, k].float() * weights[:, k : k + 1]
        total += torch.where(used[:, k : k + 1], term, 0.0)
    return total


def _add(stats: Tensor | None, counts: Tensor) -> None:
    if stats is not None:
        stats += counts.to(stats.dtype)
