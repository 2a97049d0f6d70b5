"""The reference backend: torch operations and point-to-point messages, on any device.

The rows of one (expert, source rank) are a contiguous block, both in the sender's gathered buffer
and in the receiver's result. Large blocks travel as a message each, straight to their place, so
that nothing is sorted after arrival; small ones are packed into one message per peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import Arrivals, Call, DispatchedRows, Plan
from moe_ep.backends.channel import Channel, Round
from moe_ep.errors import CapacityError
from moe_ep.layout import EPLayout
from moe_ep.quant import dequantize_fp8, quantize_fp8

_SMALL_BLOCK_BYTES = 64 << 10  # on average: then one copy is cheaper than many messages
_FP8_SOURCES = [torch.bfloat16, torch.float16, torch.float32]  # by the number that peers get
_TOKENS_PER_BLOCK = 512  # of the sum in combine: large enough to hide the cost of a call

Block = tuple[int, int]
"""(first row, number of rows)."""


@dataclass(frozen=True)
class ReferencePlan(Plan):
    """Routing of one dispatch, as indices.

    "Send order" is the order of this rank's rows by (destination rank, its expert, token, slot).
    """

    token_of_row: Tensor  # [S] source token of each row in send order
    slot_of_row: Tensor  # [S] token * K + k
    row_of_slot: Tensor  # [T, K] place in send order; S for unused slots
    outgoing: list[list[Block]]  # per peer, one block per expert: rows in send order
    incoming: list[list[Block]]  # per peer, one block per local expert: rows of the result
    padding: list[Block]  # rows of the result that no token fills

    @property
    def num_sent(self) -> int:
        return self.token_of_row.numel()

    def own_blocks(self, rank: int) -> Iterator[tuple[Block, Block]]:
        """Blocks that don't leave the rank: in send order, and in the result."""
        return zip(self.outgoing[rank], self.incoming[rank], strict=True)


class ReferenceBackend:
    """See `moe_ep.backends.base.Backend`."""

    name = "reference"
    device = None
    checks_indices = False

    def __init__(self, layout: EPLayout, group: dist.ProcessGroup, channel: Channel) -> None:
        self.layout = layout
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.num_local_experts = layout.num_local_experts
        self.num_slots_total = self.size * self.num_local_experts
        self.num_sms = layout.dispatch.num_sms
        self._scratch: dict[str, Tensor] = {}
        self._counts_wait: tuple[int, int] | None = None
        self._rows_wait: tuple[int, int] | None = None

    def prepare(
        self,
        topk_idx: Tensor | None,
        call: Call,
        capacity: int | None = None,
        *,
        x: Tensor | None = None,
        probs: Tensor | None = None,
        fp8_scale: str | None = None,
    ) -> ReferencePlan:
        """`dispatch` alone needs x, probs and fp8_scale."""
        capacity = capacity or self.layout.dispatch.capacity
        counts = torch.zeros(self.num_slots_total, dtype=torch.int64)
        if topk_idx is not None:
            flat = topk_idx.reshape(-1).long()
            counts = torch.bincount(flat[flat >= 0], minlength=self.num_slots_total)
        device = self.channel.device()
        matrix = torch.empty(self.size, self.num_slots_total + 1, dtype=torch.int64, device=device)
        matrix[self.rank, :-1] = counts
        matrix[self.rank, -1] = 0
        if x is not None and fp8_scale is not None and call.error is None:
            matrix[self.rank, -1] = _FP8_SOURCES.index(x.dtype)
        with Round(self.channel, call, call.phase) as exchange:
            for peer in exchange.peers():
                exchange.recv(peer, matrix[peer])
            for peer in exchange.peers():
                exchange.send(peer, matrix[self.rank])
            # While they travel:
            order = None if topk_idx is None else torch.argsort(flat, stable=True)
        exchange.finish()
        self._counts_wait = exchange.waited
        assert topk_idx is not None and order is not None
        matrix, sources = matrix.cpu().split([self.num_slots_total, 1], 1)
        self._check_sources(sources.flatten().tolist(), call)
        if capacity is not None:
            self._check_capacity(matrix, capacity, call)
        return self._plan(topk_idx, order, matrix, capacity, call.operation)

    def dispatch(
        self,
        plan: ReferencePlan,
        x: Tensor,
        probs: Tensor | None,
        call: Call,
        fp8_scale: str | None = None,
        *,
        dequantize: bool = False,
    ) -> DispatchedRows:
        with self.channel.whole(call):
            columns: list[Tensor] = []
            if fp8_scale is not None:
                q, scales = quantize_fp8(x, fp8_scale)
                columns += [q.view(torch.uint8), scales]
            else:
                columns.append(x.contiguous())
            by_slot = [] if probs is None else [probs.reshape(-1)]
            outputs = self._scatter(plan, columns, by_slot, call)
        row_probs = None if probs is None else outputs[-1]
        if fp8_scale is None:
            return DispatchedRows(outputs[0], None, row_probs)
        q, scales = outputs[0].view(torch.float8_e4m3fn), outputs[1]
        if dequantize:
            return DispatchedRows(dequantize_fp8(q, scales, x.dtype), None, row_probs)
        return DispatchedRows(q, scales, row_probs)

    def combine(
        self,
        plan: ReferencePlan,
        rows: Tensor,
        call: Call,
        weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        columns = [rows.contiguous(), *(c.contiguous() for c in (weights, values) if c is not None)]
        returned = self._gather(plan, columns, call)
        weight_rows = returned[1] if weights is not None else None
        out = _sum_slots(returned[0], plan.row_of_slot, weight_rows)
        if values is None:
            return out, None
        return out, returned[-1][plan.row_of_slot]

    def check(self, call: Call) -> None:
        """Nothing happens behind a call's back."""

    def last_wait(self) -> tuple[int, int] | None:
        return self._counts_wait

    def rows_wait(self) -> tuple[int, int] | None:
        return self._rows_wait

    def tally(self, plan: ReferencePlan) -> Tensor:
        rows = torch.tensor([_num_rows(blocks) for blocks in plan.incoming])
        return torch.cat([plan.valid_tokens_per_expert, rows])

    def arrivals(self, tally: Tensor) -> Arrivals:
        words = tally.tolist()
        experts, rows = words[: self.num_local_experts], words[self.num_local_experts :]
        return Arrivals(experts, rows, rows)

    def refuse(self, call: Call) -> NoReturn:
        assert call.error is not None
        Round(self.channel, call, f"{call.phase} refused").finish()
        raise call.error

    def destroy(self) -> None:
        self._scratch.clear()

    # -- rounds ---------------------------------------------------------------------------------

    def _scatter(
        self, plan: ReferencePlan, by_token: list[Tensor], by_slot: list[Tensor], call: Call
    ) -> list[Tensor]:
        """Sends columns indexed by token and by (token, slot) to their expert rows."""
        sources = [(c, plan.token_of_row) for c in by_token]
        sources += [(c, plan.slot_of_row) for c in by_slot]
        outputs = [c.new_empty(plan.num_rows, *c.shape[1:]) for c, _ in sources]
        for output in outputs:
            for first, count in plan.padding:
                output[first : first + count].zero_()
        with Round(self.channel, call, _kind(plan, outputs, call)) as exchange:
            packed: list[tuple[Tensor, list[Block], Tensor]] = []
            for peer in exchange.peers():
                blocks = plan.incoming[peer]
                for number, output in enumerate(outputs):
                    if _travels_in_blocks(blocks, output):
                        for first, count in blocks:
                            exchange.recv(peer, output[first : first + count])
                    elif blocks:
                        arriving = self._buffer(f"in {number} {peer}", _num_rows(blocks), output)
                        exchange.recv(peer, arriving)
                        packed.append((arriving, blocks, output))
            for peer in exchange.peers():
                blocks = plan.outgoing[peer]
                for number, (column, index) in enumerate(sources):
                    leaving = self._buffer(f"out {number}", plan.num_sent, column)
                    in_blocks = _travels_in_blocks(blocks, column)
                    for first, count in blocks if in_blocks else _joined(blocks):
                        rows = leaving[first : first + count]
                        torch.index_select(column, 0, index[first : first + count], out=rows)
                        exchange.send(peer, rows)
            for (sent, count), (arrived, _) in plan.own_blocks(self.rank):
                for (column, index), output in zip(sources, outputs, strict=True):
                    place = output[arrived : arrived + count]
                    torch.index_select(column, 0, index[sent : sent + count], out=place)
        exchange.finish()
        self._rows_wait = exchange.waited
        for arriving, blocks, output in packed:
            parts = arriving.split([count for _, count in blocks])
            for part, (first, count) in zip(parts, blocks, strict=True):
                output[first : first + count].copy_(part)
        return outputs

    def _gather(self, plan: ReferencePlan, columns: list[Tensor], call: Call) -> list[Tensor]:
        """Returns expert rows to their source rank, in its send order; one zero row is appended.

        What it returns is good until the next round.
        """
        outputs = [
            self._buffer(f"in {i}", plan.num_sent + 1, column) for i, column in enumerate(columns)
        ]
        for output in outputs:
            output[-1].zero_()
        with Round(self.channel, call, _kind(plan, outputs, call)) as exchange:
            for peer in exchange.peers():
                blocks = plan.outgoing[peer]
                for output in outputs:
                    in_blocks = _travels_in_blocks(blocks, output)
                    for first, count in blocks if in_blocks else _joined(blocks):
                        exchange.recv(peer, output[first : first + count])
            for peer in exchange.peers():
                blocks = plan.incoming[peer]
                for number, column in enumerate(columns):
                    parts = [column[first : first + count] for first, count in blocks]
                    if parts and not _travels_in_blocks(blocks, column):
                        leaving = self._buffer(f"out {number} {peer}", _num_rows(blocks), column)
                        parts = [torch.cat(parts, out=leaving)]
                    for part in parts:
                        exchange.send(peer, part)
            for (sent, count), (arrived, _) in plan.own_blocks(self.rank):
                for column, output in zip(columns, outputs, strict=True):
                    output[sent : sent + count].copy_(column[arrived : arrived + count])
        exchange.finish()
        self._rows_wait = exchange.waited
        return outputs

    def _buffer(self, name: str, num_rows: int, like: Tensor) -> Tensor:
        """Scratch memory of [num_rows, ...] for one column of a round.

        Kept between calls: fresh memory costs as much as sending what is written to it.
        """
        shape = (num_rows, *like.shape[1:])
        num_bytes = math.prod(shape) * like.element_size()
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < num_bytes or scratch.device != like.device:
            scratch = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._scratch[name] = scratch
        return scratch[:num_bytes].view(like.dtype).view(shape)

    # -- checks and indices -----------------------------------------------------------------------

    def _check_sources(self, sources: list[int], call: Call) -> None:
        """Rows in FP8 look alike whatever they came from; what is combined does not."""
        mine, name = sources[self.rank], self.channel.name
        for peer, theirs in enumerate(sources):
            if theirs != mine:
                raise TypeError(
                    f"{name(self.rank)}: {call.phase}, operation {call.operation}: x is "
                    f"{_FP8_SOURCES[mine]}, on {name(peer)} {_FP8_SOURCES[theirs]}; all ranks "
                    "must pass one dtype"
                )

    def _check_capacity(self, matrix: Tensor, capacity: int, call: Call) -> None:
        per_expert = _align(matrix.sum(0), self.layout.dispatch.row_alignment)
        rows = per_expert.view(self.size, self.num_local_experts).sum(1)
        worst = int(rows.argmax())
        if int(rows[worst]) > capacity:
            name = self.channel.name
            raise CapacityError(
                f"{name(self.rank)}: {call.phase}, operation {call.operation}: {name(worst)} would "
                f"receive {int(rows[worst])} rows, dispatch.capacity is {capacity}; raise it, or "
                "drop tokens in the router"
            )

    def _plan(
        self,
        topk_idx: Tensor,
        order: Tensor,
        matrix: Tensor,
        capacity: int | None,
        operation: int,
    ) -> ReferencePlan:
        """order: [T*K] slots sorted by expert. matrix: [R, R*L] rows of each rank per expert."""
        num_tokens, num_slots = topk_idx.shape
        local = self.num_local_experts
        sent = matrix[self.rank]
        num_sent = int(sent.sum())
        slot_of_row = order[order.numel() - num_sent :]  # unused slots sort first
        row_of_slot = torch.full_like(order, num_sent)
        row_of_slot[slot_of_row] = torch.arange(num_sent, device=order.device)

        valid = matrix.view(self.size, self.size, local)[:, self.rank]  # [source, expert]
        blocks = _align(valid.sum(0), self.layout.dispatch.row_alignment)
        starts = (blocks.cumsum(0) - blocks).tolist()
        used = int(blocks.sum())
        num_rows = capacity or used
        ends = [start + n for start, n in zip(starts, valid.sum(0).tolist(), strict=True)]
        bounds = [*starts[1:], num_rows]
        before = (valid.cumsum(0) - valid).tolist()
        per_source = valid.tolist()
        sent_start = (sent.cumsum(0) - sent).view(self.size, local).tolist()
        sent_count = sent.view(self.size, local).tolist()
        return ReferencePlan(
            num_tokens=num_tokens,
            num_slots=num_slots,
            num_rows=num_rows,
            tokens_per_expert=blocks,
            valid_tokens_per_expert=valid.sum(0),
            operation=operation,
            token_of_row=slot_of_row // num_slots,
            slot_of_row=slot_of_row,
            row_of_slot=row_of_slot.view(num_tokens, num_slots),
            outgoing=[
                [(s, n) for s, n in zip(sent_start[p], sent_count[p], strict=True) if n]
                for p in range(self.size)
            ],
            incoming=[
                [(starts[e] + before[p][e], n) for e, n in enumerate(per_source[p]) if n]
                for p in range(self.size)
            ],
            padding=[(a, b - a) for a, b in zip(ends, bounds, strict=True) if b > a],
        )


def _kind(plan: ReferencePlan, columns: list[Tensor], call: Call) -> str:
    shapes = (f"{c.dtype}{list(c.shape[1:])}".removeprefix("torch.") for c in columns)
    return f"{call.phase} of dispatch {plan.operation} with {' '.join(shapes)}"


def _num_rows(blocks: list[Block]) -> int:
    return sum(count for _, count in blocks)


def _joined(blocks: list[Block]) -> list[Block]:
    """Blocks that follow each other, as one."""
    return [(blocks[0][0], _num_rows(blocks))] if blocks else []


def _travels_in_blocks(blocks: list[Block], column: Tensor) -> bool:
    """Whether each block is a message of its own, else all are packed into one.

    Sender and receiver decide alike: they know the same counts.
    """
    row_bytes = math.prod(column.shape[1:]) * column.element_size()
    return _num_rows(blocks) * row_bytes >= _SMALL_BLOCK_BYTES * max(len(blocks), 1)


def _align(counts: Tensor, multiple: int) -> Tensor:
    return (counts + multiple - 1) // multiple * multiple


def _sum_slots(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """out[t] = sum over k of rows[row_of_slot[t, k]] in k order, rounded once.

    rows: [S+1, H], the last one zero. weights: [S+1] or None.
    """
    num_tokens, num_slots = row_of_slot.shape
    out = rows.new_empty(num_tokens, rows.shape[1])
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    for first in range(0, num_tokens, _TOKENS_PER_BLOCK):
        index = row_of_slot[first : first + _TOKENS_PER_BLOCK]
        place = out[first : first + _TOKENS_PER_BLOCK]
        picked = [rows.index_select(0, index[:, k]) for k in range(num_slots)]
        if weights is not None:
            scale = weights.to(wide)[index]
            picked = [row.to(wide) * scale[:, k : k + 1] for k, row in enumerate(picked)]
        if num_slots == 1:
            place.copy_(picked[0])
        elif num_slots == 2:  # one addition rounds once in any dtype
            torch.add(picked[0], picked[1], out=place)
        else:
            total = picked[0].to(wide, copy=True)
            for row in picked[1:-1]:
                total += row
            place.copy_(total.add_(picked[-1]))
    return out
