"""Dispatch and combine against a plain computation, for every rank count and option."""

from __future__ import annotations

import fp8_scenarios
import pytest
import scenarios
import stream_scenarios
from scenarios import Case

from moe_ep.testing import run_ranks

ROUTINGS = ("random", "skewed", "unused", "one_expert", "first_rank", "duplicates")


def common_cases() -> list[Case]:
    cases = [Case(routing=routing, top_k=4, alignment=8) for routing in ROUTINGS]
    cases += [Case(dtype=dtype) for dtype in scenarios.DTYPES]
    cases += [Case(dtype=dtype, exact=True, top_k=4) for dtype in scenarios.DTYPES]
    cases += [Case(tokens=(0, 5, 3, 0)), Case(tokens=(0,)), Case(tokens=(1,)), Case(tokens=(7, 4))]
    cases += [Case(fp8_scale=scale, hidden=384, alignment=16) for scale in ("fp32", "power_of_two")]
    cases += [
        Case(num_sms=n, tokens=(300, 129), fp8_scale=f) for n in (1, 40) for f in (None, "fp32")
    ]
    cases += [Case(fp8_scale="fp32", dtype="fp32", hidden=2048 + 128)]
    cases += [Case(idx_dtype="int32"), Case(num_sms=1), Case(num_sms=16, tokens=(300, 129))]
    return cases


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_equals_reference(num_ranks: int) -> None:
    run_ranks(scenarios.check_cases, num_ranks, common_cases(), limit_s=240)


def test_case_12_token_counts() -> None:
    counts = (1, 2, 31, 32, 33, 127, 128, 129, 256)
    cases = [Case(tokens=(n,), num_sms=sms, repeats=1) for n in counts for sms in (3, 8)]
    run_ranks(scenarios.check_cases, 2, cases, limit_s=120)


def test_case_13_hidden_sizes() -> None:
    sizes = (8, 64, 1536, 2880, 3584, 7168)
    cases = [Case(hidden=h, tokens=(33, 20), repeats=1) for h in sizes]
    cases += [Case(hidden=4100, dtype="fp32", tokens=(9,), repeats=1)]
    run_ranks(scenarios.check_cases, 2, cases, limit_s=120)


def test_case_14_top_k() -> None:
    cases = [Case(local=24, top_k=k, repeats=1) for k in (1, 7, 9, 12, 16, 32)]
    cases += [Case(local=24, top_k=k, repeats=1, exact=True) for k in (9, 32)]
    cases += [Case(local=1024, top_k=8, repeats=1)]
    run_ranks(scenarios.check_cases, 2, cases, limit_s=120)


def test_case_28_repeats_bit_for_bit() -> None:
    case = Case(tokens=(500, 321), hidden=1024, local=8, top_k=8, repeats=20, num_sms=16)
    run_ranks(scenarios.check_cases, 4, [case], limit_s=240)


def test_case_21_interleaved() -> None:
    run_ranks(scenarios.check_interleaved, 3, limit_s=120)


def test_case_23_graph() -> None:
    run_ranks(scenarios.check_graph, 2, limit_s=120)


def test_capture_without_capacity() -> None:
    run_ranks(scenarios.check_capture_without_capacity, 2, limit_s=120)


def test_objects_of_different_sizes() -> None:
    run_ranks(scenarios.check_sizes, 2, limit_s=120)


def test_different_num_sms() -> None:
    run_ranks(scenarios.check_different_num_sms, 4, limit_s=120)


def test_capacity() -> None:
    for told in run_ranks(scenarios.check_capacity, 2, limit_s=120):
        assert "dispatch.capacity is 30" in told and "rank 0 would receive" in told


def test_growth() -> None:
    run_ranks(scenarios.check_growth, 2, limit_s=120)


def test_streams() -> None:
    run_ranks(stream_scenarios.check_streams, 2, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_async_equals_synchronous(num_ranks: int) -> None:
    run_ranks(stream_scenarios.check_async, num_ranks, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_unaligned_tensors(num_ranks: int) -> None:
    run_ranks(stream_scenarios.check_unaligned, num_ranks, limit_s=120)


def test_fp8_values() -> None:
    run_ranks(fp8_scenarios.check_values, 1, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_autograd_equals_reference(num_ranks: int) -> None:
    run_ranks(scenarios.check_autograd, num_ranks, limit_s=120)
