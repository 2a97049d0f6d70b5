"""ExpertParallel: dispatch token rows to their experts and combine what the experts return."""

from __future__ import annotations

import weakref
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from moe_ep import backends, env
from moe_ep.autograd import Combine, Dispatch, Exchange, wants_gradient
from moe_ep.backends.base import Call
from moe_ep.checks import check_event, check_routing, check_rows, check_tokens, check_weights
from moe_ep.eager import untraced
from moe_ep.errors import BrokenError, OrderError
from moe_ep.events import CommStream, EventOverlap
from moe_ep.handle import DispatchHandle, DispatchResult
from moe_ep.handshake import handshake, with_environment
from moe_ep.layout import EPLayout
from moe_ep.measure import Measured

_LOW_LATENCY_IN_FLIGHT = 2


class ExpertParallel(Measured):
    """The EP exchange of one process group, for any number of MoE layers.

    Construction is collective: every rank of `group` must take part, and all must hold the same
    layout. So are `dispatch`, `combine` and their backwards: all ranks call them in one order.
    torch.compile breaks its graph at the verbs, which run as without it.

    Args:
        layout: what is exchanged; see EPLayout.
        group: process group of `parallel.expert * parallel.expert_tensor` ranks, where rank
            e * expert_tensor + t holds part t of the experts of EP rank e. None: the default one.

    Raises:
        LayoutError: the layout does not fit the group.
        ValueError: an environment variable is wrong. The peers get a LayoutMismatchError.
        LayoutMismatchError: the ranks hold different layouts (raised on all of them).
        BackendUnavailableError: a backend was named that cannot run here.
        PeerTimeoutError: a rank did not come within `timeouts.first_s`.
    """

    def __init__(self, layout: EPLayout, group: dist.ProcessGroup | None = None) -> None:
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.layout, problem = with_environment(layout)
        layout = self.layout
        options = layout.dispatch
        self._fp8_scale = options.scale if options.dtype == "fp8_e4m3" else None
        self._wide = torch.float64 if options.dtype == "fp64" else torch.float32  # of weights
        self.group = group
        self.rank = dist.get_rank(group)
        self.operations = 0
        self._timeouts = self.layout.timeouts
        self._handles: weakref.WeakSet[DispatchHandle] = weakref.WeakSet()
        self._destroyed = False
        self.channel, unavailable = handshake(
            layout, group, self._timeouts.first_s, backends.reasons(layout), problem
        )
        self.backend = backends.create(self.layout, group, self.channel, unavailable)
        self._comm_stream = CommStream(self.backend.device)
        self._measure(env.statistics(), env.nvtx())

    # -- verbs ------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: DispatchHandle | None = None,
        dequantize: bool = True,
        layer: str | int | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
    ) -> DispatchResult:
        """Sends every token row to the ranks of its experts. Differentiable in x and topk_weights.

        Args:
            x: [T, H] in the layout's dtype (where that is fp8_e4m3: bf16, fp16 or fp32, on all
                ranks the same). T may be 0 and may differ between ranks.
            topk_idx: [T, K] int32 or int64 expert ids, K at most `model.top_k`; -1 is an unused
                slot; an expert that is named twice gets the row twice.
            topk_weights: [T, K] floating point, carried along as `probs`; not applied to the rows.
            handle: instead of topk_idx, the routing of an earlier dispatch: nothing but rows is
                exchanged.
            dequantize: False returns an FP8 layout's rows as they travelled (no gradient).
            layer: under which statistics and profiles show it; a handle passes it on.
            previous_event: the rows are read after it, instead of after all work queued so far
                (backend cuda: and after earlier operations, on whichever stream they were).
            async_finish: the exchange runs on a stream of its own; wait for `event` of the result
                before you use its tensors.

        Returns:
            A DispatchResult.

        Raises:
            TypeError, ValueError: bad input on this rank. The peers get a PeerError.
            PeerError: bad input on another rank. The object stays usable, except after a handle
                that is not of this object, or (backend cuda) bad input with a handle.
            CapacityError: more rows than `dispatch.capacity`, on any rank.
            PeerTimeoutError: a rank did not come in time. The object is broken from then on.
        """
        if is_dynamo_compiling():
            events = {"previous_event": previous_event, "async_finish": async_finish}
            options = {"handle": handle, "dequantize": dequantize, "layer": layer, **events}
            return untraced(self.dispatch, x, topk_idx, topk_weights, **options)
        call = self._call("dispatch.rows", previous_event)
        try:
            (handle, (tokens, scales, row_probs)), event = self._comm_stream.run(
                lambda: self._dispatch(x, topk_idx, topk_weights, handle, dequantize, layer, call),
                (x, topk_idx, topk_weights),
                previous_event=None if call.error else previous_event,
                async_finish=async_finish,
            )
        finally:
            call.error = None  # its traceback leads here: a cycle that would keep tensors alive
        handle.in_flight += 1
        return DispatchResult(tokens, row_probs, handle, scales, event)

    @overload
    def combine(
        self,
        rows: Tensor,
        handle: DispatchHandle,
        weights: Tensor | None = ...,
        *,
        previous_event: EventOverlap | None = ...,
        async_finish: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def combine(
        self,
        rows: Tensor,
        handle: DispatchHandle,
        weights: Tensor | None = ...,
        *,
        previous_event: EventOverlap | None = ...,
        async_finish: Literal[True],
    ) -> tuple[Tensor, EventOverlap]: ...

    def combine(
        self,
        rows: Tensor,
        handle: DispatchHandle,
        weights: Tensor | None = None,
        *,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
    ) -> Tensor | tuple[Tensor, EventOverlap]:
        """Returns expert rows to their tokens and adds them up. Differentiable in rows and weights.

        Args:
            rows: [N, H], in the order of the dispatch; what padding rows hold is ignored.
            handle: of that dispatch.
            weights: [N] multiply the rows first (`probs`, where the experts did not apply them).
            previous_event, async_finish: as for `dispatch`; with async_finish the event to wait for
                is returned beside the result.

        Returns:
            [T, H] in the dtype of `rows`: the sum over a token's used slots, accumulated in fp32;
            zero for a token without any. The reference backend, and others with
            `dispatch.exact_combine`, add in slot order and round once; else each rank's share of a
            token is rounded before it travels. Either way results repeat bit for bit.

        Raises:
            TypeError, ValueError, OrderError: bad input on this rank. The peers get a PeerError.
            PeerError, PeerTimeoutError: as for `dispatch`. On backend cuda peers get the PeerError
                at a later call, and the object is broken on all ranks.
        """
        if is_dynamo_compiling():
            events = {"previous_event": previous_event, "async_finish": async_finish}
            return untraced(self.combine, rows, handle, weights, **events)
        call = self._call("combine.rows", previous_event)
        try:
            out, event = self._comm_stream.run(
                lambda: self._combine(rows, handle, weights, call),
                (rows, weights),
                previous_event=None if call.error else previous_event,
                async_finish=async_finish,
            )
        finally:
            call.error = None
        handle.in_flight = max(handle.in_flight - 1, 0)
        return (out, event) if async_finish else out

    def destroy(self) -> None:
        """Frees everything. Idempotent; does not wait for peers; not needed before exit."""
        if not self._destroyed:
            self._destroyed = True
            self.backend.destroy()

    # -- knobs and figures ------------------------------------------------------------------------

    def set_timeouts(self, *, first_s: float | None = None, steady_s: float | None = None) -> None:
        """Bounds every later wait for a peer, in seconds: `first_s` in the first operation,
        `steady_s` in the others. None leaves a bound as it is.

        Raises:
            LayoutError: not a positive number of seconds.
        """
        named = {"timeouts.first_s": first_s, "timeouts.steady_s": steady_s}
        given = {key: float(value) for key, value in named.items() if value is not None}
        self._timeouts = self.layout.replace(
            **{"timeouts": self._timeouts.model_dump()}, **given
        ).timeouts

    @property
    def live_handles(self) -> int:
        """Handles that somebody still holds."""
        return len(self._handles)

    @property
    def rounds(self) -> int:
        """Rounds of messages exchanged so far, set-up excluded."""
        return self.channel.rounds

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return self._destroyed

    # -- internals --------------------------------------------------------------------------------

    def _dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: DispatchHandle | None,
        dequantize: bool,
        layer: str | int | None,
        call: Call,
    ) -> tuple[DispatchHandle, tuple[Tensor, Tensor | None, Tensor | None]]:
        """The handle, and tokens, scales and probs."""
        if layer is None and isinstance(handle, DispatchHandle):
            layer = handle.layer
        backend, fp8_scale = self._backend_for(layer), self._fp8_scale
        probs = topk_weights
        if handle is None:
            call.phase = "dispatch.metadata"
            call.error = call.error or self._check_routing(x, topk_idx, topk_weights, dequantize)
            slots = None
            if call.error is None:
                slots = self._expert_slots(topk_idx)
                probs = None if probs is None else self._slot_weights(probs)
            plan = backend.prepare(slots, call, x=x, probs=probs, fp8_scale=fp8_scale)
            call = Call(call.operation, "dispatch.rows", call.timeout_s)
            handle = DispatchHandle(plan, x.dtype, x.device, self, layer=layer)
            self._handles.add(handle)
        else:
            bad_event, call.error = call.error, self._check_handle(handle)
            if call.error is not None:
                self.backend.refuse(call)
            call.error = bad_event or self._check_again(
                x, topk_idx, topk_weights, handle, dequantize
            )
            plan = handle.plan
            if call.error is not None:
                # Peers expect this rank's rows: they get zeros, and the error beside them.
                x = self._zeros(handle, plan.num_tokens)
                if probs is not None:
                    probs = x.new_zeros(plan.num_tokens, plan.num_slots, dtype=self._wide)
            elif probs is not None:
                probs = self._slot_weights(probs)
        if wants_gradient(x, probs):
            exchange = Exchange(backend, plan, self._call, fp8_scale, dequantize)
            return handle, Dispatch.apply(x, probs, exchange, call)
        arrived = backend.dispatch(plan, x, probs, call, fp8_scale, dequantize=dequantize)
        return handle, (arrived.rows, arrived.scales, arrived.probs)

    def _combine(
        self, rows: Tensor, handle: DispatchHandle, weights: Tensor | None, call: Call
    ) -> Tensor:
        bad_event, call.error = call.error, self._check_handle(handle)
        if call.error is not None:
            self.backend.refuse(call)
        plan = handle.plan
        beside = handle.device if self.backend.device is None else None  # else it moves weights
        call.error = (
            bad_event
            or check_rows(self.layout, rows, handle)
            or check_weights(beside, weights, (plan.num_rows,))
        )
        if call.error is not None:
            rows = self._zeros(handle, plan.num_rows)
            weights = None if weights is None else rows.new_zeros(plan.num_rows, dtype=self._wide)
        elif weights is not None:
            weights = self._widened(weights)
        backend = self._backend_for(handle.layer)
        if wants_gradient(rows, weights):
            out: Tensor = Combine.apply(rows, weights, Exchange(backend, plan, self._call), call)
            return out
        return backend.combine(plan, rows, call, weights=weights)[0]

    def _call(self, phase: str, event: EventOverlap | None = None) -> Call:
        if self._destroyed:
            raise BrokenError(f"rank {self.rank}: {phase} after destroy()")
        self.operations += 1
        timeouts = self._timeouts
        seconds = timeouts.first_s if self.operations == 1 else timeouts.steady_s
        problem = None if event is None else check_event(event)
        return Call(self.operations, phase, seconds, problem)

    def _zeros(self, handle: DispatchHandle, num_rows: int) -> Tensor:
        size = (num_rows, self.layout.model.hidden)
        return torch.zeros(size, dtype=handle.dtype, device=handle.device)

    def _expert_slots(self, topk_idx: Tensor | None) -> Tensor:
        """Expert ids to expert slots of the group: one per expert-tensor rank, [T, K * copies]."""
        assert topk_idx is not None
        copies = self.layout.parallel.expert_tensor
        if copies == 1:
            return topk_idx
        local = self.layout.num_local_experts
        topk_idx = topk_idx.long()
        first = (topk_idx // local * copies) * local + topk_idx % local
        part = torch.arange(copies, device=topk_idx.device) * local
        wide = topk_idx.unsqueeze(2)
        slots = torch.where(wide < 0, wide, first.unsqueeze(2) + part)  # bad ids stay bad
        return slots.flatten(1)

    def _slot_weights(self, weights: Tensor) -> Tensor:
        """Weights [T, K] as they travel, for the expert slots of `_expert_slots`."""
        weights = self._widened(weights)
        copies = self.layout.parallel.expert_tensor
        return weights if copies == 1 else weights.repeat_interleave(copies, dim=1)

    def _widened(self, weights: Tensor) -> Tensor:
        # `to` costs the host time even where there is nothing to do.
        return weights if weights.dtype == self._wide else weights.to(self._wide)

    def _check_routing(
        self, x: Tensor, topk_idx: Tensor | None, topk_weights: Tensor | None, dequantize: bool
    ) -> Exception | None:
        if topk_idx is None:
            return ValueError("dispatch takes topk_idx or a handle; it got neither")
        device, values = self.backend.device, not self.backend.checks_indices
        problem = check_tokens(self.layout, device, x, dequantize)
        if problem is not None:
            return problem
        beside = x.device if device is None else None  # a backend with a device moves the others
        return (
            check_routing(self.layout, beside, x.shape[0], topk_idx, topk_weights, values)
            or self._check_in_flight()
        )

    def _check_again(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: DispatchHandle,
        dequantize: bool,
    ) -> Exception | None:
        if topk_idx is not None:
            return ValueError("dispatch takes topk_idx or a handle; it got both")
        problem = check_tokens(self.layout, handle.device, x, dequantize)
        if problem is not None:
            return problem
        if x.shape[0] != handle.num_tokens or x.dtype != handle.dtype:
            return ValueError(
                f"x is {x.dtype} with {x.shape[0]} tokens; the handle's dispatch had "
                f"{handle.dtype} with {handle.num_tokens}"
            )
        top_k = handle.plan.num_slots // self.layout.parallel.expert_tensor
        beside = handle.device if self.backend.device is None else None
        return check_weights(beside, topk_weights, (x.shape[0], top_k)) or self._check_in_flight()

    def _check_handle(self, handle: DispatchHandle) -> Exception | None:
        if not isinstance(handle, DispatchHandle):
            return TypeError(f"the handle is a {type(handle).__name__}, not a DispatchHandle")
        if handle.owner is not self:
            return OrderError("the handle is not from a dispatch of this object")
        return None

    def _check_in_flight(self) -> Exception | None:
        if self.layout.dispatch.mode != "low_latency":
            return None
        in_flight = sum(handle.in_flight for handle in self._handles)
        if in_flight < _LOW_LATENCY_IN_FLIGHT:
            return None
        return OrderError(
            f"{in_flight} dispatches wait for their combine; low_latency mode allows "
            f"{_LOW_LATENCY_IN_FLIGHT} in flight"
        )
