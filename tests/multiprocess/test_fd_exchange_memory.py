"""Set-up of symmetric memory: which kind the ranks agree on, and what they say when none works.

The CUDA core is replaced by one whose memory is files that the processes map: handles, descriptors
and marks really travel, and each test says which pair cannot share which kind.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda_memory import SharedMemory
from moe_ep.errors import BackendUnavailableError, PeerError, PeerTimeoutError
from moe_ep.testing import launch_ranks, run_ranks

SIGNALS = SimpleNamespace(HELLO=0, GOODBYE=1)
NUM_BYTES = 4096
GPU = "00000000-0000-0000-0000-00000000000a"


class FileMemory:
    """As `_C.SymmetricMemory`. `broken`: (what, kind, rank, peer) that does not work."""

    def __init__(self, kind: str, rank: int, size: int, broken: set[tuple[Any, ...]]) -> None:
        self.kind, self.rank, self.size, self.broken = kind, rank, size, broken
        if ("allocate", kind, rank) in broken:
            raise RuntimeError(f"cudaMalloc: no {kind} memory")
        self.fd = os.memfd_create(kind)
        os.ftruncate(self.fd, NUM_BYTES)
        self.maps = {rank: mmap.mmap(self.fd, NUM_BYTES)}

    def handle(self) -> bytes:
        if self.size == 1:
            return b""
        if ("export", self.kind, self.rank) in self.broken:
            raise RuntimeError(f"cudaIpcGetMemHandle: {self.kind} is not supported")
        if self.kind == "fd":
            return os.dup(self.fd).to_bytes(4, "little")
        return f"/proc/{os.getpid()}/fd/{self.fd}".encode()

    def open(self, handles: list[bytes]) -> list[str]:
        problems = [""] * self.size
        for peer in range(self.size):
            if peer == self.rank:
                continue
            if ("map", self.kind, self.rank, peer) in self.broken:
                problems[peer] = f"{self.kind} handle refused " + "x" * 400
                continue
            if self.kind == "fd":
                fd = os.dup(int.from_bytes(handles[peer], "little"))
            else:
                fd = os.open(handles[peer].decode(), os.O_RDWR)
            if ("elsewhere", self.kind, self.rank, peer) in self.broken:
                os.close(fd)
                fd = os.memfd_create("elsewhere")
                os.ftruncate(fd, NUM_BYTES)
            self.maps[peer] = mmap.mmap(fd, NUM_BYTES)
            os.close(fd)
        return problems

    def mark(self, signal: int) -> list[str]:
        for memory in self.maps.values():
            memory[64 * signal + self.rank] = self.rank + 1
        return [""] * self.size

    def missing_marks(self, signal: int) -> list[str]:
        mine = self.maps[self.rank]
        seen = [mine[64 * signal + peer] for peer in range(self.size)]
        return ["" if mark == p + 1 else f"{mark} is there" for p, mark in enumerate(seen)]

    def close(self) -> None:
        for peer in [p for p in self.maps if p != self.rank]:
            self.maps.pop(peer).close()

    def free(self) -> None:
        assert list(self.maps) == [self.rank], "freed before it was closed"
        self.maps.pop(self.rank).close()
        os.close(self.fd)


class FileCommunicator:
    """As `_C.Communicator`, as far as memory goes."""

    def __init__(self, rank: int, size: int, broken: set[tuple[Any, ...]]) -> None:
        self.rank, self.size, self.broken = rank, size, broken
        self.kinds: list[str] = []
        self._memory: FileMemory | None = None

    def allocate(self, max_tokens: int, kind: str) -> FileMemory:
        self.release_memory()
        self.kinds.append(kind)
        self._memory = FileMemory(kind, self.rank, self.size, self.broken)
        return self._memory

    def memory(self) -> FileMemory:
        if self._memory is None:
            raise RuntimeError("no symmetric memory is allocated")
        return self._memory

    def release_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            memory.free()


CORE = SimpleNamespace(Signal=SIGNALS, MemoryKind=SimpleNamespace(IPC="ipc", FD="fd"))


def patch_gpus(gpus: list[str], no_access: set[tuple[str, str]] = frozenset()) -> Any:  # type: ignore[assignment]
    """This process sees `gpus`; between those of `no_access` there is none."""
    return mock.patch.multiple(
        torch.cuda,
        synchronize=lambda device=None: None,
        device_count=lambda: len(gpus),
        get_device_properties=lambda index: SimpleNamespace(uuid=gpus[index]),
        can_device_access_peer=lambda i, j: (gpus[i], gpus[j]) not in no_access,
    )


def make(number: int, *broken: tuple[Any, ...]) -> SharedMemory:
    group = dist.group.WORLD
    channel = Channel(group, number)
    communicator = FileCommunicator(channel.rank, channel.size, set(broken))
    return SharedMemory(CORE, communicator, channel, torch.device("cuda", 0))


def call(timeout_s: float = 20.0) -> Call:
    return Call(0, "setup", timeout_s)


def refused(memory: SharedMemory, max_tokens: int = 8) -> str:
    try:
        memory.connect(max_tokens, call())
    except (BackendUnavailableError, ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WORKING = {  # what does not work, and the kind all ranks end with
    "all well": ([], "fd"),
    "no export on rank 1": ([("export", "fd", 1)], "ipc"),
    "no allocation on rank 2": ([("allocate", "fd", 2)], "ipc"),
    "one pair cannot map": ([("map", "fd", 2, 0)], "ipc"),
    "one mapping leads elsewhere": ([("elsewhere", "fd", 0, 1)], "ipc"),
}


def _agree(rank: int) -> dict[str, Any]:
    logger = logging.getLogger("moe_ep")
    logger.setLevel(logging.INFO)
    results = {}
    with patch_gpus([GPU]):
        for number, (name, (broken, _)) in enumerate(WORKING.items()):
            records = Records()
            logger.addHandler(records)
            before = open_fds()
            memory = make(1 + number, *broken)
            communicator = memory._communicator
            memory.connect(8, call())
            kept = memory.kind, memory.max_tokens
            memory.grow(100, call())
            grown = memory.kind, memory.max_tokens
            tried = communicator.kinds
            assert communicator.memory().missing_marks(SIGNALS.HELLO) == [""] * 3
            memory.release()
            assert communicator._memory is None
            logger.removeHandler(records)
            results[name] = (kept, grown, tried, records.lines, open_fds() - before)
    return results


def test_all_ranks_take_the_same_kind() -> None:
    ranks = run_ranks(_agree, 3, limit_s=60)
    for name, (broken, kind) in WORKING.items():
        for rank, result in enumerate(ranks):
            kept, grown, tried, lines, fds = result[name]
            assert kept == (kind, 8), (name, rank)
            assert grown == (kind, 125), (name, rank)
            assert tried == (["fd", "fd"] if kind == "fd" else ["fd", "ipc", "ipc"]), name
            assert fds == 0, (name, rank)
            assert len(lines) == (rank == 0 and kind == "ipc"), (name, rank, lines)
            for line in lines:  # once, not again when memory grew
                assert "CUDA IPC, not file descriptors" in line and f"rank {broken[0][2]}" in line


def _fail(rank: int) -> dict[str, Any]:
    results = {}
    scenarios = {
        "both": ("", [("map", "ipc", 1, 0), ("map", "fd", 0, 2)]),
        "ipc only": ("ipc", [("map", "ipc", 1, 0)]),
        "fd only": ("fd", [("export", "fd", 2)]),
        "no memory": ("auto", [("allocate", "ipc", 1), ("allocate", "fd", 1)]),
    }
    with patch_gpus([GPU]):
        for number, (name, (choice, broken)) in enumerate(scenarios.items()):
            before = open_fds()
            with mock.patch.dict(os.environ, {"MOE_EP_MEMORY": choice}):
                memory = make(1 + number, *broken)
                message = refused(memory)
            assert memory._communicator._memory is None and memory.kind is None
            results[name] = (message, memory._communicator.kinds, open_fds() - before)
    return results


def test_failures_name_the_pair_on_all_ranks() -> None:
    ranks = run_ranks(_fail, 3, limit_s=60)
    wanted = {
        "both": [
            "ipc: rank 1 cannot map the memory of rank 0: ipc handle refused",
            "fd: rank 0 cannot map the memory of rank 2: fd handle refused",
        ],
        "ipc only": ["ipc: rank 1 cannot map the memory of rank 0"],
        "fd only": ["fd: rank 2: cudaIpcGetMemHandle: fd is not supported"],
        "no memory": ["ipc: rank 1: cudaMalloc: no ipc", "fd: rank 1: cudaMalloc: no fd"],
    }
    tried = {"both": ["fd", "ipc"], "ipc only": ["ipc"], "fd only": ["fd"]}
    for name, texts in wanted.items():
        assert len({result[name][0] for result in ranks}) == 1, name
        for message, kinds, fds in (result[name] for result in ranks):
            assert message.startswith("BackendUnavailableError"), message
            assert all(text in message for text in texts), message
            assert kinds == tried.get(name, ["fd", "ipc"])
            assert fds == 0, name


def _choose(rank: int) -> dict[str, str]:
    results = {}
    with patch_gpus([GPU]):
        channel = make(1)
        for name, choices in {"differ": ("ipc", "fd"), "bad": ("auto", "nvlink")}.items():
            with mock.patch.dict(os.environ, {"MOE_EP_MEMORY": choices[rank]}):
                results[name] = refused(channel)
        with mock.patch.dict(os.environ, {"MOE_EP_MEMORY": "fd"}):
            channel.connect(8, call())  # nothing is broken
        results["then"] = str(channel.kind)
        assert channel._communicator.kinds == ["fd"]
        channel.release()
    return results


def test_the_variable() -> None:
    first, second = run_ranks(_choose, 2, limit_s=60)
    assert first["differ"] == second["differ"]
    assert first["differ"].startswith("ValueError: MOE_EP_MEMORY is ipc on rank 0 and fd on rank 1")
    assert second["bad"] == "ValueError: MOE_EP_MEMORY='nvlink' is none of auto, ipc, fd"
    assert first["bad"].startswith("PeerError") and "'nvlink'" in first["bad"]
    assert first["then"] == second["then"] == "fd"


def _peer_access(rank: int) -> dict[str, str]:
    """Three GPUs A, B, C; ranks 0 and 3 share A. Processes see different ones, in other orders."""
    visible = [["A", "B", "C"], ["B"], ["C", "A"], ["A", "C"]][rank]
    denied = {
        "all": set(),
        "A to C": {("A", "C")},
        "B to A, which rank 1 cannot see": {("B", "A")},
        "C to A": {("C", "A")},
    }
    results = {}
    for number, (name, no_access) in enumerate(denied.items()):
        with patch_gpus(visible, no_access):
            memory = make(1 + number)
            results[name] = refused(memory)
            if not results[name]:
                memory.release()
            else:
                assert memory._communicator.kinds == []  # found before anything was allocated
    return results


def test_missing_peer_access_names_ranks_and_gpus() -> None:
    ranks = run_ranks(_peer_access, 4, limit_s=60)
    for result in ranks:
        assert result["all"] == result["B to A, which rank 1 cannot see"] == ""
        assert (
            "rank 0 cannot access the GPU of rank 2: GPU A has no peer access to GPU C"
            in (result["A to C"])
        )
        assert (
            "rank 2 cannot access the GPU of rank 0: GPU C has no peer access to GPU A"
            in (result["C to A"])
        )
        assert result["C to A"].startswith("BackendUnavailableError")


def _alone(rank: int) -> list[Any]:
    kinds = []
    for choice in ("auto", "ipc", "fd"):
        with patch_gpus([GPU]), mock.patch.dict(os.environ, {"MOE_EP_MEMORY": choice}):
            before = open_fds()
            memory = make(1)
            memory.connect(8, call())
            kinds.append(memory.kind)
            memory.release()
            assert open_fds() == before
    return kinds


def test_one_rank_alone() -> None:
    assert run_ranks(_alone, 1, limit_s=30) == [["fd", "ipc", "fd"]]


def _many(rank: int) -> tuple[int, int]:
    """Processes hold no descriptor of set-ups that went well or of those that failed."""
    with patch_gpus([GPU]), mock.patch.dict(os.environ, {"MOE_EP_MEMORY": "fd"}):
        before = open_fds()
        for number in range(20):
            memory = make(1 + number)
            memory.connect(8, call())
            memory.release()
        well = open_fds() - before
        for number in range(20, 25):
            assert refused(make(1 + number, ("map", "fd", number % 2, 1 - number % 2)))
    return well, open_fds() - before


def test_no_descriptor_is_left() -> None:
    assert run_ranks(_many, 2, limit_s=60) == [(0, 0)] * 2


def _dies(rank: int) -> tuple[str, float, int]:
    """Rank 1 dies after its address is known, before it sends its descriptor."""
    with patch_gpus([GPU]), mock.patch.dict(os.environ, {"MOE_EP_MEMORY": "fd"}):
        memory = make(1)
        before = open_fds()
        exchange = "moe_ep.backends.fd_exchange.FdExchange.exchange"
        started = time.monotonic()
        with mock.patch(exchange, lambda *_: os._exit(3)) if rank == 1 else mock.MagicMock():
            try:
                memory.connect(8, call(6.0))
            except PeerTimeoutError as error:
                message = str(error)
        taken = time.monotonic() - started
        memory._communicator.release_memory()
        return message, taken, open_fds() - before


def test_a_peer_that_dies_during_the_exchange() -> None:
    outcomes = launch_ranks(_dies, 3, limit_s=60)
    assert outcomes[1].exitcode == 3
    messages = []
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.result is not None, outcome
        message, taken, fds = outcome.result
        assert "in setup" in message and taken < 3 + 6 + 5, outcome  # exchange, verdict, slack
        assert fds <= 0
        messages.append(message)
    # Whoever comes second may find the first one gone.
    assert any("rank 1 in setup" in message for message in messages), messages
