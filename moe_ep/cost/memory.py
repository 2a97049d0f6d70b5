"""Symmetric memory of one rank, all layers together: what csrc/shared/symmetric_layout.h computes.

Held equal to that header by a test, for random shapes.
"""

from __future__ import annotations

from moe_ep.backends.low_latency_base import MAX_EXPERTS
from moe_ep.layout import FP8_BLOCK, EPLayout
from moe_ep.low_latency import LowLatencyVerbs

# Of an element in its widest form: gradients of an FP8 layout may be fp32.
WIDEST_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 4}
MAX_CORE_RANKS = 64
_SMALLEST_TOKENS = 128  # room that is made where a layout names no limit
_SIGNALS = 7
_ALIGN = 256
_RANK_ROW_BYTES, _ITEM_BYTES, _WORD_BYTES, _FLOAT_BYTES = 16, 8, 8, 4


def count_columns(num_experts: int, num_ranks: int) -> int:
    """Words that a rank tells every peer: rows per expert, two figures per rank, and two more."""
    return num_experts + 2 * num_ranks + 2


def symmetric_bytes(layout: EPLayout, tokens: int | None = None) -> int | None:
    """Bytes of symmetric memory per rank with backend cuda; in low-latency mode with `Buffer`.

    None where there are no kernels: for the dtype; in low-latency mode also for too many experts,
    for expert tensor parallelism, or without a number of tokens.

    Args:
        tokens: most tokens of a rank so far, where the layout names no limit: memory then has
            grown to a quarter more than that.
    """
    dtype, parallel = layout.dispatch.dtype, layout.parallel
    room = layout.tokens_per_rank
    if layout.dispatch.mode == "low_latency":
        room = room or tokens
        few = layout.model.num_experts <= MAX_EXPERTS
        if dtype not in ("bf16", "fp8_e4m3") or parallel.expert_tensor > 1 or not few or not room:
            return None
        return LowLatencyVerbs.get_low_latency_rdma_size_hint(
            room, layout.model.hidden, parallel.group_size, layout.model.num_experts
        )
    if dtype not in WIDEST_BYTES:
        return None
    if room is None:
        needed = tokens or 0
        room = _SMALLEST_TOKENS if needed <= _SMALLEST_TOKENS else needed + needed // 4
    return layout_bytes(
        num_ranks=parallel.group_size,
        num_experts=parallel.group_size * layout.num_local_experts,
        num_slots=layout.model.top_k * parallel.expert_tensor,
        max_row_bytes=layout.model.hidden * WIDEST_BYTES[dtype],
        max_scales=layout.model.hidden // FP8_BLOCK if dtype == "fp8_e4m3" else 0,
        exact_combine=layout.dispatch.exact_combine,
        max_tokens=room,
    )


def layout_bytes(
    *,
    num_ranks: int,
    num_experts: int,
    num_slots: int,
    max_row_bytes: int,
    max_scales: int,
    exact_combine: bool,
    max_tokens: int,
) -> int:
    """`symmetric_layout(shape).total` of the header; arguments are the fields of its shape."""
    tokens, alone = max_tokens, num_ranks == 1
    destinations = min(num_slots, num_ranks)
    per_slot = tokens * num_slots * _FLOAT_BYTES
    staged_row = max_scales * FP8_BLOCK if alone else max_row_bytes
    stage = _up(tokens * staged_row) + _up(tokens * max_scales * _FLOAT_BYTES) + per_slot
    regions = [
        _SIGNALS * MAX_CORE_RANKS * _WORD_BYTES,
        num_ranks * count_columns(num_experts, num_ranks) * _WORD_BYTES,
        tokens * destinations * _RANK_ROW_BYTES,
        tokens * num_slots * _ITEM_BYTES,
        stage,
        stage,
    ]
    if not alone:
        partials = num_slots if exact_combine else destinations
        regions += [tokens * partials * max_row_bytes, per_slot, per_slot]
    return sum(map(_up, regions))


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
