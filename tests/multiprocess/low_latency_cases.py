"""Low-latency exchanges beside a plain computation, on any device. Functions run on all ranks.

Every rank can make the inputs of all ranks, so what must arrive is computed here with loops over
tokens, without any communication and without the library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import Buffer


@dataclass(frozen=True)
class Case:
    """One exchange. tokens: of each rank, cyclically. local: experts of a rank. scales: None (bf16
    rows), "fp32", "power_of_two" or "packed". routing: see `_route`. mode: "hook", "plain" or
    "async". exact: weights are powers of two, so that the sums are known to the last bit."""

    tokens: tuple[int, ...] = (9, 5, 0, 12)
    hidden: int = 256
    local: int = 4
    top_k: int = 3
    max_tokens: int = 16
    scales: str | None = None
    routing: str = "random"
    idx_dtype: torch.dtype = torch.int64
    mode: str = "hook"
    exact: bool = True


@dataclass
class Inputs:
    """Of one rank: x [T, H] bf16, idx [T, K], weights [T, K] fp32."""

    x: Tensor
    idx: Tensor
    weights: Tensor


def common_cases() -> list[Case]:
    cases = [
        Case(),
        Case(mode="plain"),
        Case(mode="async", exact=False),
        Case(tokens=(0, 5, 3, 0)),  # case 1
        Case(tokens=(0,)),
        Case(tokens=(1,), top_k=1),
        Case(routing="unused", idx_dtype=torch.int32, exact=False),
        Case(routing="none"),
        Case(routing="one_expert", tokens=(16, 7)),
        Case(routing="first_rank", top_k=4),
        Case(routing="twice", tokens=(7, 8)),
        Case(hidden=8, tokens=(3, 4)),
        Case(hidden=2880, top_k=4, tokens=(13, 2)),
        Case(local=48, top_k=32, tokens=(4, 9), exact=False),  # case 14
        Case(max_tokens=33, tokens=(33, 31, 32, 1)),
    ]
    for scales in ("fp32", "power_of_two", "packed"):
        cases.append(Case(scales=scales, hidden=512, mode="plain"))
        cases.append(Case(scales=scales, hidden=1536, routing="unused", tokens=(11, 0)))
    cases.append(Case(scales="fp32", hidden=384, tokens=(5, 2)))
    return cases


def _route(case: Case, num_tokens: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    experts = case.local * num_ranks
    shape = (num_tokens, case.top_k)
    if case.routing == "none":
        return torch.full(shape, -1)
    if case.routing == "one_expert":
        idx = torch.full(shape, -1)
        idx[:, 1] = experts - 1
        return idx
    choice = case.local if case.routing == "first_rank" else experts
    idx = torch.rand(num_tokens, choice, generator=generator).argsort(1)[:, : case.top_k]
    idx = torch.nn.functional.pad(idx, (0, case.top_k - idx.shape[1]), value=-1)
    if case.routing == "unused":
        idx = torch.where(torch.rand(shape, generator=generator) < 0.5, -1, idx)
    if case.routing == "twice":
        idx[:, 1] = idx[:, 0]
    return idx


def make_inputs(case: Case, seed: int, rank: int, num_ranks: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens = case.tokens[rank % len(case.tokens)]
    x = torch.randn(num_tokens, case.hidden, generator=generator)
    x *= torch.rand(num_tokens, 1, generator=generator) * 8
    x[:1] = 0
    idx = _route(case, num_tokens, num_ranks, generator)
    weights = torch.rand(num_tokens, case.top_k, generator=generator)
    if case.exact:
        weights = torch.exp2(torch.randint(-3, 2, weights.shape, generator=generator).float())
    weights[idx < 0] = float("nan")  # of unused slots: must not matter
    return Inputs(x.bfloat16(), idx.to(case.idx_dtype), weights)


def expected_rows(case: Case, inputs: list[Inputs], expert: int) -> list[tuple[int, int]]:
    """(source rank, token) of every row of an expert, in order."""
    return [
        (rank, token)
        for rank, mine in enumerate(inputs)
        for token, chosen in enumerate(mine.idx.tolist())
        for one in chosen
        if one == expert
    ]


def expert_output(row: Tensor, expert: int) -> Tensor:
    """Of any rows [..., H] bf16: exact, and different for every expert."""
    return row * (1 - 2 * (expert % 2)) * 2.0 ** (expert % 3)


def expected_sum(case: Case, mine: Inputs) -> tuple[Tensor, Tensor]:
    """[T, H] fp32 before the rounding, and the sum of magnitudes."""
    total = torch.zeros(mine.x.shape)
    size = torch.zeros(mine.x.shape)
    for token, chosen in enumerate(mine.idx.tolist()):
        for k, expert in enumerate(chosen):
            if expert >= 0:
                term = expert_output(mine.x[token], expert).float() * mine.weights[token, k]
                total[token] += term
                size[token] += term.abs()
    return total, size


def make_buffer(cases: list[Case], **options: Any) -> Buffer:
    size = dist.get_world_size()
    hints = [
        Buffer.get_low_latency_rdma_size_hint(c.max_tokens, c.hidden, size, c.local * size)
        for c in cases
    ]
    return Buffer(dist.group.WORLD, num_rdma_bytes=max(hints), low_latency_mode=True, **options)


@dataclass
class Flight:
    """A dispatch on its way, or received."""

    case: Case
    inputs: list[Inputs]
    recv_x: Any
    count: Tensor
    handle: Any
    hook: Any
    event: Any
    idx: Tensor
    weights: Tensor


def send(buffer: Buffer, case: Case, seed: int, device: str, **options: Any) -> Flight:
    inputs = [make_inputs(case, seed, rank, buffer.group_size) for rank in range(buffer.group_size)]
    mine = inputs[buffer.rank]
    assert buffer._low_latency is not None
    assert (buffer._low_latency.device is not None) == (
        device == "cuda"
    )  # the backend that is meant
    idx = mine.idx.to(device)
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        mine.x.to(device),
        idx,
        case.max_tokens,
        case.local * buffer.group_size,
        use_fp8=case.scales is not None,
        round_scale=case.scales in ("power_of_two", "packed"),
        use_ue8m0=case.scales == "packed",
        async_finish=case.mode == "async",
        return_recv_hook=case.mode == "hook",
        **options,
    )
    return Flight(case, inputs, recv_x, count, handle, hook, event, idx, mine.weights.to(device))


def receive(flight: Flight) -> None:
    if flight.case.mode == "hook":
        flight.hook()
    else:
        assert flight.hook is None
        flight.event.current_stream_wait()


def check_received(buffer: Buffer, flight: Flight) -> None:
    case, size, rank = flight.case, buffer.group_size, buffer.rank
    num_rows = size * case.max_tokens
    rows, scales = flight.recv_x if case.scales else (flight.recv_x, None)
    assert rows.shape == (case.local, num_rows, case.hidden)
    assert rows.dtype == (torch.float8_e4m3fn if case.scales else torch.bfloat16)
    assert flight.count.dtype == torch.int32 and flight.count.shape == (case.local,)
    src_info, layout_range, max_tokens, hidden, num_experts = flight.handle
    assert (max_tokens, hidden, num_experts) == (case.max_tokens, case.hidden, case.local * size)
    assert src_info.shape == (case.local, num_rows) and src_info.dtype == torch.int32
    assert layout_range.shape == (case.local, size) and layout_range.dtype == torch.int64
    per_row = None if scales is None else unpacked(case, scales.cpu(), num_rows)
    for local in range(case.local):
        wanted = expected_rows(case, flight.inputs, rank * case.local + local)
        assert int(flight.count[local]) == len(wanted)
        begin = 0
        for source in range(size):
            number = sum(1 for s, _ in wanted if s == source)
            word = int(layout_range[local, source])
            assert (word >> 32, word & 0xFFFFFFFF) == (begin, number), (local, source)
            begin += number
        assert src_info[local, :begin].tolist() == [token for _, token in wanted]
        if not wanted:
            continue
        sent = torch.stack([flight.inputs[source].x[token] for source, token in wanted])
        got = rows[local, :begin].cpu()
        if per_row is None:
            assert torch.equal(got, sent), local
        else:
            check_fp8(case, got, per_row[local, :begin], sent)


def unpacked(case: Case, scales: Tensor, num_rows: int) -> Tensor:
    """[L, N, H/128] fp32; checks shape, dtype and strides."""
    columns = case.hidden // 128
    if case.scales == "packed":
        assert scales.dtype == torch.int32
        columns //= 4
    else:
        assert scales.dtype == torch.float32
    assert scales.shape == (case.local, num_rows, columns)
    assert scales.stride() == (columns * num_rows, 1, num_rows)
    if case.scales != "packed":
        return scales
    parts = [(scales >> (8 * i) & 0xFF) for i in range(4)]
    exponents = torch.stack(parts, dim=3).flatten(2)
    return torch.exp2(exponents.float() - 127)


def check_fp8(case: Case, got: Tensor, scales: Tensor, sent: Tensor) -> None:
    """Case 30."""
    wide = scales.repeat_interleave(128, dim=1)
    x = sent.float()
    error = (got.float() * wide - x).abs()
    assert bool((error <= x.abs() / 16 + wide * 2.0**-10).all())
    amax = x.view(len(x), -1, 128).abs().amax(2)
    zero = amax == 0
    assert bool((scales[zero] == 1).all()) and bool((got.float()[x == 0] == 0).all())
    least = amax[~zero] / 448
    if case.scales == "fp32":
        assert torch.equal(scales[~zero], least)
    else:
        mantissa, _ = torch.frexp(scales)
        assert bool((mantissa == 0.5).all())
        assert bool((scales[~zero] >= least).all()) and bool((scales[~zero] < 2 * least).all())


def send_back(buffer: Buffer, flight: Flight, **options: Any) -> tuple[Tensor, Any, Any]:
    """The experts, whose inputs are the tokens as they were sent, and the combine."""
    case, size = flight.case, buffer.group_size
    x = buffer.get_next_low_latency_combine_buffer(flight.handle)
    y = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)  # rows nobody sent must not matter
    for local in range(case.local):
        expert = buffer.rank * case.local + local
        for place, (source, token) in enumerate(expected_rows(case, flight.inputs, expert)):
            y[local, place] = expert_output(flight.inputs[source].x[token], expert)
    x.copy_(y)
    assert x.shape == (case.local, size * case.max_tokens, case.hidden)
    return buffer.low_latency_combine(
        x,
        flight.idx,
        flight.weights,
        flight.handle,
        zero_copy=True,
        async_finish=case.mode == "async",
        return_recv_hook=case.mode == "hook",
        **options,
    )


def check_sum(buffer: Buffer, flight: Flight, out: Tensor) -> None:
    total, size = expected_sum(flight.case, flight.inputs[buffer.rank])
    assert out.dtype == torch.bfloat16 and out.shape == total.shape
    got = out.cpu()
    if flight.case.exact:
        assert torch.equal(got, total.bfloat16())
    else:
        bound = total.abs() * 2.0**-8 + size * 2.0**-20
        assert bool(((got.float() - total).abs() <= bound).all())


def check_case(buffer: Buffer, case: Case, seed: int, device: str) -> None:
    stats = torch.full((case.local,), 5, dtype=torch.int32, device=device)
    waits = torch.zeros(buffer.group_size, dtype=torch.int64, device=device)
    flight = send(
        buffer,
        case,
        seed,
        device,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
    )
    receive(flight)
    check_received(buffer, flight)
    assert torch.equal(stats, flight.count + 5)
    mine = flight.inputs[buffer.rank]
    place = torch.empty_like(mine.x, device=device) if seed % 2 else None
    out, event, hook = send_back(buffer, flight, out=place, combine_wait_recv_cost_stats=waits)
    assert place is None or out is place
    receive(replace(flight, hook=hook, event=event))
    check_sum(buffer, flight, out)
    assert bool((waits >= 0).all())


def check_cases(rank: int, cases: list[Case], device: str = "cpu") -> None:
    buffer = make_buffer(cases)
    for number, case in enumerate(cases):
        try:
            check_case(buffer, case, number, device)
        except Exception as error:
            raise AssertionError(f"rank {rank}: {case}") from error
    buffer.destroy()
    buffer.destroy()
