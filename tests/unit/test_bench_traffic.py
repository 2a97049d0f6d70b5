"""The benchmark's byte counts, against a routing small enough to count by hand."""

from __future__ import annotations

import pytest
import torch

from moe_ep.cli.bench import traffic
from moe_ep.cli.bench.traffic import Counts, RowBytes, Traffic
from moe_ep.layout import EPLayout

# Rank 0 of 2, two experts each: experts 0 and 1 are here, 2 and 3 on rank 1.
#   token 0: both its experts are here            one destination
#   token 1: one here, one there                  two
#   token 2: both there                           one
#   token 3: one there, one slot unused           one
ROUTING = [[0, 1], [1, 2], [3, 2], [3, -1]]
COUNTS = Counts(
    ranks=2, tokens=4, slots=7, remote_slots=4, destinations=5, remote_destinations=3, arriving=6
)


def test_counts() -> None:
    assert Counts.of(torch.tensor(ROUTING), 0, 2, 2, arriving=6) == COUNTS
    none = Counts.of(torch.full((2, 2), -1), 1, 2, 2, arriving=1)
    assert none == Counts(2, 2, 0, 0, 0, 0, arriving=1)


def test_dispatch_two_ranks() -> None:
    # Rows: 4 read and 4 written to stage, 5 read by the destinations, 6 arrive and are written.
    moved = traffic.dispatch(COUNTS, RowBytes(x=10, wire=10), 10, 10)
    assert moved == Traffic(payload=70, hbm=(4 + 4 + 5 + 6) * 10, link=30)


def test_dispatch_fp8() -> None:
    layout = EPLayout(
        model={"hidden": 256, "num_experts": 4, "top_k": 2},
        parallel={"expert": 2},
        dispatch={"dtype": "fp8_e4m3"},
    )
    row = RowBytes.of(layout)
    assert row == RowBytes(x=512, wire=256 + 2 * 4)
    # To bf16 rows: staging reads 512 and writes 264 a token, five reads of 264, six rows of 512.
    moved = traffic.dispatch(COUNTS, row, row.x, 256)
    assert moved == Traffic(7 * 256, 4 * (512 + 264) + 5 * 264 + 6 * 512, 3 * 264)
    assert traffic.dispatch(COUNTS, row, row.wire, 256).hbm == 4 * (512 + 264) + (5 + 6) * 264


def test_combine_two_ranks() -> None:
    # 6 rows are read and summed; this rank's 5 partial sums are written and read; 4 tokens written.
    assert traffic.combine(COUNTS, 10, exact=False) == Traffic(70, (6 + 2 * 5 + 4) * 10, 30)
    # exact: its 7 rows travel themselves, 4 of them from the other rank.
    assert traffic.combine(COUNTS, 10, exact=True) == Traffic(70, (6 + 2 * 7 + 4) * 10, 40)


def test_one_rank_is_a_permute() -> None:
    counts = Counts.of(torch.tensor(ROUTING), 0, 1, 4, arriving=7)
    assert counts == Counts(1, 4, 7, 0, 4, 0, arriving=7)
    row = RowBytes(10, 10)
    assert traffic.dispatch(counts, row, 10, 10) == Traffic(70, (4 + 7) * 10, 0)
    for exact in (False, True):
        assert traffic.combine(counts, 10, exact) == Traffic(70, (7 + 4) * 10, 0)


def test_units_of_a_balanced_routing() -> None:
    """In rows per token, summed over ranks: dispatch 2 + D + K, combine K + 1 + 2 D."""
    torch.manual_seed(0)
    ranks, local, top_k, tokens = 4, 2, 3, 50
    routes = [torch.rand(tokens, ranks * local).topk(top_k).indices for _ in range(ranks)]
    arriving = [sum(int((idx // local == rank).sum()) for idx in routes) for rank in range(ranks)]
    every = [Counts.of(routes[r], r, ranks, local, arriving[r]) for r in range(ranks)]
    d = sum(len(set(row)) for idx in routes for row in (idx // local).tolist()) / (ranks * tokens)
    unit = ranks * tokens * 2
    row = RowBytes(2, 2)
    dispatched = sum(traffic.dispatch(counts, row, 2, 2).hbm or 0 for counts in every)
    combined = sum(traffic.combine(counts, 2, False).hbm or 0 for counts in every)
    assert dispatched == pytest.approx((2 + d + top_k) * unit)
    assert combined == pytest.approx((top_k + 1 + 2 * d) * unit)


def test_reference_sends_a_row_per_slot() -> None:
    assert traffic.without_sharing(COUNTS, 20, 10) == Traffic(70, None, 80)


def test_sums() -> None:
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33)
    assert Traffic(1, None, 3) + Traffic(10, 20, 30) == Traffic(11, None, 33)


def test_floor_counts_all_ranks_of_a_gpu() -> None:
    # 1 MB and 3 MB at 1 TB/s: 4 us on one GPU, 3 us on two; three ranks on two GPUs.
    assert traffic.floor_us([1_000_000, 3_000_000], ["a", "a"], 1e12) == pytest.approx(4)
    assert traffic.floor_us([1_000_000, 3_000_000], ["a", "b"], 1e12) == pytest.approx(3)
    assert traffic.floor_us([2_000_000] * 3, ["a", "b", "a"], 1e12) == pytest.approx(4)
