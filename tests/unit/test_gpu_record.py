"""The GPU record is of the sources as they are, and scripts/test.sh --gpu keeps what it found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """tests/gpu/record.py and run_all.py, which are programs and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    yield importlib.import_module("record"), importlib.import_module("run_all")
    for name in ("record", "run_all"):
        sys.modules.pop(name, None)


@pytest.fixture
def record(modules: tuple[Any, Any]) -> Any:
    return modules[0]


def test_the_record_is_of_these_sources(record: Any) -> None:
    assert record.FILE.exists(), f"no {record.FILE}: {record.RUN_COMMAND} or {record.NOTE_COMMAND}"
    found = record.problems(json.loads(record.FILE.read_text()), record.sources_hash())
    assert not found, "\n".join(found)


def good(record: Any) -> dict[str, Any]:
    about = {"date": "d", "gpu": "g", "driver": "5", "cuda": "13", "torch": "2", "python": "3"}
    tests = {"passed": 3, "failed": 0, "skipped": 0}
    return {"ran": True, "sources": "s", "tests": tests, "bench": [], "not_run": {}, **about}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sources": "t"}, "of other sources"),
        ({"tests": {"passed": 3, "failed": 1, "skipped": 0}}, "1 of the GPU tests failed"),
        ({"tests": {"passed": 0, "failed": 0, "skipped": 9}}, "0 passed"),
        ({"tests": None}, "'tests' must hold"),
        ({"gpu": ""}, "'gpu' must be"),
        ({"bench": None}, "'bench' must be"),
        ({"ran": "yes"}, "'ran' must be"),
        ({"ran": False, "reason": " "}, "needs a 'reason'"),
    ],
)
def test_problems(record: Any, changes: dict[str, Any], told: str) -> None:
    assert record.problems(good(record), "s") == []
    (problem,) = record.problems({**good(record), **changes}, "s")
    assert told in problem
    assert record.RUN_COMMAND in problem and record.NOTE_COMMAND in problem


def test_the_hash_follows_the_sources(record: Any, tmp_path: Path) -> None:
    files = ("CMakeLists.txt", "csrc/kernels/a.cu", "csrc/shared/b.h", "moe_ep/backends/c.py")
    for name in (*files, "csrc/notes.md", "moe_ep/layout.py", "moe_ep/backends/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    assert [str(p.relative_to(tmp_path)) for p in record.source_files(tmp_path)] == list(files)
    seen = {record.sources_hash(tmp_path)}
    for name in files:
        (tmp_path / name).write_text("new")
        seen.add(record.sources_hash(tmp_path))
    assert len(seen) == 1 + len(files)
    last = record.sources_hash(tmp_path)
    (tmp_path / "csrc/notes.md").write_text("new")
    assert record.sources_hash(tmp_path) == last
    (tmp_path / "csrc/kernels/a.cu").rename(tmp_path / "csrc/kernels/z.cu")
    assert record.sources_hash(tmp_path) != last
    note = record.not_run("no GPU", tmp_path)
    assert not record.problems(note, record.sources_hash(tmp_path))
    with pytest.raises(ValueError, match="reason"):
        record.not_run(" ", tmp_path)


def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return  # there is one: scripts/test.sh --gpu is the test
    command = ["bash", str(ROOT / "scripts" / "test.sh"), "--gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no GPU" in done.stderr and "nvidia-cuda-mps-control" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_ends_at_its_limit(modules: tuple[Any, Any], tmp_path: Path) -> None:
    """Also one whose children ignore what it is told; nothing is left running."""
    _, run_all = modules
    file = tmp_path / "pid"
    script = f"trap '' INT; (trap '' INT TERM; echo $BASHPID >{file}; sleep 300) & wait; wait"
    begin = time.monotonic()
    run_all.END_S = 2
    with (tmp_path / "log").open("w") as log:
        assert run_all.run_limited(["bash", "-c", script], log, 1.0) is None
        assert time.monotonic() - begin < 30
        assert run_all.run_limited(["bash", "-c", "exit 3"], log, 60.0) == 3
    child = Path(f"/proc/{file.read_text().strip()}/stat")
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() - begin < 60, "the child is still running"


@pytest.mark.timeout(400)
def test_tests_and_benchmarks_are_recorded(
    modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole run but the build, on a CPU: a benchmark that works and one that fails."""
    record, run_all = modules
    tool = tmp_path / "bin" / "nvidia-cuda-mps-control"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(record, "sources_hash", lambda: "s")
    monkeypatch.setattr(record, "FILE", tmp_path / "record.json")
    monkeypatch.setattr(run_all, "WORK", tmp_path / "work")
    monkeypatch.setattr(run_all, "nvidia_smi", lambda field: f"some {field}")
    versions = run_all.versions()  # asks a process that imports torch: once is enough
    monkeypatch.setattr(run_all, "versions", lambda: versions)
    monkeypatch.setattr(run_all, "COMMON", "--backend reference --tokens 8 --iterations 1")
    monkeypatch.setattr(run_all, "SHAPES", ((2, "--hidden 16"), (1, "--hidden 0")))
    options = argparse.Namespace(
        only=["bench"], tests=None, limit=300.0, quick=False, resume=False, out=tmp_path / "out"
    )
    assert run_all.Run(options).all() == 1  # nothing says that these sources were built
    assert not record.FILE.exists()
    monkeypatch.setattr(run_all.Run, "build", lambda self: self.state.update(built=True) or True)
    options.only = ["build", "bench"]
    assert run_all.Run(options).all() == 1
    written = json.loads((tmp_path / "out" / "record.json").read_text())
    assert written == json.loads(record.FILE.read_text())
    assert (written["ran"], written["sources"]) == (True, "s")
    works, fails = written["bench"]
    (run,) = works["report"]["runs"]
    assert "problem" not in works and works["ranks"] == 2 and works["report"]["ranks"] == 2
    assert {"dispatch", "combine"} <= {timing["name"] for timing in run["timings"]}
    assert "exit status 2" in fails["problem"] and "report" not in fails
    assert list(written["not_run"]) == ["bench 1 x --hidden 0"]
    assert "model.hidden: 0" in (tmp_path / "out" / "bench.log").read_text()

    options = argparse.Namespace(
        only=["tests", "bench"], tests=None, limit=300.0, quick=False, resume=True, out=None
    )
    monkeypatch.setattr(run_all, "SHAPES", ((2, "--hidden 16"),))
    (tmp_path / "some_tests").mkdir()
    tests = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n"
    tests += "@pytest.mark.skip\ndef test_c(): pass\n"
    (tmp_path / "some_tests" / "test_some.py").write_text(tests)
    monkeypatch.setattr(run_all, "TESTS", str(tmp_path / "some_tests"))
    assert run_all.Run(options).all() == 1
    again = json.loads(record.FILE.read_text())
    assert again["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert again["bench"] == [works], "a finished benchmark is kept"
    assert "1 of the GPU tests failed" in " ".join(record.problems(again, "s"))

    options.tests = f"{tmp_path / 'some_tests' / 'test_some.py'}::test_a"
    run_all.Run(options).all()
    part = json.loads(record.FILE.read_text())["tests"]
    assert part == {"passed": 1, "failed": 0, "skipped": 0, "only": [options.tests]}
