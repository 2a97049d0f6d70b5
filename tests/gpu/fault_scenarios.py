"""Run inside ranks: what happens when a rank is wrong, late or dead."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from unittest import mock

import torch
import torch.distributed as dist
from dense_layer import Target, check_layer
from reference_model import Problem
from scenarios import Case, call, check_case, make_backend, make_inputs
from torch import Tensor

from moe_ep import ExpertParallel
from moe_ep.backends import cuda
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


def check_left_halfway(rank: int) -> str:
    """Rank 1 runs out of memory once its rows are on their way. What each rank is told then."""
    case = Case(tokens=(64,))
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)
    check_case(backend, case)
    told = ""
    plan = backend.prepare(idx, call(1), x=x, probs=probs)
    try:
        if rank == 1:
            full = torch.OutOfMemoryError("no room for rows")
            with mock.patch.object(cuda, "new_rows", side_effect=full), suppress(type(full)):
                backend.dispatch(plan, x, probs, call(1))
            backend.prepare(idx, call(2), x=x, probs=probs)
        else:
            rows = backend.dispatch(plan, x, probs, call(1)).rows
            backend.combine(plan, rows, call(2, "combine.rows", timeout_s=2.0))
            torch.cuda.synchronize()
            backend.check(call(3))
    except (BrokenError, PeerTimeoutError) as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
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


def check_slow_peer(
    rank: int, timeout_s: float, sleep_s: float
) -> tuple[str, float, tuple[int, int] | None]:
    """Case 8: rank 1 comes late to an exchange. Also returns whom the device has waited for."""
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
    waited = backend.last_wait()
    dist.barrier()
    backend.destroy()
    return told, seconds, waited


def check_lifecycle(rank: int, times: int) -> int:
    """Constructions and destructions in a row; returns the bytes of GPU memory they left."""
    case = Case(repeats=1, tokens=(8,))

    def live(number: int) -> None:
        backend = make_backend(case)
        x, idx, probs = make_inputs(case, number)
        plan = backend.prepare(idx, call())
        backend.combine(plan, backend.dispatch(plan, x, probs, call()).rows, call())
        backend.destroy()
        backend.destroy()

    for number in range(2):  # what is loaded and cached once, on all ranks
        live(number)
    dist.barrier()
    before = Target().used_bytes()
    for number in range(times):
        live(number)
    dist.barrier()
    return Target().used_bytes() - before


def check_bad_combine(rank: int, what: str, target: Target) -> tuple[str, str, str]:
    """The last rank combines something impossible: what each rank is told, then and later."""
    ep = ExpertParallel(target.layout())
    ep.set_timeouts(first_s=10, steady_s=10)
    problem = Problem(ep.layout, 3, [9] * dist.get_world_size())
    check_layer(target, ep, problem)
    x = problem.x[rank].float().to(target.device)
    idx = problem.idx[rank].to(target.device)
    d = ep.dispatch(x, idx)
    rows: Tensor = d.tokens
    if rank == dist.get_world_size() - 1:
        wrong = {"shape": rows[:-1], "hidden": rows[:, :64], "dtype": rows.bfloat16()}
        rows = wrong[what]
    told = []
    for attempt in range(3):
        try:
            if attempt == 0:
                ep.combine(rows, d.handle)
            else:
                ep.dispatch(x, idx)
            told.append("")
        except (TypeError, ValueError, PeerError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        dist.barrier()
    ep.destroy()
    assert torch.ones(4, device=target.device).sum().item() == 4  # the context is well
    return told[0], told[1], told[2]


def check_skipped_dispatch(rank: int, target: Target) -> tuple[str, float, str]:
    """Case 6: rank 1 leaves out one dispatch. What rank 0 is told, when, and what comes next."""
    ep = ExpertParallel(target.layout())
    problem = Problem(ep.layout, 6, [9, 4])
    for _ in range(2):
        check_layer(target, ep, problem)
    before = ep.operations
    x = problem.x[rank].float().to(target.device)
    idx = problem.idx[rank].to(target.device)
    ep.set_timeouts(steady_s=2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done"])  # alive, and not dispatching
        ep.destroy()
        return "", 0.0, ""
    told = again = ""
    started = time.monotonic()
    try:
        ep.dispatch(x, idx)
    except PeerTimeoutError as error:
        told = str(error)
    seconds = time.monotonic() - started
    assert ep.operations == before + 1
    told = told.replace(f"operation {before + 1} ", "the operation left out ")
    try:
        ep.dispatch(x, idx)
    except BrokenError as error:
        again = str(error)
    store.set("done", "1")
    ep.destroy()
    return told, seconds, again


ENDINGS = ("no destroy", "destroy twice", "destroy after the group", "group only", "time-out")


def end(rank: int, target: Target) -> float:
    """Case 46: ranks 2n and 2n + 1 end as ENDINGS[n] says. Returns when, in monotonic seconds."""
    groups = [dist.new_group([2 * n, 2 * n + 1]) for n in range(len(ENDINGS))]
    how, group = ENDINGS[rank // 2], groups[rank // 2]
    layout = target.layout(model__num_experts=4, parallel__expert=2)
    ep = ExpertParallel(layout, group)
    problem = Problem(layout, 46, [3, 2])
    check_layer(target, ep, problem)
    x = problem.x[ep.rank].float().to(target.device)
    d = ep.dispatch(x, problem.idx[ep.rank].to(target.device))  # in flight at the end
    dist.barrier()
    if how == "destroy twice":
        ep.destroy()
        ep.destroy()
    elif how == "destroy after the group":
        ep.combine(d.tokens, d.handle)
        dist.destroy_process_group()
        ep.destroy()
    elif how == "group only":
        dist.destroy_process_group()
    elif how == "time-out":
        _time_out(ep, d.tokens, d.handle)
    globals()["kept until exit"] = (ep, d)
    return time.monotonic()


def _time_out(ep: ExpertParallel, rows: Tensor, handle: object) -> None:
    """Rank 1 stays, but does not combine."""
    store = dist.distributed_c10d._get_default_store()
    if ep.rank == 1:
        store.wait(["timed out"])
        return
    ep.set_timeouts(steady_s=0.5)
    try:
        ep.combine(rows, handle)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        ep.combine(rows, handle)  # type: ignore[arg-type]
    except PeerTimeoutError:
        store.set("timed out", "1")
