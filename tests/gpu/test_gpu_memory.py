"""Symmetric memory shared through CUDA IPC and through file descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memory_scenarios
import pytest
from scenarios import Case

from moe_ep.testing import launch_ranks, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_both_kinds_give_the_same_results(num_ranks: int) -> None:
    cases = [
        Case(tokens=(64, 33, 0, 7), top_k=4, alignment=8, routing="unused"),
        Case(tokens=(300, 129), hidden=2880, local=8, top_k=8, dtype="fp32", repeats=1),
        Case(tokens=(50,), exact=True, top_k=3),
        Case(tokens=(20,), hidden=384, fp8_scale="fp32"),
    ]
    run_ranks(memory_scenarios.check_kinds, num_ranks, cases, limit_s=180)


@pytest.mark.parametrize("kind", memory_scenarios.KINDS)
def test_fresh_objects(kind: str) -> None:
    run_ranks(memory_scenarios.check_fresh_objects, 4, kind, 150, limit_s=120)


def test_growth_with_file_descriptors() -> None:
    run_ranks(memory_scenarios.check_fd_growth, 2, limit_s=120)


def test_case_52_expandable_segments() -> None:
    """Two processes on one GPU, in a fresh process whose children all have the setting."""
    done = subprocess.run(
        [sys.executable, "-c", "import memory_scenarios; memory_scenarios.run_case_52()"],
        cwd=Path(__file__).parent,
        env={
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "case 52 passed" in done.stdout


@pytest.mark.usefixtures("fresh_mps")
@pytest.mark.parametrize(
    ("kind", "corruption"),
    [("ipc", "ipc shortened"), ("ipc", "ipc of zeros"), ("fd", "fd of a file")],
)
def test_case_52_a_failed_handle_exchange_names_the_pair(kind: str, corruption: str) -> None:
    told = run_ranks(memory_scenarios.check_corrupted, 3, [corruption], kind, limit_s=120)
    assert len(set(told)) == 1, told
    assert f"{kind}: rank 0 cannot map the memory of rank 2: " in told[0]


@pytest.mark.usefixtures("fresh_mps")
def test_auto_takes_handles_where_file_descriptors_fail() -> None:
    told = run_ranks(memory_scenarios.check_corrupted, 3, ["fd of a file"], "auto", limit_s=120)
    assert told == ["ipc"] * 3


@pytest.mark.usefixtures("fresh_mps")
def test_both_reasons_are_told() -> None:
    both = ["ipc shortened", "fd of a file"]
    for told in run_ranks(memory_scenarios.check_corrupted, 2, both, "auto", limit_s=120):
        assert "ipc: rank 0 cannot map the memory of rank 1: it sent a handle of 10 bytes" in told
        assert "fd: rank 0 cannot map the memory of rank 1: cuMemImportFromShareableHandle" in told


@pytest.mark.alone
@pytest.mark.parametrize("kind", memory_scenarios.KINDS)
def test_constructions_leave_nothing(kind: str) -> None:
    for left, fds in run_ranks(memory_scenarios.check_lifecycle, 2, kind, 50, limit_s=240):
        assert left < 64 << 20, (kind, left)
        assert fds < 10, (kind, fds)


@pytest.mark.parametrize("kind", memory_scenarios.KINDS)
def test_case_46_exit_without_destroy(kind: str) -> None:
    for outcome in launch_ranks(memory_scenarios.check_no_destroy, 2, kind, limit_s=90):
        assert outcome.exitcode == 0 and outcome.result == kind, outcome
