"""Set-up of NVSHMEM between ranks: what they agree on, and what they say when it cannot be.

The module is replaced by one whose messages are files: rendezvous, comparisons and greetings really
travel, and each scenario says what is wrong on which rank.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import EPLayout, ExpertParallel
from moe_ep.backends import nvshmem_turn
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.hosts import find_hosts
from moe_ep.backends.nvshmem_runtime import NvshmemRuntime
from moe_ep.errors import BackendUnavailableError, PeerTimeoutError
from moe_ep.testing import launch_ranks, run_ranks

CPU = torch.device("cpu")
BLOCK = 4096


class FileHost:
    """As `_C_nvshmem.NvshmemHost`."""

    def __init__(self, core: FileCore, rank: int, num_ranks: int, members: str) -> None:
        self.core, self.rank, self.num_ranks, self.spans = core, rank, num_ranks, members
        self.live: set[int] = set()

    def start(self, unique_id: bytes, timeout_s: float) -> bool:
        if self.core.users == 0:
            assert unique_id == b"id of rank 0"
        self.core.users += 1
        self.core.spans = self.spans
        return ("start", self.rank) not in self.core.broken

    def ping_block_bytes(self) -> int:
        return BLOCK

    def allocate(self, num_bytes: int, timeout_s: float) -> int | None:
        if ("room", self.rank) in self.core.broken and num_bytes != BLOCK:
            raise RuntimeError(f"NVSHMEM has no symmetric memory of {num_bytes} bytes")
        self.core.addresses += 256
        self.live.add(self.core.addresses)
        return self.core.addresses

    def free(self, address: int, timeout_s: float) -> bool:
        self.live.remove(address)
        return True

    def peer_address(self, address: int, rank: int) -> int:
        return address + 1_000_000 * (rank + 1)

    def ping(self, block: int, number: int, timeout_s: float) -> bool:
        if ("stuck", self.rank) in self.core.broken:
            return False
        for peer in range(self.num_ranks):
            if ("ping", self.rank, peer) not in self.core.broken:
                (self.core.folder / f"{block}-{self.rank}-{peer}-{number}").touch()
        return True

    def missing_pings(self, block: int, number: int) -> list[int]:
        names = [f"{block}-{peer}-{self.rank}-{number}" for peer in range(self.num_ranks)]
        return [peer for peer, name in enumerate(names) if not (self.core.folder / name).exists()]

    def gpu_sends(self) -> bool:
        return False

    def finish(self, timeout_s: float) -> bool:
        assert not self.live, "memory must be freed first"
        self.core.users -= 1
        return True


class FileCore:
    """As the module `_C_nvshmem`; `broken` holds what does not work."""

    NVSHMEM_VERSION = "3.4.5"

    def __init__(self, folder: Path, *broken: tuple[Any, ...], loaded: str = "3.4.5") -> None:
        self.folder, self.broken, self.loaded = folder, set(broken), loaded
        folder.mkdir(exist_ok=True)
        self.users, self.spans, self.addresses = 0, "", 0

    def loaded_version(self) -> str:
        return self.loaded

    def members(self) -> str:
        return self.spans

    def is_running(self) -> bool:
        return self.users > 0

    def unique_id(self) -> bytes:
        return b"id of rank 0"

    def NvshmemHost(self, device: int, rank: int, num_ranks: int, members: str) -> FileHost:
        return FileHost(self, rank, num_ranks, members)


def layout(ranks: int, backend: str = "nvshmem", **internode: Any) -> EPLayout:
    return EPLayout(
        model={"hidden": 64, "num_experts": 12, "top_k": 2},
        parallel={"expert": ranks},
        backend=backend,
        internode=internode,
    )


class Bench:
    """Scenarios of one rank, each on a channel of its own."""

    def __init__(self, folder: str) -> None:
        self.folder, self.number = Path(folder), 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def core(self, *broken: tuple[Any, ...], **options: str) -> FileCore:
        return FileCore(self.folder / str(self.number), *broken, **options)

    def build(self, core: FileCore | None = None, **options: Any) -> NvshmemRuntime:
        self.number += 1
        wanted = options.pop("layout", None) or layout(self.size)
        group = options.pop("group", None) or dist.distributed_c10d._get_default_group()
        variables = options.pop("variables", {})
        core = core or self.core()
        with mock.patch.dict(os.environ, variables):
            channel = Channel(group, self.number)
            call = Call(0, "setup", options.pop("timeout_s", 20.0))
            return NvshmemRuntime(wanted, channel, CPU, call, core=core)

    def told(self, *args: Any, **options: Any) -> str:
        try:
            self.build(*args, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


TWO = {"MOE_EP_RANKS_PER_HOST": "2"}


def check_memory(bench: Bench) -> None:
    """Two simulated hosts of two ranks: memory, addresses, release, and the next one."""
    core = bench.core()
    runtime = bench.build(core, variables=TWO)
    hosts = runtime.hosts
    assert (hosts.num_hosts, hosts.ranks_per_host, hosts.simulated) == (2, 2, True)
    assert runtime.transport == "p2p" and runtime.max_rdma_tokens == 2048
    call = Call(1, "setup", 20.0)
    memory = runtime.allocate(1 << 20, call)
    assert memory.num_bytes == 1 << 20
    for rank in range(bench.size):
        address = memory.peer_address(rank)
        if rank == bench.rank:
            assert address == memory.address
        else:
            assert (address != 0) == (rank // 2 == bench.rank // 2)
    with pytest.raises(ValueError, match=r"rank 0 asks for 64 bytes.*rank 1 for 65"):
        runtime.allocate(64 + bench.rank, call)
    runtime.free(memory, call)
    runtime.allocate(256, call)  # is freed by release
    runtime.release()
    runtime.release()
    assert core.users == 0
    bench.build(core, variables=TWO).release()


def check_sharing(bench: Bench) -> None:
    """Two objects over the same ranks share NVSHMEM; other ranks are refused for good."""
    core = bench.core()
    first, second = bench.build(core), bench.build(core)
    assert core.users == 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[bench.rank // 2]
    for last in (False, True):
        told = bench.told(core, layout=layout(2), group=pair)
        assert told.startswith("BackendUnavailableError: rank 0: NVSHMEM of this process"), told
        assert "spans ranks 0, 1, 2, 3 until it ends" in told, told
        if not last:
            second.release()
            first.release()
    if bench.rank == 1:
        core.users = 1  # as if this rank alone had not destroyed what it had
    told = bench.told(core)
    assert "NVSHMEM of an earlier object is none on rank 0 and in use on rank 1" in told, told
    core.users = 0
    bench.build(core).release()
    assert core.users == 0


def check_refusals(bench: Bench) -> dict[str, str]:
    """What each rank is told in each of many misfits."""
    rank, size = bench.rank, bench.size
    last, odd = rank == size - 1, str(2 if rank else 4)
    say: dict[str, str] = {}
    say["versions"] = bench.told(bench.core(loaded="3.3.9" if last else "3.4.5"))
    say["uneven"] = bench.told(variables={"MOE_EP_RANKS_PER_HOST": "3"})
    say["borders differ"] = bench.told(variables={"MOE_EP_RANKS_PER_HOST": odd})
    say["bad border"] = bench.told(variables={"MOE_EP_RANKS_PER_HOST": "x" if last else "2"})
    say["tokens differ"] = bench.told(variables={"DEEP_EP_NUM_MAX_RDMA_TOKENS": odd})
    say["transports"] = bench.told(variables={"NVSHMEM_REMOTE_TRANSPORT": "ucx"} if last else {})
    say["one host"] = bench.told(layout=layout(size, "auto"))
    say["ping"] = bench.told(bench.core(("ping", 3, 1)), variables=TWO, timeout_s=4.0)
    runtime = bench.build(bench.core(("room", 2)))
    try:
        runtime.allocate(1 << 40, Call(1, "setup", 20.0))
    except BackendUnavailableError as error:
        say["room"] = str(error)
    return say


def scenarios(rank: int, folder: str) -> dict[str, str]:
    bench = Bench(folder)
    check_memory(bench)
    check_sharing(bench)
    return check_refusals(bench)


WANTED = {
    "versions": ("BackendUnavailableError: rank 3: ", "compiled with NVSHMEM 3.4.5", "3.3.9"),
    "uneven": ("BackendUnavailableError", "different numbers of ranks", "3 on host 0", "1 on host"),
    "borders differ": ("ValueError", "MOE_EP_RANKS_PER_HOST is 4 on rank 0 and 2 on rank 1"),
    "tokens differ": ("BackendUnavailableError", "DEEP_EP_NUM_MAX_RDMA_TOKENS is 4 on rank 0"),
    "transports": ("BackendUnavailableError", "transport is p2p on rank 0 and ucx on rank 3"),
    "one host": ("BackendUnavailableError", "all ranks are on one"),
    "ping": ("BackendUnavailableError: rank 1: no message has come from rank 3 (host 1",),
    "room": ("rank 2: NVSHMEM has no symmetric memory of 1099511627776 bytes",),
}


def test_scenarios(tmp_path: Path) -> None:
    answers = run_ranks(scenarios, 4, str(tmp_path), limit_s=120)
    for name, parts in WANTED.items():
        assert len({answer[name] for answer in answers}) == 1, (name, answers)
        for part in parts:
            assert part in answers[0][name], (name, answers[0][name])
    told = [answer["bad border"] for answer in answers]
    assert told[3].startswith("ValueError: MOE_EP_RANKS_PER_HOST='x'"), told
    assert all(text.startswith("PeerError") and "rank 3" in text for text in told[:3]), told


def stuck(rank: int, folder: str) -> str:
    bench = Bench(folder)
    return bench.told(bench.core(("stuck", 2)), variables=TWO, timeout_s=5.0)


def test_a_transport_that_takes_no_messages(tmp_path: Path) -> None:
    told = run_ranks(stuck, 4, str(tmp_path), limit_s=60)
    assert all(text.startswith("PeerTimeoutError: ") for text in told), told
    assert "rank 2 waited 5 s for NVSHMEM in setup" in told[2], told
    # The first of the others that loses rank 2 ends, too, and so on.
    assert any("rank 2 in setup" in told[rank] for rank in (0, 1, 3)), told
    assert all(" in setup" in told[rank] for rank in (0, 1, 3)), told


def late(rank: int, folder: str) -> tuple[str, float]:
    """Rank 2 dies before the set-up; NVSHMEM itself is never asked."""
    if rank == 2:
        os._exit(1)
    begin = time.monotonic()
    core = FileCore(Path(folder) / "late", ("start", 0), ("start", 1))
    try:
        NvshmemRuntime(
            layout(3), Channel(dist.group.WORLD, 1), CPU, Call(0, "setup", 3.0), core=core
        )
    except PeerTimeoutError as error:
        assert core.users == 0
        return str(error), time.monotonic() - begin
    return "", 0.0


def second_job(rank: int, folder: str) -> str:
    core = FileCore(Path(folder) / "second")
    try:
        NvshmemRuntime(
            layout(2), Channel(dist.group.WORLD, 1), CPU, Call(0, "setup", 3.0), core=core
        )
    except BackendUnavailableError as error:
        assert core.users == 0
        return str(error)
    return ""


def test_another_job_is_starting(tmp_path: Path) -> None:
    with nvshmem_turn.to_start(60) as problem:
        assert problem == ""
        for told in run_ranks(second_job, 2, str(tmp_path), limit_s=60):
            assert "rank 0: another job has kept /dev/shm/moe_ep-nvshmem" in told, told
    assert run_ranks(second_job, 2, str(tmp_path), limit_s=60) == ["", ""]


def hangs(rank: int, folder: str) -> str:
    """NVSHMEM's start does not come back: a rank has died after the rendezvous."""
    core = FileCore(Path(folder) / "hangs", ("start", rank))
    try:
        NvshmemRuntime(
            layout(2), Channel(dist.group.WORLD, 1), CPU, Call(0, "setup", 3.0), core=core
        )
    except PeerTimeoutError as error:
        return str(error)
    return ""


def test_dead_peer(tmp_path: Path) -> None:
    answers = [outcome.result for outcome in launch_ranks(late, 3, str(tmp_path), limit_s=60)[:2]]
    assert all(" in setup" in told and seconds < 5.0 for told, seconds in answers), answers
    # Who learns of it first names it, and ends; the other one may then miss that rank.
    assert any("rank 2 in setup" in told for told, _ in answers), answers
    for told in run_ranks(hangs, 2, str(tmp_path), limit_s=60):
        assert "waited 3 s for NVSHMEM in setup" in told, told


def by_name(rank: int) -> list[str]:
    """Without the module: by name an error with the fix, auto takes another one."""
    told = []
    with mock.patch.dict(sys.modules, {"moe_ep._C_nvshmem": None}):
        for backend in ("nvshmem", "auto"):
            try:
                ep = ExpertParallel(layout(2, backend))
                told.append(ep.backend.name)
                ep.destroy()
            except BackendUnavailableError as error:
                told.append(str(error))
    with mock.patch.dict(os.environ, {"MOE_EP_RANKS_PER_HOST": "1"}):
        hosts = find_hosts(Channel(dist.group.WORLD, 9), Call(0, "setup", 20.0))
    assert (hosts.num_hosts, hosts.host) == (2, rank)
    return told


def test_asked_for_by_name_without_the_module() -> None:
    for told, other in run_ranks(by_name, 2, limit_s=60):
        assert other in ("cuda", "reference")
        for part in ("backend 'nvshmem' cannot run", "_C_nvshmem", "pip install nvidia-nvshmem-cu"):
            assert part in told, told
