"""Low-latency mode over peer memory: kernels of csrc/kernels/low_latency_*.cu.

Each half of a verb is one kernel, with nothing on the GPU in between; both at once are one kernel,
too. Legend of shapes: see low_latency_base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda_memory import SharedMemory
from moe_ep.backends.low_latency_base import (
    ROW_ALIGNMENT,
    CombineInputs,
    Outgoing,
    Receive,
    Result,
    Shape,
    block_timeout,
    new_result,
)
from moe_ep.backends.low_latency_expert_out import ExpertOut
from moe_ep.errors import BrokenError, OrderError, PeerError, PeerTimeoutError

_FP8_SCALES = {None: 0, "fp32": 1, "power_of_two": 2}
_OPERATION_SHIFT = 32  # of a ready word
_DEFAULT_SMS = 20


class Released(Protocol):
    """Symmetric memory, as far as the backend goes on with it once it is there."""

    def release(self) -> None:
        """Frees everything once no peer uses it; never waits long for one that stays away."""


@dataclass
class CudaLowLatencyPlan:
    """Of this rank's result: slots [L, N] int32, token*K + k of the source rank; layout_range. Of
    its tokens: index [T, K] int32, the place of each among this rank's rows for the expert.
    operation: which dispatch it was, as the device counts."""

    slots: Tensor
    layout_range: Tensor
    index: Tensor
    operation: int


class CudaLowLatencyBackend:
    """See `moe_ep.backends.low_latency_base.LowLatencyBackend`.

    Nothing waits for the device: bad input of a peer, or its absence, raises at a later call, and
    the object stops.

    Args:
        core: the module `moe_ep._C`.
        channel: for the set-up; not used per operation.
        num_bytes: of symmetric memory, the same on all ranks.

    Raises:
        BackendUnavailableError: memory cannot be shared between two ranks (the message names them).
    """

    name = "cuda"

    def __init__(self, core: Any, channel: Channel, num_bytes: int, call: Call) -> None:
        self._core = core
        self.rank, self.size = channel.rank, channel.size
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.num_sms = _DEFAULT_SMS
        self._max_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        torch.cuda.current_stream(self._device)  # torch's context first
        self._last_stream: torch.cuda.Stream | None = None
        self._sent = 0  # operations whose first half was launched
        self._timeout_s = call.timeout_s  # of the last kernel
        self._broken: str | None = None
        self._comm: Any
        self._memory: Released
        self._comm, self._memory, ranks_on_gpu = self._connect(channel, num_bytes, call)
        self._expert_out = ExpertOut(self._comm, self._device)
        # Kernels wait for each other: those of all ranks on one GPU must fit on it together.
        self._max_sms = max(self._max_sms // ranks_on_gpu, 1)

    def _connect(self, channel: Channel, num_bytes: int, call: Call) -> tuple[Any, Released, int]:
        """The core's object, its memory, and how many ranks share this rank's GPU."""
        comm = self._core.LowLatency(self._device.index, self.rank, self.size)
        memory = SharedMemory(self._core, comm, channel, self._device)
        memory.connect(num_bytes, call)
        comm.set_one_gpu(memory.ranks_on_gpu == self.size)
        return comm, memory, memory.ranks_on_gpu

    @property
    def device(self) -> torch.device:
        return self._device

    # -- verbs ------------------------------------------------------------------------------------

    def dispatch(
        self, shape: Shape, tag: int, outgoing: Outgoing | None, call: Call, at_once: bool
    ) -> tuple[Result, CudaLowLatencyPlan, Receive]:
        self.check(call)
        pack = outgoing is not None and outgoing.pack_scales
        result = new_result(shape, self.size, pack, self._device)
        tokens = 0 if outgoing is None else len(outgoing.x)
        index = torch.empty(tokens, shape.num_slots, dtype=torch.int32, device=self._device)
        slots = torch.empty_like(result.src_info)
        plan = CudaLowLatencyPlan(slots, result.layout_range, index, self._sent + 1)
        tensors = self._core.LowLatencyDispatchTensors()
        tensors.fp8, tensors.pack_scales = int(shape.fp8), pack
        kept: list[Tensor | None] = [plan.slots, index, *vars(result).values()]
        if outgoing is not None:
            x, topk_idx = _aligned(outgoing.x), outgoing.topk_idx.contiguous()
            kept += [x, topk_idx, outgoing.recv_stats, outgoing.wait_stats]
            tensors.x, tensors.topk_idx = x.data_ptr(), topk_idx.data_ptr()
            tensors.num_tokens, tensors.fp8 = tokens, _FP8_SCALES[outgoing.scale]
            tensors.topk_is_64_bit = topk_idx.dtype == torch.int64
            tensors.expert_stats = _address(outgoing.recv_stats)
            tensors.waiting_stats = _address(outgoing.wait_stats)
        tensors.rows, tensors.scales = result.rows.data_ptr(), _address(result.scales)
        tensors.recv_count, tensors.src_info = result.count.data_ptr(), result.src_info.data_ptr()
        tensors.slots, tensors.layout_range = plan.slots.data_ptr(), plan.layout_range.data_ptr()
        tensors.index = index.data_ptr()
        return (
            result,
            plan,
            self._start(self._comm.dispatch, shape, tag, tensors, call, kept, at_once),
        )

    def combine(
        self,
        shape: Shape,
        tag: int,
        plan: CudaLowLatencyPlan,
        inputs: CombineInputs | None,
        call: Call,
        at_once: bool,
    ) -> Receive:
        self.check(call)
        tensors = self._core.LowLatencyCombineTensors()
        tensors.slots, tensors.layout_range = plan.slots.data_ptr(), plan.layout_range.data_ptr()
        tensors.index = plan.index.data_ptr()
        kept: list[Tensor | None] = [plan.slots, plan.layout_range, plan.index]
        if inputs is not None:
            x, topk_idx = _aligned(inputs.x), inputs.topk_idx.contiguous()
            weights = inputs.topk_weights.contiguous()
            kept += [x, topk_idx, weights, inputs.out, inputs.wait_stats, inputs.block_signals]
            tensors.x, tensors.topk_idx = x.data_ptr(), topk_idx.data_ptr()
            tensors.topk_is_64_bit = topk_idx.dtype == torch.int64
            tensors.topk_weights, tensors.out = weights.data_ptr(), inputs.out.data_ptr()
            tensors.num_tokens = len(inputs.out)
            tensors.waiting_stats = _address(inputs.wait_stats)
            if inputs.block_signals is not None:
                tensors.block_signals = inputs.block_signals.data_ptr()
                tensors.blocks_per_expert = inputs.block_signals.shape[1]
                tensors.signal_value = inputs.signal_value
            elif inputs.zero_copy:  # with signals, rows are sent one by one
                tensors.expert_out = self._expert_out.sent(inputs.x, self._sent + 1)
        return self._start(self._comm.combine, shape, tag, tensors, call, kept, at_once)

    def refuse(self, shape: Shape | None, tag: int, call: Call) -> NoReturn:
        """Peers are not told of an OrderError: a rank that is out of turn, as all of them mostly
        are then, can go on, and its buffer is in use."""
        assert call.error is not None
        if shape is not None and not isinstance(call.error, OrderError):
            nothing = torch.zeros(shape.num_experts, dtype=torch.int64, device=self._device)
            plan = CudaLowLatencyPlan(nothing, nothing, nothing, 0)
            self.combine(shape, tag, plan, None, call, at_once=False)  # raises it
        raise call.error

    def combine_buffer(
        self, shape: Shape, plan: CudaLowLatencyPlan, device: torch.device
    ) -> Tensor:
        size = (shape.num_experts // self.size, shape.num_rows(self.size), shape.hidden)
        buffer, wait = self._expert_out.lend(self._shape(shape), size, plan.operation)
        if wait:
            here = Call(plan.operation, "low_latency_combine buffer", self._timeout_s)
            self._comm.wait_expert_out(self._shape(shape), wait, self._launch(here))
        if buffer is None:
            return torch.empty(size, dtype=torch.bfloat16, device=device)
        return buffer

    def round_trip_us(self, peer: int, rounds: int, call: Call) -> float | None:
        self.check(call)
        took = torch.zeros(1, dtype=torch.int64, device=self._device)
        shape = self._shape(Shape(1, 8, self.size, 1, fp8=False))
        self._comm.ping(shape, peer, rounds, took.data_ptr(), self._launch(call))
        nanoseconds = int(took.item())
        self.check(call)  # the peer may not have come
        return nanoseconds / 1e3

    def destroy(self) -> None:
        if self._comm is None:
            return
        self._comm = None
        self._broken = self._broken or "destroy()"
        self._memory.release()

    # -- one operation ----------------------------------------------------------------------------

    def _start(
        self,
        verb: Callable[[Any, Any, Any], None],
        shape: Shape,
        tag: int,
        tensors: Any,
        call: Call,
        kept: list[Tensor | None],
        at_once: bool,
    ) -> Receive:
        """Launches the first half, or both. Returns what is left to do."""
        core, core_shape = self._core, self._shape(shape)
        send, receive = core.LOW_LATENCY_SEND, core.LOW_LATENCY_RECEIVE
        if at_once and call.error is None:
            both = core.LowLatencyCall(core_shape, tag, send | receive, 0)
            verb(both, tensors, self._launch(call, kept))
            self._count_sent()
            return _nothing
        ticket = torch.empty(1, dtype=torch.int64, device=self._device)
        kept.append(ticket)
        halves = [
            core.LowLatencyCall(core_shape, tag, part, ticket.data_ptr())
            for part in (send, receive)
        ]
        verb(halves[0], tensors, self._launch(call, kept))
        self._count_sent()
        self._raise_own_error(call)
        return lambda: verb(halves[1], tensors, self._launch(call, kept))

    def _count_sent(self) -> None:
        # The device counts as many or, with replayed graphs, more.
        self._sent += not torch.cuda.is_current_stream_capturing()

    def _shape(self, shape: Shape) -> Any:
        return self._core.LowLatencyShape(
            num_ranks=self.size,
            num_experts=shape.num_experts,
            num_slots=shape.num_slots,
            hidden=shape.hidden,
            max_tokens=shape.max_tokens,
        )

    def _launch(self, call: Call, kept: Iterable[Tensor | None] = ()) -> Any:
        """Kernels run in the order in which they were launched, whatever the streams.

        kept: tensors the kernel uses that may have been allocated on another stream.
        """
        stream = torch.cuda.current_stream(self._device)
        last, capturing = self._last_stream, torch.cuda.is_current_stream_capturing()
        if last is not None and last != stream and not capturing:
            stream.wait_stream(last)
        self._last_stream, self._timeout_s = stream, call.timeout_s
        for tensor in kept:
            if tensor is not None and not capturing:
                tensor.record_stream(stream)
        num_sms = min(self.num_sms, self._max_sms)
        bad_input = call.error is not None
        return self._core.Launch(stream.cuda_stream, call.timeout_s, num_sms, bad_input)

    # -- errors -----------------------------------------------------------------------------------

    def check(self, call: Call) -> None:
        if self._broken is not None:
            raise BrokenError(
                f"rank {self.rank}: {call.phase}, operation {call.operation}: this object stopped "
                f"earlier ({self._broken}); build a new one"
            )
        if self._comm.is_quiet():
            return
        here = f"{call.phase}, operation {call.operation}"
        fault = self._comm.fault()
        if fault is not None:
            raise self._of_fault(fault)
        peer = self._comm.bad_peer()
        self._broken = f"rank {peer} gave bad input"
        if peer == self.rank:
            raise ValueError(
                f"rank {peer}: topk_idx of an operation before {here} held an id that is neither "
                "-1 nor an expert, or named one expert more than num_max_dispatch_tokens_per_rank "
                "times"
            )
        raise PeerError(
            f"rank {self.rank}: rank {peer} gave bad input to an operation before {here}; see its "
            "log"
        )

    def _of_fault(self, fault: Any) -> Exception:
        expected = fault.expected >> _OPERATION_SHIFT  # 0: not a ready word
        if "block_signals" in fault.phase:
            block = fault.expected & ((1 << _OPERATION_SHIFT) - 1)
            error = block_timeout(fault.rank, self._timeout_s, expected, block, fault.operation)
            self._broken = str(error)
            return error
        if expected and fault.seen >> _OPERATION_SHIFT == expected:
            self._broken = f"rank {fault.peer} was in an operation of another shape"
            return OrderError(
                f"rank {fault.rank}: {fault.phase}, operation {fault.operation}: {self._broken}; "
                "all ranks must make the same calls in the same order"
            )
        where = "did not reach this operation"
        if not expected and "rows)" in fault.phase:
            where = "had begun this operation, and not all of its rows have come"
        self._broken = (
            f"rank {fault.rank} waited {self._timeout_s:g} s for {self._name_of(fault.peer)} in "
            f"{fault.phase}, operation {fault.operation} (expected {fault.expected:#x}, seen "
            f"{fault.seen:#x}; rank {fault.peer} {where}: see its log; raise MOE_EP_TIMEOUT_S if "
            "it was only slow)"
        )
        return PeerTimeoutError(self._broken)

    def _name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def _raise_own_error(self, call: Call) -> None:
        """Peers learn of it from the device, at some later call: nobody can go on after that."""
        if call.error is not None:
            self._broken = f"bad input to {call.phase}, operation {call.operation}"
            raise call.error


def _nothing() -> None:
    pass


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous, and where 16 bytes at a time can be read."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ROW_ALIGNMENT else rows


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
