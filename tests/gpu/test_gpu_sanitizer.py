"""compute-sanitizer finds nothing in our kernels, with one rank and with two.

All runs start at once, so that together they take as long as the slowest. They don't use the MPS
server of the other tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 200
PLANTED = ("memcheck of a planted fault", 1)
RUNS = [
    ("memcheck", 1),
    ("racecheck", 1),
    ("synccheck", 1),
    ("memcheck", 2),
    ("synccheck", 2),
    ("racecheck", 2),
]

pytestmark = [
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


def _start(name: str, num_ranks: int, folder: Path) -> list[subprocess.Popen]:
    folder.mkdir()
    tool = name.split()[0]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_MPS")}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")])
    )
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if tool == "memcheck":  # else all tensors share blocks, whose ends alone are watched
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # Only our kernels are instrumented: torch's are many, and not in question.
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3"]
    command += ["--kernel-regex", "kns=moe_ep", "--print-limit", "5"]
    command += [sys.executable, str(HERE / "sanitize.py"), "--ranks", str(num_ranks)]
    command += ["--plant"] if name == PLANTED[0] else []
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--store", str(folder / "store")],
            env=environment,
            stdout=(folder / f"rank_{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(num_ranks)
    ]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: Any) -> Iterator[dict[tuple[str, int], list[tuple[int | None, str]]]]:
    """Exit code (None: killed at the limit) and output of every rank of every run."""
    base = tmp_path_factory.mktemp("sanitizer")
    folders = {run: base / f"{run[0].replace(' ', '_')}_{run[1]}" for run in (*RUNS, PLANTED)}
    processes = {run: _start(*run, folder) for run, folder in folders.items()}
    deadline = time.monotonic() + LIMIT_S
    found: dict[tuple[str, int], list[tuple[int | None, str]]] = {}
    try:
        for run, ranks in processes.items():
            found[run] = []
            for rank, process in enumerate(ranks):
                try:
                    code = process.wait(timeout=max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    code = None
                found[run].append((code, (folders[run] / f"rank_{rank}.txt").read_text()))
    finally:
        for ranks in processes.values():
            for process in ranks:
                process.kill()
                process.wait()
    yield found


@pytest.mark.parametrize(("tool", "num_ranks"), RUNS)
def test_finds_nothing(outputs: Any, tool: str, num_ranks: int) -> None:
    for rank, (code, text) in enumerate(outputs[tool, num_ranks]):
        assert code == 0, f"rank {rank}, exit code {code}:\n{text[:1500]}\n...\n{text[-2500:]}"
        assert "done" in text
        found = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
        assert found in text, text[-2500:]


def test_finds_a_planted_fault(outputs: Any) -> None:
    """The filter lets our kernels through, and a write beyond a tensor is seen."""
    [(code, text)] = outputs[PLANTED]
    assert code not in (0, None), text[-2500:]
    assert "Invalid __global__ write" in text and "moe_ep" in text, text[:2500]
