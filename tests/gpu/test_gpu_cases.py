"""Cases 1, 2, 18, 22, 26, 30, 42, 43, 49 and 53 with backend cuda; ranks start twice in all."""

from __future__ import annotations

import case_scenarios
import pytest
from dense_layer import Target
from mps import MpsServer

from moe_ep.testing import run_ranks

pytestmark = pytest.mark.alone

FOUR_RANKS = ["case_01_uneven_tokens", "case_26_sum_in_fp32", "case_53_no_nccl"]
TWO_RANKS = [
    "case_02_all_tokens_to_one_rank",
    "case_18_index_types",
    "case_22_poisoned_memory",
    "case_30_fp8",
    "case_42_layers_share_buffers",
    "case_43_memory_stays_flat",
    "case_49_no_kernel_for_the_gpu",
]
Failures = dict[str, list[str]]


def _failures(names: list[str], num_ranks: int) -> Failures:
    answers = run_ranks(case_scenarios.run_checks, num_ranks, names, Target(), limit_s=240)
    return {name: [a[name] for a in answers if a[name] is not None] for name in names}


@pytest.fixture(scope="module")
def failures(_mps_session: MpsServer) -> Failures:
    return {**_failures(FOUR_RANKS, 4), **_failures(TWO_RANKS, 2)}


@pytest.mark.parametrize("name", FOUR_RANKS + TWO_RANKS)
def test(failures: Failures, name: str) -> None:
    assert not failures[name], "\n".join(failures[name])


def test_all_checks_are_run() -> None:
    assert set(FOUR_RANKS + TWO_RANKS) == set(case_scenarios.CHECKS)
