"""The CUDA backend: one host, peer memory, no collective library.

Every rank maps the symmetric memory of its peers (file descriptors or CUDA IPC) and kernels of
`moe_ep/_C` move the rows; what they do is told in csrc/kernels. This file checks tensors, allocates
results, and turns what the device reports into errors.
"""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import Call, DispatchedRows
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda_figures import CudaFigures
from moe_ep.backends.cuda_memory import Memory, SharedMemory
from moe_ep.backends.cuda_plan import CudaPlan
from moe_ep.errors import BrokenError, CapacityError, PeerError, PeerTimeoutError
from moe_ep.layout import FP8_BLOCK, EPLayout

MAX_RANKS = 64
MAX_EXPERT_SLOTS = 2048
ROW_MULTIPLE_BYTES = 16

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FP8_SCALES = {None: 0, "fp32": 1, "power_of_two": 2}
_WIDEST_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 4}
_SMALLEST_TOKENS = 128
_REMEMBERED_OPERATIONS = 64
_SMALL_LISTS_BYTES = 4 << 20
_OK, _BAD_INPUT, _NEEDS_ROOM, _OVERFLOW = range(4)  # NotifyStatus of csrc/shared/control.h


def _load_core() -> Any:
    return importlib.import_module("moe_ep._C")


def unavailable_reason(layout: EPLayout) -> str | None:
    """Why this backend cannot run `layout` here, with the fix; None where it can."""
    try:
        _load_core()
    except ImportError as error:
        return f"moe_ep/_C is not there ({error}); install with nvcc on the PATH to build it"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES"
    lacking = _lacking_architecture()
    if lacking is not None:
        return lacking
    dtype, hidden = layout.dispatch.dtype, layout.model.hidden
    if dtype not in _WIDEST_BYTES:
        return f"dispatch.dtype {dtype} is not supported; use {', '.join(_WIDEST_BYTES)}"
    narrowest = 4 if dtype == "fp32" else 2
    if hidden * narrowest % ROW_MULTIPLE_BYTES:
        return (
            f"model.hidden={hidden} makes rows of {hidden * narrowest} bytes; they must be a "
            f"multiple of {ROW_MULTIPLE_BYTES} bytes"
        )
    size = layout.parallel.group_size
    if size > MAX_RANKS:
        return f"the group has {size} ranks; one host can have {MAX_RANKS}"
    slots = size * layout.num_local_experts
    if slots > MAX_EXPERT_SLOTS:
        return f"{slots} expert slots in the group; at most {MAX_EXPERT_SLOTS} are supported"
    if layout.dispatch.mode != "throughput":
        return f"dispatch.mode {layout.dispatch.mode} is not supported by it yet"
    if layout.dispatch.capacity is not None and layout.tokens_per_rank is None:
        return "dispatch.capacity makes shapes static and needs tokens_per_rank to be set too"
    return None


def _lacking_architecture() -> str | None:
    """Kernels run on GPUs of their architecture and, compiled anew by the driver, on later ones."""
    architectures = _load_core().ARCHITECTURES
    major, minor = torch.cuda.get_device_capability()
    if any(tuple(map(int, name.split("."))) <= (major, minor) for name in architectures):
        return None
    return (
        f"{torch.cuda.get_device_name()} has architecture {major}.{minor}, moe_ep/_C "
        f"has kernels for {', '.join(architectures)}; install with "
        f"MOE_EP_CUDA_ARCHS={major}.{minor}"
    )


class CudaBackend(CudaFigures):
    """See `moe_ep.backends.base.Backend`.

    Args:
        layout: what is exchanged.
        group: all its ranks on one host; several may share a GPU.
        channel: for the set-up and when symmetric memory grows; not used per operation.

    With `dispatch.exact_combine` all rows of a token are summed at its own rank, in slot order, and
    rounded once. Else each rank sums its share of a token first: less traffic, one more rounding.

    Raises:
        BackendUnavailableError: memory cannot be shared between two ranks (the message names them).
    """

    name = "cuda"
    checks_indices = True

    def __init__(self, layout: EPLayout, group: dist.ProcessGroup, channel: Channel) -> None:
        self._core = _load_core()
        self.layout = layout
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.num_local_experts = layout.num_local_experts
        self._max_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_sms = layout.dispatch.num_sms
        config = self._core.CommunicatorConfig()
        config.device = self.device.index
        config.rank, config.num_ranks = self.rank, self.size
        config.num_experts = self.size * self.num_local_experts
        config.num_slots = layout.model.top_k * layout.parallel.expert_tensor
        config.max_row_bytes = layout.model.hidden * _WIDEST_BYTES[layout.dispatch.dtype]
        fp8 = layout.dispatch.dtype == "fp8_e4m3"
        config.max_scales = layout.model.hidden // FP8_BLOCK if fp8 else 0
        config.exact_combine = layout.dispatch.exact_combine
        config.row_alignment = layout.dispatch.row_alignment
        self._configure(config)
        torch.cuda.current_stream(self.device)  # torch's context first
        self._comm: Any = self._core.Communicator(config)
        self._max_slots = config.num_slots
        self._destinations = self._core.max_destinations(config.num_slots, self.size)
        self._offsets = self._core.plan_header(self.size, self.num_local_experts)
        self._calls: deque[tuple[int, Call]] = deque(maxlen=_REMEMBERED_OPERATIONS)
        self._last_stream: torch.cuda.Stream | None = None
        self._broken: str | None = None
        self._pending: CudaPlan | None = None  # its counts are on their way
        memory = SharedMemory(self._core, self._comm, channel, self.device)
        memory.connect(
            layout.tokens_per_rank or _SMALLEST_TOKENS, Call(0, "setup", layout.timeouts.first_s)
        )
        # Kernels wait for each other: those of all ranks on one GPU must fit on it together.
        self._max_sms = max(self._max_sms // memory.ranks_on_gpu, 1)
        self._memory: Memory = memory

    def _configure(self, config: Any) -> None:
        """Room for what a backend between hosts adds."""

    # -- verbs ------------------------------------------------------------------------------------

    def prepare(self, topk_idx: Tensor | None, call: Call, capacity: int | None = None) -> CudaPlan:
        self.check(call)
        if topk_idx is None:
            width = self.layout.model.top_k * self.layout.parallel.expert_tensor
            topk_idx = torch.empty(0, width, dtype=torch.int64)
        topk_idx = topk_idx.to(self.device).contiguous()
        if self._pending is not None:
            self._pending.resolve()  # there is one place for counts
        plan = self._new_plan(topk_idx, call)
        capacity = capacity or self.layout.dispatch.capacity
        if capacity is not None:
            plan.add_lists(self._core, capacity, capacity)
            plan.set_rows(capacity)
            self._notify(plan, topk_idx, self._launch(call), call, capacity)
            self._raise_own_error(call)
            return plan
        has_lists = self._start(plan, topk_idx, call)
        plan._set(complete=lambda: self._complete(plan, topk_idx, has_lists, call))
        self._pending = plan
        if call.error is not None:
            plan.resolve()
        return plan

    def dispatch(
        self,
        plan: CudaPlan,
        x: Tensor,
        probs: Tensor | None,
        call: Call,
        fp8_scale: str | None = None,
        *,
        dequantize: bool = False,
    ) -> DispatchedRows:
        """With `dequantize`, rows quantised on the way come back in the dtype of `x` at once."""
        self.check(call)
        launch = self._launch(call)
        x = x.to(self.device).contiguous()
        hidden = x.shape[1]
        tensors = self._core.DispatchTensors()
        tensors.x, tensors.hidden, tensors.type = x.data_ptr(), hidden, _TYPES[x.dtype]
        tensors.fp8 = _FP8_SCALES[fp8_scale]
        if probs is not None:
            probs = probs.to(self.device, torch.float32).contiguous()
            tensors.probs = probs.data_ptr()
        # Staging needs no counts: it runs while the host waits for them and makes room for rows.
        self._comm.stage(plan.view, tensors, launch)
        room = self._memory.max_tokens
        plan.resolve()
        if self._memory.max_tokens != room:
            self._comm.stage(plan.view, tensors, launch)
        returns_fp8 = fp8_scale is not None and not dequantize
        rows = x.new_empty(
            plan.num_rows, hidden, dtype=torch.float8_e4m3fn if returns_fp8 else x.dtype
        )
        tensors.rows = rows.data_ptr()
        scales, row_probs = None, None
        if returns_fp8:
            scales = x.new_empty(plan.num_rows, hidden // FP8_BLOCK, dtype=torch.float32)
            # An empty tensor has no address, and none would mean "dequantise".
            tensors.row_scales = scales.data_ptr() or rows.element_size()
        if probs is not None:
            row_probs = probs.new_empty(plan.num_rows)
            tensors.row_probs = row_probs.data_ptr()
        self._remember(self._comm.dispatch(plan.view, tensors, launch), call)
        self._record(plan)
        self._raise_own_error(call)
        return DispatchedRows(rows=rows, scales=scales, probs=row_probs)

    def combine(
        self,
        plan: CudaPlan,
        rows: Tensor,
        call: Call,
        weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.check(call)
        plan.resolve()
        launch = self._launch(call)
        rows = rows.to(self.device).contiguous()
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        slot_values = None
        tensors = self._core.CombineTensors()
        tensors.rows, tensors.out = rows.data_ptr(), out.data_ptr()
        tensors.hidden, tensors.type = rows.shape[1], _TYPES[rows.dtype]
        if weights is not None:
            weights = weights.to(self.device, torch.float32).contiguous()
            # All ranks must run the same protocol, also one whose own rows are none.
            tensors.weights = weights.data_ptr() or weights.element_size()
        if values is not None:
            values = values.to(self.device, torch.float32).contiguous()
            slot_values = values.new_empty(plan.num_tokens, plan.num_slots)
            tensors.values = values.data_ptr() or values.element_size()
            tensors.slot_values = slot_values.data_ptr()
        self._remember(self._comm.combine(plan.view, tensors, launch), call)
        self._record(plan)
        self._raise_own_error(call)
        return out, slot_values

    def last_wait(self) -> tuple[int, int] | None:
        """See `Backend.last_wait`; by the device's clock, whose tick is up to a microsecond."""
        if self._comm is None:
            return None
        waited: tuple[int, int] | None = self._comm.last_wait()
        return waited

    def refuse(self, call: Call) -> NoReturn:
        """Takes part in the peers' operation with nothing but the error."""
        assert call.error is not None
        none = torch.empty(0, 1, dtype=torch.int64, device=self.device)
        plan = self._new_plan(none, call)
        plan.source.zero_()
        plan.add_lists(self._core, 0, 0)
        rows = torch.empty(0, self.layout.model.hidden, dtype=torch.bfloat16, device=self.device)
        if self.layout.dispatch.dtype == "fp32":
            rows = rows.float()
        if call.phase.startswith("combine"):
            self.combine(plan, rows, call)
        self.dispatch(plan, rows, None, call)
        raise call.error

    def destroy(self) -> None:
        """Frees everything once no peer uses it; a peer that stays away costs two seconds."""
        if self._comm is None:
            return
        self._comm = None
        self._broken = self._broken or "destroy()"
        self._memory.release()

    # -- one operation ----------------------------------------------------------------------------

    def _new_plan(self, topk_idx: Tensor, call: Call) -> CudaPlan:
        local = self.num_local_experts
        return CudaPlan(
            self._core, topk_idx, self._offsets, self._destinations, local, call.operation
        )

    def _start(self, plan: CudaPlan, topk_idx: Tensor, call: Call) -> bool:
        """Launches the exchange of counts; and of lists, if it need not wait for the counts."""
        limits = self._list_limits()
        if limits is not None:
            plan.add_lists(self._core, *limits)
        self._notify(plan, topk_idx, self._launch(call), call)
        return limits is not None

    def _complete(self, plan: CudaPlan, topk_idx: Tensor, has_lists: bool, call: Call) -> None:
        """Waits for the counts of `_start` and finishes the plan."""
        while True:
            launch = self._launch(call)
            counts = self._comm.wait_counts(launch)
            if counts is None:
                self.check(call)
            if counts.status != _NEEDS_ROOM:
                break
            try:
                self._memory.grow(counts.max_tokens, call)
            except Exception as error:
                self._pending, self._broken = None, f"its memory could not grow: {error}"
                raise
            has_lists = self._start(plan, topk_idx, call)
        self._pending = None
        self._raise_status(counts, call)
        if not has_lists:
            plan.add_lists(self._core, counts.num_rank_rows, counts.num_items)
            self._fetch_lists(plan, launch)
        plan.set_rows(counts.num_rows, counts)

    def _fetch_lists(self, plan: CudaPlan, launch: Any) -> None:
        self._comm.fetch_lists(plan.view, launch)

    def _notify(
        self, plan: CudaPlan, topk_idx: Tensor, launch: Any, call: Call, capacity: int = 0
    ) -> None:
        """The host waits for the counts, unless a capacity makes it unnecessary."""
        is_64_bit, report = topk_idx.dtype == torch.int64, capacity == 0
        number = self._comm.notify(
            plan.view, topk_idx.data_ptr(), is_64_bit, report, capacity, launch
        )
        self._remember(number, call)

    def _list_limits(self) -> tuple[int, int] | None:
        """Rank rows and items this rank can get at most; None where that is much memory.

        The peers' tokens may have more slots than those of this rank.
        """
        rank_rows = self.size * self._memory.max_tokens
        items = rank_rows * self._max_slots
        num_bytes = rank_rows * self._core.RANK_ROW_BYTES + items * self._core.ITEM_BYTES
        return (rank_rows, items) if num_bytes <= _SMALL_LISTS_BYTES else None

    def _launch(self, call: Call) -> Any:
        stream = torch.cuda.current_stream(self.device)
        last = self._last_stream
        if last is not None and last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)  # operations run in the order in which they were called
        self._last_stream = stream
        bad_input = call.error is not None
        num_sms = min(self.num_sms, self._max_sms)
        return self._core.Launch(stream.cuda_stream, call.timeout_s, num_sms, bad_input)

    def _record(self, plan: CudaPlan) -> None:
        """The plan's memory was allocated on the stream of its `prepare`."""
        if self._last_stream is not None and self._last_stream != plan.stream:
            plan.record_stream(self._last_stream)

    def _remember(self, number: int, call: Call) -> None:
        self._calls.append((number, call))

    # -- errors -----------------------------------------------------------------------------------

    def check(self, call: Call) -> None:
        """Raises what the device has reported so far; does not synchronise."""
        if self._broken is not None:
            raise BrokenError(
                f"rank {self.rank}: {call.phase}, operation {call.operation}: this object stopped "
                f"earlier ({self._broken}); build a new one"
            )
        if self._comm.is_quiet():
            return
        fault = self._comm.fault()
        if fault is not None:
            raise self._peer_timeout(fault)
        bad_peer = self._comm.take_bad_peer()
        if bad_peer >= 0:
            self._broken = f"rank {bad_peer} gave bad input while rows were on their way"
            raise PeerError(
                f"rank {self.rank}: rank {bad_peer} gave bad input to an operation before "
                f"{call.phase}, operation {call.operation}; see its log"
            )
        self._broken = "a static capacity was exceeded or an index was bad"
        self._raise_status(self._comm.sticky(), call)

    def _raise_own_error(self, call: Call) -> None:
        """Peers learn of it from the device, at some later call: nobody can go on after that."""
        if call.error is not None:
            self._broken = f"bad input to {call.phase}, operation {call.operation}"
            raise call.error

    def _peer_timeout(self, fault: Any) -> PeerTimeoutError:
        calls = [known for number, known in self._calls if number == fault.operation]
        operation = calls[0].operation if calls else fault.operation
        seconds = f"{calls[0].timeout_s:g} s " if calls else ""
        whom = self._name_of(fault.peer)
        message = (
            f"rank {fault.rank} waited {seconds}for {whom} in {fault.phase}, operation "
            f"{operation} (expected {fault.expected}, seen {fault.seen}; {whom} did not "
            "reach this operation: see its log; raise the layout's time-outs if it was only slow)"
        )
        self._broken = message
        return PeerTimeoutError(message)

    def _name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def _raise_status(self, counts: Any, call: Call) -> None:
        where = f"rank {self.rank}: {call.phase}, operation {call.operation}"
        if call.error is not None:
            raise call.error
        if counts.status == _BAD_INPUT and counts.culprit == self.rank:
            raise ValueError(
                f"{where}: topk_idx holds an index that is neither -1 nor below "
                f"{self.size * self.num_local_experts}, the expert slots of the group"
            )
        if counts.status == _BAD_INPUT:
            raise PeerError(f"{where}: rank {counts.culprit} gave bad input")
        if counts.status == _OVERFLOW:
            raise CapacityError(
                f"{where}: rank {counts.culprit} would receive {counts.worst_rows} rows, "
                f"dispatch.capacity is {counts.capacity}; raise it, or drop tokens in the router"
            )
