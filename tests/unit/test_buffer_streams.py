"""What CommStream asks of CUDA, in which order: recorded with stand-ins, no GPU needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_ep.events import CommStream, EventHandle, EventOverlap

GPU = torch.device("cuda", 0)


class Recorder:
    """Stands in for `torch.cuda`; `log` tells what was asked, by the names of streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.caller, self.comm = Stream(self, "caller"), Stream(self, "comm")
        self.current = self.caller
        self.capturing = False

    def Stream(self, device: torch.device, priority: int) -> Stream:
        assert device == GPU and priority < 0
        return self.comm

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def Event(self) -> Event:
        return Event(self)

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Stream:
    def __init__(self, cuda: Recorder, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name} waits for event of {event.stream}")


class Event:
    def __init__(self, cuda: Recorder) -> None:
        self.cuda, self.stream = cuda, ""

    def record(self) -> None:
        self.stream = self.cuda.current.name


class Rows(torch.Tensor):
    """A tensor that says it is on the GPU and records who else uses its memory."""

    cuda_log: list[str]
    label: str
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        self.cuda_log.append(f"{self.label} used by {stream.name}")


def rows(cuda: Recorder, name: str) -> Rows:
    tensor = torch.ones(1).as_subclass(Rows)
    tensor.cuda_log, tensor.label = cuda.log, name
    return tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("Stream", "Event", "current_stream", "stream", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", recorder.is_current_stream_capturing
    )
    return recorder


def run(cuda: Recorder, comm: CommStream, **options: Any) -> EventOverlap:
    def operation() -> Any:
        cuda.log.append(f"runs on {cuda.current.name}")
        return [rows(cuda, "result"), 5, (None, torch.ones(1))]

    result, event = comm.run(operation, ((rows(cuda, "input"), None), torch.ones(1)), **options)
    assert result[1] == 5 and cuda.current is cuda.caller
    return event


def test_not_asynchronous_and_not_always(cuda: Recorder) -> None:
    event = run(cuda, CommStream(GPU))
    assert event.event is None and cuda.log == ["runs on caller"]


def test_always_on_its_own_stream(cuda: Recorder) -> None:
    event = run(cuda, CommStream(GPU, always=True))
    assert event.event is None
    assert cuda.log == [
        "comm waits for caller",
        "input used by comm",
        "runs on comm",
        "result used by caller",
        "caller waits for event of comm",
    ]


def test_asynchronous(cuda: Recorder) -> None:
    event = run(cuda, CommStream(GPU), async_finish=True)
    assert cuda.log == [
        "comm waits for caller",
        "input used by comm",
        "runs on comm",
        "result used by caller",
    ]
    cuda.log.clear()
    with event:
        assert not cuda.log
    assert cuda.log == ["caller waits for event of comm"]


@pytest.mark.parametrize("async_finish", [False, True])
def test_after_an_event_only(cuda: Recorder, async_finish: bool) -> None:
    previous = EventOverlap(EventHandle())
    run(cuda, CommStream(GPU), previous_event=previous, async_finish=async_finish)
    assert cuda.log == [
        "input used by comm",
        "comm waits for event of caller",
        "runs on comm",
        "result used by caller",
        *([] if async_finish else ["caller waits for event of comm"]),
    ]


def test_an_empty_event_is_none(cuda: Recorder) -> None:
    run(cuda, CommStream(GPU), previous_event=EventOverlap(), async_finish=True)
    assert cuda.log[0] == "comm waits for caller"


def test_while_a_graph_is_captured(cuda: Recorder) -> None:
    """The communication stream joins the capture, and every operation keeps its place."""
    comm, cuda.capturing = CommStream(GPU), True
    run(cuda, comm)
    assert cuda.log == ["runs on caller"], "nothing asynchronous yet: one stream"
    for options in ({"previous_event": EventOverlap(EventHandle()), "async_finish": True}, {}):
        cuda.log.clear()
        run(cuda, comm, **options)
        assert cuda.log[0] == "comm waits for caller" and "runs on comm" in cuda.log


def test_without_a_stream_of_its_own(cuda: Recorder) -> None:
    """Backends that run on any device stay on the caller's stream, after the event."""
    with cuda.stream(cuda.comm):
        previous = EventOverlap(EventHandle())
    cuda.log.clear()
    run(cuda, CommStream(None), previous_event=previous)
    assert cuda.log == ["caller waits for event of comm", "runs on caller"]
