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
    make_buffer,
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


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
