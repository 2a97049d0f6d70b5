"""Statistics of backend cuda: rows by link, times by events of the GPU, waits by its clock."""

from __future__ import annotations

from typing import Any

import pytest
import statistics_scenarios
from dense_layer import Target
from mps import MpsServer

from moe_ep.testing import run_ranks

pytestmark = pytest.mark.alone

CHECKS = ["rows, bytes and times", "with exact_combine", "waits", "static shapes"]


@pytest.fixture(scope="module")
def told(_mps_session: MpsServer) -> list[dict[str, Any]]:
    answers = run_ranks(statistics_scenarios.run_all, 2, Target(), limit_s=120)
    print(f"host us of dispatch and combine: {answers[0]['cost']}")
    return answers


@pytest.mark.parametrize("name", CHECKS)
def test(told: list[dict[str, Any]], name: str) -> None:
    failures = [answer[name] for answer in told if answer[name] is not None]
    assert not failures, "\n".join(failures)
