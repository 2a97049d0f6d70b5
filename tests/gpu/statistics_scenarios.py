"""Run inside ranks: what a layer on the GPU tells about its rows, times and waits."""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from dense_layer import Target
from reference_model import Problem

from moe_ep import ExpertParallel
from moe_ep.statistics import VERBS

SLEPT_S = 0.5


def rows_from(problem: Problem, rank: int, local: int, once: bool) -> list[int]:
    """[source] rows for the experts of `rank`; `once`: a row for several of them counts once."""
    counts = []
    for idx in problem.idx:
        mine = (idx >= 0) & (idx // local == rank)
        counts.append(int((mine.any(1) if once else mine).sum()))
    return counts


def step(target: Target, ep: ExpertParallel, problem: Problem, layer: str) -> None:
    x = problem.x[ep.rank].to(target.device, torch.float32).requires_grad_()
    weights = problem.weights[ep.rank].to(target.device, torch.float32).requires_grad_()
    d = ep.dispatch(x, problem.idx[ep.rank].to(target.device), weights, layer=layer)
    ep.combine(d.tokens, d.handle, d.probs).sum().backward()


def rows_bytes_and_times(rank: int, target: Target, exact: bool) -> None:
    layout = target.layout(dispatch__exact_combine=exact)
    ep = ExpertParallel(layout)
    ranks = dist.get_world_size()
    problem = Problem(layout, 5, [300 - 90 * r for r in range(ranks)], unused=0.2)
    step(target, ep, problem, "")  # not counted
    ep.collect_stats()
    for _ in range(3):
        step(target, ep, problem, "one")
    mine = ep.stats()
    one = mine.layers["one"]
    experts = torch.cat(problem.idx).flatten()
    wanted = [3 * int((experts == 2 * rank + e).sum()) for e in range(2)]
    assert one.tokens_per_expert == wanted, (one.tokens_per_expert, wanted)
    shares = target.backend == "cuda"  # the reference sends a row for every expert
    for verb in VERBS:
        figures = one.verbs[verb]
        combines = verb in ("combine", "dispatch_backward")
        rows = rows_from(problem, rank, 2, once=shares and not (exact and combines))
        assert figures.calls == figures.timed == 3, (verb, figures)
        assert 0 < figures.us < 60e6 and figures.wait_us <= figures.us, (verb, figures)
        assert figures.links["own_rank"].rows == 3 * rows[rank], (verb, figures, rows)
        others = 3 * (sum(rows) - rows[rank])
        assert figures.links["own_host"].rows == others, (verb, figures, rows)
        assert figures.links["own_host"].bytes == others * 128 * 4
    group = ep.gather_stats(reset=True)
    assert group.by_rank[rank] == mine
    assert sum(group.tokens_per_expert()) == 3 * int((experts >= 0).sum())
    ep.destroy()


def waits(rank: int, target: Target) -> None:
    ep = ExpertParallel(target.layout())
    problem = Problem(ep.layout, 6, [64] * dist.get_world_size())
    step(target, ep, problem, "")
    ep.collect_stats()
    dist.barrier()
    if rank == 1:
        time.sleep(SLEPT_S)
    step(target, ep, problem, "")
    group = ep.gather_stats()
    for other, one in enumerate(group.by_rank):
        dispatch = one.total.verbs["dispatch"]
        if other == 1:
            assert dispatch.wait_us < SLEPT_S / 2 * 1e6, dispatch
        else:
            assert SLEPT_S / 2 * 1e6 < dispatch.wait_us < 2 * SLEPT_S * 1e6, dispatch
            assert max(dispatch.waited_for_us, key=lambda p: dispatch.waited_for_us[p]) == 1
    ep.destroy()


def static_shapes(rank: int, target: Target) -> None:
    """With a capacity the host knows no counts: they are read when they are asked for."""
    layout = target.layout(dispatch__capacity=256, tokens_per_rank=64)
    ep = ExpertParallel(layout)
    ep.collect_stats()
    problem = Problem(layout, 7, [40] * dist.get_world_size())
    step(target, ep, problem, "")
    experts = torch.cat(problem.idx).flatten()
    wanted = [int((experts == 2 * rank + e).sum()) for e in range(2)]
    assert ep.stats().total.tokens_per_expert == wanted
    ep.destroy()


def cost(rank: int, target: Target) -> dict[str, float]:
    """Host microseconds of a dispatch and combine, statistics off and on. Medians; not judged."""
    ep = ExpertParallel(target.layout())
    problem = Problem(ep.layout, 8, [256] * dist.get_world_size())
    x = problem.x[rank].to(target.device, torch.float32)
    idx = problem.idx[rank].to(target.device)
    found: dict[str, float] = {}
    for name, on in (("off", False), ("on", True), ("off again", False)):
        ep.collect_stats(on)
        times = []
        for _ in range(200):
            dist.barrier()
            begin = time.perf_counter()
            d = ep.dispatch(x, idx)
            ep.combine(d.tokens, d.handle)
            times.append(time.perf_counter() - begin)
        found[name] = sorted(times)[100] * 1e6
    ep.destroy()
    return found


def run_all(rank: int, target: Target) -> dict[str, Any]:
    """Of each check None or its traceback; a failure on one rank only would leave peers waiting,
    which is bounded by their time-outs."""
    checks: dict[str, Any] = {
        "rows, bytes and times": lambda: rows_bytes_and_times(rank, target, exact=False),
        "with exact_combine": lambda: rows_bytes_and_times(rank, target, exact=True),
        "waits": lambda: waits(rank, target),
        "static shapes": lambda: static_shapes(rank, target),
    }
    told: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            check()
            told[name] = None
        except Exception:
            told[name] = traceback.format_exc()
    told["cost"] = cost(rank, target)
    return told
