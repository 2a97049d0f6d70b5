"""Low-latency mode between hosts: the kernels of one host with NVSHMEM puts where a host ends.

All symmetric memory is one block of the NVSHMEM heap. Ranks of this host map each other's; rows for
other hosts are put with a signal, once to each host (form "layered": into the memory of the rank of
the same place there, whose neighbours read them) or once to each expert (form "slots"). Expert rows
return to their tokens one by one either way, so that sums are those of one host, bit for bit. See
csrc/shared/low_latency_hosts.h.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from moe_ep import env
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.backends.cuda_memory import gpu_id
from moe_ep.backends.low_latency_cuda import CudaLowLatencyBackend
from moe_ep.backends.nvshmem_runtime import NvshmemRuntime
from moe_ep.errors import BackendUnavailableError
from moe_ep.layout import EPLayout

logger = logging.getLogger("moe_ep")

_ALL_GPUS = 200  # of `_C_nvshmem.network_write_order`


class HeapMemory:
    """A block of the NVSHMEM heap.

    Args:
        comm: `_C_nvshmem.HostsLowLatency`, whose memory it becomes. num_bytes: asked for.

    Attributes:
        problem: which rank's memory cannot be reached here; empty where all of this host can.
    """

    def __init__(self, runtime: NvshmemRuntime, comm: Any, num_bytes: int, call: Call) -> None:
        self._runtime, self._comm = runtime, comm
        self.broken = False
        """Whether a wait for a peer has expired: then NVSHMEM is not asked to free anything."""
        self.problem = ""
        block, hosts = runtime.allocate(comm.block_bytes(num_bytes), call), runtime.hosts
        addresses = [block.peer_address(rank) for rank in range(hosts.num_ranks)]
        for rank, address in enumerate(addresses):
            if not address and hosts.same_host(rank):
                self.problem = (
                    f"rank {hosts.rank} cannot reach the memory of rank {rank} on its own host; "
                    "put the ranks on GPUs with peer access (nvidia-smi topo -p2p rw)"
                )
        comm.attach(addresses, num_bytes)

    def release(self) -> None:
        """As `SharedMemory.release`."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the CUDA context is gone, and the memory with it
            return
        broken = self.broken or not self._comm.is_quiet()  # what no call has raised yet
        self._comm = None
        self._runtime.release(broken)


class NvshmemLowLatencyBackend(CudaLowLatencyBackend):
    """See `moe_ep.backends.low_latency_base.LowLatencyBackend`, and the backend of one host.

    Args:
        core, channel, num_bytes: as there.
        layout: its section `internode`.

    Raises:
        BackendUnavailableError: NVSHMEM cannot run between these ranks, or two of a host have no
            peer access; with backend auto also where all ranks are on one host.
        ValueError: MOE_EP_LOW_LATENCY_FORM is none of its values (the peers get a PeerError), or
            differs between ranks.
    """

    name = "nvshmem"

    def __init__(
        self, core: Any, layout: EPLayout, channel: Channel, num_bytes: int, call: Call
    ) -> None:
        self._layout = layout
        super().__init__(core, channel, num_bytes, call)

    def _connect(self, channel: Channel, num_bytes: int, call: Call) -> tuple[Any, HeapMemory, int]:
        runtime = NvshmemRuntime(self._layout, channel, self._device, call)
        self._hosts = hosts = runtime.hosts
        try:
            form, ranks_on_gpu = self._agree(channel, self._write_order(runtime.core), call)
            comm = runtime.core.HostsLowLatency(
                self._device.index, self.rank, self.size, hosts.ranks_per_host, form == "slots"
            )
            memory = HeapMemory(runtime, comm, num_bytes, call)
            mine = {"problem": memory.problem}
            for answer in exchange_json(channel, mine, call, "low-latency memory"):
                if answer["problem"]:
                    raise BackendUnavailableError(answer["problem"])
        except Exception:
            runtime.release()
            raise
        return comm, memory, ranks_on_gpu

    def _write_order(self, core: Any) -> int:
        """Which GPUs see in order what comes from other hosts; simulated ones have no network."""
        if self._hosts.simulated or self._hosts.num_hosts == 1:
            return _ALL_GPUS
        order: int = core.network_write_order(self._device.index)
        return order

    def _agree(self, channel: Channel, write_order: int, call: Call) -> tuple[str, int]:
        """The form, the same on all ranks, and how many of them share this rank's GPU."""
        mine = {"form": "", "order": str(write_order), "gpu": gpu_id(self._device.index)}
        try:
            mine["form"] = env.low_latency_form() or ""
        except ValueError as error:
            call = replace(call, error=error)
        answers = exchange_json(channel, mine, call, "low-latency form")
        orders = [int(answer["order"]) for answer in answers]
        form = _choose_form([answer["form"] for answer in answers], orders)
        if self.rank == 0:
            doubt = _doubt(form, orders)
            level = logging.WARNING if doubt else logging.INFO
            logger.log(level, "low-latency mode: rows go to other hosts in form %r%s", form, doubt)
        return form, [answer["gpu"] for answer in answers].count(mine["gpu"])

    def border(self) -> Any:
        """What this rank has put to other hosts: `rows`, `bytes` of them, `other_bytes` (routes).
        Waits for the device."""
        return self._comm.border()

    def round_trip_us(self, peer: int, rounds: int, call: Call) -> float | None:
        """None: it is not measured where hosts may lie between."""
        return None

    def destroy(self) -> None:
        if self._comm is not None:
            assert isinstance(self._memory, HeapMemory)
            self._memory.broken = self._broken is not None
        super().destroy()

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts.host_of(rank)})"


def _choose_form(asked: list[str], orders: list[int]) -> str:
    """The form of all ranks.

    Layered, a rank polls a counter in a neighbour's memory and then reads rows there that the
    network has written: the neighbour's GPU must keep their order for other GPUs, too.

    Args:
        asked: by rank; empty: whatever is safe.
        orders: `_C_nvshmem.network_write_order`, by rank.

    Raises:
        ValueError: ranks differ.
    """
    safe = "layered" if min(orders) >= _ALL_GPUS else "slots"
    forms = [form or safe for form in asked]
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"{env.LOW_LATENCY_FORM} is {forms[0]} on rank 0 and {form} on rank {rank}; give "
                "all ranks the same"
            )
    return forms[0]


def _doubt(form: str, orders: list[int]) -> str:
    """What the form relies on and a GPU does not promise; empty if nothing. What the network writes
    into a rank's own memory NVSHMEM's signals answer for."""
    lowest = min(orders)
    if form == "slots" or lowest >= _ALL_GPUS:
        return ""
    return (
        f"; the GPU of rank {orders.index(lowest)} does not promise that its neighbours see what "
        f"the network writes in order (cudaDevAttrGPUDirectRDMAWritesOrdering is {lowest}), which "
        "this form relies on"
    )
