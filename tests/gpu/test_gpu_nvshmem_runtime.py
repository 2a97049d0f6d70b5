"""NVSHMEM between ranks that share a GPU: start, memory, messages, several groups, faults."""

from __future__ import annotations

import time
from pathlib import Path

import nvshmem_runtime_scenarios as scenarios
import pytest

import moe_ep
from moe_ep.backends import nvshmem_library
from moe_ep.testing import launch_ranks, run_ranks

# Built or not, never "built but broken": that fails below.
_BUILT = any(Path(moe_ep.__path__[0]).glob("_C_nvshmem*.so"))
pytestmark = pytest.mark.skipif(not _BUILT, reason="moe_ep/_C_nvshmem is not built")


@pytest.mark.alone
def test_hundred_starts_in_a_row() -> None:
    """At eight ranks. NVSHMEM 3.4.5 itself leaves 1.7 MB a rank and start; its heap is 512 MB."""
    for found in run_ranks(scenarios.check_starts, 8, 100, limit_s=180):
        assert found["left"] < 8 * (4 << 20), found


def test_memory() -> None:
    assert set(run_ranks(scenarios.check_memory, 4, limit_s=90)) == {"p2p"}


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_pings(num_ranks: int) -> None:
    found = run_ranks(scenarios.check_pings, num_ranks, 16, limit_s=90)
    assert found == [16 * num_ranks] * num_ranks


def test_several_groups() -> None:
    for refusals in run_ranks(scenarios.check_groups, 4, limit_s=90):
        for told in refusals:
            assert "spans ranks 0, 1, 2, 3 until it ends" in told, refusals
            assert "cannot span ranks" in told, refusals


def test_another_version_is_refused() -> None:
    loaded = nvshmem_library.load().loaded_version()
    for told in run_ranks(scenarios.check_version, 2, limit_s=90):
        assert "compiled with NVSHMEM 3.0.6" in told and f"loaded NVSHMEM {loaded}" in told, told


@pytest.mark.usefixtures("fresh_mps")
def test_start_with_a_dead_peer() -> None:
    for outcome in launch_ranks(scenarios.check_dead_peer, 3, limit_s=60)[:2]:
        assert outcome.result is not None, outcome
        started, seconds = outcome.result
        assert not started and seconds < 4.0, outcome


@pytest.mark.usefixtures("fresh_mps")
def test_case_46_exit_without_release() -> None:
    begin = time.monotonic()
    for outcome in launch_ranks(scenarios.end_without_release, 2, limit_s=60):
        assert outcome.exitcode == 0 and outcome.result is not None, outcome
        assert begin + outcome.seconds - outcome.result < 10, outcome
