"""Low-latency mode over peer memory: kernels of csrc/kernels/low_latency_*.cu.

Each half of a verb is one kernel; between the two nothing occupies the GPU. Legend of shapes: see
low_latency_base.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
    new_result,
)
from moe_ep.errors import BrokenError, OrderError, PeerError, PeerTimeoutError

_FP8_SCALES = {None: 0, "fp32": 1, "power_of_two": 2}
_OPERATION_SHIFT = 32  # of a ready word
_DEFAULT_SMS = 20


@dataclass
class CudaLowLatencyPlan:
    """slots: [L, N] int32, token*K + k of the source rank. layout_range: of the result."""

    slots: Tensor
    layout_range: Tensor


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
        self._comm: Any = core.LowLatency(self._device.index, self.rank, self.size)
        self._last_stream: torch.cuda.Stream | None = None
        self._timeout_s = 0.0  # of the last kernel
        self._broken: str | None = None
        self._memory = SharedMemory(core, self._comm, channel, self._device)
        self._memory.connect(num_bytes, call)
        # Kernels wait for each other: those of all ranks on one GPU must fit on it together.
        self._max_sms = max(self._max_sms // self._memory.ranks_on_gpu, 1)

    @property
    def device(self) -> torch.device:
        return self._device

    # -- verbs ------------------------------------------------------------------------------------

    def dispatch(
        self, shape: Shape, tag: int, outgoing: Outgoing | None, call: Call
    ) -> tuple[Result, CudaLowLatencyPlan, Receive]:
        self.check(call)
        pack = outgoing is not None and outgoing.pack_scales
        result = new_result(shape, self.size, pack, self._device)
        plan = CudaLowLatencyPlan(torch.empty_like(result.src_info), result.layout_range)
        ticket = torch.empty(1, dtype=torch.int64, device=self._device)
        tensors = self._core.LowLatencyDispatchTensors()
        tensors.ticket, tensors.fp8, tensors.pack_scales = ticket.data_ptr(), int(shape.fp8), pack
        kept: list[Tensor | None] = [ticket, plan.slots, *vars(result).values()]
        if outgoing is not None:
            x, topk_idx = _aligned(outgoing.x), outgoing.topk_idx.contiguous()
            kept += [x, topk_idx, outgoing.recv_stats, outgoing.wait_stats]
            tensors.x, tensors.topk_idx = x.data_ptr(), topk_idx.data_ptr()
            tensors.num_tokens, tensors.fp8 = len(x), _FP8_SCALES[outgoing.scale]
            tensors.topk_is_64_bit = topk_idx.dtype == torch.int64
            tensors.expert_stats = _address(outgoing.recv_stats)
            tensors.waiting_stats = _address(outgoing.wait_stats)
        tensors.rows, tensors.scales = result.rows.data_ptr(), _address(result.scales)
        tensors.recv_count, tensors.src_info = result.count.data_ptr(), result.src_info.data_ptr()
        tensors.slots, tensors.layout_range = plan.slots.data_ptr(), plan.layout_range.data_ptr()
        core_shape = self._shape(shape)
        self._comm.send_dispatch(core_shape, tag, tensors, self._launch(call))
        self._raise_own_error(call)

        def receive() -> None:
            self._comm.receive_dispatch(core_shape, tag, tensors, self._launch(call, kept))

        return result, plan, receive

    def combine(
        self,
        shape: Shape,
        tag: int,
        plan: CudaLowLatencyPlan,
        inputs: CombineInputs | None,
        call: Call,
    ) -> Receive:
        self.check(call)
        ticket = torch.empty(1, dtype=torch.int64, device=self._device)
        tensors = self._core.LowLatencyCombineTensors()
        tensors.ticket = ticket.data_ptr()
        tensors.slots, tensors.layout_range = plan.slots.data_ptr(), plan.layout_range.data_ptr()
        kept: list[Tensor | None] = [ticket, plan.slots, plan.layout_range]
        if inputs is not None:
            x, topk_idx = _aligned(inputs.x), inputs.topk_idx.contiguous()
            weights = inputs.topk_weights.contiguous()
            kept += [x, topk_idx, weights, inputs.out, inputs.wait_stats]
            tensors.x, tensors.topk_idx = x.data_ptr(), topk_idx.data_ptr()
            tensors.topk_is_64_bit = topk_idx.dtype == torch.int64
            tensors.topk_weights, tensors.out = weights.data_ptr(), inputs.out.data_ptr()
            tensors.num_tokens = len(inputs.out)
            tensors.waiting_stats = _address(inputs.wait_stats)
        core_shape = self._shape(shape)
        self._comm.send_combine(core_shape, tag, tensors, self._launch(call, kept))
        self._raise_own_error(call)

        def receive() -> None:
            self._comm.receive_combine(core_shape, tag, tensors, self._launch(call, kept))

        return receive

    def destroy(self) -> None:
        if self._comm is None:
            return
        self._comm = None
        self._broken = self._broken or "destroy()"
        self._memory.release()

    # -- one operation ----------------------------------------------------------------------------

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
        if expected and fault.seen >> _OPERATION_SHIFT == expected:
            self._broken = f"rank {fault.peer} was in an operation of another shape"
            return OrderError(
                f"rank {fault.rank}: {fault.phase}, operation {fault.operation}: {self._broken}; "
                "all ranks must make the same calls in the same order"
            )
        self._broken = (
            f"rank {fault.rank} waited {self._timeout_s:g} s for rank {fault.peer} in "
            f"{fault.phase}, operation {fault.operation} (expected {fault.expected:#x}, seen "
            f"{fault.seen:#x}; rank {fault.peer} did not reach this operation: see its log; raise "
            "MOE_EP_TIMEOUT_S if it was only slow)"
        )
        return PeerTimeoutError(self._broken)

    def _raise_own_error(self, call: Call) -> None:
        """Peers learn of it from the device, at some later call: nobody can go on after that."""
        if call.error is not None:
            self._broken = f"bad input to {call.phase}, operation {call.operation}"
            raise call.error


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous, and where 16 bytes at a time can be read."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ROW_ALIGNMENT else rows


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
