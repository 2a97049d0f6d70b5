"""Run inside ranks: NVSHMEM itself, without the backend on top."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_ep import EPLayout
from moe_ep.backends import nvshmem_library
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.nvshmem_runtime import NvshmemRuntime
from moe_ep.errors import BackendUnavailableError


def layout(ranks: int) -> EPLayout:
    shape = {"hidden": 128, "num_experts": ranks, "top_k": 1}
    return EPLayout(model=shape, parallel={"expert": ranks}, backend="nvshmem")


def build(number: int, group: Any = None, core: Any = None) -> NvshmemRuntime:
    """A runtime over a channel of its own."""
    torch.cuda.init()
    group = group or dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", torch.cuda.current_device())
    channel = Channel(group, number % 100 + 1)
    return NvshmemRuntime(layout(channel.size), channel, device, Call(0, "setup", 30.0), core=core)


def check_starts(rank: int, times: int) -> dict[str, float]:
    """Starts and releases NVSHMEM many times in one process; greetings prove that it works.

    "left": bytes of the GPU, of all ranks together, that one more start has taken for good.
    """
    with mock.patch.dict(os.environ, {"MOE_EP_RANKS_PER_HOST": "2"}):
        begin = time.monotonic()
        build(0).release()
        first = time.monotonic() - begin
        dist.barrier()
        free = torch.cuda.mem_get_info()[0]
        for number in range(1, times):
            runtime = build(number)
            assert runtime.core.is_running()
            runtime.release()
            assert not runtime.core.is_running(), f"start {number}: not released"
        seconds = time.monotonic() - begin - first
    dist.barrier()
    left = (free - torch.cuda.mem_get_info()[0]) / (times - 1)
    return {"first_s": first, "seconds": seconds, "left": left}


def check_memory(rank: int) -> str:
    """Memory is zeroed; on the own host peers are written by plain stores, elsewhere not at all."""
    size = dist.get_world_size()
    with mock.patch.dict(os.environ, {"MOE_EP_RANKS_PER_HOST": "2"}):
        runtime = build(0)
    call = Call(1, "setup", 30.0)
    memory = runtime.allocate(1 << 20, call)
    assert memory.address % 256 == 0
    assert not bool(_words(memory.address, 1 << 17).any())
    dist.barrier()  # nobody writes before all have looked
    addresses = [memory.peer_address(peer) for peer in range(size)]
    for peer, address in enumerate(addresses):
        assert (address != 0) == (peer // 2 == rank // 2), addresses
        if address:
            _words(address, 1 << 17)[rank] = 100 + rank
    torch.cuda.synchronize()
    dist.barrier()
    got = _words(memory.address, 1 << 17)[:size].tolist()
    neighbours = [100 + peer if peer // 2 == rank // 2 else 0 for peer in range(size)]
    assert got == neighbours, (got, neighbours)
    runtime.free(memory, call)
    runtime.release()
    return runtime.transport


def _words(address: int, count: int) -> torch.Tensor:
    """[count] int64 at a device address."""
    interface = {"shape": (count,), "typestr": "<i8", "data": (address, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def check_pings(rank: int, times: int) -> int:
    """Every ping of every rank arrives, at every rank, with its payload; one that was not sent does
    not."""
    runtime = build(0)
    host, block = runtime._host, runtime._ping_block
    size, arrived = dist.get_world_size(), 0
    for number in range(2, times + 2):
        late = number % size  # this rank sends after all have looked
        if rank != late:
            assert host.ping(block, number, 20.0)
        dist.barrier()
        assert host.missing_pings(block, number) == [late], number
        dist.barrier()
        if rank == late:
            assert host.ping(block, number, 20.0)
        dist.barrier()
        assert host.missing_pings(block, number) == []
        arrived += size
    runtime.release()
    return arrived


def check_groups(rank: int) -> list[str]:
    """The same ranks share NVSHMEM, or use it one after the other; other ranks are refused."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, 2 * half)))]
    mine = groups[rank // half]
    first, second = build(0), build(1)
    told = [_refusal(2, mine)]
    second.release()
    memory = first.allocate(4096, Call(1, "setup", 30.0))  # the other one has left it running
    assert memory.address and first.core.is_running()
    first.release()
    assert not first.core.is_running()
    told.append(_refusal(3, mine))
    build(4).release()
    return told


def _refusal(number: int, group: Any) -> str:
    try:
        build(number, group)
    except BackendUnavailableError as error:
        return str(error)
    return ""


def check_version(rank: int) -> str:
    """A module that says that it was compiled with another version is not started at all."""
    core = nvshmem_library.load()
    other = SimpleNamespace(
        NVSHMEM_VERSION="3.0.6",
        loaded_version=core.loaded_version,
        members=core.members,
        is_running=core.is_running,
        unique_id=core.unique_id,
        NvshmemHost=None,
    )
    try:
        build(0, core=other)
    except BackendUnavailableError as error:
        return str(error)
    return ""


def check_dead_peer(rank: int) -> tuple[bool, float]:
    """The last rank dies after the rendezvous: NVSHMEM's start does not come back, ours does."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    core = nvshmem_library.load()
    box = [core.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    if rank == dist.get_world_size() - 1:
        os._exit(3)
    host = core.NvshmemHost(0, rank, dist.get_world_size(), "all")
    begin = time.monotonic()
    started = host.start(box[0], 3.0)
    return started, time.monotonic() - begin


def end_without_release(rank: int) -> float:
    build(0)
    return time.monotonic()
