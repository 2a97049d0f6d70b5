"""Run inside ranks: what happens when a rank is wrong, late or dead."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from scenarios import Case, call, check_case, make_backend, make_inputs

from moe_ep.errors import BrokenError, PeerError, PeerTimeoutError


def check_bad_input(rank: int) -> str:
    """A bad index on the last rank raises on all ranks, and the backend goes on."""
    case = Case()
    backend = make_backend(case)
    _x, idx, _probs = make_inputs(case)
    bad = idx.clone()
    if rank == dist.get_world_size() - 1:
        bad[3, 1] = 10_000
    told = ""
    try:
        backend.prepare(bad, call()).resolve()
    except (ValueError, PeerError) as error:
        told = type(error).__name__
    check_case(backend, case)
    backend.destroy()
    return told


def check_dead_peer(rank: int) -> str:
    """Cases 9 and 6: the last rank dies between dispatch and combine."""
    case = Case(tokens=(64,))
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)
    plan = backend.prepare(idx, call(1))
    rows = backend.dispatch(plan, x, probs, call(1)).rows
    torch.cuda.synchronize()
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        os._exit(3)
    start = time.monotonic()
    backend.combine(plan, rows, call(2, "combine.rows", timeout_s=2.0))
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    told = ""
    try:
        backend.check(call(3))
    except PeerTimeoutError as error:
        told = str(error)
    assert 1.5 < seconds < 7.0, seconds
    try:
        backend.prepare(idx, call(4))
    except BrokenError:
        told += " | broken"
    backend.destroy()
    assert torch.ones(4, device="cuda").sum().item() == 4  # the CUDA context is well
    return told


def check_slow_peer(rank: int, timeout_s: float, sleep_s: float) -> tuple[str, float]:
    """Case 8: rank 1 comes late to an exchange."""
    case = Case(tokens=(16,))
    backend = make_backend(case)
    _x, idx, _probs = make_inputs(case)
    backend.prepare(idx, call(1)).resolve()
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(sleep_s)
    told = ""
    try:
        backend.prepare(idx, call(2, "dispatch.metadata", timeout_s)).resolve()
    except PeerTimeoutError as error:
        told = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    backend.destroy()
    return told, seconds


def check_lifecycle(rank: int, times: int) -> int:
    """Constructions and destructions in a row; returns the bytes of GPU memory they left."""
    case = Case(repeats=1, tokens=(8,))
    for _ in range(2):
        make_backend(case).destroy()
    torch.cuda.synchronize()
    dist.barrier()
    free = torch.cuda.mem_get_info()[0]
    dist.barrier()
    for number in range(times):
        backend = make_backend(case)
        x, idx, probs = make_inputs(case, number)
        plan = backend.prepare(idx, call())
        backend.combine(plan, backend.dispatch(plan, x, probs, call()).rows, call())
        backend.destroy()
        backend.destroy()
    torch.cuda.synchronize()
    dist.barrier()
    return free - torch.cuda.mem_get_info()[0]
