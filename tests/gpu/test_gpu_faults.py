"""What happens when a rank is wrong, late or dead, and what destroy leaves behind."""

from __future__ import annotations

import fault_scenarios
import pytest

from moe_ep.testing import launch_ranks, run_ranks


def test_bad_index_raises_everywhere() -> None:
    assert run_ranks(fault_scenarios.check_bad_input, 3, limit_s=120) == [
        "PeerError",
        "PeerError",
        "ValueError",
    ]


@pytest.mark.usefixtures("fresh_mps")
def test_case_9_dead_peer() -> None:
    outcomes = launch_ranks(fault_scenarios.check_dead_peer, 3, limit_s=90)
    for outcome in outcomes[:2]:
        assert outcome.exitcode is not None and outcome.result is not None, outcome
        assert f"rank {outcome.rank} waited 2 s for rank 2 in combine" in outcome.result
        assert "operation 2" in outcome.result and outcome.result.endswith("| broken")
    assert outcomes[2].exitcode == 3


@pytest.mark.usefixtures("fresh_mps")
def test_case_8_late_peer() -> None:
    outcomes = launch_ranks(fault_scenarios.check_slow_peer, 2, 2.0, 5.0, limit_s=90)
    told, seconds = outcomes[0].result
    assert "rank 0 waited 2 s for rank 1" in told and "operation 2" in told
    assert 2.0 <= seconds < 4.0


def test_case_8_long_enough() -> None:
    for told, _ in run_ranks(fault_scenarios.check_slow_peer, 2, 10.0, 3.0, limit_s=90):
        assert told == ""


def test_lifecycle() -> None:
    left = run_ranks(fault_scenarios.check_lifecycle, 4, 20, limit_s=180)
    assert max(left) < 64 << 20, left
