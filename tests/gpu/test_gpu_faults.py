"""What happens when a rank is wrong, late or dead, and what destroy leaves behind."""

from __future__ import annotations

import time

import fault_scenarios
import pytest
from dense_layer import Target

from moe_ep.testing import launch_ranks, run_ranks


def test_bad_index_raises_everywhere() -> None:
    assert run_ranks(fault_scenarios.check_bad_input, 3, limit_s=120) == [
        "PeerError",
        "PeerError",
        "ValueError",
    ]


@pytest.mark.parametrize(
    ("what", "error"),
    [("shape", "ValueError: rows are"), ("hidden", "ValueError"), ("dtype", "TypeError")],
)
def test_bad_combine_raises_everywhere(what: str, error: str) -> None:
    *peers, culprit = run_ranks(fault_scenarios.check_bad_combine, 3, what, Target(), limit_s=90)
    assert culprit[0].startswith(error), culprit
    assert culprit[1].startswith("BrokenError") and "bad input to combine" in culprit[1], culprit
    for told in peers:
        assert told[0] == "", told  # rows are on their way already
        assert told[1].startswith("PeerError") and "rank 2 gave bad input" in told[1], told
        assert told[2].startswith("BrokenError"), told


def test_a_dispatch_left_halfway() -> None:
    waiting, culprit = run_ranks(fault_scenarios.check_left_halfway, 2, limit_s=90)
    assert culprit.startswith("BrokenError") and "left halfway: OutOfMemoryError" in culprit
    assert waiting.startswith("PeerTimeoutError: rank 0 waited 2 s for rank 1 in combine"), waiting


def test_case_6_skipped_dispatch() -> None:
    told, seconds, again = run_ranks(
        fault_scenarios.check_skipped_dispatch, 2, Target(), limit_s=90
    )[0]
    assert "rank 0 waited 2 s for rank 1 in dispatch" in told, told
    assert "the operation left out" in told, told
    assert 2.0 <= seconds < 4.0
    assert "stopped earlier" in again and "rank 1" in again, again


def test_case_46_endings() -> None:
    endings = fault_scenarios.ENDINGS
    begin = time.monotonic()
    outcomes = launch_ranks(fault_scenarios.end, 2 * len(endings), Target(), limit_s=120)
    for outcome in outcomes:
        how = endings[outcome.rank // 2]
        assert outcome.exitcode == 0 and outcome.result is not None, (how, outcome)
        assert begin + outcome.seconds - outcome.result < 10, (how, outcome)


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
    told, seconds, _ = outcomes[0].result
    assert "rank 0 waited 2 s for rank 1" in told and "operation 2" in told
    assert 2.0 <= seconds < 4.0


def test_case_8_long_enough() -> None:
    early, late = run_ranks(fault_scenarios.check_slow_peer, 2, 10.0, 3.0, limit_s=90)
    assert early[0] == late[0] == ""
    nanoseconds, peer = early[2]
    assert peer == 1 and 2.5e9 < nanoseconds < 4e9
    assert late[2][0] < 0.5e9


@pytest.mark.alone
def test_lifecycle() -> None:
    """A hundred constructions by eight ranks; each would leave megabytes if it left anything."""
    left = run_ranks(fault_scenarios.check_lifecycle, 8, 100, limit_s=240)
    assert max(left) < 16 << 20, left
