"""What the ranks of a GPU test of low-latency mode do; the cases are those of the CPU tests."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiprocess"))

import low_latency_cases
import low_latency_order
from low_latency_cases import (
    Case,
    check_case,
    make_buffer,
    make_inputs,
    receive,
    send,
    send_back,
)

from moe_ep import BrokenError, Buffer, OrderError, PeerError, PeerTimeoutError
from moe_ep.layout import Timeouts

NUM_SMS = 8
_LARGE = [
    Case(
        tokens=(128, 100), hidden=7168, local=16, top_k=8, max_tokens=128, scales=scales, mode=mode
    )
    for scales, mode in ((None, "hook"), ("fp32", "plain"), ("packed", "async"))
]
_MODES = (("plain", None), ("hook", "fp32"), ("plain", "packed"))


def prepare(timeout_s: float = 20.0) -> None:
    os.environ["MOE_EP_TIMEOUT_S"] = str(timeout_s)
    Buffer.set_num_sms(NUM_SMS)  # waiting blocks of all ranks must fit on one GPU together


def check_rounds(rank: int, rounds: int) -> None:
    prepare()
    low_latency_order.check_rounds(rank, rounds, "cuda", _delay)


def check_all(rank: int, cases: list[Case]) -> list[str]:
    """Everything that ends well, in one set of processes; returns what `check_hooks` does."""
    prepare()
    low_latency_cases.check_cases(rank, cases, "cuda")
    told = low_latency_order.check_hooks(rank, "cuda")
    for case in (Case(exact=False), Case(scales="fp32", exact=False, hidden=1536, mode="plain")):
        check_repeats(case)
    check_idle_between()
    for mode in ("hook", "plain"):
        for scales in (None, "fp32"):
            check_graph(rank, Case((24, 9, 0, 17), 512, max_tokens=24, scales=scales, mode=mode))
    torch.cuda.synchronize()
    return told


def check_large(rank: int) -> None:
    prepare()
    low_latency_cases.check_cases(rank, _LARGE, "cuda")


def check_poisoned(rank: int) -> None:
    prepare()
    low_latency_order.check_poisoned(rank, "cuda")


def check_sizes(rank: int) -> None:
    """Cases 12 and 18: sizes around a warp and a block, several num_sms, both types of index."""
    prepare()
    most = 256
    buffer = make_buffer([Case(max_tokens=most, hidden=512)])
    for num_sms in (2, 16):
        Buffer.set_num_sms(num_sms)
        for tokens in (1, 2, 31, 32, 33, 127, 128, 129, 256):
            for dtype, mode in ((torch.int32, "plain"), (torch.int64, "hook")):
                own = (tokens, most - tokens)
                case = Case(own, 512, max_tokens=most, idx_dtype=dtype, mode=mode)
                check_case(buffer, case, tokens, "cuda")
    Buffer.set_num_sms(NUM_SMS)
    buffer.destroy()


def check_uneven_sms(rank: int) -> None:
    """Every rank launches another number of blocks, and another one each time."""
    prepare()
    cases = [Case(mode=mode, scales=scales, hidden=512) for mode, scales in _MODES]
    buffer = make_buffer(cases)
    for number in range(24):
        Buffer.set_num_sms((2, 6, 16, 4, 10)[(rank + number) % 5])
        check_case(buffer, cases[number // 2 % len(cases)], number, "cuda")
    Buffer.set_num_sms(NUM_SMS)
    buffer.destroy()


def check_other_limit(rank: int) -> str:
    """Case 11: ranks with different num_max_dispatch_tokens_per_rank; what each is told."""
    prepare()
    buffer = make_buffer([Case(max_tokens=128)])
    try:
        send(buffer, Case(tokens=(3,), max_tokens=64 if rank == 0 else 128), 0, "cuda")
    except ValueError as error:
        return str(error)
    finally:
        buffer.destroy()
    return ""


def check_lent_again(rank: int) -> None:
    """A combine buffer whose memory somebody keeps, and not the tensor, is not lent again."""
    prepare()
    case = Case()
    buffer = make_buffer([case])
    flight = send(buffer, case, 1, "cuda")
    receive(flight)
    same = buffer.get_next_low_latency_combine_buffer(flight.handle).data
    flight = send(buffer, case, 2, "cuda")
    receive(flight)
    others = [buffer.get_next_low_latency_combine_buffer(flight.handle) for _ in range(3)]
    assert same.data_ptr() not in [other.data_ptr() for other in others]
    buffer.destroy()


def _delay(generator: random.Random) -> None:
    torch.cuda._sleep(generator.choice([0, 0, 20_000, 400_000]))
    time.sleep(generator.choice([0, 0, 0, 0.002]))


def check_repeats(case: Case) -> None:
    """Case 28."""
    buffer = make_buffer([case])
    first: list[torch.Tensor] = []
    for _ in range(20):
        flight = send(buffer, case, 7, "cuda")
        low_latency_cases.receive(flight)
        out, event, hook = send_back(buffer, flight)
        low_latency_cases.receive(replace(flight, hook=hook, event=event))
        got = [out, *valid_parts(flight.recv_x, flight.count, flight.handle)]
        first = first or got
        for one, other in zip(got, first, strict=True):
            assert torch.equal(one, other)
    buffer.destroy()


def valid_parts(recv_x: Any, count: torch.Tensor, handle: Any) -> list[torch.Tensor]:
    """What a dispatch defines, as new tensors."""
    rows = recv_x if isinstance(recv_x, tuple) else (recv_x,)
    parts = [count.clone(), handle[1].clone()]
    for local, number in enumerate(count.tolist()):
        parts += [tensor[local, :number].float() for tensor in (*rows, handle[0])]
    return parts


def check_idle_between() -> None:
    """Between a send and its hook nothing runs: the GPU is idle although no peer has sent."""
    buffer, case = make_buffer([Case()]), Case()
    check_case(buffer, case, 0, "cuda")
    torch.cuda.synchronize()
    dist.barrier()
    if buffer.rank == 0:
        started = time.monotonic()
        flight = send(buffer, case, 1, "cuda")
        torch.cuda.synchronize()
        assert time.monotonic() - started < 5  # a wait for the peers would end after 20 s
        dist.barrier()
    else:
        dist.barrier()
        flight = send(buffer, case, 1, "cuda")
    flight.hook()
    low_latency_cases.check_received(buffer, flight)
    buffer.destroy()


def check_graph(rank: int, case: Case) -> None:
    """Case 23: captured and replayed ten times with new inputs, with no cleaning in between."""
    buffer = make_buffer([case])
    size = buffer.group_size
    first = make_inputs(case, 0, rank, size)
    static = [t.cuda() for t in (first.x, first.idx, first.weights)]

    def exchange() -> tuple[torch.Tensor, list[Any]]:
        x, idx, weights = static
        recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
            x,
            idx,
            case.max_tokens,
            case.local * size,
            use_fp8=case.scales is not None,
            return_recv_hook=case.mode == "hook",
        )
        if hook is not None:
            hook()
        rows = (recv_x[0] if isinstance(recv_x, tuple) else recv_x).bfloat16()
        out, _, hook = buffer.low_latency_combine(
            rows, idx, weights, handle, return_recv_hook=case.mode == "hook"
        )
        if hook is not None:
            hook()
        return out, [recv_x, count, handle]

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            exchange()
        raise AssertionError("captured a shape that the ranks have not compared")
    except OrderError as error:
        assert "before the capture" in str(error)
    exchange()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, received = exchange()
    for seed in range(1, 11):
        fresh = make_inputs(case, seed, rank, size)
        for place, value in zip(static, (fresh.x, fresh.idx, fresh.weights), strict=True):
            place.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [out.clone(), *valid_parts(*received)]
        if case.scales is None:  # experts that change nothing
            total = (fresh.x.float() * _used_weights(fresh)).bfloat16()
            assert torch.equal(replayed[0].cpu(), total), seed
        if seed % 3 == 0:
            eager, again = exchange()
            for one, other in zip(replayed, [eager, *valid_parts(*again)], strict=True):
                assert torch.equal(one, other), seed
    torch.cuda.synchronize()
    dist.barrier()
    del graph, out, received
    buffer.destroy()


def _used_weights(inputs: low_latency_cases.Inputs) -> torch.Tensor:
    """[T, 1]: sums of a few powers of two, exact in fp32, as is their product with a bf16."""
    return torch.where(inputs.idx >= 0, inputs.weights, 0.0).sum(1, keepdim=True)


def check_bad_input(rank: int, what: str) -> list[str]:
    """The last rank gives bad input to the second use of a shape; what each is told, and later."""
    prepare(5)
    buffer, case = make_buffer([Case()]), Case(tokens=(6,), max_tokens=8)
    check_case(buffer, case, 0, "cuda")
    mine = make_inputs(case, 1, rank, buffer.group_size)
    x, idx = mine.x, mine.idx
    if rank == buffer.group_size - 1:
        if what == "tokens":
            x, idx = torch.zeros(9, case.hidden).bfloat16(), torch.zeros(9, 3, dtype=torch.int64)
        elif what == "id":
            idx[1, 1] = 1 << 32  # its lower half is a good one
        else:
            idx[:] = 0
    told = []
    for _ in range(3):
        try:
            _, _, _, _, hook = buffer.low_latency_dispatch(
                x.cuda(),
                idx.cuda(),
                case.max_tokens,
                case.local * buffer.group_size,
                use_fp8=False,
                return_recv_hook=True,
            )
            assert hook is not None
            hook()
            told.append("")
        except (ValueError, PeerError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        dist.barrier()
    buffer.destroy()
    assert torch.ones(4, device="cuda").sum().item() == 4
    return told


def check_bad_combine(rank: int) -> list[str]:
    """The last rank's weights are of another dtype; what each is told, then and later."""
    prepare(5)
    buffer, case = make_buffer([Case()]), Case(tokens=(6,))
    check_case(buffer, case, 0, "cuda")
    flight = send(buffer, case, 1, "cuda")
    flight.hook()
    if rank == buffer.group_size - 1:
        flight.weights = flight.weights.double()
    told = []
    for step in (send_back, check_case):
        try:
            if step is send_back:
                send_back(buffer, flight)[2]()
            else:
                check_case(buffer, case, 2, "cuda")
            told.append("")
        except (TypeError, PeerError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        dist.barrier()
    buffer.destroy()
    return told


def check_unaligned(rank: int) -> None:
    """x that begins two bytes off, x with strides, out that begins two bytes off."""
    prepare()
    buffer, case = make_buffer([Case()]), Case()
    flat = torch.ones(4 * case.hidden + 1, dtype=torch.bfloat16, device="cuda")
    experts = case.local * buffer.group_size
    idx = torch.zeros(4, 3, dtype=torch.int64, device="cuda") - 1
    idx[:, 1] = rank * case.local
    for x in (flat[1:].view(4, case.hidden), flat[:-1].view(case.hidden, 4).t()):
        rows, count, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, case.max_tokens, experts, use_fp8=False
        )
        assert count.tolist() == [4, 0, 0, 0] and bool((rows[0, :4] == 1).all())
        weights = torch.full((4, 3), 2.0, device="cuda")
        out, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
        assert bool((out == 2).all())
    buffer.destroy()


def check_other_shape(rank: int) -> str:
    """Rank 1 uses another shape that all know; what the ranks are told at their next call."""
    prepare(5)
    cases = [Case(mode="plain"), Case(mode="plain", max_tokens=24)]
    buffer = make_buffer(cases)
    for case in cases:
        check_case(buffer, case, 0, "cuda")
    send(buffer, cases[rank], 1, "cuda")
    torch.cuda.synchronize()
    try:
        send(buffer, cases[0], 2, "cuda")
    except (OrderError, PeerTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_dead_peer(rank: int, verb: str) -> str:
    """Case 9: the last rank is killed before a dispatch, or between one and the combine."""
    prepare()
    buffer, case = make_buffer([Case()]), Case(mode="plain")
    flight = send(buffer, case, 1, "cuda")
    torch.cuda.synchronize()
    dist.barrier()
    assert buffer._low_latency is not None
    buffer._low_latency._timeouts = Timeouts(first_s=2.0, steady_s=2.0)  # not of the set-up
    if rank == buffer.group_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if verb == "dispatch":
        send(buffer, case, 2, "cuda")
    else:
        send_back(buffer, flight)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    assert 1.5 < seconds < 7.0, seconds
    told = []
    for _ in range(2):
        try:
            send(buffer, case, 3, "cuda")
        except (PeerTimeoutError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
    buffer.destroy()
    assert torch.ones(4, device="cuda").sum().item() == 4  # the CUDA context is well
    return " | ".join(told)
