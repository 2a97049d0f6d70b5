"""RankServer: ranks forked from a prepared process, as separate as those of `launch_ranks`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ep.testing import RankServer

PREPARED: list[str] = []


def _prepare(word: str) -> None:
    PREPARED.append(word)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer(_prepare, "once") as server:
        yield server


def _sum_and_change(rank: int, factor: int) -> tuple[list[str], int, float]:
    seen = list(PREPARED)
    PREPARED.append("by a rank")
    total = torch.tensor([float(factor * rank)])
    dist.all_reduce(total)
    return seen, os.getpid(), total.item()


def test_every_call_has_fresh_processes(server: RankServer) -> None:
    calls = [server.run(_sum_and_change, ranks, 10) for ranks in (2, 3)]
    assert [seen for call in calls for seen, _, _ in call] == [["once"]] * 5
    assert len({pid for call in calls for _, pid, _ in call}) == 5
    assert [total for call in calls for _, _, total in call] == [10.0] * 2 + [30.0] * 3
    assert not PREPARED, "prepared in a process of its own"


def _ends(rank: int, how: str) -> str:
    if rank == 1 and how == "raises":
        raise ValueError("a mistake of rank 1")
    if rank == 1 and how == "exits":
        os._exit(7)
    if rank == 1 and how == "hangs":
        time.sleep(600)
    return "well"


@pytest.mark.parametrize(
    ("how", "exitcode", "told"),
    [
        ("raises", 1, "a mistake of rank 1"),
        ("exits", 7, "ended without a result"),
        ("hangs", None, "killed: still running after 6 s"),
    ],
)
def test_outcomes(server: RankServer, how: str, exitcode: int | None, told: str) -> None:
    good, bad = server.launch(_ends, 2, how, limit_s=6)
    assert (good.exitcode, good.result, good.error) == (0, "well", None)
    assert bad.exitcode == exitcode and bad.error is not None and told in bad.error


def test_run_wants_every_rank_to_succeed(server: RankServer) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 ranks failed(.|\n)*a mistake of rank 1"):
        server.run(_ends, 2, "raises")


def _hangs(rank: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Jobs in the background of a shell script ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_nothing(tmp_path: Path) -> None:
    """As when pytest's time limit ends a test: the ranks end, and the next call starts anew."""
    with RankServer(_prepare, "again") as server:
        thread = threading.Thread(target=_interrupt_when_running, args=(tmp_path, os.getpid()))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            server.run(_hangs, 2, str(tmp_path))
        thread.join()
        pids = [int(Path(tmp_path, str(rank)).read_text()) for rank in range(2)]
        deadline = time.monotonic() + 20
        while any(map(_runs, pids)):
            assert time.monotonic() < deadline, pids
            time.sleep(0.01)
        assert server.run(_sum_and_change, 2, 1)[0][0] == ["again"]


def _interrupt_when_running(folder: Path, pid: int) -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if all(Path(folder, str(rank)).exists() for rank in range(2)):
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)


def _fails() -> None:
    print("no such framework", file=sys.stderr)
    raise ImportError("no such framework")


def _leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@pytest.mark.parametrize(
    ("prepare", "told"), [(_fails, "no such framework"), (_leaves_a_thread, "left 1 threads")]
)
def test_a_bad_preparation_is_told(prepare, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        RankServer(prepare) as server,
        pytest.raises(RuntimeError, match=f"{prepare.__name__} .*has ended"),
    ):
        server.run(_ends, 2, "well")
    assert told in capfd.readouterr().err
