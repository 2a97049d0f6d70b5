"""The CUDA backend: one host, peer memory, no collective library.

Every rank maps the symmetric memory of its peers (file descriptors or CUDA IPC) and kernels of
`moe_ep/_C` move the rows; what they do is told in csrc/kernels. This file places tensors, allocates
results and launches.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import Call, DispatchedRows
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda_errors import NEEDS_ROOM, CudaErrors
from moe_ep.backends.cuda_figures import CudaFigures
from moe_ep.backends.cuda_limits import ROW_MULTIPLE_BYTES, WIDEST_BYTES, load_core
from moe_ep.backends.cuda_memory import Memory, SharedMemory
from moe_ep.backends.cuda_plan import CudaPlan, StagedTokens
from moe_ep.errors import OrderError
from moe_ep.layout import FP8_BLOCK, EPLayout

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FP8_SCALES = {None: 0, "fp32": 1, "power_of_two": 2}
_SMALLEST_TOKENS = 128
_REMEMBERED_OPERATIONS = 64
_SMALL_LISTS_BYTES = 4 << 20
_NO_LISTS = (0, 0)


class CudaBackend(CudaErrors, CudaFigures):
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
        self._core = load_core()
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
        config.max_row_bytes = layout.model.hidden * WIDEST_BYTES[layout.dispatch.dtype]
        fp8 = layout.dispatch.dtype == "fp8_e4m3"
        config.max_scales = layout.model.hidden // FP8_BLOCK if fp8 else 0
        config.exact_combine = layout.dispatch.exact_combine
        config.row_alignment = layout.dispatch.row_alignment
        self._configure(config)
        torch.cuda.current_stream(self.device)  # torch's context first
        self._comm: Any = self._core.Communicator(config)
        self._max_slots = config.num_slots
        self._offsets = self._core.plan_header(self.size, self.num_local_experts)
        self._calls: deque[tuple[int, Call]] = deque(maxlen=_REMEMBERED_OPERATIONS)
        self._device_index = self.device.index
        self._int32 = torch.empty(0, dtype=torch.int32, device=self.device)
        self._stream = -1  # handle of the one below
        self._last_stream: torch.cuda.Stream | None = None
        self._launch_key: tuple[int, float, int, bool] | None = None
        self._same_launch: Any = None
        self._broken: str | None = None
        self._pending: CudaPlan | None = None  # its counts are on their way
        memory = SharedMemory(self._core, self._comm, channel, self.device)
        memory.connect(
            layout.tokens_per_rank or _SMALLEST_TOKENS, Call(0, "setup", layout.timeouts.first_s)
        )
        self._memory: Memory = memory
        self._list_limits = _NO_LISTS
        self._set_list_limits()
        # Kernels wait for each other: those of all ranks on one GPU must fit on it together.
        self._max_sms = max(self._max_sms // memory.ranks_on_gpu, 1)

    def _configure(self, config: Any) -> None:
        """Room for what a backend between hosts adds."""

    # -- verbs ------------------------------------------------------------------------------------

    def prepare(
        self,
        topk_idx: Tensor | None,
        call: Call,
        capacity: int | None = None,
        *,
        x: Tensor | None = None,
        probs: Tensor | None = None,
        fp8_scale: str | None = None,
    ) -> CudaPlan:
        """With `x`, its rows are staged while counts travel and the host gets ready."""
        self.check(call)
        capacity = capacity or self.layout.dispatch.capacity
        if capacity is None and call.error is None and torch.cuda.is_current_stream_capturing():
            raise OrderError(
                f"rank {self.rank}: {call.phase}, operation {call.operation}: the host waits for "
                "counts, which a CUDA graph cannot capture; set dispatch.capacity (Buffer: "
                "num_worst_tokens)"
            )
        if topk_idx is None:
            width = self.layout.model.top_k * self.layout.parallel.expert_tensor
            topk_idx = torch.empty(0, width, dtype=torch.int64)
        topk_idx, _ = self._placed(topk_idx)
        if self._pending is not None:
            self._pending.resolve()  # there is one place for counts
        launch = self._launch(call)
        limits = self._list_limits if capacity is None else (capacity, capacity)
        plan = self._new_plan(topk_idx.shape, limits, call)
        if x is not None and call.error is None:
            plan.staged = self._staged_tokens(x, probs, fp8_scale)
        self._start(plan, topk_idx, launch, call, capacity or 0)
        if capacity is not None:
            plan.set_rows(capacity)
            self._raise_own_error(call)
            return plan
        plan.complete = lambda: self._complete(plan, topk_idx, call)
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
        if plan.staged is None:
            x, probs, tensors = self._staged_tokens(x, probs, fp8_scale)
            # Staging needs no counts: it runs while the host waits for them and makes room.
            self._comm.stage(plan.view, tensors, launch)
            room = self._memory.max_tokens
            plan.resolve()
            if self._memory.max_tokens != room:
                self._comm.stage(plan.view, tensors, launch)
        else:
            plan.resolve()  # stages again where memory had to grow first
            x, probs, tensors = plan.staged
            plan.staged = None
        try:
            fp8 = fp8_scale is not None and not dequantize
            arrived, addresses = new_rows(plan.rows, x, probs, fp8)
            self._calls.append((self._comm.dispatch(plan.view, tensors, *addresses, launch), call))
            self._record(plan)
        except BaseException as error:
            self._left_halfway(call, error)
            raise
        self._raise_own_error(call)
        return arrived

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
        rows, address = self._placed(rows)
        hidden = rows.shape[1]
        out = rows.new_empty(plan.num_tokens, hidden)
        slot_values = None
        # All ranks must run the same protocol, also one whose own rows are none: an empty tensor
        # has no address.
        address_of_weights = address_of_values = address_of_slots = 0
        if weights is not None:
            weights, address_of_weights = self._placed(weights, torch.float32)
            address_of_weights = address_of_weights or weights.element_size()
        if values is not None:
            values, address_of_values = self._placed(values, torch.float32)
            slot_values = values.new_empty(plan.num_tokens, plan.num_slots)
            address_of_values = address_of_values or values.element_size()
            address_of_slots = slot_values.data_ptr()
        tensors = self._core.CombineTensors(
            address,
            address_of_weights,
            address_of_values,
            out.data_ptr(),
            address_of_slots,
            hidden,
            _TYPES[rows.dtype],
        )
        self._calls.append((self._comm.combine(plan.view, tensors, launch), call))
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
        self._launch(call)
        plan = self._new_plan((0, 1), (0, 0), call)
        plan.source.zero_()
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

    def _placed(self, tensor: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
        """On this object's device, without gaps, where kernels can read 16 bytes at a time; mostly
        it is so already. And its address."""
        if tensor.device != self.device or (dtype is not None and tensor.dtype != dtype):
            tensor = tensor.to(self.device, dtype or tensor.dtype)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        address = tensor.data_ptr()
        if address % ROW_MULTIPLE_BYTES:
            tensor = tensor.clone()
            address = tensor.data_ptr()
        return tensor, address

    def _staged_tokens(
        self, x: Tensor, probs: Tensor | None, fp8_scale: str | None
    ) -> StagedTokens:
        x, address = self._placed(x)
        address_of_probs = 0
        if probs is not None:
            probs, address_of_probs = self._placed(probs, torch.float32)
        tensors = self._core.DispatchTensors(
            address, address_of_probs, x.shape[1], _TYPES[x.dtype], _FP8_SCALES[fp8_scale]
        )
        return x, probs, tensors

    def _new_plan(
        self, shape: tuple[int, ...], list_limits: tuple[int, int], call: Call
    ) -> CudaPlan:
        num_tokens, num_slots = shape
        return CudaPlan(
            self._comm,
            (num_tokens, num_slots),
            list_limits,
            self._offsets,
            call.operation,
            self._stream,
            self._int32,
        )

    def _start(
        self, plan: CudaPlan, topk_idx: Tensor, launch: Any, call: Call, capacity: int = 0
    ) -> None:
        """Launches the exchange of counts, and of lists, if the plan has room for them; on the way
        it stages what the plan is to send, if that is known.

        The host waits for the counts, unless a capacity makes it unnecessary."""
        staged = None if plan.staged is None else plan.staged[2]
        is_64_bit, report = topk_idx.dtype == torch.int64, capacity == 0
        number = self._comm.notify(
            plan.view, staged, topk_idx.data_ptr(), is_64_bit, report, capacity, launch
        )
        self._calls.append((number, call))

    def _complete(self, plan: CudaPlan, topk_idx: Tensor, call: Call) -> None:
        """Waits for the counts of `_start` and finishes the plan."""
        try:
            counts = self._wait_counts(plan, topk_idx, call)
        finally:
            self._pending = None
        self._raise_status(counts, call)
        try:
            if not plan.has_lists:
                plan.add_lists(self._core, counts.num_rank_rows, counts.num_items)
                self._fetch_lists(plan, self._launch(call))
        except BaseException as error:
            self._left_halfway(call, error)
            raise
        plan.set_rows(counts.num_rows, counts)

    def _wait_counts(self, plan: CudaPlan, topk_idx: Tensor, call: Call) -> Any:
        while True:
            launch = self._launch(call)
            counts = self._comm.wait_counts(launch)
            if counts is None:
                self.check(call)
            if counts.status != NEEDS_ROOM:
                return counts
            try:
                self._memory.grow(counts.max_tokens, call)
            except Exception as error:
                self._broken = f"its memory could not grow: {error}"
                raise
            self._set_list_limits()
            if plan.has_lists and self._list_limits != _NO_LISTS:
                plan.add_lists(self._core, *self._list_limits)
            else:
                plan.drop_lists()
            self._start(plan, topk_idx, launch, call)

    def _fetch_lists(self, plan: CudaPlan, launch: Any) -> None:
        self._comm.fetch_lists(plan.view, launch)

    def _set_list_limits(self) -> None:
        """Rank rows and items this rank can get at most; none where that is much memory, so that
        plans get their lists only when the counts are known.

        The peers' tokens may have more slots than those of this rank.
        """
        rank_rows = self.size * self._memory.max_tokens
        items = rank_rows * self._max_slots
        num_bytes = rank_rows * self._core.RANK_ROW_BYTES + items * self._core.ITEM_BYTES
        self._list_limits = (rank_rows, items) if num_bytes <= _SMALL_LISTS_BYTES else _NO_LISTS

    def _launch(self, call: Call) -> Any:
        # The handle alone: a Stream object costs the host more than all else here.
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        if stream != self._stream:
            self._change_stream(stream)
        bad_input = call.error is not None
        key = (stream, call.timeout_s, self.num_sms, bad_input)
        if key != self._launch_key:  # mostly as in the call before
            num_sms = min(self.num_sms, self._max_sms)
            self._launch_key = key
            self._same_launch = self._core.Launch(stream, call.timeout_s, num_sms, bad_input)
        return self._same_launch

    def _change_stream(self, stream: int) -> None:
        """Operations run in the order in which they were called, on whichever stream."""
        current = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._last_stream)
        self._stream, self._last_stream = stream, current

    def _record(self, plan: CudaPlan) -> None:
        """The plan's memory was allocated on the stream of its `prepare`."""
        if plan.stream != self._stream and self._last_stream is not None:
            plan.record_stream(self._last_stream)


def new_rows(
    num_rows: int, x: Tensor, probs: Tensor | None, fp8: bool
) -> tuple[DispatchedRows, tuple[int, int, int]]:
    """Room for what x [T, H] and probs [T, K] become, and the addresses of rows, probs, scales."""
    hidden = x.shape[1]
    scales = row_probs = None
    address_of_scales = address_of_probs = 0
    if fp8:
        rows = x.new_empty(num_rows, hidden, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(num_rows, hidden // FP8_BLOCK, dtype=torch.float32)
        # An empty tensor has no address, and none would mean "dequantise".
        address_of_scales = scales.data_ptr() or rows.element_size()
    else:
        rows = x.new_empty(num_rows, hidden)
    if probs is not None:
        row_probs = probs.new_empty(num_rows)
        address_of_probs = row_probs.data_ptr()
    addresses = (rows.data_ptr(), address_of_probs, address_of_scales)
    return DispatchedRows(rows, scales, row_probs), addresses
