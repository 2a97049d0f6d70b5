"""Communication beside computation: events, and a stream of its own for what is communicated.

`EventHandle` and `EventOverlap` have the interface of DeepEP V1. On a CPU, where a call's work is
done when it returns, there is nothing to wait for and all of it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_HIGH_PRIORITY = -1


class EventHandle:
    """Marks the work queued on the current CUDA stream when it is made."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # else no CUDA work has ever been queued
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Later work of the current stream starts after the marked work. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What an operation returns to be waited for; also a context manager that waits at its end.

    with event:
        work_that_overlaps_the_communication()

    Args:
        event: None where there is nothing to wait for: the operation was not asynchronous.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Later work of the current stream starts after the operation. The host does not wait."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.current_stream_wait()


class CommStream:
    """Runs operations on a CUDA stream of its own, so that they can overlap with computation.

    Args:
        device: of the tensors; with None or a CPU, every operation simply runs.
        always: also operations that are not asynchronous. Without it those run on the caller's
            stream, which is cheaper; but the next asynchronous one, whose order after them must be
            kept, then starts no earlier than what was queued there before it.
    """

    def __init__(self, device: torch.device | None, *, always: bool = False) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        self._always = always
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream, made when first asked for.

        Raises:
            RuntimeError: this object's device is not a GPU.
        """
        if self.device is None:
            raise RuntimeError("there is no communication stream without a GPU")
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=_HIGH_PRIORITY)
        return self._stream

    def run(
        self,
        operation: Callable[[], Result],
        inputs: Any = (),
        *,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
    ) -> tuple[Result, EventOverlap]:
        """Runs `operation`, whose kernels go to the stream that is current inside.

        On the communication stream it starts after `previous_event` or, without one, after all work
        that the caller's stream has so far; and the caller's stream waits for its end unless
        `async_finish`. While a CUDA graph is captured, it always starts after all work so far; and
        operations that are not asynchronous go to the communication stream, too, once it is used.

        Args:
            inputs: tensors the operation reads, in tuples and lists of any depth; other values
                are passed over. Their memory is kept until the communication stream has read them.

        Returns:
            What `operation` returned, and an event to wait for (empty unless `async_finish`). The
            tensors in the result, in tuples and lists of any depth, belong to the stream that
            wrote them and are kept until the caller's stream, too, is done with them.
        """
        if self.device is None:
            if previous_event is not None:
                previous_event.current_stream_wait()
            return operation(), EventOverlap(EventHandle() if async_finish else None)
        # Asking whether a graph is captured costs the host more than all else here.
        capturing = self._stream is not None and torch.cuda.is_current_stream_capturing()
        if not (self._always or async_finish or previous_event is not None or capturing):
            return operation(), _NOTHING_TO_WAIT_FOR
        if self._stream is None:
            capturing = torch.cuda.is_current_stream_capturing()
        caller, stream = torch.cuda.current_stream(self.device), self.stream
        if previous_event is None or previous_event.event is None or capturing:
            stream.wait_stream(caller)
        for tensor in _tensors(inputs):
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            if previous_event is not None:
                previous_event.current_stream_wait()
            result = operation()
            done = EventHandle()
        for tensor in _tensors(result):
            tensor.record_stream(caller)
        if async_finish:
            return result, EventOverlap(done)
        with torch.cuda.stream(caller):  # of this device, whichever is current
            done.current_stream_wait()
        return result, _NOTHING_TO_WAIT_FOR


_NOTHING_TO_WAIT_FOR = EventOverlap()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The CUDA tensors in a nest of tuples and lists."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
