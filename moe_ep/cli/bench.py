"""moe-ep bench: how long dispatch and combine take here, beside an all-to-all of the same bytes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import trange

from moe_ep import env
from moe_ep.dispatcher import ExpertParallel
from moe_ep.layout import DTYPE_BYTES, EPLayout

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

_EPILOG = """examples:
  moe-ep bench --tokens 4096 --hidden 1024                 one rank: a permute and its inverse
  torchrun --nproc-per-node 2 -m moe_ep bench --json r.json  two ranks over gloo
  torchrun --nproc-per-node 8 -m moe_ep bench --layout configs/mixtral_8x7b_ep8.yaml

Every rank sends random tokens with uniform routing. A time is the slowest rank's; the table gives
the median, least and most of --iterations. all_to_all is torch's all_to_all_single with the very
rows that dispatch (and back, combine) moves; it does no permute and no sum."""


@dataclass
class Timing:
    """One line of the table; microseconds, and bytes that one rank sends (rows to itself too)."""

    name: str
    median_us: float
    min_us: float
    max_us: float
    payload_bytes: int


def add_parser(commands: Any, name: str) -> None:
    parser = commands.add_parser(
        name,
        help="time dispatch and combine beside an all-to-all of the same bytes",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layout", type=Path, metavar="FILE", help="EP layout; flags below replace its values")
    add("--backend", choices=("auto", "reference", "cuda", "nvshmem"), help="(default: auto)")
    add("--tokens", type=int, help="tokens per rank, T (default: 4096)")
    add("--hidden", type=int, help="columns of a row, H (default: 1024)")
    add("--top-k", type=int, help="experts per token, K (default: 2)")
    add("--experts", type=int, help="experts of all ranks, E (default: 8)")
    add("--dtype", choices=(*_DTYPES, "fp8_e4m3"), help="(default: bf16)")
    add("--iterations", type=int, default=50, help="timed repetitions (default: %(default)s)")
    add("--warmup", type=int, default=3, help="repetitions before them (default: %(default)s)")
    add("--seed", type=int, default=0, help="of tokens and routing (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")


def run(options: argparse.Namespace) -> int:
    with _process_group(options.backend) as group:
        layout = _layout(options, dist.get_world_size(group))
        ep = ExpertParallel(layout, group)
        try:
            report = _measure(ep, options)
        finally:
            ep.destroy()
        if dist.get_rank(group) == 0:
            print(_table(report))
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=2) + "\n")
                print(f"written: {options.json}")
    return 0


def _layout(options: argparse.Namespace, num_ranks: int) -> EPLayout:
    flags = {
        "model.hidden": options.hidden,
        "model.num_experts": options.experts,
        "model.top_k": options.top_k,
        "tokens_per_rank": options.tokens,
        "dispatch.dtype": options.dtype,
        "backend": options.backend,
    }
    changes = {key: value for key, value in flags.items() if value is not None}
    if options.layout is not None:
        return EPLayout.from_yaml(options.layout).replace(**changes)
    base = EPLayout(
        model={"hidden": 1024, "num_experts": max(8, num_ranks), "top_k": 2},
        parallel={"expert": 1},
        tokens_per_rank=4096,
    )
    return base.replace(**changes, **{"parallel.expert": num_ranks})


def _measure(ep: ExpertParallel, options: argparse.Namespace) -> dict[str, Any]:
    layout, group = ep.layout, ep.group
    generator = torch.Generator().manual_seed(options.seed * 1000 + ep.rank)
    num_tokens = layout.tokens_per_rank or 4096
    top_k, num_experts = layout.model.top_k, layout.model.num_experts
    dtype = _DTYPES.get(layout.dispatch.dtype, torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() and layout.backend != "reference" else "cpu"
    x = torch.randn(num_tokens, layout.model.hidden, generator=generator).to(device, dtype)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = scores.topk(top_k, dim=1).indices.to(device)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
    first = ep.dispatch(x, topk_idx, weights)
    rows = torch.randn(first.tokens.shape, generator=generator).to(device, dtype)
    there, back = _all_to_all(ep, topk_idx, rows)

    def forward_backward() -> None:
        leaf = x.detach().requires_grad_()
        dispatched = ep.dispatch(leaf, topk_idx, weights)
        ep.combine(dispatched.tokens, dispatched.handle).backward(x)

    cases: dict[str, Callable[[], object]] = {
        "all_to_all there": there,
        "all_to_all back": back,
        "dispatch": lambda: ep.dispatch(x, topk_idx, weights),
        "dispatch, cached": lambda: ep.dispatch(x, handle=first.handle, topk_weights=weights),
        "combine": lambda: ep.combine(rows, first.handle),
        "forward + backward": forward_backward,
    }
    microseconds = _time(cases, group, options, device)
    sent = num_tokens * top_k * layout.model.hidden
    row_bytes = sent * rows.element_size()
    dispatch_bytes = sent * DTYPE_BYTES[layout.dispatch.dtype]
    payload = {
        "dispatch": dispatch_bytes,
        "dispatch, cached": dispatch_bytes,
        "forward + backward": 3 * row_bytes + dispatch_bytes,
    }
    timings = []
    for column, name in enumerate(cases):
        values = microseconds[:, column].tolist()
        timings.append(
            Timing(
                name,
                statistics.median(values),
                min(values),
                max(values),
                payload.get(name, row_bytes),
            )
        )
    median = {timing.name: timing.median_us for timing in timings}
    floor = median["all_to_all there"] + median["all_to_all back"]
    return {
        "layout": layout.model_dump(),
        "backend": ep.backend.name,
        "ranks": dist.get_world_size(group),
        "tokens": num_tokens,
        "device": _device_name(device),
        "all_to_all_backend": dist.get_backend_config(group),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
        "iterations": options.iterations,
        "timings": [asdict(timing) for timing in timings],
        "whole_way_us": median["dispatch"] + median["combine"],
        "ratio_to_all_to_all": (median["dispatch"] + median["combine"]) / floor,
    }


def _all_to_all(
    ep: ExpertParallel, topk_idx: Tensor, rows: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same rows through all_to_all_single: to the experts' ranks, and back."""
    ranks, local = dist.get_world_size(ep.group), ep.layout.num_local_experts
    copies = ep.layout.parallel.expert_tensor
    if copies > 1:
        raise ValueError("bench compares with all_to_all at parallel.expert_tensor=1 only")
    sent = torch.bincount(topk_idx.reshape(-1) // local, minlength=ranks)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=ep.group)
    splits, arriving_splits = sent.tolist(), arriving.tolist()
    outgoing = rows.new_zeros(sum(splits), rows.shape[1])
    incoming = rows.new_zeros(sum(arriving_splits), rows.shape[1])

    def there() -> object:
        return dist.all_to_all_single(incoming, outgoing, arriving_splits, splits, group=ep.group)

    def back() -> object:
        return dist.all_to_all_single(outgoing, incoming, splits, arriving_splits, group=ep.group)

    return there, back


def _time(
    cases: dict[str, Callable[[], object]],
    group: dist.ProcessGroup,
    options: argparse.Namespace,
    device: str,
) -> Tensor:
    """Microseconds of the slowest rank, [iterations, cases]; cases take turns, so that what else
    the machine does falls on all of them."""
    times = torch.zeros(options.iterations, len(cases), dtype=torch.float64)
    quiet = dist.get_rank(group) != 0 or not sys.stderr.isatty()
    for step in trange(-options.warmup, options.iterations, desc="bench", disable=quiet):
        for column, case in enumerate(cases.values()):
            dist.barrier(group)
            started = time.perf_counter()
            case()
            if device == "cuda":
                torch.cuda.synchronize()
            if step >= 0:
                times[step, column] = (time.perf_counter() - started) * 1e6
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times


def _table(report: dict[str, Any]) -> str:
    layout = report["layout"]
    model, dispatch = layout["model"], layout["dispatch"]
    lines = [
        f"# moe-ep bench: backend {report['backend']}, {report['ranks']} ranks, "
        f"{report['tokens']} tokens x {model['hidden']}, top-{model['top_k']} of "
        f"{model['num_experts']} experts, {dispatch['dtype']}",
        f"# {report['device']}, torch {report['torch']}, {report['threads_per_rank']} threads a "
        f"rank, {report['iterations']} iterations, all_to_all over {report['all_to_all_backend']}",
        f"# {'':<20} {'median':>10} {'min':>10} {'max':>10} {'bytes a rank':>14} {'rate':>9}",
        f"# {'':<20} {'(us)':>10} {'(us)':>10} {'(us)':>10} {'(B)':>14} {'(GB/s)':>9}",
    ]
    for t in report["timings"]:
        rate = t["payload_bytes"] / t["median_us"] / 1e3
        lines.append(
            f"  {t['name']:<20} {t['median_us']:>10.0f} {t['min_us']:>10.0f} {t['max_us']:>10.0f} "
            f"{t['payload_bytes']:>14} {rate:>9.2f}"
        )
    lines.append(
        f"# dispatch + combine: {report['whole_way_us']:.0f} us, "
        f"{report['ratio_to_all_to_all']:.2f} x all_to_all there and back"
    )
    return "\n".join(lines)


def _device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"


@contextmanager
def _process_group(backend: str | None) -> Iterator[dist.ProcessGroup]:
    """The group of torchrun's processes, or of this process alone.

    NCCL moves GPU tensors where every rank has a GPU of its own, else gloo.
    """
    gpus = torch.cuda.device_count() if backend != "reference" else 0
    if gpus:
        torch.cuda.set_device(env.local_rank() % gpus)
    if env.under_torchrun():
        own_gpus = gpus and env.local_size() <= gpus
        dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpus else "gloo")
        yield dist.distributed_c10d._get_default_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
            yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()
