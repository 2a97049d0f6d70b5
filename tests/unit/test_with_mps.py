"""scripts/with_mps.sh, with a stand-in for the program that controls MPS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "with_mps.sh"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes how it was called and what it was told."""
    log, control = tmp_path / "log", tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >>{log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ranks_and_their_server(log: Path) -> None:
    done = run("3", "sh", "-c", 'echo "$RANK of $WORLD_SIZE at $CUDA_MPS_PIPE_DIRECTORY"')
    assert done.returncode == 0, done.stderr
    started, ended = log.read_text().splitlines()
    folder = started.removeprefix("-d ")
    assert ended == f" {folder}" and not Path(folder).exists()
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 3 at {folder}" for rank in range(3)]


def test_the_status_of_the_first_rank_that_failed(log: Path) -> None:
    assert run("3", "sh", "-c", 'exit "$((RANK * 2))"').returncode == 2
    assert len(log.read_text().splitlines()) == 2


def test_a_command_that_starts_its_ranks_itself(log: Path) -> None:
    done = run("--", "sh", "-c", 'echo "rank ${RANK-none}"; exit 5')
    assert (done.returncode, done.stdout) == (5, "rank none\n")
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize("arguments", [(), ("2",), ("0", "true"), ("two", "true")])
def test_wrong_arguments(log: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and "usage:" in done.stderr and not log.exists()


def test_without_mps(tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    environment = {"PATH": str(tmp_path)}
    command = ["bash", str(SCRIPT), "2", sys.executable, "-c", ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "nvidia-cuda-mps-control is not on the PATH" in done.stderr
