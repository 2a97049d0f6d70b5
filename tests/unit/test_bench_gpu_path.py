"""How `moe-ep bench` times on a GPU, tried on a CPU with a wall clock in place of CUDA's events."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.backends.reference import ReferenceBackend
from moe_ep.cli import main
from moe_ep.cli.bench import clocks, runner
from moe_ep.cli.bench.cases import Session
from moe_ep.cli.bench.ranks import Guard, Ranks

FLAGS = ("--tokens", "16", "--hidden", "128", "--iterations", "3", "--backend", "reference")


class WallClock:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.seconds: float | None = None

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: WallClock) -> float:
        assert self.seconds is not None and end.seconds is not None
        return (end.seconds - self.seconds) * 1e3


class Graph:
    """Replays nothing, in a time of its own."""

    def replay(self) -> None:
        time.sleep(1e-3)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events, graphs and streams without a GPU; returns the log of what was asked of them."""
    log: list[str] = []

    @contextlib.contextmanager
    def capture(graph: Graph, stream: object) -> Iterator[None]:
        log.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "Event", WallClock)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("hold"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Stand-in")
    monkeypatch.setattr(runner, "_driver", lambda: "1.2")
    monkeypatch.setattr(clocks, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(Ranks, "on_gpu", property(lambda ranks: True))
    monkeypatch.setattr(ReferenceBackend, "device", torch.device("cpu"))
    return log


def report(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "r.json"
    status = main(["bench", "--json", str(file), *FLAGS, *flags])
    data: dict[str, Any] = json.loads(file.read_text())
    return status, data


def test_every_case_is_timed(
    stand_in: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, data = report(tmp_path, "--peer", "megatron")
    assert status == 0 and data["complete"]
    assert (data["device"], data["driver"], data["devices"]) == ("Stand-in", "1.2", 1)
    timings = {timing["name"]: timing for timing in data["timings"]}
    own = {"notify", "dispatch", "dispatch, cached", "combine", "whole way", "forward + backward"}
    assert {name for name, timing in timings.items() if timing["by"] == "reference"} == own
    for name in own:
        timing = timings[name]
        for least, middle, most in (
            (timing["min_us"], timing["median_us"], timing["max_us"]),
            (timing["alone_us"]["min"], timing["alone_us"]["median"], timing["alone_us"]["max"]),
        ):
            assert 0 < least <= middle <= most
        if name != "forward + backward":  # not captured
            assert timing["graph_us"]["median"] >= 1e3 / clocks.GRAPH_CALLS
    assert {name for name in own if timings[name]["host_us"]} == {
        "dispatch",
        "dispatch, cached",
        "combine",
    }
    assert stand_in.count("capture") == 5
    assert stand_in.count("hold") == 3 * len(timings)
    # The floor of a peer: 16 tokens and 32 rows of 128 bf16 columns, read or written once.
    permute = timings["megatron permute"]
    assert permute["hbm_bytes"] == (16 + 32) * 128 * 2
    assert permute["floor_us"] == pytest.approx(permute["hbm_bytes"] / data["copy_GBps"] / 1e3)
    assert permute["ratio_to_floor"] == pytest.approx(permute["median_us"] / permute["floor_us"])
    ours, theirs = timings["whole way"], timings["megatron whole way"]
    assert data["ratios"]["megatron"] == pytest.approx(ours["median_us"] / theirs["median_us"])
    assert data["ratio_to_all_to_all"] is None  # gloo would carry GPU tensors through the host
    printed = capsys.readouterr().out
    assert "24 SMs a rank" in printed and "driver 1.2" in printed and "megatron 0." in printed


def test_a_failing_case_is_told_and_the_rest_goes_on(
    stand_in: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sessions: list[Session] = []

    def combine(session: Session) -> None:
        sessions.append(session)
        raise RuntimeError("no combine today")

    monkeypatch.setattr(Session, "combine", combine)
    status, data = report(tmp_path)
    timings = {timing["name"]: timing for timing in data["timings"]}
    assert status == 1
    assert timings["combine"]["error"] == "rank 0: RuntimeError: no combine today"
    assert timings["combine"]["median_us"] is None and data["whole_way_us"] is None
    assert set(data["errors"]) == {"combine", "combine, graph"}
    assert timings["whole way"]["median_us"] > 0  # of a new session: the old one may be broken
    assert len(set(map(id, sessions))) == 2 and sessions[0].ep.destroyed
    assert "combine             failed: rank 0: RuntimeError" in capsys.readouterr().out


def test_host_time_has_one_barrier(stand_in: list[str]) -> None:
    """A barrier before each call would let the process cool down."""

    class Counted(Ranks):
        barriers = 0

        def barrier(self) -> None:
            Counted.barriers += 1

        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    ranks = Counted(None, torch.device("cpu"), ["a", "a"])  # type: ignore[arg-type]
    calls: list[float] = []
    median = clocks.on_host(Guard(lambda: calls.append(0.0)), ranks)
    assert len(calls) == clocks.HOST_WARMUP + clocks.HOST_CALLS
    assert Counted.barriers == 1 and median > 0
    assert stand_in == ["synchronize", "synchronize"]


def test_slowest() -> None:
    """Two ranks, three calls: each rank's figures first, or each call's slowest rank first."""

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            other = (9.0, 0.5, 10.0) if isinstance(value, tuple) else [1.0, 9.0, 2.0]
            return [value, other]

    ranks = Two(None, torch.device("cpu"), ["a", "a"])  # type: ignore[arg-type]
    assert clocks.slowest_rank(ranks, [3.0, 1.0, 8.0]) == clocks.Spread(9.0, 1.0, 10.0)
    assert clocks.slowest_call(ranks, [3.0, 1.0, 8.0]) == clocks.Spread(8.0, 3.0, 9.0)


def test_first_error_prefers_the_cause() -> None:
    class Three(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return ["PeerTimeoutError: waited", None, value]

    ranks = Three(None, torch.device("cpu"), ["a"] * 3)  # type: ignore[arg-type]
    assert ranks.first_error("ValueError: bad") == "rank 2: ValueError: bad"
    assert ranks.first_error(None) == "rank 0: PeerTimeoutError: waited"


def test_a_guard_keeps_the_first_error() -> None:
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        raise KeyError("first")

    guard = Guard(action)
    guard(), guard(), guard.run(lambda: calls.append(2))
    assert calls == [1] and guard.error == "KeyError: 'first'"
