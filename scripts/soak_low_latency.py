"""Many rounds of low-latency dispatch and combine, with checked results and flat memory.

python scripts/soak_low_latency.py --ranks 2 --rounds 200                   # processes on a CPU
scripts/with_mps.sh 2 python3 scripts/soak_low_latency.py --rounds 50000 --minutes 5
torchrun --nproc-per-node 8 scripts/soak_low_latency.py --rounds 50000      # one GPU a rank

Rounds come in batches with new tokens and routing. On a GPU most are replays of two captured decode
steps, with and without zero copy; the others use hooks, two exchanges at a time in random order.
Ends after --rounds or --minutes, whichever comes first. Prints one line of JSON; the exit status is
0 if every result was right, no call failed and no memory was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flag_types import positive, positive_number
from moe_ep import Buffer, env
from moe_ep.low_latency_checks import dispatch_shape
from moe_ep.testing import run_ranks

_EAGER = 20  # rounds of a batch that are not replays


class Soak:
    """One rank's part. Experts return their rows as they are, so a token comes back times the sum
    of its weights, which is exact: weights are powers of two."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.size, self.options = rank, dist.get_world_size(), options
        self.device = torch.device("cpu")
        if torch.cuda.is_available() and env.backend() != "reference":
            self.device = torch.device("cuda", env.local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.experts = options.local * self.size
        Buffer.set_num_sms(options.num_sms)
        hint = Buffer.get_low_latency_rdma_size_hint(
            options.tokens, options.hidden, self.size, self.experts
        )
        self.buffer = Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True)
        self.x = torch.zeros(
            options.tokens, options.hidden, dtype=torch.bfloat16, device=self.device
        )
        slots = (options.tokens, options.top_k)
        self.idx = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.weights = torch.zeros(slots, device=self.device)
        self.order = random.Random(1000 + rank)
        self.renew(0)
        self.outputs: list[Tensor] = []
        self.replays: list[Callable[[], object]] = []

    def renew(self, batch: int) -> None:
        """New tokens and routing, of this batch and rank; some slots are unused."""
        generator = torch.Generator().manual_seed(1000 * batch + self.rank)
        slots = self.idx.shape
        scores = torch.rand(slots[0], self.experts, generator=generator)
        idx = scores.topk(slots[1], dim=1).indices
        idx[torch.rand(slots, generator=generator) < 0.1] = -1
        weights = torch.exp2(torch.randint(-3, 2, slots, generator=generator).float())
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.idx.copy_(idx)
        self.weights.copy_(weights)

    def expected(self) -> Tensor:
        used = torch.where(self.idx >= 0, self.weights, 0.0).sum(1, keepdim=True)
        return (self.x.float() * used).bfloat16()

    def step(self, zero_copy: bool) -> Tensor:
        rows, handle, _ = self.dispatch(hook=False)
        return self.combine(rows, handle, zero_copy, hook=False)[0]

    def dispatch(self, hook: bool) -> tuple[Tensor, Any, Any]:
        rows, _, handle, _, receive = self.buffer.low_latency_dispatch(
            self.x,
            self.idx,
            self.options.tokens,
            self.experts,
            use_fp8=False,
            return_recv_hook=hook,
        )
        assert isinstance(rows, Tensor)
        return rows, handle, receive

    def combine(self, rows: Tensor, handle: Any, zero_copy: bool, hook: bool) -> tuple[Tensor, Any]:
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
        out, _, receive = self.buffer.low_latency_combine(
            rows, self.idx, self.weights, handle, zero_copy=zero_copy, return_recv_hook=hook
        )
        return out, receive

    def capture(self) -> None:
        """Two decode steps; on a CPU there are none to replay."""
        self.step(False)
        self.step(True)
        if self.device.type == "cpu":
            return
        torch.cuda.synchronize()
        dist.barrier()
        for zero_copy in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs.append(self.step(zero_copy))
            self.replays.append(graph.replay)

    def pair(self) -> None:
        """Two exchanges at a time, received in an order of this rank's own."""
        flights = [self.dispatch(hook=True) for _ in range(2)]
        for _, _, receive in self.shuffled(flights):
            receive()
        returned = [
            self.combine(rows, handle, i == 1, True) for i, (rows, handle, _) in enumerate(flights)
        ]
        for _, receive in self.shuffled(returned):
            receive()
        for out, _ in returned:
            self.check(out)

    def shuffled(self, pair: list[Any]) -> list[Any]:
        return pair if self.order.random() < 0.5 else pair[::-1]

    def check(self, out: Tensor) -> None:
        if not torch.equal(out, self.expected()):
            raise AssertionError(f"rank {self.rank}: a round gave a wrong result")

    def batch(self, number: int, rounds: int) -> None:
        self.renew(number)
        eager = rounds if not self.replays else min(_EAGER, rounds)
        for _ in range(-(-eager // 2)):
            self.pair()
        for out in self.outputs:
            out.fill_(float("nan"))
        for i in range(rounds - eager):
            self.replays[i % len(self.replays)]()
        if rounds - eager >= len(self.outputs):
            for out in self.outputs:
                self.check(out)

    def goes_on(self, done: int, deadline: float) -> bool:
        """Rank 0 decides for all."""
        more = torch.tensor([done < self.options.rounds and time.monotonic() < deadline])
        dist.broadcast(more, 0)
        return bool(more)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def soak(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Raises what a call raised, or AssertionError for a wrong result or lost memory."""
    run = Soak(rank, options)
    run.capture()
    started = time.monotonic()
    done, batches, held = 0, 0, 0
    while run.goes_on(done, started + 60 * options.minutes):
        rounds = min(options.batch, options.rounds - done)
        batches += 1
        run.batch(batches, rounds)
        done += rounds
        if batches == 1:
            held = run.allocated()
    lost = run.allocated() - held
    if lost > 0:
        raise AssertionError(f"rank {rank}: {lost} bytes more are allocated than after a batch")
    seconds = time.monotonic() - started
    run.replays.clear()
    run.outputs.clear()
    dist.barrier()
    run.buffer.destroy()
    return {
        "ranks": run.size,
        "device": str(run.device),
        "rounds": done,
        "batches": batches,
        "seconds": round(seconds, 2),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Soak test of low-latency mode.")
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="where no launcher has set them")
    add("--rounds", type=positive, default=50_000)
    add("--minutes", type=positive_number, default=10.0)
    add("--batch", type=positive, default=500, help="rounds with the same inputs")
    add("--tokens", type=positive, default=32)
    add("--hidden", type=positive, default=1024)
    add("--top-k", type=positive, default=4)
    add("--local", type=positive, default=8, help="experts of a rank")
    add("--num-sms", type=positive, default=8)
    options = parser.parse_args(arguments)
    if env.under_torchrun():
        options.ranks = int(os.environ["WORLD_SIZE"])
    try:
        dispatch_shape(
            options.ranks,
            sys.maxsize,
            x=torch.empty(options.tokens, options.hidden, dtype=torch.bfloat16, device="meta"),
            topk_idx=torch.empty(options.tokens, options.top_k, dtype=torch.int64, device="meta"),
            max_tokens=options.tokens,
            num_experts=options.local * options.ranks,
            use_fp8=False,
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = parse()
    limit_s = 60 * options.minutes + 120
    if env.under_torchrun():
        dist.init_process_group("gloo")
        seen, is_first = [soak(dist.get_rank(), options)], dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
    else:
        seen, is_first = run_ranks(soak, options.ranks, options, limit_s=limit_s), True
    if is_first:
        print(json.dumps(seen[0]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
