"""Run inside ranks: symmetric memory of both kinds, and handles that do not do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from scenarios import Case, call, check_case, check_growth, make_backend, make_inputs
from torch import Tensor

from moe_ep.backends import cuda_memory
from moe_ep.backends.cuda import CudaBackend
from moe_ep.errors import BackendUnavailableError
from moe_ep.testing import run_ranks

KINDS = ("ipc", "fd")


@contextmanager
def memory_kind(kind: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"MOE_EP_MEMORY": kind}):
        yield


def exchange(backend: CudaBackend, case: Case) -> list[Tensor]:
    x, idx, probs = make_inputs(case)
    plan = backend.prepare(idx, call())
    arrived = backend.dispatch(plan, x, probs, call())
    out, values = backend.combine(plan, arrived.rows, call(), values=arrived.probs)
    assert arrived.probs is not None and values is not None
    return [arrived.rows, arrived.probs, out, values]


def check_kinds(rank: int, cases: list[Case]) -> None:
    """Every case is right with memory of each kind, and its results are the same bit for bit."""
    for case in cases:
        results = []
        for kind in KINDS:
            with memory_kind(kind):
                backend = make_backend(case)
            assert backend._memory.kind == kind
            check_case(backend, case)
            results.append(exchange(backend, case))
            backend.destroy()
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), case


def check_fresh_objects(rank: int, kind: str, times: int) -> None:
    with memory_kind(kind):
        scenarios.check_fresh_objects(rank, times)


def check_fd_growth(rank: int) -> None:
    with memory_kind("fd"):
        check_growth(rank)


def check_expandable(rank: int, kind: str) -> str:
    """Case 52, in a process whose caching allocator has expandable segments."""
    held = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    assert any(segment["is_expandable"] for segment in segments), "not in effect"
    case = Case(tokens=(300, 129), hidden=1024, top_k=4)
    with memory_kind(kind):
        backend = make_backend(case)
    for seed in range(3):
        check_case(backend, replace(case, tokens=(64 << seed, 30 << (2 * seed))), seed)
    used = backend._memory.kind
    backend.destroy()
    assert not held.any()
    return str(used)


def run_case_52() -> None:
    """Called in a process of its own: the allocator's settings are read once, from the start."""
    for kind, wanted in (("auto", "fd"), ("ipc", "ipc")):
        assert run_ranks(check_expandable, 2, kind, limit_s=120) == [wanted] * 2
    print("case 52 passed")


def _shortened(offer: Any) -> None:
    offer.text = offer.text[:20]


def _of_zeros(offer: Any) -> None:
    offer.text = "0" * len(offer.text)


def _of_a_file(offer: Any) -> None:
    os.close(offer._fd)
    offer._fd = os.memfd_create("no memory of a GPU")


CORRUPTIONS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "ipc shortened": (cuda_memory.IpcOffer, _shortened),
    "ipc of zeros": (cuda_memory.IpcOffer, _of_zeros),
    "fd of a file": (cuda_memory.FdOffer, _of_a_file),
}


@contextmanager
def corrupted(names: list[str]) -> Iterator[None]:
    """What this process offers its peers is spoiled."""

    def make(name: str, *args: Any) -> Any:
        offer_type, spoil = CORRUPTIONS[name]
        offer = offer_type(*args)
        spoil(offer)
        return offer

    spoiled = {name.split()[0]: partial(make, name) for name in names}
    with mock.patch.dict(cuda_memory._OFFERS, spoiled):
        yield


def check_corrupted(rank: int, names: list[str], kind: str) -> str:
    """The last rank offers handles that can't be mapped: what all are told, or the kind used."""
    case = Case(tokens=(40, 17))
    last = rank == dist.get_world_size() - 1
    backend = None
    with memory_kind(kind), corrupted(names if last else []):
        try:
            backend = make_backend(case)
            told = str(backend._memory.kind)
        except BackendUnavailableError as error:
            told = str(error)
    if backend is None:  # nothing is broken: another one can be made
        backend = make_backend(case)
    check_case(backend, case)
    backend.destroy()
    return told


def used_bytes() -> int:
    """Of the whole GPU, when no rank is doing anything."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    dist.barrier()
    return total - free


def check_lifecycle(rank: int, kind: str, times: int) -> tuple[int, int]:
    """Bytes of GPU memory and file descriptors that constructions in a row leave behind."""
    case = Case(repeats=1, tokens=(8,))

    def once() -> None:
        backend = make_backend(case)
        exchange(backend, case)
        backend.destroy()

    with memory_kind(kind):
        for _ in range(3):
            once()
        before, fds = used_bytes(), len(os.listdir("/proc/self/fd"))
        for _ in range(times):
            once()
        return used_bytes() - before, len(os.listdir("/proc/self/fd")) - fds


def check_no_destroy(rank: int, kind: str) -> str:
    case = Case(tokens=(40, 17))
    with memory_kind(kind):
        backend = make_backend(case)
    check_case(backend, case)
    globals()["kept until exit"] = backend
    return str(backend._memory.kind)
