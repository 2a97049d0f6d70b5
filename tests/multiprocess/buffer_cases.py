"""Exchanges of a Buffer beside a plain computation, on any device. Functions run on all ranks.

Every rank can make the inputs of all ranks, so what must arrive is computed here with loops over
tokens, without any communication and without the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import Buffer

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23, "fp8": 2.0**-8}


@dataclass(frozen=True)
class Case:
    """One exchange. tokens: of each rank, cyclically. routing: see `_route`. local: experts of a
    rank. scales: how they lie in memory, "row", "column", "one" (one a row) or "int" (packed)."""

    tokens: tuple[int, ...] = (9, 5, 0, 12)
    hidden: int = 256
    local: int = 4
    top_k: int = 3
    dtype: str = "bf16"
    scales: str = "row"
    routing: str = "random"
    alignment: int = 1
    idx_dtype: str = "int64"
    with_topk: bool = True
    worst: bool = False
    use_async: bool = False
    ranks_per_host: int = 0  # not 0: a host's rows of a token are added up and rounded first


@dataclass
class Inputs:
    """Of one rank: x [T, H], scales [T, S] or [T] or None, idx [T, K], weights [T, K]."""

    x: Tensor
    scales: Tensor | None
    idx: Tensor
    weights: Tensor

    def given(self, device: str) -> Any:
        """x as a Buffer takes it."""
        x = self.x.to(device)
        if self.scales is None:
            return x
        scales = self.scales.to(device)
        assert len(x) < 2 or scales.stride() == self.scales.stride()
        return x, scales


def _route(case: Case, num_tokens: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    experts = case.local * num_ranks
    shape = (num_tokens, case.top_k)
    if case.routing == "one_expert":
        return torch.full(shape, experts - 1)
    choice = case.local if case.routing == "first_rank" else experts
    idx = torch.rand(num_tokens, choice, generator=generator).argsort(1)[:, : case.top_k]
    idx = torch.nn.functional.pad(idx, (0, case.top_k - idx.shape[1]), value=-1)
    if case.routing == "unused":
        idx = torch.where(torch.rand(shape, generator=generator) < 0.5, -1, idx)
    if case.routing == "none":
        idx = torch.full(shape, -1)
    return idx


def make_inputs(case: Case, seed: int, rank: int, num_ranks: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens = case.tokens[rank % len(case.tokens)]
    x = torch.randn(num_tokens, case.hidden, generator=generator).to(DTYPES[case.dtype])
    scales = None
    if case.dtype == "fp8":
        scales = torch.rand(num_tokens, case.hidden // 128, generator=generator) + 0.5
        if case.scales == "one":
            scales = scales[:, 0].contiguous()
        elif case.scales == "int":
            scales = torch.randint(-(2**31), 2**31, scales.shape, generator=generator).int()
        elif case.scales == "column":
            scales = scales.T.contiguous().T
    idx = _route(case, num_tokens, num_ranks, generator).to(getattr(torch, case.idx_dtype))
    weights = torch.rand(num_tokens, case.top_k, generator=generator) + 0.1
    return Inputs(x, scales, idx, weights)


@dataclass
class Expected:
    """What one rank must get: where each row comes from, and the ids and weights beside it."""

    rows: list[tuple[int, int]]  # (source rank, token)
    idx: Tensor
    weights: Tensor
    counts: list[int]

    def take(self, of_rank: list[Tensor]) -> Tensor:
        """The rows [N, ...] out of each source rank's tensor [T, ...]."""
        whole = torch.cat([tensor.view(_plain(tensor.dtype)) for tensor in of_rank])
        starts = torch.tensor([0, *(len(tensor) for tensor in of_rank)]).cumsum(0)
        index = torch.tensor([int(starts[s]) + t for s, t in self.rows], dtype=torch.int64)
        return whole[index].view(of_rank[0].dtype)


def _plain(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


def expect(case: Case, world: list[Inputs], rank: int) -> Expected:
    first, last = rank * case.local, (rank + 1) * case.local
    rows, idx, weights, counts = [], [], [], [0] * case.local
    for source, inputs in enumerate(world):
        for token, experts in enumerate(inputs.idx.tolist()):
            mine = [first <= e < last for e in experts]
            if not any(mine):
                continue
            rows.append((source, token))
            idx.append([e - first if m else -1 for e, m in zip(experts, mine, strict=True)])
            given = inputs.weights[token].tolist()
            weights.append([w if m else 0.0 for w, m in zip(given, mine, strict=True)])
            for expert in experts:
                if first <= expert < last:
                    counts[expert - first] += 1
    counts = [-(-n // case.alignment) * case.alignment for n in counts]
    shape = (len(rows), case.top_k)
    dtype = getattr(torch, case.idx_dtype)
    return Expected(
        rows,
        torch.tensor(idx, dtype=dtype).view(shape),
        torch.tensor(weights, dtype=torch.float32).view(shape),
        counts,
    )


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, dtype and shape included."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(
        actual.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def poison(device: str) -> None:
    """Leaves NaN in the memory that the next results will be given."""
    sizes = (1 << 20, 1 << 16, 1 << 12, 1 << 8)
    blocks = [torch.full((n,), float("nan"), device=device) for n in sizes]
    del blocks


def check_layout(case: Case, world: list[Inputs], rank: int, layout: tuple[Any, ...]) -> None:
    per_rank, per_rdma_rank, per_expert, in_rank, _ = layout
    idx, num_ranks = world[rank].idx, len(world)
    assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
    assert per_rdma_rank is None
    wanted = [[any(e // case.local == r for e in row if e >= 0) for r in range(num_ranks)]
              for row in idx.tolist()]  # fmt: skip
    wanted = torch.tensor(wanted, dtype=torch.bool).view(len(idx), num_ranks)
    assert torch.equal(in_rank.cpu(), wanted)
    assert torch.equal(per_rank.cpu(), wanted.sum(0, dtype=torch.int32))
    wanted = [int((idx == e).sum()) for e in range(case.local * num_ranks)]
    assert per_expert.tolist() == wanted


def check_case(buffer: Buffer, case: Case, seed: int, device: str = "cpu") -> None:
    """Layout, dispatch, dispatch again and combine, every result against the plain one."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    world = [make_inputs(case, seed, r, num_ranks) for r in range(num_ranks)]
    again = [make_inputs(case, seed + 500, r, num_ranks) for r in range(num_ranks)]
    expected, mine = expect(case, world, rank), world[rank]
    idx, weights = mine.idx.to(device), mine.weights.to(device)
    options: dict[str, Any] = {"async_finish": case.use_async}
    if case.use_async:
        options |= {"previous_event": buffer.capture(), "allocate_on_comm_stream": True}
    layout = buffer.get_dispatch_layout(idx, case.local * num_ranks, **options)
    if case.use_async:
        options["previous_event"] = layout[4]
        layout[4].current_stream_wait()
    check_layout(case, world, rank, layout)
    worst = sum(case.tokens[r % len(case.tokens)] for r in range(num_ranks)) if case.worst else 0
    arguments = dict(zip(_LAYOUT_NAMES, layout[:4], strict=True))
    if case.with_topk:
        arguments |= {"topk_idx": idx, "topk_weights": weights}
    poison(device)
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        mine.given(device),
        expert_alignment=case.alignment,
        num_worst_tokens=worst,
        **arguments,
        **options,
    )
    event.current_stream_wait()
    check_rows(case, recv_x, expected, world, worst)
    assert counts == ([] if worst else expected.counts), (counts, expected.counts)
    used = len(expected.rows)
    if case.with_topk:
        assert same(recv_idx[:used], expected.idx) and same(recv_weights[:used], expected.weights)
        assert (recv_idx[used:] == -1).all() and not recv_weights[used:].any()
        assert len(recv_idx) == len(recv_weights) == (worst or used)
    else:
        assert recv_idx is None and recv_weights is None
    if not worst:
        sources = torch.tensor([s for s, _ in expected.rows], dtype=torch.int64)
        prefix = sources.bincount(minlength=num_ranks).cumsum(0)
        assert handle[0][:, rank].tolist() == prefix.tolist()
    poison(device)
    repeated = buffer.dispatch(again[rank].given(device), handle=handle, **options)
    assert repeated[1:5] == (None, None, None, None)
    repeated[5].current_stream_wait()
    check_rows(case, repeated[0], expected, again, worst)
    check_combine(buffer, case, world, handle, seed, worst, device)


_LAYOUT_NAMES = (
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "is_token_in_rank",
)


def check_rows(
    case: Case, recv_x: Any, expected: Expected, world: list[Inputs], worst: int
) -> None:
    data, scales = recv_x if case.dtype == "fp8" else (recv_x, None)
    used = len(expected.rows)
    assert data.is_contiguous() and len(data) == (worst or used), (len(data), worst, used)
    assert same(data[:used], expected.take([inputs.x for inputs in world]))
    assert not data[used:].view(_plain(data.dtype)).any()
    if scales is not None:
        wanted = expected.take([inputs.scales for inputs in world])
        assert scales.is_contiguous() and same(scales[:used], wanted)
        assert len(scales) == len(data) and not scales[used:].any()


def check_combine(
    buffer: Buffer,
    case: Case,
    world: list[Inputs],
    handle: Any,
    seed: int,
    worst: int,
    device: str,
) -> None:
    """Rows that have nothing to do with the dispatch are summed, with 0, 1 and 2 biases."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_tokens = len(world[rank].x)
    dtype = torch.bfloat16 if case.dtype == "fp8" else DTYPES[case.dtype]
    everyone = [expect(case, world, r) for r in range(num_ranks)]
    exact = torch.zeros(num_tokens, case.hidden, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    weight_sums = torch.zeros(num_tokens, case.top_k, dtype=torch.float64)
    host_size = case.ranks_per_host or num_ranks
    host_sums = torch.zeros(num_ranks // host_size, *exact.shape, dtype=torch.float64)
    for owner, theirs in enumerate(everyone):
        generator = torch.Generator().manual_seed(31 + 1000 * seed + owner)
        size = len(theirs.rows)
        rows = torch.randn(size, case.hidden, generator=generator).to(dtype)
        row_weights = torch.rand(size, case.top_k, generator=generator)
        for place, (source, token) in enumerate(theirs.rows):
            if source == rank:
                exact[token] += rows[place].double()
                host_sums[owner // host_size, token] += rows[place].double()
                magnitude[token] += rows[place].double().abs()
                weight_sums[token] += row_weights[place].double()
        if owner == rank:
            mine, my_weights = rows, row_weights
    left_over = worst - len(mine) if worst else 0
    mine = torch.cat([mine, torch.full((left_over, case.hidden), float("nan"), dtype=dtype)])
    my_weights = torch.cat([my_weights, torch.full((left_over, case.top_k), float("nan"))])
    generator = torch.Generator().manual_seed(7 + seed)
    biases = [torch.randn(exact.shape, generator=generator).to(dtype) for _ in range(2)]
    options: dict[str, Any] = {"async_finish": case.use_async}
    for number in range(3):
        given: Any = (None, biases[0], tuple(biases))[number]
        given = given.to(device) if number == 1 else given
        given = tuple(b.to(device) for b in given) if number == 2 else given
        if case.use_async:
            options["previous_event"] = buffer.capture()
        poison(device)
        out, out_weights, event = buffer.combine(
            mine.to(device),
            handle,
            topk_weights=my_weights.to(device) if number else None,
            bias=given,
            **options,
        )
        event.current_stream_wait()
        wanted = exact + sum(b.double() for b in biases[:number])
        roundings = EPSILON[case.dtype] * (exact.abs() * (number > 0) + wanted.abs())
        if case.ranks_per_host:
            roundings += EPSILON[case.dtype] * host_sums.abs().sum(0)
        limit = roundings + 1e-6 * (magnitude + 1)
        assert out.dtype == dtype and out.shape == wanted.shape
        error = (out.cpu().double() - wanted).abs()
        assert (error <= limit).all(), f"{number} biases: off by {float((error - limit).max())}"
        if number == 0:
            assert out_weights is None
            continue
        assert out_weights.dtype == torch.float32 and out_weights.is_contiguous()
        torch.testing.assert_close(out_weights.cpu().double(), weight_sums, rtol=1e-6, atol=1e-6)


def common_cases() -> list[Case]:
    cases = [Case(routing=r) for r in ("random", "unused", "one_expert", "first_rank", "none")]
    cases += [Case(dtype=d, top_k=5) for d in ("fp16", "fp32")]
    cases += [Case(dtype="fp8", scales=s, hidden=384) for s in ("row", "column", "one", "int")]
    cases += [Case(tokens=(0, 5, 3, 0)), Case(tokens=(1,)), Case(tokens=(0,)), Case(tokens=(0, 1))]
    cases += [Case(alignment=16, routing="unused"), Case(idx_dtype="int32"), Case(top_k=1)]
    cases += [Case(with_topk=False), Case(with_topk=False, dtype="fp8", hidden=128)]
    cases += [Case(worst=True), Case(worst=True, routing="unused", tokens=(0, 7))]
    cases += [Case(worst=True, dtype="fp8", scales="column", hidden=512, routing="one_expert")]
    cases += [Case(hidden=8, top_k=4), Case(hidden=1024, tokens=(40, 3), local=8, top_k=8)]
    cases += [Case(use_async=True), Case(use_async=True, dtype="fp8", scales="column")]
    cases += [Case(use_async=True, worst=True), Case(hidden=64, tokens=(130, 33))]
    return cases


def check_cases(rank: int, cases: list[Case], device: str = "cpu") -> None:
    """All cases on one Buffer: rows of many widths in turn."""
    buffer = Buffer(dist.group.WORLD)
    for number, case in enumerate(cases):
        try:
            check_case(buffer, case, number, device)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    buffer.destroy()


def in_environment(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function on the CPU; the fork server keeps the environment that it was started with,
    so the rank itself sets what the Buffer reads."""
    os.environ["MOE_EP_BACKEND"] = "reference"
    os.environ["MOE_EP_TIMEOUT_S"] = "20"
    return function(rank, *args)
