"""The NVSHMEM backend: peer memory inside a host, NVSHMEM between hosts.

A row crosses the border of a host once for every host that wants it: rank i of a host puts it into
the inbox of rank i of the other one, whose host's ranks pull it from there as if it were a row of
that rank. Sums come back the same way: added up on each host, put to the token's rank once, and
added up there. So everything within a host is the CUDA backend's, chunk by chunk; see
csrc/nvshmem/rail_kernels.h for the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends import cuda
from moe_ep.backends.base import Arrivals, Call, DispatchedRows
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.backends.cuda import CudaBackend
from moe_ep.backends.cuda_limits import ROW_MULTIPLE_BYTES
from moe_ep.backends.cuda_memory import gpu_id
from moe_ep.backends.cuda_plan import CudaPlan
from moe_ep.backends.nvshmem_memory import HostChannel, HostsMemory
from moe_ep.backends.nvshmem_plan import ChunkShape, HostsPlan
from moe_ep.backends.nvshmem_runtime import NvshmemRuntime
from moe_ep.errors import BackendUnavailableError
from moe_ep.layout import FP8_BLOCK, EPLayout

_INBOX_SLOTS = 2  # csrc/shared/rail_layout.h
_LETTERS = 300


class NvshmemBackend(CudaBackend):
    """See `moe_ep.backends.base.Backend`.

    Args:
        layout: what is exchanged.
        group: its ranks, equally many on every host, those of a host in a row.
        channel: for the set-up and when symmetric memory grows; not used per operation.

    Each host sums its share of a token, and the token's rank sums over hosts; both in fp32 and in a
    fixed order, each rounded once. FP8 rows cross the border as they are quantised.

    Raises:
        BackendUnavailableError: NVSHMEM cannot run between these ranks, memory cannot be shared
            between two ranks of a host, or the layout asks for `dispatch.exact_combine`.
    """

    name = "nvshmem"

    def __init__(self, layout: EPLayout, group: dist.ProcessGroup, channel: Channel) -> None:
        if layout.dispatch.exact_combine:
            raise BackendUnavailableError(
                "dispatch.exact_combine brings every expert row to its token's rank; between hosts "
                "rows are summed on each host first: set it to false, or take backend reference"
            )
        call = Call(0, "setup", layout.timeouts.first_s)
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.current_stream(device)  # torch's context first
        self._runtime = NvshmemRuntime(layout, channel, device, call)
        hosts = self._hosts = self._runtime.hosts
        chunk_tokens = max(self._runtime.max_rdma_tokens // _INBOX_SLOTS, 1)
        if layout.tokens_per_rank is not None:
            chunk_tokens = min(chunk_tokens, layout.tokens_per_rank)
        self._rail_config = self._runtime.core.RailConfig()
        self._chunk_tokens = chunk_tokens
        problem, failed = "", None
        try:
            super().__init__(layout, group, HostChannel(channel, hosts))
        except Exception as error:  # the other hosts must come to know
            problem, failed = f"host {hosts.host}: {error}"[:_LETTERS], error
        mine = {"problem": problem, "gpu": gpu_id(device.index)}
        answers = exchange_json(channel, mine, call)
        problem = next((answer["problem"] for answer in answers if answer["problem"]), "")
        if problem:
            if failed is None:
                self._memory.release()
            self._runtime.release()
            if failed is not None and not isinstance(failed, BackendUnavailableError):
                raise failed  # no reason to take another backend
            raise BackendUnavailableError(problem) from failed
        self.channel, self.rank, self.size = channel, channel.rank, channel.size
        self._shape = ChunkShape(
            hosts.num_hosts,
            hosts.ranks_per_host,
            chunk_tokens,
            self._max_slots,
            min(self._max_slots, hosts.ranks_per_host),
            self.num_local_experts,
        )
        # One block for each local expert and host that rows come from.
        blocks = self.num_local_experts * hosts.num_hosts
        self._offsets = self._core.plan_header(hosts.ranks_per_host, blocks)
        self._rail: Any = self._runtime.core.RailExchange(self._rail_config)
        self._both = HostsMemory(self._memory, self._runtime, self._rail, call)
        self._memory = self._both
        self._last_chunks = 1
        ranks_on_gpu = [answer["gpu"] for answer in answers].count(mine["gpu"])
        properties = torch.cuda.get_device_properties(self.device)
        self._max_sms = max(properties.multi_processor_count // ranks_on_gpu, 1)

    def _configure(self, config: Any) -> None:
        hosts, rail = self._hosts, self._rail_config
        config.num_experts *= hosts.num_hosts  # once for every host that rows come from
        config.num_hosts, config.host = hosts.num_hosts, hosts.host
        config.chunk_tokens = self._chunk_tokens
        rail.device = config.device
        rail.host, rail.num_hosts = hosts.host, hosts.num_hosts
        rail.local_rank, rail.ranks_per_host = hosts.local, hosts.ranks_per_host
        rail.num_local_experts = self.num_local_experts
        rail.num_slots, rail.max_row_bytes = config.num_slots, config.max_row_bytes
        rail.max_scales, rail.chunk_tokens = config.max_scales, self._chunk_tokens

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
        """Rows are staged chunk by chunk, by `dispatch`: x, probs and fp8_scale are its alone."""
        return super().prepare(topk_idx, call, capacity)

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
        assert isinstance(plan, HostsPlan)
        self.check(call)
        plan.resolve()
        try:
            arrived = self._exchange(plan, x, probs, call, fp8_scale, dequantize)
        except BaseException as error:
            self._left_halfway(call, error)
            raise
        self._raise_own_error(call)
        return arrived

    def _exchange(
        self,
        plan: HostsPlan,
        x: Tensor,
        probs: Tensor | None,
        call: Call,
        fp8_scale: str | None,
        dequantize: bool,
    ) -> DispatchedRows:
        """Rows to other hosts and from them, of a plan whose counts are known."""
        launch = self._launch(call)
        x, _ = self._placed(x)
        hidden = x.shape[1]
        tensors = self._core.DispatchTensors(
            0, 0, hidden, cuda._TYPES[x.dtype], cuda._FP8_SCALES[fp8_scale]
        )
        rows_out = self._runtime.core.RailRows()
        rows_out.status, rows_out.expert_of_slot = (
            plan.status_address,
            plan.addresses["expert_of_slot"],
        )
        rows_out.num_tokens = plan.num_tokens
        travels, scales_out = x, None
        if fp8_scale is not None:
            travels, scales_out = self._quantize(x, fp8_scale, launch)
            rows_out.num_scales = hidden // FP8_BLOCK
            # All ranks run the same protocol, also one without tokens of its own.
            rows_out.scales = scales_out.data_ptr() or ROW_MULTIPLE_BYTES
        rows_out.x, rows_out.row_bytes = travels.data_ptr(), hidden * travels.element_size()
        if probs is not None:
            probs = _widen(probs.to(self.device, torch.float32), self._max_slots)
            rows_out.probs = probs.data_ptr() or ROW_MULTIPLE_BYTES
        fp8 = fp8_scale is not None and not dequantize
        arrived, targets = cuda.new_rows(plan.num_rows, x, probs, fp8)
        self._move_rows(plan, rows_out, tensors, targets, launch, call)
        self._record(plan)
        return arrived

    def _move_rows(
        self,
        plan: HostsPlan,
        rows: Any,
        tensors: Any,
        targets: tuple[int, int, int],
        launch: Any,
        call: Call,
    ) -> None:
        """Chunk by chunk. Every kernel waits only for kernels that all ranks launch before it."""
        views = plan.chunk_views(self._core)
        self._last_chunks = len(views)

        def send(chunk: int) -> None:
            if chunk < len(views):
                rows.first_token = chunk * self._chunk_tokens
                self._rail.send_rows(self._comm, rows, launch)

        for chunk in range(_INBOX_SLOTS):
            send(chunk)
        for chunk, view in enumerate(views):
            rows.first_token = chunk * self._chunk_tokens
            self._rail.stage_rows(self._comm, view, rows, launch)
            self._calls.append((self._comm.dispatch(view, tensors, *targets, launch), call))
            send(chunk + _INBOX_SLOTS)

    def combine(
        self,
        plan: CudaPlan,
        rows: Tensor,
        call: Call,
        weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(plan, HostsPlan)
        self.check(call)
        plan.resolve()
        launch = self._launch(call)
        rows, address = self._placed(rows)
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        sums = self._runtime.core.RailSums()
        sums.status, sums.expert_of_slot = plan.status_address, plan.addresses["expert_of_slot"]
        sums.num_tokens, sums.hidden = plan.num_tokens, rows.shape[1]
        sums.type = cuda._TYPES[rows.dtype]
        sums.out = out.data_ptr()
        slot_values = None
        address_of_weights = address_of_values = 0
        if weights is not None:
            weights = weights.to(self.device, torch.float32).contiguous()
            address_of_weights = weights.data_ptr() or weights.element_size()
        if values is not None:
            values = values.to(self.device, torch.float32).contiguous()
            slot_values = values.new_empty(plan.num_tokens, self._max_slots)
            address_of_values = values.data_ptr() or values.element_size()
            sums.slot_values = slot_values.data_ptr()
        sources = (address, address_of_weights, address_of_values)
        self._move_sums(plan, sums, sources, launch, call)
        self._record(plan)
        self._raise_own_error(call)
        if slot_values is not None:
            slot_values = slot_values[:, : plan.num_slots].contiguous()
        return out, slot_values

    def _move_sums(
        self, plan: HostsPlan, sums: Any, sources: tuple[int, int, int], launch: Any, call: Call
    ) -> None:
        views = plan.chunk_views(self._core)
        self._last_chunks = len(views)

        def add(chunk: int) -> None:
            sums.first_token = chunk * self._chunk_tokens
            self._rail.add_sums(self._comm, sums, launch)

        for chunk, view in enumerate(views):
            sums.sums = self._rail.sums(chunk)
            if sources[2]:
                sums.values = self._rail.values(chunk)
            tensors = self._core.CombineTensors(
                *sources, sums.sums, sums.values, sums.hidden, sums.type
            )
            self._calls.append((self._comm.combine(view, tensors, launch), call))
            self._rail.return_sums(self._comm, view, sums, launch)
            if chunk > 0:
                add(chunk - 1)
        add(len(views) - 1)

    def last_wait(self) -> tuple[int, int] | None:
        """As in backend cuda, among the ranks of this host."""
        waited = super().last_wait()
        if waited is None:
            return None
        return waited[0], self._hosts.rank_of(self._hosts.host, waited[1])

    def arrivals(self, tally: Tensor) -> Arrivals:
        """Rows of other hosts count for the rank of this host that took them in."""
        hosts = self._hosts
        blocks = self.num_local_experts * hosts.num_hosts
        rank_rows, _, counts = self._parts(tally, hosts.ranks_per_host, blocks)
        sources = [0] * self.size
        first = hosts.rank_of(hosts.host, 0)
        sources[first : first + hosts.ranks_per_host] = rank_rows
        experts = [sum(counts[e : e + hosts.num_hosts]) for e in range(0, blocks, hosts.num_hosts)]
        return Arrivals(experts, sources, sources)

    def border(self) -> Any:
        """What this rank has put to other hosts: `rows`, `bytes` of them, `other_bytes`. Waits for
        the device."""
        return self._rail.border()

    def destroy(self) -> None:
        if self._comm is not None:
            self._both.broken = self._broken is not None
        super().destroy()
        self._rail = None

    # -- one operation ----------------------------------------------------------------------------

    def _new_plan(
        self, shape: tuple[int, ...], list_limits: tuple[int, int], call: Call
    ) -> HostsPlan:
        num_tokens, num_slots = shape
        plan = HostsPlan(
            self._core,
            num_tokens,
            num_slots,
            self._shape,
            self._offsets,
            self._memory.max_tokens,
            self._last_chunks,
            call.operation,
            self._stream,
            self.device,
        )
        # With a capacity, lists are as long as that.
        if list_limits != cuda._NO_LISTS:
            plan.add_lists(self._core, *list_limits)
        return plan

    def _set_list_limits(self) -> None:
        """Lists are cut into chunks once the counts of all of them are known."""

    def _start(
        self, plan: CudaPlan, topk_idx: Tensor, launch: Any, call: Call, capacity: int = 0
    ) -> None:
        """Launches the exchange of expert ids along the rail and of counts on this host, and with
        a capacity the cutting of lists."""
        assert isinstance(plan, HostsPlan)
        if plan.room_chunks != self._shape.num_chunks(self._memory.max_tokens):  # it has grown
            plan.make_room(self._core, self._memory.max_tokens, self.device)
        is_64_bit, report = topk_idx.dtype == torch.int64, capacity == 0
        num_tokens, num_slots = topk_idx.shape
        tokens = plan.room_chunks * self._shape.host_tokens
        host_topk = torch.empty(tokens * self._max_slots, dtype=torch.int32, device=self.device)
        self._rail.exchange_routing(
            self._comm,
            topk_idx.data_ptr(),
            is_64_bit,
            num_tokens,
            num_slots,
            plan.addresses["expert_of_slot"],
            host_topk.data_ptr(),
            launch,
        )
        # Where there is room for the lists already, the core would copy them as they are.
        view = plan.view_without_lists(self._core)
        number = self._comm.notify_hosts(
            view, host_topk.data_ptr(), num_tokens, self._rail.verdict(), report, capacity, launch
        )
        self._calls.append((number, call))
        self._rail.agree(self._comm, view, report, capacity, launch)
        if capacity > 0:
            self._fetch_lists(plan, launch)

    def _fetch_lists(self, plan: CudaPlan, launch: Any) -> None:
        assert isinstance(plan, HostsPlan)
        addresses = plan.addresses
        self._rail.fetch_chunks(
            self._comm,
            plan.view,
            plan.room_chunks,
            addresses["cuts"],
            addresses["chunk_headers"],
            launch,
        )

    def _quantize(self, x: Tensor, scale: str, launch: Any) -> tuple[Tensor, Tensor]:
        num_tokens, hidden = x.shape
        q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(num_tokens, hidden // FP8_BLOCK, dtype=torch.float32)
        self._rail.quantize(
            x.data_ptr(),
            cuda._TYPES[x.dtype],
            num_tokens,
            hidden,
            scale == "power_of_two",
            q.data_ptr(),
            scales.data_ptr(),
            launch,
        )
        return q, scales

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts.host_of(rank)})"


def _widen(probs: Tensor, num_slots: int) -> Tensor:
    """[T, K] to [T, num_slots]: the ranks of a host read each other's with one shape."""
    missing = num_slots - probs.shape[1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing else probs.contiguous()
