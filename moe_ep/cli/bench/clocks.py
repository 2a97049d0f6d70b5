"""Ways to time a call that every rank makes. All figures are microseconds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import trange

from moe_ep.cli.bench.ranks import Guard, Ranks

COPY_BYTES = 1 << 30
HOST_WARMUP, HOST_CALLS = 20, 100
GRAPH_CALLS = 10  # a replay itself takes about 50 us more where eight ranks share a GPU
_HOLD_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to launch one case


@dataclass(frozen=True)
class Spread:
    """Of one case, over its calls."""

    median: float
    min: float
    max: float


def slowest_rank(ranks: Ranks, times: list[float]) -> Spread:
    """Median, least and most of each rank's calls, then the slowest rank's of each."""
    mine = (statistics.median(times), min(times), max(times))
    median, least, most = (max(column) for column in zip(*ranks.gather(mine), strict=True))
    return Spread(median, least, most)


def slowest_call(ranks: Ranks, times: list[float]) -> Spread:
    """The slowest rank of each call, then median, least and most over the calls."""
    slowest = [max(call) for call in zip(*ranks.gather(times), strict=True)]
    return Spread(statistics.median(slowest), min(slowest), max(slowest))


def in_turns(
    cases: dict[str, Guard], ranks: Ranks, iterations: int, warmup: int
) -> dict[str, Spread]:
    """Wall time of each call after a barrier; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    quiet = ranks.rank != 0 or not sys.stderr.isatty()
    for step in trange(-warmup, iterations, desc="bench", disable=quiet):
        for name, case in cases.items():
            ranks.barrier()
            started = time.perf_counter()
            case()
            elapsed = (time.perf_counter() - started) * 1e6
            if step >= 0:
                times[name].append(elapsed)
    return {name: slowest_call(ranks, calls) for name, calls in times.items()}


def back_to_back(case: Guard, ranks: Ranks, iterations: int, warmup: int) -> Spread:
    """GPU time of each call, issued one after the other."""
    for _ in range(warmup):
        case()
    case.run(torch.cuda.synchronize)
    ranks.barrier()
    events = [_Events() for _ in range(iterations)]
    for pair in events:
        case.run(pair.begin.record)
        case()
        case.run(pair.end.record)
    case.run(torch.cuda.synchronize)
    return slowest_rank(ranks, [pair.microseconds(case) for pair in events])


def alone(case: Guard, ranks: Ranks, iterations: int, line_up: Callable[[], object]) -> Spread:
    """GPU time of one call at a time. `line_up`: ends on all ranks at once, on the device."""
    events = [_Events() for _ in range(iterations)]
    for pair in events:
        case.run(torch.cuda.synchronize)
        ranks.barrier()
        case.run(lambda: torch.cuda._sleep(_HOLD_CYCLES))
        case.run(line_up)
        case.run(pair.begin.record)
        case()
        case.run(pair.end.record)
    case.run(torch.cuda.synchronize)
    return slowest_call(ranks, [pair.microseconds(case) for pair in events])


def in_graph(
    case: Guard,
    ranks: Ranks,
    iterations: int,
    stream: torch.cuda.Stream,
    calls: int = GRAPH_CALLS,
) -> Spread:
    """GPU time of one of several calls that were captured together on `stream`."""
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                case()

    case()
    case.run(torch.cuda.synchronize)
    ranks.barrier()
    case.run(capture)
    if ranks.first_error(case.error) is not None:  # nobody replays what a peer could not capture
        return Spread(0.0, 0.0, 0.0)
    replay = Guard(graph.replay)
    spread = back_to_back(replay, ranks, iterations, 1)
    case.error = replay.error
    return Spread(spread.median / calls, spread.min / calls, spread.max / calls)


def on_host(case: Guard, ranks: Ranks) -> float:
    """Median time from the call in Python to its return, of calls back to back.

    One barrier before them all, and some calls that don't count: the first ones after a barrier are
    those of a process that has just slept, with cold caches.
    """
    case.run(torch.cuda.synchronize)
    ranks.barrier()
    for _ in range(HOST_WARMUP):
        case()
    times = []
    for _ in range(HOST_CALLS):
        begin = time.perf_counter()
        case()
        times.append((time.perf_counter() - begin) * 1e6)
    case.run(torch.cuda.synchronize)
    return slowest_rank(ranks, times).median


def copy_rate(ranks: Ranks) -> float:
    """Bytes per second of a large device copy, reads and writes counted; rank 0 measures alone."""
    rate = 0.0
    ranks.barrier()
    if ranks.rank == 0:
        source = torch.ones(COPY_BYTES // 4, device=ranks.device)
        target = torch.empty_like(source)
        copy = Guard(lambda: target.copy_(source))
        events = [_Events() for _ in range(8)]
        for pair in events:
            pair.begin.record()
            copy()
            pair.end.record()
        torch.cuda.synchronize()
        middle = statistics.median(pair.microseconds(copy) for pair in events)
        rate = 2 * COPY_BYTES / (middle * 1e-6)
        del source, target, copy
        torch.cuda.empty_cache()
    return float(ranks.gather(rate)[0])


class _Events:
    """One pair around one call."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def microseconds(self, case: Guard) -> float:
        return 0.0 if case.error is not None else self.begin.elapsed_time(self.end) * 1e3
