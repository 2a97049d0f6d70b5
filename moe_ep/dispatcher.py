"""ExpertParallel: dispatch token rows to their experts and combine what the experts return."""

from __future__ import annotations

import json
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import backends, env
from moe_ep.autograd import Combine, Dispatch, Exchange
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round
from moe_ep.errors import BrokenError, LayoutError, LayoutMismatchError, OrderError
from moe_ep.handle import DispatchHandle, DispatchResult
from moe_ep.layout import EPLayout

_DTYPES = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp32": (torch.float32,),
    "fp64": (torch.float64,),
    "fp8_e4m3": (torch.bfloat16, torch.float16, torch.float32),
}
_LOW_LATENCY_IN_FLIGHT = 2
_HANDSHAKE_BYTES = 8192


class ExpertParallel:
    """The EP exchange of one process group, for any number of MoE layers.

    Construction is collective: every rank of `group` must take part, and all must hold the same
    layout. So are `dispatch`, `combine` and their backwards: all ranks call them in one order.

    Args:
        layout: what is exchanged; see EPLayout.
        group: process group of `parallel.expert * parallel.expert_tensor` ranks, where rank
            e * expert_tensor + t holds part t of the experts of EP rank e. None: the default one.

    Raises:
        LayoutError: the layout does not fit the group.
        LayoutMismatchError: the ranks hold different layouts (raised on all of them).
        BackendUnavailableError: a backend was named that cannot run here.
        PeerTimeoutError: a rank did not come within `timeouts.first_s`.
    """

    def __init__(self, layout: EPLayout, group: dist.ProcessGroup | None = None) -> None:
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        chosen = env.backend()
        self.layout = layout if chosen is None else layout.replace(backend=chosen)
        self.group = group
        self.rank = dist.get_rank(group)
        self.operations = 0
        seconds = env.timeout_s()
        self._first_s = seconds or layout.timeouts.first_s
        self._steady_s = seconds or layout.timeouts.steady_s
        self._handles: weakref.WeakSet[DispatchHandle] = weakref.WeakSet()
        self._destroyed = False
        number = _handshake(self.layout, group, Call(0, "setup", self._first_s))
        self.channel = Channel(group, number)
        self.backend = backends.create(self.layout, group, self.channel)

    # -- verbs ------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: DispatchHandle | None = None,
        dequantize: bool = True,
    ) -> DispatchResult:
        """Sends every token row to the ranks of its experts. Differentiable in x and topk_weights.

        Args:
            x: [T, H] in the layout's dtype (bf16, fp16 or fp32 where that is fp8_e4m3). T may be
                0 and may differ between ranks.
            topk_idx: [T, K] int32 or int64 expert ids, K at most `model.top_k`; -1 is an unused
                slot; an expert that is named twice gets the row twice.
            topk_weights: [T, K] floating point, carried along as `probs`; not applied to the rows.
            handle: instead of topk_idx, the routing of an earlier dispatch: nothing but rows is
                exchanged.
            dequantize: False returns an FP8 layout's rows as they travelled (no gradient).

        Returns:
            A DispatchResult.

        Raises:
            TypeError, ValueError: bad input on this rank. The peers get a PeerError.
            PeerError: bad input on another rank. The object stays usable.
            CapacityError: more rows than `dispatch.capacity`, on any rank.
            PeerTimeoutError: a rank did not come in time. The object is broken from then on.
        """
        call = self._call("dispatch")
        call.error = self._check_input(x, topk_idx, topk_weights, handle, dequantize)
        if handle is None:
            slots = None if call.error is not None else self._expert_slots(topk_idx)
            call.phase = "dispatch.metadata"
            plan = self.backend.prepare(slots, call)
            call = Call(call.operation, "dispatch.rows", call.timeout_s)
            handle = DispatchHandle(plan, call.operation, owner=self)
            self._handles.add(handle)
        plan = handle.plan
        probs = topk_weights
        if call.error is not None:
            x, probs = self._zeros(plan.num_tokens, x), None
        elif probs is not None:
            copies = self.layout.parallel.expert_tensor
            probs = probs.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
            probs = probs.unsqueeze(2).expand(-1, -1, copies).flatten(1)
        options = self.layout.dispatch
        fp8_scale = options.scale if options.dtype == "fp8_e4m3" else None
        exchange = Exchange(self.backend, plan, self._call, fp8_scale, dequantize)
        tokens, scales, row_probs = Dispatch.apply(x, probs, exchange, call)
        return DispatchResult(tokens, row_probs, plan.tokens_per_expert.clone(), handle, scales)

    def combine(
        self, rows: Tensor, handle: DispatchHandle, weights: Tensor | None = None
    ) -> Tensor:
        """Returns expert rows to their tokens and adds them up. Differentiable in rows and weights.

        Args:
            rows: [N, H], in the order of the dispatch; what padding rows hold is ignored.
            handle: of that dispatch.
            weights: [N] multiply the rows first (`probs`, where the experts did not apply them).

        Returns:
            [T, H] in the dtype of `rows`: the sum over a token's used slots in slot order,
            accumulated in fp32 and rounded once; zero for a token without any.

        Raises:
            TypeError, ValueError, OrderError: bad input on this rank. The peers get a PeerError.
            PeerError, PeerTimeoutError: as for `dispatch`.
        """
        call = self._call("combine.rows")
        if not isinstance(handle, DispatchHandle) or handle.owner is not self:
            raise OrderError(f"rank {self.rank}: this handle is not from a dispatch of this object")
        plan = handle.plan
        call.error = self._check_rows(rows, handle, weights)
        if call.error is not None:
            rows, weights = self._zeros(plan.num_rows, rows), None
        elif weights is not None:
            weights = weights.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
        handle.combined = True
        out: Tensor = Combine.apply(rows, weights, Exchange(self.backend, plan, self._call), call)
        return out

    def destroy(self) -> None:
        """Frees everything. Idempotent; does not wait for peers; not needed before exit."""
        if not self._destroyed:
            self._destroyed = True
            self.backend.destroy()

    # -- knobs and figures ------------------------------------------------------------------------

    def set_timeouts(self, *, first_s: float | None = None, steady_s: float | None = None) -> None:
        """Bounds every later wait for a peer, in seconds: of the first operation, of the others."""
        for seconds in (first_s, steady_s):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"a time-out of {seconds} s; it must be positive")
        self._first_s = first_s if first_s is not None else self._first_s
        self._steady_s = steady_s if steady_s is not None else self._steady_s

    @property
    def live_handles(self) -> int:
        """Handles that somebody still holds."""
        return len(self._handles)

    @property
    def rounds(self) -> int:
        """Rounds of messages exchanged so far, set-up excluded."""
        return self.channel.rounds

    # -- internals --------------------------------------------------------------------------------

    def _call(self, phase: str) -> Call:
        if self._destroyed:
            raise BrokenError(f"rank {self.rank}: {phase} after destroy()")
        self.operations += 1
        timeout_s = self._first_s if self.operations == 1 else self._steady_s
        return Call(self.operations, phase, timeout_s)

    def _zeros(self, num_rows: int, instead_of: Tensor) -> Tensor:
        """Rows of the size that peers expect, sent together with this rank's error."""
        dtype = _DTYPES[self.layout.dispatch.dtype][0]
        device = instead_of.device if isinstance(instead_of, Tensor) else None
        return torch.zeros(num_rows, self.layout.model.hidden, dtype=dtype, device=device)

    def _expert_slots(self, topk_idx: Tensor | None) -> Tensor:
        """Expert ids to expert slots of the group: one per expert-tensor rank, [T, K * copies]."""
        assert topk_idx is not None
        copies = self.layout.parallel.expert_tensor
        if copies == 1:
            return topk_idx
        local = self.layout.num_local_experts
        first = (topk_idx // local * copies) * local + topk_idx % local
        part = torch.arange(copies, device=topk_idx.device) * local
        slots = torch.where(topk_idx.unsqueeze(2) < 0, -1, first.unsqueeze(2) + part)
        return slots.flatten(1)

    def _check_input(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: DispatchHandle | None,
        dequantize: bool,
    ) -> Exception | None:
        layout = self.layout
        if (topk_idx is None) == (handle is None):
            return ValueError("dispatch takes either topk_idx or a handle")
        problem = self._check_tokens(x)
        if problem is not None:
            return problem
        if not dequantize and (layout.dispatch.dtype != "fp8_e4m3" or x.requires_grad):
            return ValueError("dequantize=False needs dispatch.dtype fp8_e4m3 and no gradient of x")
        if handle is not None:
            if handle.owner is not self or x.shape[0] != handle.num_tokens:
                return ValueError(
                    f"x has {x.shape[0]} tokens; the handle is of a dispatch with "
                    f"{handle.num_tokens} of this object"
                )
            width = handle.plan.num_slots // layout.parallel.expert_tensor
            return _check_weights(topk_weights, (x.shape[0], width))
        assert topk_idx is not None
        if topk_idx.dtype not in (torch.int32, torch.int64):
            return TypeError(f"topk_idx is {topk_idx.dtype}; it must be int32 or int64")
        if topk_idx.dim() != 2 or topk_idx.shape[0] != x.shape[0]:
            return ValueError(f"topk_idx {_shape(topk_idx)} does not fit x {_shape(x)}")
        if not 1 <= topk_idx.shape[1] <= layout.model.top_k:
            return ValueError(
                f"topk_idx has {topk_idx.shape[1]} slots a token; model.top_k={layout.model.top_k}"
            )
        if topk_idx.numel() and not self.backend.checks_indices:
            low, high = (int(value) for value in torch.aminmax(topk_idx))
            if low < -1 or high >= layout.model.num_experts:
                return ValueError(
                    f"topk_idx holds {low if low < -1 else high}; valid are -1 (unused) and "
                    f"0 to {layout.model.num_experts - 1}"
                )
        if layout.dispatch.mode == "low_latency":
            flying = sum(not handle.combined for handle in self._handles)
            if flying >= _LOW_LATENCY_IN_FLIGHT:
                return OrderError(
                    f"{flying} dispatches wait for their combine; low_latency mode allows "
                    f"{_LOW_LATENCY_IN_FLIGHT} in flight"
                )
        return _check_weights(topk_weights, tuple(topk_idx.shape))

    def _check_tokens(self, x: Tensor) -> Exception | None:
        layout = self.layout
        if not isinstance(x, Tensor):
            return TypeError(f"x is a {type(x).__name__}, not a tensor")
        allowed = _DTYPES[layout.dispatch.dtype]
        if x.dtype not in allowed:
            return TypeError(
                f"x is {x.dtype}; dispatch.dtype {layout.dispatch.dtype} takes "
                + ", ".join(map(str, allowed))
            )
        if x.dim() != 2 or x.shape[1] != layout.model.hidden:
            return ValueError(f"x is {_shape(x)}; it must be [T, {layout.model.hidden}]")
        limit = layout.tokens_per_rank
        if limit is not None and x.shape[0] > limit:
            return ValueError(f"x has {x.shape[0]} tokens; tokens_per_rank={limit}")
        return None

    def _check_rows(
        self, rows: Tensor, handle: DispatchHandle, weights: Tensor | None
    ) -> Exception | None:
        expected = (handle.num_rows, self.layout.model.hidden)
        if not isinstance(rows, Tensor):
            return TypeError(f"rows are a {type(rows).__name__}, not a tensor")
        if tuple(rows.shape) != expected:
            return ValueError(f"rows are {_shape(rows)}; this dispatch returned {list(expected)}")
        if rows.dtype not in _DTYPES[self.layout.dispatch.dtype]:
            return TypeError(
                f"rows are {rows.dtype}; dispatch.dtype {self.layout.dispatch.dtype} takes "
                + ", ".join(map(str, _DTYPES[self.layout.dispatch.dtype]))
            )
        return _check_weights(weights, (handle.num_rows,))


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_weights(weights: Tensor | None, shape: tuple[int, ...]) -> Exception | None:
    if weights is None:
        return None
    if not weights.is_floating_point():
        return TypeError(f"weights are {weights.dtype}; they must be floating point")
    if tuple(weights.shape) != shape:
        return ValueError(f"weights are {_shape(weights)}; they must be {list(shape)}")
    return None


def _handshake(layout: EPLayout, group: dist.ProcessGroup, call: Call) -> int:
    """Compares layouts across the group; returns the number of a free channel, equal on all ranks.

    A rank whose layout doesn't fit the group says so instead of its layout, so that no peer waits.
    """
    channel = Channel(group)
    problem = ""
    if channel.size != layout.parallel.group_size:
        experts = layout.model.num_experts
        copies = layout.parallel.expert_tensor
        fits = [n * copies for n in range(1, experts + 1) if experts % n == 0]
        problem = (
            f"the layout is for {layout.parallel.group_size} ranks (parallel.expert="
            f"{layout.parallel.expert} x expert_tensor={copies}), the group has {channel.size}; "
            f"{experts} experts fit groups of {', '.join(map(str, fits))}"
        )
    text = json.dumps(
        {"layout": layout.model_dump(), "problem": problem, "channel": Channel.next_number}
    )
    data = text.encode().ljust(_HANDSHAKE_BYTES)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(channel.device())
    frames = {peer: torch.empty_like(mine) for peer in range(channel.size) if peer != channel.rank}
    exchange = Round(channel, call)
    for peer, frame in frames.items():
        exchange.recv(peer, frame)
    for peer in exchange.peers():
        exchange.send(peer, mine)
    exchange.finish()
    answers = {peer: json.loads(f.cpu().numpy().tobytes()) for peer, f in frames.items()}
    if problem:
        raise LayoutError(problem)
    for peer, answer in sorted(answers.items()):
        theirs = EPLayout(**answer["layout"])
        different = layout.differences(theirs)
        if different:
            raise LayoutMismatchError(
                f"ranks {channel.rank} and {peer} were given different layouts: "
                + "; ".join(different)
            )
    proposals = [Channel.next_number, *(answer["channel"] for answer in answers.values())]
    Channel.next_number = max(proposals) + 1
    return max(proposals)
