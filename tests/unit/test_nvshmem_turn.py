"""Jobs of one machine start and leave NVSHMEM in turn."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moe_ep.backends import nvshmem_turn


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "turn.lock"
    monkeypatch.setattr(nvshmem_turn, "FILE", file)
    return file


def test_a_start_keeps_others_from_starting(file: Path) -> None:
    with nvshmem_turn.to_start(1) as mine:
        with nvshmem_turn.to_start(0.05) as other:
            assert f"another job has kept {file} for 0.05 s" in other
        assert mine == ""
    with nvshmem_turn.to_start(0.05) as problem:
        assert problem == ""


def test_nobody_leaves_during_a_start() -> None:
    left: list[float] = []

    def leave() -> None:
        with nvshmem_turn.to_leave(30):
            left.append(time.monotonic())

    with nvshmem_turn.to_start(1):
        thread = threading.Thread(target=leave)
        thread.start()
        time.sleep(0.1)
        started = time.monotonic()
    thread.join()
    assert left[0] >= started


def test_ranks_leave_together_and_nobody_starts_meanwhile() -> None:
    leave, start = nvshmem_turn.to_leave, nvshmem_turn.to_start
    with leave(1), leave(0.05), start(0.05) as problem:
        assert "another job" in problem


def test_leaving_waits_no_longer_than_it_is_told() -> None:
    with nvshmem_turn.to_start(1):
        begin = time.monotonic()
        with nvshmem_turn.to_leave(0.1):
            assert 0.1 <= time.monotonic() - begin < 5


def test_without_a_place_for_the_file_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_turn, "FILE", Path("/nowhere/turn.lock"))
    with nvshmem_turn.to_start(0.05) as first, nvshmem_turn.to_start(0.05) as second:
        assert first == second == ""


def test_an_error_gives_the_turn_back() -> None:
    with pytest.raises(RuntimeError, match="oh"), nvshmem_turn.to_start(1):
        raise RuntimeError("oh")
    with nvshmem_turn.to_start(0.05) as problem:
        assert problem == ""
