"""Checks of what low-latency operations are called with. They raise; the peers are told first.

Legend of shapes: see `moe_ep.low_latency`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep.backends.low_latency_base import (
    MAX_EXPERTS,
    MAX_SLOTS,
    MAX_TOKENS,
    ROW_ALIGNMENT,
    SCALES_PER_WORD,
    CombineInputs,
    Outgoing,
    Shape,
    num_bytes_needed,
)
from moe_ep.buffer_checks import (
    INDEX_DTYPES,
    check_dimensions,
    check_kind,
    check_shape,
    check_tensor,
    integer,
)
from moe_ep.errors import OrderError
from moe_ep.layout import FP8_BLOCK

_COLUMN_MULTIPLE = ROW_ALIGNMENT // torch.bfloat16.itemsize
_MOST_ROWS = (1 << 31) - 1


def size_hint(max_tokens: Any, hidden: Any, num_ranks: Any, num_experts: Any) -> int:
    """As `num_bytes_needed`, checked."""
    max_tokens = integer("num_max_dispatch_tokens_per_rank", max_tokens, 1)
    hidden, num_ranks = integer("hidden", hidden, 1), integer("num_ranks", num_ranks, 1)
    num_experts = _checked_experts(num_experts, num_ranks)
    return num_bytes_needed(max_tokens, hidden, num_ranks, num_experts)


def _checked_experts(num_experts: Any, num_ranks: int) -> int:
    num_experts = integer("num_experts", num_experts)
    if not 1 <= num_experts <= MAX_EXPERTS or num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts}; it must be a multiple of the {num_ranks} ranks, at most "
            f"{MAX_EXPERTS}"
        )
    return num_experts


def dispatch_shape(
    num_ranks: int,
    num_bytes: int,
    *,
    x: Any,
    topk_idx: Any,
    max_tokens: Any,
    num_experts: Any,
    use_fp8: bool,
    **_: Any,
) -> Shape:
    """What the ranks agree on, checked, and nothing else; num_bytes: of memory."""
    check_dimensions("x", x, 2)
    check_dimensions("topk_idx", topk_idx, 2)
    num_experts = _checked_experts(num_experts, num_ranks)
    max_tokens = integer("num_max_dispatch_tokens_per_rank", max_tokens)
    if not 1 <= max_tokens <= MAX_TOKENS or max_tokens * num_experts > _MOST_ROWS:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank={max_tokens}; it must be 1 to "
            f"{min(MAX_TOKENS, _MOST_ROWS // num_experts)}"
        )
    hidden, num_slots = x.shape[1], topk_idx.shape[1]
    multiple = FP8_BLOCK if use_fp8 else _COLUMN_MULTIPLE
    if hidden == 0 or hidden % multiple:
        raise ValueError(
            f"hidden={hidden}; it must be a multiple of {multiple} with use_fp8={bool(use_fp8)}"
        )
    most_slots = min(MAX_SLOTS, num_experts)
    if not 1 <= num_slots <= most_slots:
        raise ValueError(
            f"topk_idx has {num_slots} slots a token; with num_experts={num_experts} it can have 1 "
            f"to {most_slots}"
        )
    needed = num_bytes_needed(max_tokens, hidden, num_ranks, num_experts)
    if needed > num_bytes:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank={max_tokens}, hidden={hidden} and num_experts="
            f"{num_experts} need {needed} bytes of symmetric memory, this Buffer has "
            f"num_rdma_bytes={num_bytes}; build it with Buffer.get_low_latency_rdma_size_hint("
            f"{max_tokens}, {hidden}, {num_ranks}, {num_experts})"
        )
    return Shape(max_tokens, hidden, num_experts, num_slots, bool(use_fp8))


def num_equal(
    shape: Shape,
    *,
    x: Any,
    topk_idx: Any,
    max_tokens: Any,
    num_experts: Any,
    use_fp8: bool,
    **_: Any,
) -> int:
    """In how many of its fields a shape is that of arguments which `dispatch_shape` refuses."""
    return sum(
        (
            isinstance(max_tokens, int) and max_tokens == shape.max_tokens,
            isinstance(num_experts, int) and num_experts == shape.num_experts,
            _is_table(x) and x.shape[1] == shape.hidden,
            _is_table(topk_idx) and topk_idx.shape[1] == shape.num_slots,
            use_fp8 is shape.fp8,
        )
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dim() == 2


def outgoing(
    shape: Shape,
    num_ranks: int,
    device: torch.device | None,
    *,
    x: Tensor,
    topk_idx: Tensor,
    recv_stats: Any,
    wait_stats: Any,
    round_scale: bool,
    use_ue8m0: bool,
    one_ending: bool,
    **_: Any,
) -> Outgoing:
    """This rank's part, checked. The device itself finds bad ids where there is one."""
    place = device or x.device
    check_kind("x", x, (torch.bfloat16,), device)
    check_kind("topk_idx", topk_idx, INDEX_DTYPES, place)
    num_tokens = x.shape[0]
    if num_tokens > shape.max_tokens:
        raise ValueError(
            f"x has {num_tokens} tokens; num_max_dispatch_tokens_per_rank={shape.max_tokens}"
        )
    check_shape("topk_idx", topk_idx, (num_tokens, shape.num_slots))
    _check_ending(one_ending)
    if use_ue8m0 and not (shape.fp8 and round_scale):
        raise ValueError("use_ue8m0 needs use_fp8 and round_scale: its scales are powers of two")
    multiple = FP8_BLOCK * SCALES_PER_WORD
    if use_ue8m0 and shape.hidden % multiple:
        raise ValueError(f"hidden={shape.hidden}; use_ue8m0 needs a multiple of {multiple}")
    local = _local(shape, num_ranks)
    _check_stats("cumulative_local_expert_recv_stats", recv_stats, torch.int32, local, place)
    _check_stats("dispatch_wait_recv_cost_stats", wait_stats, torch.int64, num_ranks, place)
    if device is None:
        _check_ids(topk_idx, shape)
    scale = ("power_of_two" if round_scale else "fp32") if shape.fp8 else None
    return Outgoing(x, topk_idx, scale, bool(use_ue8m0), recv_stats, wait_stats)


def check_handle(handle: Any, kind: type, owner: object, received: bool = True) -> None:
    if not isinstance(handle, kind):
        raise TypeError(f"handle is a {type(handle).__name__}; pass what low_latency_dispatch gave")
    if handle.owner is not owner:  # type: ignore[attr-defined]
        raise ValueError("the handle is of another Buffer")
    if received and not handle.received:  # type: ignore[attr-defined]
        raise OrderError("the dispatch of this handle has not been received; call its hook first")


def combine_inputs(
    handle: Any,
    num_ranks: int,
    device: torch.device | None,
    *,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    use_logfmt: bool,
    out: Any,
    wait_stats: Any,
    one_ending: bool,
    zero_copy: bool,
    block_signals: Any,
    block_signal_value: Any,
) -> CombineInputs:
    """This rank's part, checked. handle: a LowLatencyHandle."""
    shape: Shape = handle.shape
    place = device or handle[0].device
    if use_logfmt:
        raise ValueError("use_logfmt=True is not supported; rows travel as bf16")
    _check_ending(one_ending)
    check_tensor("x", x, (torch.bfloat16,), 3, place)
    check_shape("x", x, (_local(shape, num_ranks), shape.num_rows(num_ranks), shape.hidden))
    slots = (handle.num_tokens, shape.num_slots)
    check_tensor("topk_idx", topk_idx, INDEX_DTYPES, 2, place)
    check_shape("topk_idx", topk_idx, slots)
    check_tensor("topk_weights", topk_weights, (torch.float32,), 2, place)
    check_shape("topk_weights", topk_weights, slots)
    if out is None:
        out = x.new_empty(handle.num_tokens, shape.hidden)
    check_tensor("out", out, (torch.bfloat16,), 2, place)
    check_shape("out", out, (handle.num_tokens, shape.hidden))
    if not out.is_contiguous() or out.data_ptr() % ROW_ALIGNMENT:
        raise ValueError(f"out must be contiguous and begin at a multiple of {ROW_ALIGNMENT} bytes")
    _check_stats("combine_wait_recv_cost_stats", wait_stats, torch.int64, num_ranks, place)
    if zero_copy:
        x = handle.combine_buffer
        if x is None:
            raise ValueError(
                "zero_copy=True, but there is no buffer with rows: write them to what "
                "get_next_low_latency_combine_buffer(handle) returns before each such combine"
            )
    signals = _block_signals(shape, num_ranks, block_signals, block_signal_value, place)
    return CombineInputs(
        x, topk_idx, topk_weights, out, wait_stats, zero_copy, signals, block_signal_value
    )


def _block_signals(
    shape: Shape, num_ranks: int, signals: Any, value: Any, device: torch.device
) -> Tensor | None:
    """[L, B], checked."""
    if signals is None:
        return None
    local, num_rows = _local(shape, num_ranks), shape.num_rows(num_ranks)
    if isinstance(signals, Tensor) and signals.dim() == 1:
        signals = signals.unsqueeze(1)
    check_tensor("block_signals", signals, (torch.int32,), 2, device)
    blocks = signals.shape[1]
    if len(signals) != local or blocks == 0 or num_rows % blocks or not signals.is_contiguous():
        raise ValueError(
            f"block_signals is {list(signals.shape)}; it must be contiguous, [{local}] or "
            f"[{local}, blocks] with as many blocks as divide {num_rows} rows"
        )
    if not isinstance(value, int) or not 1 <= value <= _MOST_ROWS:
        raise ValueError(f"block_signal_value={value!r}; it must be 1 to {_MOST_ROWS}")
    return signals


def _local(shape: Shape, num_ranks: int) -> int:
    return shape.num_experts // num_ranks


def _check_ids(topk_idx: Tensor, shape: Shape) -> None:
    if topk_idx.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(topk_idx))
    if low < -1 or high >= shape.num_experts:
        raise ValueError(
            f"topk_idx holds {low if low < -1 else high}; valid are -1 (unused) and 0 to "
            f"{shape.num_experts - 1}"
        )
    counts = torch.bincount(topk_idx[topk_idx >= 0].long(), minlength=shape.num_experts)
    most = int(counts.max())
    if most > shape.max_tokens:
        raise ValueError(
            f"topk_idx names expert {int(counts.argmax())} {most} times; "
            f"num_max_dispatch_tokens_per_rank={shape.max_tokens} rows fit"
        )


def _check_ending(one_ending: bool) -> None:
    if not one_ending:
        raise ValueError("async_finish and return_recv_hook exclude each other")


def _check_stats(
    name: str, value: Any, dtype: torch.dtype, length: int, device: torch.device
) -> None:
    if value is None:
        return
    check_tensor(name, value, (dtype,), 1, device)
    check_shape(name, value, (length,))
    if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
