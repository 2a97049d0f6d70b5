"""What a backend of low-latency mode is: two verbs, each in two halves.

The first half sends and never waits for a peer's data. The second, returned as a function, receives
and fills tensors that exist since the first. Every rank does all operations in the same order.

Legend of shapes: T tokens of this rank, Tmax of any rank at most, H hidden, K top-k, R ranks,
E experts, L = E/R local experts, N = R*Tmax rows that a local expert can get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.errors import PeerTimeoutError
from moe_ep.layout import FP8_BLOCK

MAX_SLOTS = 32
MAX_EXPERTS = 2048
MAX_TOKENS = (1 << 23) - 1
SCALES_PER_WORD = 4
ROW_ALIGNMENT = 16  # bytes: what a kernel moves at a time
_ROW_BYTES_PER_COLUMN = 2
_MARK_BYTES, _ALIGN = 4096, 256
_WORD_BYTES, _ROUTE_BYTES, _INDEX_BYTES, _MAX_RANKS, _MAX_BLOCKS = 8, 8, 4, 64, 255

Receive = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """What ranks must agree on before they exchange rows."""

    max_tokens: int  # Tmax
    hidden: int
    num_experts: int
    num_slots: int  # K
    fp8: bool

    def num_rows(self, num_ranks: int) -> int:
        """N."""
        return num_ranks * self.max_tokens


def num_bytes_needed(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory: csrc/shared/low_latency_layout.h says for what."""
    words = 2 * (3 * MAX_EXPERTS + (4 + 2 * _MAX_BLOCKS) * _MAX_RANKS) + _MAX_RANKS
    signals = words * _WORD_BYTES
    row_bytes = hidden * _ROW_BYTES_PER_COLUMN
    routes = _align(max_tokens * min(MAX_SLOTS, num_experts) * _ROUTE_BYTES)
    order = _align(max_tokens * num_experts * _INDEX_BYTES)
    stage = _align(max_tokens * row_bytes) + routes + order
    slot_rows = max_tokens * (num_experts - num_experts // num_ranks) * row_bytes
    most = max(
        max_tokens * num_experts * row_bytes,
        num_ranks * stage,
        stage + num_ranks * routes + slot_rows,
    )
    return _MARK_BYTES + signals + 4 * _align(most)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Outgoing:
    """One rank's part in a dispatch.

    x: [T, H] bf16. topk_idx: [T, K] int32 or int64, -1 unused. scale: "fp32", "power_of_two" or,
    for bf16 rows, None. pack_scales: exponents of four power-of-two scales in an int32.
    recv_stats: [L] int32, the received rows are added to it. wait_stats: [R] int64, the nanoseconds
    waited for each rank are added to it.
    """

    x: Tensor
    topk_idx: Tensor
    scale: str | None = None
    pack_scales: bool = False
    recv_stats: Tensor | None = None
    wait_stats: Tensor | None = None


@dataclass(frozen=True)
class Result:
    """What a dispatch fills.

    rows: [L, N, H] bf16 or float8_e4m3fn. scales: None, [L, N, H/128] fp32 or [L, N, H/512] int32,
    column-major in the last two dimensions. count: [L] int32. src_info: [L, N] int32, the token of
    the source rank. layout_range: [L, R] int64, first row << 32 | number of rows, by source rank.
    """

    rows: Tensor
    scales: Tensor | None
    count: Tensor
    src_info: Tensor
    layout_range: Tensor


@dataclass(frozen=True)
class CombineInputs:
    """One rank's part in a combine.

    x: [L, N, H] bf16. topk_idx: [T, K], as dispatched. topk_weights: [T, K] fp32. out: [T, H] bf16,
    to be filled with the sum over used slots of weight * row, in k order and fp32, rounded once.
    wait_stats: as for a dispatch. zero_copy: x is what the backend's `combine_buffer` gave.
    block_signals: [L, B] int32, B blocks of N/B rows of an expert. A block that holds rows is sent
    once its signal has reached signal_value.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    out: Tensor
    wait_stats: Tensor | None = None
    zero_copy: bool = False
    block_signals: Tensor | None = None
    signal_value: int = 1


def block_timeout(
    rank: int, seconds: float, expert: int, block: int, operation: int
) -> PeerTimeoutError:
    """What ends a combine whose caller has not raised the signal of a block of a local expert."""
    return PeerTimeoutError(
        f"rank {rank} waited {seconds:g} s for its own signal of local expert {expert}, block "
        f"{block}, in low_latency_combine, operation {operation}; whoever computes that block must "
        "raise block_signals, and needs SMs to run on: see Buffer.set_num_sms"
    )


def new_result(shape: Shape, num_ranks: int, pack_scales: bool, device: torch.device) -> Result:
    """Tensors for a dispatch to fill; rows no token fills stay undefined."""
    local, rows = shape.num_experts // num_ranks, shape.num_rows(num_ranks)
    scales = None
    if shape.fp8:
        columns = shape.hidden // FP8_BLOCK
        kind = torch.float32
        if pack_scales:
            columns, kind = columns // SCALES_PER_WORD, torch.int32
        scales = torch.empty(local, columns, rows, dtype=kind, device=device).transpose(1, 2)
    dtype = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
    return Result(
        rows=torch.empty(local, rows, shape.hidden, dtype=dtype, device=device),
        scales=scales,
        count=torch.empty(local, dtype=torch.int32, device=device),
        src_info=torch.empty(local, rows, dtype=torch.int32, device=device),
        layout_range=torch.empty(local, num_ranks, dtype=torch.int64, device=device),
    )


class LowLatencyBackend(Protocol):
    """Moves rows between the ranks of one group.

    With `call.error`, a verb tells the peers of it in place of data and raises it. With `at_once`
    the receiving half is called immediately, so that the first half may do its work, too.
    """

    name: str
    num_sms: int

    @property
    def device(self) -> torch.device | None:
        """Where tensors must be; None: anywhere."""

    def dispatch(
        self, shape: Shape, tag: int, outgoing: Outgoing | None, call: Call, at_once: bool
    ) -> tuple[Result, Any, Receive]:
        """Sends each row to the experts of its used slots.

        Args:
            tag: number of the shape among those agreed on.
            outgoing: None only together with `call.error`.

        Returns:
            A result to be filled, what `combine` needs, and the receiving half.
        """

    def combine(
        self,
        shape: Shape,
        tag: int,
        plan: Any,
        inputs: CombineInputs | None,
        call: Call,
        at_once: bool,
    ) -> Receive:
        """Returns rows to their tokens; `inputs` is None only together with `call.error`."""

    def refuse(self, shape: Shape | None, tag: int, call: Call) -> NoReturn:
        """Raises `call.error` where this rank has no plan to take part with, and tells the peers
        where they can be told.

        Args:
            shape: what the peers probably use; None: nothing has been dispatched yet.
        """

    def combine_buffer(self, shape: Shape, plan: Any, device: torch.device) -> Tensor:
        """[L, N, H] bf16 for the expert rows of a dispatch, to be combined with `zero_copy`."""

    def round_trip_us(self, peer: int, rounds: int, call: Call) -> float | None:
        """How long a signal takes to `peer`, which must make the same call, and back: the mean of
        `rounds`. Waits for them. None: signals are messages of the host."""

    def check(self, call: Call) -> None:
        """Raises what is known to have gone wrong before; does not wait."""

    def destroy(self) -> None:
        """Frees what the backend owns; idempotent, never waits for a dead peer."""
