"""Buffer on GPU tensors: the cases of the CPU tests, streams, CUDA graphs, and bad input."""

from __future__ import annotations

import buffer_scenarios
import pytest
from buffer_cases import Case, common_cases

from moe_ep.testing import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_plain_computation(num_ranks: int) -> None:
    run_ranks(buffer_scenarios.check_cases, num_ranks, common_cases(), limit_s=240)


def test_large_rows() -> None:
    cases = [
        Case(tokens=(257, 100), hidden=7168, local=32, top_k=8, dtype=dtype, use_async=use_async)
        for dtype in ("bf16", "fp8")
        for use_async in (False, True)
    ]
    run_ranks(buffer_scenarios.check_cases, 2, cases, limit_s=240)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_overlaps_with_the_callers_stream(num_ranks: int) -> None:
    run_ranks(buffer_scenarios.check_overlap, num_ranks, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_of_streams(num_ranks: int) -> None:
    run_ranks(buffer_scenarios.check_memory_of_streams, num_ranks, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("use_async", [False, True])
def test_case_23_graph(num_ranks: int, dtype: str, use_async: bool) -> None:
    run_ranks(buffer_scenarios.check_graph, num_ranks, dtype, use_async, limit_s=120)


def test_bad_input_raises_on_all_ranks() -> None:
    wrong = ["ValueError", "TypeError", "ValueError"] * 2
    assert run_ranks(buffer_scenarios.check_bad_input, 3, limit_s=120) == [
        ["PeerError"] * 6,
        ["PeerError"] * 6,
        wrong,
    ]


def test_static_bad_ids_raise_on_all_ranks() -> None:
    """The host does not wait for the call that has them: that one raises, or the next."""
    for rank, told in enumerate(run_ranks(buffer_scenarios.check_static_bad_ids, 3, limit_s=120)):
        errors = [text for text in told if text]
        expected = "ValueError: rank 2: bad input" if rank == 2 else "PeerError: rank"
        assert len(errors) >= 2 and errors[0].startswith(expected), told
        assert rank == 2 or "rank 2 gave bad input" in errors[0], told
        assert errors[-1].startswith("BrokenError"), told
