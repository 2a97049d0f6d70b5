"""Decoding with low-latency mode: two micro-batches, one computing while the other travels.

python scripts/decode_demo.py --ranks 4                       # processes of this machine
scripts/with_mps.sh 4 python3 scripts/decode_demo.py          # ranks that share one GPU
torchrun --nproc-per-node 8 scripts/decode_demo.py            # one GPU a rank
... --trace decode.json --plot decode.png                     # what ran when, in the last step

Every rank decodes its own sequences, the experts are divided among the ranks. The hidden states of
the first step are compared with those of the same model without any communication.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from decode_model import Decoder, Shape, dequantized
from decode_timeline import Timeline, draw, write_trace

from moe_ep import Buffer, env
from moe_ep.testing import run_ranks

_ROUNDING = {"bf16": 0.02, "fp8": 0.12}  # of the hidden states, relative


class EpDecoder:
    """Runs a Decoder whose experts are divided among the ranks of the default group."""

    def __init__(self, model: Decoder, max_tokens: int, use_fp8: bool, device: Any) -> None:
        self.model, self.max_tokens, self.use_fp8 = model, max_tokens, use_fp8
        self.timeline = Timeline(device)
        size, shape = dist.get_world_size(), model.shape
        hint = Buffer.get_low_latency_rdma_size_hint(max_tokens, shape.hidden, size, shape.experts)
        self.buffer = Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True)
        self.first_expert = dist.get_rank() * shape.experts // size

    def step(self, tokens: Tensor, hold: bool = False) -> Tensor:
        """tokens [T] -> hidden states [T, H] fp32, in two micro-batches. hold: see Timeline."""
        self.timeline.start(hold)
        halves = [self.model.embedding[part] for part in tokens.tensor_split(2)]
        for layer in range(self.model.shape.layers):
            # Each list has one of both halves; a hook is called as late as its data allow.
            sent = [self._dispatch(half, layer, h) for half, h in enumerate(halves)]
            returned = [self._experts(half, layer, *parts) for half, parts in enumerate(sent)]
            halves = [self._finish(half, *parts) for half, parts in enumerate(returned)]
        return torch.cat(halves)

    def _dispatch(self, half: int, layer: int, h: Tensor) -> tuple[Any, ...]:
        with self.timeline.span("before experts", half):
            h, x, idx, weights = self.model.before_experts(layer, h)
        with self.timeline.span("dispatch: send", half):
            rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
                x,
                idx,
                self.max_tokens,
                self.model.shape.experts,
                use_fp8=self.use_fp8,
                return_recv_hook=True,
            )
        return h, idx, weights, rows, handle, hook

    def _experts(
        self,
        half: int,
        layer: int,
        h: Tensor,
        idx: Tensor,
        weights: Tensor,
        rows: Any,
        handle: Any,
        hook: Any,
    ) -> tuple[Any, ...]:
        with self.timeline.span("dispatch: receive", half):
            hook()
        with self.timeline.span("experts", half):
            y = self.model.experts(layer, dequantized(rows), self.first_expert)
        with self.timeline.span("combine: send", half):
            out, _, hook = self.buffer.low_latency_combine(
                y, idx, weights, handle, return_recv_hook=True
            )
        return h, out, hook

    def _finish(self, half: int, h: Tensor, out: Tensor, hook: Any) -> Tensor:
        with self.timeline.span("combine: receive", half):
            hook()
        return h + out.float()


@torch.no_grad()
def decode(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of the demo: what it saw."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and env.backend() != "reference":
        device = torch.device("cuda", env.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    shape = Shape(options.hidden, options.layers, options.experts, options.top_k)
    model = Decoder(shape, device)
    Buffer.set_num_sms(options.num_sms)
    ep = EpDecoder(model, -(-options.tokens // 2), options.fp8, device)
    generator = torch.Generator().manual_seed(rank + 1)
    tokens = torch.randint(shape.vocabulary, (options.tokens,), generator=generator).to(device)
    alone = model.step_alone(tokens)
    error, seconds, drawn = 0.0, [], bool(options.trace or options.plot)
    for step in range(options.steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        h = ep.step(tokens, hold=drawn and step == options.steps - 1)
        tokens = model.next_tokens(h)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if step == 0:
            error = float((h - alone).norm() / alone.norm())
    spans = ep.timeline.spans()
    ep.buffer.destroy()
    return {
        "spans": spans,
        "rank": rank,
        "device": str(device),
        "step_ms": round(1e3 * statistics.median(seconds[1:] or seconds), 3),
        "relative_error": error,
        "tokens": tokens.tolist()[:8],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding with low-latency expert parallelism.")
    parser.add_argument("--ranks", type=int, default=2, help="where no launcher has set them")
    parser.add_argument("--tokens", type=int, default=32, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--fp8", action="store_true", help="rows travel as FP8 to the experts")
    parser.add_argument("--num-sms", type=int, default=8, help="of a communication kernel")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="for chrome://tracing")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="the same as a picture")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if env.under_torchrun():
        dist.init_process_group("gloo")
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, decode(dist.get_rank(), options))
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        seen, is_first = run_ranks(decode, options.ranks, options, limit_s=600), True
    bound = _ROUNDING["fp8" if options.fp8 else "bf16"]
    if is_first:
        spans = [line.pop("spans") for line in seen]
        for line in seen:
            print(json.dumps(line))
        if options.trace is not None:
            write_trace(options.trace, spans)
        if options.plot is not None:
            draw(options.plot, spans)
    return 0 if all(line["relative_error"] < bound for line in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
