"""What a Buffer's operations do, on the stream they were put on. See `moe_ep.buffer` for arguments.

Legend of shapes: as in `moe_ep.buffer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep import buffer_checks as checks
from moe_ep.backends.base import Call
from moe_ep.errors import OrderError
from moe_ep.rank_exchange import RankExchange, RankPlan
from moe_ep.rank_rows import (
    META_UNIT,
    Outgoing,
    RowFormat,
    destination_slots,
    pack_meta,
    round_up,
    unpack_scales,
    unpack_topk,
)

Rows = Tensor | tuple[Tensor, Tensor]
DispatchOutput = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, "Handle | None"]


class Handle(NamedTuple):
    """The routing of one dispatch, for `combine` and for dispatches that repeat it.

    `rank_prefix_matrix` [R, R] int32 on the CPU: rows that ranks 0 to i send to rank j; only this
    rank's column is known, the others are -1 (None for dispatches with `num_worst_tokens`).
    """

    rank_prefix_matrix: Tensor | None
    plan: RankPlan


@dataclass
class _Load:
    """What one rank sends of itself."""

    data: Tensor  # [T, H]
    scales: Tensor | None = None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None


def count(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens per rank [R] int32, per expert [E] int32, and whether token t goes to rank r [T, R].

    Ids out of range count nowhere. Nothing waits for the device.
    """
    device = topk_idx.device
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    experts = torch.where(valid, topk_idx, num_experts).long()
    ranks = experts // (num_experts // num_ranks)  # R where unused
    in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=device)
    in_rank = in_rank.scatter_(1, ranks, True)[:, :num_ranks].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    flat = experts.flatten()
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts], in_rank


def dispatch(
    exchange: RankExchange,
    x: Any,
    handle: Any,
    routing: dict[str, Any],
    config: Any,
    num_sms: int,
    *,
    alignment: Any,
    num_worst_tokens: Any,
) -> DispatchOutput:
    """What a user gave is checked here, so that peers can be told.

    Args:
        routing: the arguments of `Buffer.dispatch` that describe it, by name.
        num_sms: where config is None.
    """
    if handle is not None:
        return _dispatch_again(exchange, x, handle, routing, config, num_sms)
    return _dispatch_new(exchange, x, routing, config, num_sms, alignment, num_worst_tokens)


def _dispatch_new(
    exchange: RankExchange,
    x: Any,
    routing: dict[str, Any],
    config: Any,
    num_sms: int,
    alignment: Any,
    num_worst_tokens: Any,
) -> DispatchOutput:
    size = exchange.size
    call = exchange.call("dispatch")
    num_worst = 0
    try:
        num_worst = checks.integer("num_worst_tokens", num_worst_tokens)
        num_sms = checks.num_sms(config, num_sms)
        alignment = checks.integer("expert_alignment", alignment, 1)
        data, scales = checks.split_x(x)
        checks.check_payload(data, scales, exchange.device)
        form = checks.check_routing(data, scales, routing, num_worst, size, exchange.device)
        load = _Load(data, scales, routing["topk_idx"], routing["topk_weights"])
        outgoing = Outgoing(
            form,
            num_worst,
            data.shape[0],
            destination_slots(routing["is_token_in_rank"], form.num_slots(size)),
            routing["is_token_in_rank"],
            load.topk_idx,
            routing["num_tokens_per_rank"],
            routing["num_tokens_per_expert"],
        )
    except (TypeError, ValueError) as error:
        outgoing = Outgoing(num_worst_tokens=num_worst, error=error)
    plan, headers = exchange.plan(outgoing, call, num_sms)
    recv_x, meta = _send(plan, plan.format, load, call, num_sms)
    recv_idx, recv_weights = None, None
    if meta is not None and load.topk_idx is not None:
        recv_idx, recv_weights = unpack_topk(form, meta, exchange.rank, size, load.topk_idx.dtype)
    if headers is None or num_worst:
        return recv_x, recv_idx, recv_weights, [], Handle(None, plan)
    counts = headers.received_per_expert(form.num_experts // size, alignment)
    return recv_x, recv_idx, recv_weights, counts, Handle(headers.rank_prefix_matrix(), plan)


def _dispatch_again(
    exchange: RankExchange,
    x: Any,
    handle: Any,
    routing: dict[str, Any],
    config: Any,
    num_sms: int,
) -> DispatchOutput:
    plan, call = _start(exchange, handle, "dispatch.rows")
    form, device = plan.format, plan.device
    try:
        num_sms = checks.num_sms(config, num_sms)
        given = [name for name in ("topk_idx", "topk_weights") if routing[name] is not None]
        if given:
            raise ValueError(f"dispatch with a handle takes no {' and '.join(given)}")
        data, scales = checks.split_x(x)
        checks.check_payload(data, scales, device)
        form = checks.check_again(data, scales, form, plan.num_tokens)
        load = _Load(data, scales)
    except (TypeError, ValueError) as error:
        # Peers expect this rank's rows: they get zeros, and the error beside them.
        call.error = error
        zeros = torch.zeros(plan.num_tokens, form.hidden, dtype=torch.float32, device=device)
        load = _Load(zeros.to(form.dtype))
    return _send(plan, form, load, call, num_sms)[0], None, None, None, None


def combine(
    exchange: RankExchange,
    x: Any,
    handle: Any,
    topk_weights: Any,
    bias: Any,
    config: Any,
    num_sms: int,
) -> tuple[Tensor, Tensor | None]:
    """Sums of the rank rows of each token, and of their weights. num_sms: as for `dispatch`."""
    # On backend reference the phases of all ranks are compared.
    phase = "combine.rows" if topk_weights is None else "combine.rows and weights"
    plan, call = _start(exchange, handle, phase)
    form, device = plan.format, plan.device
    biases: list[Tensor] = []
    try:
        num_sms = checks.num_sms(config, num_sms)
        checks.check_sums(x, form, plan.num_rows, device)
        biases = checks.check_bias(bias, plan.num_tokens, x, device)
        if topk_weights is not None:
            checks.check_topk_weights(topk_weights, plan.num_rows, device, form.num_topk)
            checks.check_words(topk_weights.shape[1], plan.row_bytes)
    except (TypeError, ValueError) as error:
        call.error = error
        x = torch.zeros(plan.num_rows, form.hidden, dtype=checks.sum_dtype(form), device=device)
    out = plan.owner.combine(plan, x, call, num_sms)
    if biases:
        wide = out.float()
        for tensor in biases:
            wide += tensor
        out = wide.to(out.dtype)
    if topk_weights is None:
        return out, None
    num_topk = topk_weights.shape[1]
    padding = round_up(num_topk, META_UNIT) - num_topk
    rows = torch.nn.functional.pad(topk_weights, (0, padding))
    sums = plan.owner.combine(plan, rows, replace(call, phase="combine.weights"), num_sms)
    return out, sums[:, :num_topk].contiguous()


def _send(
    plan: RankPlan, form: RowFormat, load: _Load, call: Call, num_sms: int
) -> tuple[Rows, Tensor | None]:
    """Sends payload rows, then meta rows where `form` has any."""
    payload = load.data.contiguous()
    if payload.element_size() == 1:
        payload = payload.view(torch.bfloat16)  # bytes, whatever they mean
    rows = plan.owner.dispatch(plan, payload, replace(call, phase="dispatch.rows"), num_sms)
    recv_x = rows.view(load.data.dtype)
    if form.meta_words == 0:
        return recv_x, None
    packed = pack_meta(form, load.topk_idx, load.topk_weights, load.scales)
    meta = plan.owner.dispatch(plan, packed, replace(call, phase="dispatch.meta"), num_sms)
    if load.scales is None:
        return recv_x, meta
    return (recv_x, unpack_scales(form, meta, load.scales)), meta


def _start(exchange: RankExchange, handle: Any, phase: str) -> tuple[RankPlan, Call]:
    """The plan of a handle, which may be of an earlier Buffer of the same group."""
    if isinstance(handle, Handle) and handle.plan.owner.group is exchange.group:
        return handle.plan, handle.plan.owner.call(phase)
    call = exchange.call(phase)
    call.error = OrderError("the handle is of a Buffer of another group")
    if not isinstance(handle, Handle):
        call.error = TypeError(f"the handle is a {type(handle).__name__}, not from `dispatch`")
    exchange.refuse(call)
