"""Low-latency mode between hosts, no GPU: which backend is taken, what ranks agree on, what is said
where it cannot be. The core is replaced by one whose messages are files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from low_latency_cases import Case, check_case, make_buffer
from test_nvshmem_setup import CPU, FileCore, FileHost, layout

from moe_ep import BackendUnavailableError, PeerError
from moe_ep.backends import hosts, low_latency_nvshmem, nvshmem_library, nvshmem_transport
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.low_latency_nvshmem import NvshmemLowLatencyBackend
from moe_ep.low_latency_exchange import LowLatency
from moe_ep.testing import run_ranks

NUM_BYTES = 1 << 20


class FileLowLatency:
    """As `_C_nvshmem.HostsLowLatency`."""

    def __init__(self, device: Any, rank: int, size: int, per_host: int, by_slots: bool) -> None:
        self.by_slots = by_slots

    def block_bytes(self, num_bytes: int) -> int:
        return num_bytes * 3 // 2

    def attach(self, addresses: list[int], num_bytes: int) -> None:
        self.addresses, self.num_bytes = addresses, num_bytes

    def is_quiet(self) -> bool:
        return True


class LowLatencyCore(FileCore):
    HostsLowLatency = FileLowLatency


def _connect(core: FileCore, number: int) -> tuple[Any, Any, int]:
    """What a backend makes of the core, as its constructor does on a GPU."""
    backend = object.__new__(NvshmemLowLatencyBackend)
    backend.rank, backend.size = dist.get_rank(), dist.get_world_size()
    backend._layout, backend._device = layout(backend.size), CPU
    group = dist.distributed_c10d._get_default_group()
    with (
        mock.patch.object(nvshmem_library, "load", lambda: core),
        mock.patch.object(low_latency_nvshmem, "gpu_id", lambda index: f"GPU {backend.rank // 3}"),
    ):
        return backend._connect(Channel(group, number), NUM_BYTES, Call(0, "setup", 20.0))


class ApartCore(LowLatencyCore):
    """Two ranks of a host have no peer access."""

    def NvshmemHost(self, *args: Any) -> FileHost:
        host = super().NvshmemHost(*args)
        if host.rank == 2:
            host.peer_address = lambda address, rank: 0  # type: ignore[method-assign]
        return host


def _apart(rank: int, folder: str) -> str:
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    core = ApartCore(Path(folder))
    with pytest.raises(BackendUnavailableError) as caught:
        _connect(core, 20)
    assert core.users == 0
    return str(caught.value)


def test_no_peer_access_within_a_host(tmp_path: Path) -> None:
    for told in run_ranks(_apart, 4, str(tmp_path), limit_s=60):
        assert "rank 2 cannot reach the memory of rank 3 on its own host" in told, told


def _forms(rank: int, folder: str) -> list[str]:
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    told, first = [], rank // 2 * 2
    for number, (mine, others) in enumerate(
        [("", ""), ("slots", "slots"), ("slots", "layered"), ("both", "slots")]
    ):
        os.environ["MOE_EP_LOW_LATENCY_FORM"] = mine if rank == 3 else others
        core = LowLatencyCore(Path(folder) / str(number))
        try:
            comm, memory, ranks_on_gpu = _connect(core, 10 + number)
        except (ValueError, PeerError) as error:
            told.append(f"{type(error).__name__}: {error}")
            assert core.users == 0  # NVSHMEM has been left
            continue
        told.append("slots" if comm.by_slots else "layered")
        near = [address != 0 for address in comm.addresses]
        assert near == [first <= peer < first + 2 for peer in range(4)]
        assert comm.num_bytes == NUM_BYTES and ranks_on_gpu == (3 if rank < 3 else 1)
        with mock.patch.object(low_latency_nvshmem.torch.cuda, "synchronize"):
            memory.release()
        assert core.users == 0
    return told


def test_ranks_agree_on_the_form(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(_forms, 4, str(tmp_path), limit_s=60)):
        assert told[:2] == ["layered", "slots"]
        differs = "MOE_EP_LOW_LATENCY_FORM is layered on rank 0 and slots on rank 3"
        assert told[2].startswith("ValueError: ") and differs in told[2], told
        wrong = "MOE_EP_LOW_LATENCY_FORM='both' is neither layered nor slots"
        assert told[3].startswith("ValueError: " if rank == 3 else "PeerError: "), told
        assert wrong in told[3], told


class NetworkCore(LowLatencyCore):
    """GPUs of real hosts, of which the last promises less than the others."""

    def __init__(self, folder: Path, order: int) -> None:
        super().__init__(folder)
        self.order = order if dist.get_rank() == 3 else 200

    def network_write_order(self, device: int) -> int:
        return self.order


def _on_a_network(rank: int, folder: str) -> list[tuple[str, str]]:
    told = []
    with (
        mock.patch.object(hosts, "_host_id", lambda: f"machine {rank // 2}"),
        mock.patch.object(nvshmem_transport, "has_adapters", lambda: True),
    ):
        for number, (order, form) in enumerate(ORDERS):
            os.environ["MOE_EP_LOW_LATENCY_FORM"] = form
            core = NetworkCore(Path(folder) / str(number), order)
            with mock.patch.object(low_latency_nvshmem.logger, "log") as log:
                comm, memory, _ = _connect(core, 30 + number)
            lines = [str(call.args[1]) % call.args[2:] for call in log.call_args_list]
            assert len(lines) == (rank == 0)
            told.append(("slots" if comm.by_slots else "layered", "".join(lines)))
            with mock.patch.object(low_latency_nvshmem.torch.cuda, "synchronize"):
                memory.release()
    return told


ORDERS = [(200, ""), (100, ""), (100, "layered"), (0, "")]


def test_form_that_the_gpus_can_take(tmp_path: Path) -> None:
    """Neighbours read what the network has written only where their GPUs see it in order."""
    for rank, told in enumerate(run_ranks(_on_a_network, 4, str(tmp_path), limit_s=60)):
        assert [form for form, _ in told] == ["layered", "slots", "layered", "slots"]
        if rank > 0:
            continue
        doubts = ["rank 3 does not promise" in line for _, line in told]
        assert doubts == [False, False, True, False]
        assert "its neighbours see" in told[2][1] and "Ordering is 100)" in told[2][1]


def _without_module(rank: int) -> list[str]:
    told = []
    os.environ["MOE_EP_RANKS_PER_HOST"] = "1"
    os.environ["MOE_EP_BACKEND"] = "nvshmem"
    with mock.patch.dict(sys.modules, {"moe_ep._C_nvshmem": None}):
        for build in (
            lambda: LowLatency(dist.distributed_c10d._get_default_group(), 1 << 26),
            lambda: make_buffer([Case()]),
        ):
            with pytest.raises(BackendUnavailableError) as caught:
                build()
            told.append(str(caught.value))
        os.environ["MOE_EP_BACKEND"] = "auto"
        with mock.patch.dict(sys.modules, {"moe_ep._C": None}):
            buffer = make_buffer([Case()])
        assert buffer._low_latency is not None
        told.append(buffer._low_latency.backend_name)
        check_case(buffer, Case(), 0, "cpu")
        buffer.destroy()
    return told


def test_asked_for_by_name_without_the_module() -> None:
    for *told, automatic in run_ranks(_without_module, 2, limit_s=60):
        assert automatic == "reference"
        assert "'nvshmem' cannot run low-latency mode" in told[0]
        for text in told:
            assert "_C_nvshmem" in text and "pip install nvidia-nvshmem-cu" in text, text
