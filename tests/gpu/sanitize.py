"""Small exchanges of one rank, for compute-sanitizer:

compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py --rank 0 --ranks 2 --store FILE
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import scenarios
import torch
import torch.distributed as dist
from scenarios import Case

from moe_ep import Buffer

sys.path.append(str(Path(__file__).resolve().parents[1] / "multiprocess"))

import low_latency_cases
from low_latency_cases import Case as LowLatencyCase

TIMEOUT_S = 200.0  # instrumented kernels are slow, and without MPS ranks take turns
ALONE = [
    Case(tokens=(37,), top_k=3, alignment=8, routing="unused", repeats=1),
    Case(tokens=(33,), hidden=2880, local=16, top_k=12, repeats=1),
    Case(tokens=(20,), fp8_scale="fp32", hidden=384, alignment=4, repeats=1),
    Case(tokens=(9,), dtype="fp32", hidden=4100, repeats=1),
    Case(tokens=(12,), tokens_per_rank=16, capacity=64, repeats=1),
]
TOGETHER = [
    Case(tokens=(9, 5), top_k=3, alignment=8, routing="unused", num_sms=4, repeats=1),
    Case(tokens=(7, 0), exact=True, num_sms=2, repeats=1),
    Case(tokens=(5, 6), fp8_scale="power_of_two", hidden=256, num_sms=2, repeats=1),
    Case(tokens=(6, 4), tokens_per_rank=8, capacity=32, num_sms=2, repeats=1),
]
LOW_LATENCY = [
    LowLatencyCase(tokens=(9, 5)),
    LowLatencyCase(tokens=(7, 0), mode="plain", scales="fp32", hidden=384),
    LowLatencyCase(tokens=(4, 6), mode="plain", scales="packed", hidden=512, routing="unused"),
    LowLatencyCase(tokens=(5, 8), mode="plain", hidden=2880, routing="twice", top_k=4),
]
LOW_LATENCY_ALONE = [
    *LOW_LATENCY,
    LowLatencyCase(local=48, top_k=32, tokens=(40,), max_tokens=70, exact=False),
    LowLatencyCase(tokens=(0,)),
]


def check_low_latency(rank: int, num_ranks: int) -> None:
    """Through moe_ep.Buffer: both halves apart and together, with and without a copy."""
    os.environ["MOE_EP_TIMEOUT_S"] = str(TIMEOUT_S)
    Buffer.set_num_sms(4 if num_ranks == 1 else 2)
    cases = LOW_LATENCY_ALONE if num_ranks == 1 else LOW_LATENCY
    low_latency_cases.check_cases(rank, cases, "cuda")
    case = LOW_LATENCY[0]
    buffer = low_latency_cases.make_buffer([case])
    flight = low_latency_cases.send(buffer, case, 1, "cuda")
    flight.hook()
    rows = flight.recv_x.clone()  # an ordinary tensor: its rows are written to the peers
    signals = torch.ones(case.local, 2, dtype=torch.int32, device="cuda")
    out, _, _ = buffer.low_latency_combine(
        rows, flight.idx, flight.weights, flight.handle, block_signals=signals
    )
    mine = flight.inputs[rank]
    scale = torch.where(mine.idx >= 0, mine.weights, 0.0).sum(1, keepdim=True)
    assert torch.equal(out.cpu(), (mine.x.float() * scale).bfloat16())
    buffer.destroy()


def plant_fault() -> None:
    """A dispatch whose result has room for a row less than it writes."""
    case = replace(ALONE[0], timeout_s=TIMEOUT_S)
    backend = scenarios.make_backend(case)
    x, idx, probs = scenarios.make_inputs(case)
    plan = backend.prepare(idx, case.call())
    plan.rows = plan.num_rows - 1
    backend.dispatch(plan, x, probs, case.call())
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", help="file for the rendezvous, the same for all ranks")
    parser.add_argument(
        "--plant", action="store_true", help="give a dispatch too little room, to be found"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or Path(folder) / "store"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=options.rank,
            world_size=options.ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        if options.plant:
            plant_fault()
        cases = ALONE if options.ranks == 1 else TOGETHER
        patient = [replace(case, timeout_s=TIMEOUT_S) for case in cases]
        scenarios.check_cases(options.rank, patient)
        check_low_latency(options.rank, options.ranks)
        dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
