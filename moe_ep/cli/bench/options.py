"""The command line of `moe-ep bench`, and the layouts it asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_ep.cli.bench.peers import PEERS
from moe_ep.cli.outputs import check_file, check_plot
from moe_ep.layout import BACKENDS, DTYPE_BYTES, EPLayout

DEFAULT_TOKENS = 4096

_DESCRIPTION = "Times dispatch and combine on every rank at once, beside a floor and peers."

_EPILOG = """examples:
  moe-ep bench --tokens 4096 --hidden 1024                 one rank: a permute and its inverse
  torchrun --nproc-per-node 2 -m moe_ep bench --json r.json  two ranks over gloo
  torchrun --nproc-per-node 8 -m moe_ep bench --layout configs/mixtral_8x7b_ep8.yaml
  moe-ep bench --backend cuda,reference --dtype bf16,fp8_e4m3 --tokens 512,4096 --plot r.png
  scripts/with_mps.sh 8 python3 -m moe_ep bench --backend cuda --num-sms 16    ranks share one GPU

what is timed
  notify              the exchange of row counts alone
  dispatch            x [T, H] to expert-major rows, counts included
  dispatch, cached    the same rows with a routing that is known already
  combine             expert rows back to [T, H]
  whole way           dispatch and combine
  forward + backward  both, and the gradient of x
Every rank sends random tokens with uniform routing. FP8 layouts have "dispatch, cached, fp8 rows"
too: rows left as they travelled. all_to_all is torch's all_to_all_single with the very rows that
dispatch (and back, combine) moves; it does no permute and no sum. It is left out where its
tensors would pass through host memory (GPU tensors over gloo).

how, on a CPU
  Wall time between a barrier and the return of the call, the slowest rank's; the cases take turns,
  so that what else the machine does falls on all of them. Median, least and most of --iterations.

how, on a GPU (two CUDA events around each call)
  median, min, max    calls back to back on the stream, each rank's figure, then the slowest rank.
                      Where the host is slower than the device, its gaps are in it.
  alone               one call at a time on an idle GPU: after a barrier the stream is held for
                      about 2 ms, so that the launches are queued, and (several ranks) a one-token
                      combine lines the ranks up. The slowest rank of each call, median of all.
                      "dispatch" and "whole way" wait for their counts on the host all the same.
  graph               one of several calls captured in a CUDA graph, with a static capacity of the
                      rows that arrive: the host's share and the wait for counts are left out.
  host                time from the call in Python to its return, the median of 20 calls back to
                      back, no barrier between them; "dispatch" has a static capacity there, so
                      that it does not wait for counts.
  floor               the bytes that must cross the memory of one GPU, of all ranks that share it,
                      over the rate of a large device copy in the same run (reads and writes
                      counted). Rows of x, per token: dispatch 2 (staging, if there is more than one
                      rank) + D (1 on one rank) + K, combine K + 1 + 2 D (no D on one rank), where D
                      is the number of distinct ranks a token goes to, measured. exact combine has
                      K in place of D. FP8 rows count as the bytes they have where they are.
  link bytes          that would leave the rank over a link to another GPU, counted likewise.

--mode low_latency: the low-latency verbs of moe_ep.Buffer, at most --tokens a rank
  dispatch, combine   send and receive at once; "zero copy": with the rows in the buffer of
                      get_next_low_latency_combine_buffer, which is asked for in the time
  ..., send / receive the halves, as they run with a hook, one after the other
  dispatch + combine  one after the other, as in a decode step
  ..., one token      the same with a single short row: what launches and signals alone take
  a kernel of torch   the smallest there is, no rank waiting for another: a launch alone
  graph               one of 40 calls in a captured graph, the median of --iterations replays
  floor               x or the expert rows once in, the result once out. HBM counts what passes
                      through other memory on the way, too.

--peer megatron: Megatron-core's unfused permute and unpermute on this rank's own tokens, with the
  multi-hot map they need; all ranks at once, no communication (Megatron's all-to-all comes on top).
--peer deep_ep: an installed DeepEP (V1 interface), within one host; and, if Megatron-core is there,
  its permute and unpermute around it, which together do what dispatch and combine do here.
A case or peer that fails is reported as an error, the rest goes on, and the exit status is 1."""


def add_parser(commands: Any, name: str) -> None:
    parser = commands.add_parser(
        name,
        help="time dispatch and combine beside a floor and peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layout", type=Path, metavar="FILE", help="EP layout; flags below replace its values")
    add("--backend", type=_list_of(BACKENDS), metavar="NAME[,...]", help="(default: auto)")
    add("--tokens", type=_integers, metavar="T[,...]", help="tokens per rank (default: 4096)")
    add("--hidden", type=int, help="columns of a row, H (default: 1024)")
    add("--top-k", type=int, help="experts per token, K (default: 2)")
    add("--experts", type=int, help="experts of all ranks, E (default: 8)")
    dtypes = tuple(DTYPE_BYTES)
    add("--dtype", type=_list_of(dtypes), metavar="NAME[,...]", help="(default: bf16)")
    add("--num-sms", type=_integers, metavar="N[,...]", help="SMs of the kernels (default: 24)")
    add("--exact-combine", action="store_true", default=None, help="sum in slot order, round once")
    modes = ("throughput", "low_latency")
    add("--mode", choices=modes, default=modes[0], help="(default: %(default)s)")
    peers = _list_of(tuple(PEERS))
    add("--peer", type=peers, default=[], metavar="NAME[,...]", help=f"beside: {', '.join(PEERS)}")
    add("--iterations", type=int, default=50, help="timed repetitions (default: %(default)s)")
    add("--warmup", type=int, default=3, help="repetitions before them (default: %(default)s)")
    add("--seed", type=int, default=0, help="of tokens and routing (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="draw time and ratio against tokens")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what can be known to be wrong before any rank is contacted."""
    for name, least in (("iterations", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name}: {getattr(options, name)}; it must be at least {least}")
    check_file("--json", options.json)
    check_plot(options.plot)


def wants_gpu(options: argparse.Namespace) -> bool:
    """The reference backend alone runs on the CPU, also where there is a GPU."""
    backends = options.backend
    if backends is None and options.layout is not None:
        backends = [EPLayout.from_yaml(options.layout).backend]
    return backends != ["reference"]


def layouts(options: argparse.Namespace, num_ranks: int) -> list[EPLayout]:
    """One layout for each of --num-sms, --tokens, --dtype and --backend, in this order of loops."""
    base = EPLayout(
        model={"hidden": 1024, "num_experts": max(8, num_ranks), "top_k": 2},
        parallel={"expert": 1},
        timeouts={"first_s": 60.0, "steady_s": 20.0},  # a fault ends the case, not the benchmark
    )
    shape = {
        "model.hidden": options.hidden,
        "model.num_experts": options.experts,
        "model.top_k": options.top_k,
        "dispatch.exact_combine": options.exact_combine,
    }
    changes = {key: value for key, value in shape.items() if value is not None}
    if options.layout is not None:
        base = EPLayout.from_yaml(options.layout)
    else:
        changes["parallel.expert"] = num_ranks
    tokens = options.tokens or [base.tokens_per_rank or DEFAULT_TOKENS]
    return [
        base.replace(
            **changes,
            **{
                "dispatch.num_sms": num_sms,
                "tokens_per_rank": count,
                "dispatch.dtype": dtype,
                "backend": backend,
            },
        )
        for num_sms in options.num_sms or [base.dispatch.num_sms]
        for count in tokens
        for dtype in options.dtype or [base.dispatch.dtype]
        for backend in options.backend or [base.backend]
    ]


def _list_of(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}; choose from {', '.join(allowed)}")
        return names

    return parse


def _integers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number, or several with commas between them"
        ) from None
