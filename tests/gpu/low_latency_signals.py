"""Combines that send while their rows are still being computed; what the ranks of the tests do.

A fake GEMM on a stream of its own writes the rows of one local expert after the other and raises
their signals. What has arrived is read from the symmetric memory itself.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiprocess"))

import low_latency_cases
from low_latency_cases import Case, Flight, check_case, expert_output, make_buffer, send
from low_latency_scenarios import prepare

from moe_ep import BrokenError, Buffer, PeerTimeoutError
from moe_ep.backends.low_latency_expert_out import _DeviceArray

CASE = Case(tokens=(12, 9, 16, 7), hidden=1024, local=4, top_k=4, exact=True)
STEP_CYCLES, LONG_CYCLES = 2_000_000, 1_000_000_000  # about 1 ms, 600 ms
SENTINEL = -7.0


def prepare_streams(timeout_s: float = 20.0) -> None:
    """As `prepare`; streams that share a hardware queue may wait for each other."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # MPS has a few for all its clients
    prepare(timeout_s)


def expert_rows(flight: Flight, rank: int) -> torch.Tensor:
    """[L, N, H] of what the experts make of the received rows; NaN where there is none."""
    case = flight.case
    rows = torch.full(flight.recv_x.shape, float("nan"), dtype=torch.bfloat16)
    for local in range(case.local):
        expert = rank * case.local + local
        places = low_latency_cases.expected_rows(case, flight.inputs, expert)
        for place, (source, token) in enumerate(places):
            rows[local, place] = expert_output(flight.inputs[source].x[token], expert)
    return rows.cuda()


def slots_of(buffer: Buffer, case: Case) -> list[torch.Tensor]:
    """[Tmax, K, H] bf16 of both buffers: where the peers write this rank's expert rows."""
    backend = buffer._low_latency._backend  # type: ignore[union-attr]
    shape = backend._shape(buffer._low_latency._agreed[0])  # type: ignore[union-attr]
    ends = [backend._comm.expert_out(shape, which) for which in (1, 2)]
    part = ends[1] - ends[0]
    size = (case.max_tokens, case.top_k, case.hidden)
    arrays = [_DeviceArray(ends[0] - (2 - i) * part, size) for i in range(2)]
    return [torch.as_tensor(a, device="cuda").view(torch.bfloat16) for a in arrays]


class FakeGemm:
    """Writes rows block by block on its own stream and raises the signals."""

    def __init__(self, rows: torch.Tensor, blocks: int) -> None:
        self.stream = torch.cuda.Stream()
        self.rows, self.out = rows, torch.empty_like(rows)
        self.signals = torch.zeros(len(rows), blocks, dtype=torch.int32, device="cuda")
        self.ended = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.run(0, raises=0)  # kernels are loaded before any other waits for them
        torch.cuda.synchronize()
        self.out.fill_(float("nan"))
        torch.cuda.synchronize()

    def run(self, expert: int, raises: int = 1, cycles: int = STEP_CYCLES) -> None:
        """One local expert. raises: what its signals become. cycles: that it takes."""
        per_block = self.rows.shape[1] // self.signals.shape[1]
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            for block in range(self.signals.shape[1]):
                part = slice(block * per_block, (block + 1) * per_block)
                self.out[expert, part].copy_(self.rows[expert, part])
                self.signals[expert, block].fill_(raises)
            self.ended.record()


def check_early_sends(rank: int, blocks: int) -> float:
    """All rows but those of the last expert of each rank arrive while its GEMM still runs.

    Returns:
        Milliseconds of the device's clock from their arrival to the end of the GEMM.
    """
    prepare_streams()
    buffer = make_buffer([CASE])
    check_case(buffer, CASE, 0, "cuda")
    torch.cuda.synchronize()
    dist.barrier()
    slots = slots_of(buffer, CASE)
    for slot in slots:
        slot.fill_(SENTINEL)
    torch.cuda.synchronize()
    dist.barrier()
    flight = send(buffer, CASE, 1, "cuda")
    flight.hook()
    gemm = FakeGemm(expert_rows(flight, rank), blocks)
    dist.barrier()
    for expert in range(CASE.local):
        is_last = expert == CASE.local - 1
        gemm.run(expert, raises=3, cycles=LONG_CYCLES if is_last else STEP_CYCLES)
    out, _, hook = combine(buffer, flight, gemm, signal_value=3, return_recv_hook=True)
    mine, arrived = flight.inputs[rank], torch.cuda.Event(enable_timing=True)
    early = (mine.idx >= 0) & (mine.idx % CASE.local != CASE.local - 1)
    late = (mine.idx >= 0) & ~early
    assert bool(early.any()) and bool(late.any())
    wanted = torch.stack(
        [
            torch.stack([expert_output(mine.x[t], int(e)) for e in experts])
            for t, experts in enumerate(mine.idx)
        ]
    )
    watcher, deadline = torch.cuda.Stream(), time.monotonic() + 10
    with torch.cuda.stream(watcher):
        while True:
            seen = slots[0][: len(mine.x)].cpu()  # of operation 4
            arrived.record()
            if torch.equal(seen[early], wanted[early]):
                break
            assert time.monotonic() < deadline, "nothing was sent before the GEMM had ended"
    assert not gemm.ended.query()
    assert bool((seen[late] == SENTINEL).all())  # not raised yet
    hook()
    low_latency_cases.check_sum(buffer, flight, out)
    torch.cuda.synchronize()
    for seed in (2, 3):
        check_case(buffer, CASE, seed, "cuda")
    buffer.destroy()
    return arrived.elapsed_time(gemm.ended)


def combine(
    buffer: Buffer, flight: Flight, gemm: FakeGemm, signal_value: int = 1, **options: Any
) -> tuple[torch.Tensor, Any, Any]:
    return buffer.low_latency_combine(
        gemm.out,
        flight.idx,
        flight.weights,
        flight.handle,
        block_signals=gemm.signals,
        block_signal_value=signal_value,
        **options,
    )


def check_missing_signal(rank: int) -> str:
    """The last rank's GEMM leaves out an expert; what each rank is told at its next call."""
    prepare_streams(3)
    buffer = make_buffer([CASE])
    check_case(buffer, CASE, 0, "cuda")
    flight = send(buffer, CASE, 1, "cuda")
    flight.hook()
    gemm = FakeGemm(expert_rows(flight, rank), 1)
    left_out = 2 if rank == buffer.group_size - 1 else -1
    assert int(flight.count[2]) > 0
    started = time.monotonic()
    for expert in range(CASE.local):
        if expert != left_out:
            gemm.run(expert)
    combine(buffer, flight, gemm)
    torch.cuda.synchronize()
    assert time.monotonic() - started < 10
    told = []
    for _ in range(2):
        try:
            send(buffer, CASE, 2, "cuda")
            told.append("")
        except (PeerTimeoutError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
    buffer.destroy()
    return " | ".join(told)


def check_captured(rank: int) -> None:
    """A decode step with signals in a CUDA graph: the GEMM on a branch of its own."""
    prepare_streams()
    buffer = make_buffer([CASE])
    size = buffer.group_size
    first = low_latency_cases.make_inputs(CASE, 0, rank, size)
    x, idx, weights = (t.cuda() for t in (first.x, first.idx, first.weights))
    experts = CASE.local * size
    signals = torch.zeros(CASE.local, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()

    def step() -> torch.Tensor:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, experts, use_fp8=False
        )
        signals.zero_()
        y = torch.empty_like(rows)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for expert in range(CASE.local):
                torch.cuda._sleep(20_000)
                torch.mul(rows[expert], 2, out=y[expert])
                signals[expert].fill_(1)
        out, _, _ = buffer.low_latency_combine(y, idx, weights, handle, block_signals=signals)
        torch.cuda.current_stream().wait_stream(side)
        return out

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(1, 11):
        fresh = low_latency_cases.make_inputs(CASE, seed, rank, size)
        for place, value in zip(
            (x, idx, weights), (fresh.x, fresh.idx, fresh.weights), strict=True
        ):
            place.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        scale = torch.where(fresh.idx >= 0, fresh.weights, 0.0).sum(1, keepdim=True)
        assert torch.equal(out.cpu(), (2 * fresh.x.float() * scale).bfloat16()), seed
    dist.barrier()
    del graph, out
    buffer.destroy()


def check_free_between(rank: int) -> list[str]:
    """Names of the kernels of a dispatch with a hook and of what runs before the hook, as they
    begin. Nothing runs beside what comes between; the last kernel may be launched while the one
    before it ends, and wait."""
    prepare()
    buffer = make_buffer([CASE])
    check_case(buffer, CASE, 0, "cuda")
    matrix = torch.randn(1024, 1024, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flight = send(buffer, CASE, 1, "cuda")
        for _ in range(4):
            matrix @ matrix
        flight.hook()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
    )
    for (_, end, _), (start, _, _) in itertools.pairwise(kernels[:-1]):
        assert start >= end, kernels
    assert kernels[-1][0] > kernels[-2][0] and kernels[-1][1] > kernels[-2][1], kernels
    low_latency_cases.check_received(buffer, flight)
    buffer.destroy()
    return [name for _, _, name in kernels]
