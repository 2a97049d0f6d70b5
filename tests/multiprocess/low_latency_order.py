"""Low-latency operations two at a time, and when their hooks do something. On any device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from low_latency_cases import (
    Case,
    check_case,
    check_received,
    check_sum,
    expected_rows,
    make_buffer,
    make_inputs,
    receive,
    send,
    send_back,
)

SENTINEL = -7


def check_rounds(rank: int, rounds: int, device: str, delay: Any) -> None:
    """Case 21: two exchanges at a time, their hooks in either order, late on some ranks.

    delay: called with a random generator of this rank between the steps.
    """
    shapes = [Case(hidden=256), Case(hidden=128, top_k=2, tokens=(3, 16), max_tokens=24)]
    buffer = make_buffer(shapes)
    same, own = random.Random(5), random.Random(100 + rank)
    for number in range(rounds):
        pair = []
        for side in range(2):
            base = shapes[same.randrange(2)]
            scales = same.choice([None, None, "fp32", "power_of_two"])
            most = base.max_tokens
            tokens = tuple(same.randint(0, most) for _ in range(buffer.group_size))
            routing = same.choice(["random", "unused", "one_expert", "first_rank"])
            case = replace(base, tokens=tokens, routing=routing, scales=scales)
            pair.append(send(buffer, case, 2 * number + side, device))
            delay(own)
        order = pair if own.random() < 0.5 else pair[::-1]  # no other rank need do the same
        for flight in order:
            receive(flight)
            delay(own)
        for flight in order:
            check_received(buffer, flight)
        backs = []
        for flight in pair:
            out, _, hook = send_back(buffer, flight)
            backs.append((flight, out, hook))
            delay(own)
        for flight, out, hook in backs if own.random() < 0.5 else backs[::-1]:
            hook()
            delay(own)
            check_sum(buffer, flight, out)
    buffer.destroy()


def check_hooks(rank: int, device: str) -> list[str]:
    """Nothing is received before the hook; a third send without one raises. What was raised."""
    case, told = Case(), []
    buffer = make_buffer([case])
    check_case(buffer, case, 0, device)

    def expect(function: Any, *args: Any) -> None:
        try:
            function(*args)
            told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    first = send(buffer, case, 1, device)
    for tensor in (first.count, first.recv_x, *first.handle[:2]):
        tensor.fill_(SENTINEL)
    settle(device)
    dist.barrier()  # everybody has sent
    settle(device)
    for tensor in (first.count, first.recv_x, *first.handle[:2]):
        assert bool((tensor == SENTINEL).all())
    expect(send_back, buffer, first)
    second = send(buffer, case, 2, device)
    expect(send, buffer, case, 3, device)
    for flight in (second, first):
        flight.hook()
        check_received(buffer, flight)
        flight.count.fill_(SENTINEL)
        flight.hook()  # again: nothing
        assert bool((flight.count == SENTINEL).all())
    out, _, hook = send_back(buffer, first)
    kept = out.fill_(SENTINEL).clone()
    settle(device)
    dist.barrier()
    settle(device)
    assert torch.equal(out, kept)
    hook()
    check_sum(buffer, first, out)
    check_case(buffer, case, 4, device)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.local * buffer.group_size)
    check_case(buffer, case, 5, device)
    buffer.destroy()
    return told


def check_poisoned(rank: int, device: str) -> None:
    """Case 22: all memory that is handed out is NaN, as are rows that earlier operations left."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN from here on
    assert bool(torch.empty(4, device=device).isnan().all())
    cases = [
        Case(mode="plain"),
        Case(),
        Case(scales="fp32"),
        Case(routing="unused", scales="packed"),
    ]
    cases = [replace(case, hidden=512) for case in cases]
    buffer = make_buffer(cases)
    for seed, case in enumerate(cases):
        _leave_nan(buffer, case, device)
        check_case(buffer, case, seed, device)
        if case.scales is None:
            _leave_nan(buffer, case, device)
            _check_gradients(buffer, case, seed, device)
    buffer.destroy()


def _leave_nan(buffer: Any, case: Case, device: str) -> None:
    """In both buffers, staged rows and returned ones, and in both places for expert rows."""
    most, size = case.max_tokens, buffer.group_size
    x = torch.full((most, case.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    slots = torch.arange(most * case.top_k, device=device).view(most, case.top_k)
    idx, weights = slots % (case.local * size), torch.ones(slots.shape, device=device)
    sent = [
        buffer.low_latency_dispatch(
            x, idx, most, case.local * size, use_fp8=case.scales is not None
        )
        for _ in range(2)
    ]
    for zero_copy in (False, True):
        for _, _, handle, _, _ in sent:
            rows = buffer.get_next_low_latency_combine_buffer(handle).fill_(torch.nan)
            rows = rows if zero_copy else rows.clone()
            out, _, _ = buffer.low_latency_combine(rows, idx, weights, handle, zero_copy=zero_copy)
            assert bool(out.isnan().all())


def _check_gradients(buffer: Any, case: Case, seed: int, device: str) -> None:
    """A layer whose experts scale their rows, forward and backward, by the low-latency verbs. Small
    integers: every sum is exact."""
    size, rank, local = buffer.group_size, buffer.rank, case.local
    everyone = [make_inputs(case, seed, r, size) for r in range(size)]
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 4, (local * size, case.hidden), generator=generator).float()
    xs, grads = (
        [torch.randint(-4, 5, i.x.shape, generator=generator).bfloat16() for i in everyone]
        for _ in range(2)
    )
    idx = everyone[rank].idx.to(device)
    ones = torch.ones(idx.shape, device=device)

    def exchange(rows: Any) -> tuple[Any, Any, Any]:
        got, count, handle, _, hook = buffer.low_latency_dispatch(
            rows[rank].to(device), idx, case.max_tokens, local * size, use_fp8=False
        )
        assert hook is None
        places = torch.arange(got.shape[1], device=device)
        return got, handle, places < count.unsqueeze(1)

    weight = scales[rank * local : (rank + 1) * local].unsqueeze(1).to(device).requires_grad_()
    rows, handle, here = exchange(xs)
    leaf = rows.detach().requires_grad_()
    y = (leaf[here].float() * weight.expand(rows.shape)[here]).bfloat16()  # experts know the count
    padded = torch.full_like(rows, torch.nan)
    padded[here] = y.detach()
    out = buffer.low_latency_combine(padded, idx, ones, handle)[0]
    dy, handle, here_again = exchange(grads)
    assert torch.equal(here, here_again)
    assert bool(rows[~here].isnan().all() and dy[~here].isnan().all())  # nobody wrote to them
    y.backward(dy[here])
    assert leaf.grad is not None
    padded[here] = leaf.grad[here]
    dx = buffer.low_latency_combine(padded, idx, ones, handle)[0]
    for got, sent in ((out, xs), (dx, grads)):
        used = torch.zeros(sent[rank].shape)
        for k in range(case.top_k):
            chosen = everyone[rank].idx[:, k]
            used += torch.where(chosen.unsqueeze(1) >= 0, scales[chosen], 0.0)
        assert torch.equal(got.cpu(), (used * sent[rank].float()).bfloat16())
    assert weight.grad is not None
    for expert in range(local):
        total = torch.zeros(case.hidden)
        for source, token in expected_rows(case, everyone, rank * local + expert):
            total += xs[source][token].float() * grads[source][token].float()
        assert torch.equal(weight.grad[expert, 0].cpu(), total)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
