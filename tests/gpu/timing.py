"""Times of the CUDA backend, beside a device copy measured in the same run. One rank's program:

scripts/with_mps.sh 8 python3 tests/gpu/timing.py --num-sms 16 --hidden 7168 --top-k 8 --experts 256

Prints one JSON line from rank 0. Times are microseconds: the median over the calls on each rank,
then the slowest rank. Bytes are those a rank must move through its memory (HBM) and those that
would cross a link to another GPU, counted from the routing that was timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import EPLayout
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda import CudaBackend

COPY_BYTES = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--num-sms", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="time FP8 dispatch too")
    parser.add_argument("--exact", action="store_true", help="exact combine")
    parser.add_argument("--calls", type=int, default=15)
    return parser.parse_args()


def event_times(action: Callable[[], Any], calls: int, warm_up: int = 3) -> list[float]:
    """GPU time of each call, back to back on the stream, in microseconds."""
    for _ in range(warm_up):
        action()
    torch.cuda.synchronize()
    dist.barrier()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for begin, end in events:
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def graph_times(action: Callable[[], Any], calls: int, repeats: int = 8) -> list[float]:
    """GPU time of one of `calls` calls captured together: the host's share is left out."""
    action()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            action()
    return [time / calls for time in event_times(graph.replay, repeats)]


def slowest_median(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    mine = (ordered[len(ordered) // 2], ordered[0], ordered[-1])
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    median, low, high = (round(max(rank[i] for rank in ranks), 1) for i in range(3))
    return {"median": median, "min": low, "max": high}


def copy_rate() -> float:
    """Bytes per second of a large device copy, reads and writes counted; rank 0 measures alone."""
    rate = [0.0]
    dist.barrier()
    if dist.get_rank() == 0:
        source = torch.randn(COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        best = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            best.append(begin.elapsed_time(end))
        rate = [2 * COPY_BYTES / (sorted(best)[len(best) // 2] * 1e-3)]
        del source, target
        torch.cuda.empty_cache()
    dist.broadcast_object_list(rate, 0)
    return rate[0]


def host_time(action: Callable[[], Any], calls: int = 20) -> float:
    """Median time from the call in Python to its return, the GPU not being waited for."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return round(sorted(times)[calls // 2], 1)


def destinations_per_token(idx: Tensor, local: int, size: int) -> float:
    ranks = torch.zeros(len(idx), size, device=idx.device)
    ranks.scatter_(1, idx // local, 1.0)
    return ranks.sum().item() / len(idx)


def main() -> None:
    args = arguments()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.cuda.set_device(0)
    layout = EPLayout(
        model={"hidden": args.hidden, "num_experts": args.experts, "top_k": args.top_k},
        parallel={"expert": size},
        tokens_per_rank=args.tokens,
        dispatch={
            "dtype": "fp8_e4m3" if args.fp8 else "bf16",
            "num_sms": args.num_sms,
            "exact_combine": args.exact,
        },
    )
    group = dist.group.WORLD
    backend = CudaBackend(layout, group, Channel(group, 1))
    torch.manual_seed(rank)
    x = torch.randn(args.tokens, args.hidden, device="cuda").bfloat16()
    idx = torch.rand(args.tokens, args.experts, device="cuda").argsort(1)[:, : args.top_k]
    idx = idx.contiguous()
    probs = torch.rand(args.tokens, args.top_k, device="cuda")

    def call() -> Call:
        return Call(1, "timing", 20.0)

    plan = backend.prepare(idx, call())
    rows = backend.dispatch(plan, x, probs, call()).rows
    rows = torch.randn_like(rows)

    def whole_way() -> None:
        fresh = backend.prepare(idx, call())
        arrived = backend.dispatch(fresh, x, probs, call())
        backend.combine(fresh, arrived.rows, call())

    def full_dispatch() -> None:
        backend.dispatch(backend.prepare(idx, call()), x, probs, call())

    def notify() -> None:  # what `prepare` launches, the host not waiting for its counts
        launch = backend._launch(call())
        backend._comm.notify(plan.view, idx.data_ptr(), True, False, launch)
        backend._comm.fetch_lists(plan.view, launch)

    actions: dict[str, Callable[[], Any]] = {
        "prepare": lambda: backend.prepare(idx, call()).resolve(),
        "dispatch": full_dispatch,
        "dispatch_cached": lambda: backend.dispatch(plan, x, probs, call()),
        "combine": lambda: backend.combine(plan, rows, call()),
        "whole_way": whole_way,
    }
    if args.fp8:
        actions["dispatch_fp8"] = lambda: backend.dispatch(plan, x, probs, call(), "fp32")
        actions["dispatch_fp8_to_bf16"] = lambda: backend.dispatch(
            plan, x, probs, call(), "fp32", dequantize=True
        )
    times = {name: slowest_median(event_times(f, args.calls)) for name, f in actions.items()}
    times["notify"] = slowest_median(graph_times(notify, args.calls))
    host = {name: host_time(actions[name]) for name in ("dispatch_cached", "combine")}
    rate = copy_rate()
    d = destinations_per_token(idx, args.experts // size, size)
    unit = args.tokens * args.hidden * 2 * size  # bytes that all ranks together move per row
    remote = d * (size - 1) / size
    staged = 2 if size > 1 else 0
    dispatch_bytes = (staged + (d if size > 1 else 1) + args.top_k) * unit
    combine_bytes = (args.top_k + 1 + (2 * d if size > 1 else 0)) * unit
    result = {
        "gpu": torch.cuda.get_device_name(),
        "ranks": size,
        "num_sms": args.num_sms,
        "tokens": args.tokens,
        "hidden": args.hidden,
        "top_k": args.top_k,
        "experts": args.experts,
        "copy_GBps": round(rate / 1e9),
        "us": times,
        "host_us": host,
        "floor_us": {
            "dispatch": round(dispatch_bytes / rate * 1e6, 1),
            "combine": round(combine_bytes / rate * 1e6, 1),
        },
        "ratio_to_floor": {
            "dispatch": round(times["dispatch"]["median"] * 1e-6 * rate / dispatch_bytes, 3),
            "dispatch_cached": round(
                times["dispatch_cached"]["median"] * 1e-6 * rate / dispatch_bytes, 3
            ),
            "combine": round(times["combine"]["median"] * 1e-6 * rate / combine_bytes, 3),
        },
        "link_bytes_per_rank": round(remote * unit / size),
    }
    torch.cuda.synchronize()
    backend.check(call())
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    backend.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
