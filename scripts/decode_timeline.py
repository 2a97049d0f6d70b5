"""What ran when in a decode step of decode_demo.py: a Chrome trace and a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_HOLD_CYCLES = 40_000_000  # about 20 ms


@dataclass(frozen=True)
class Span:
    """Microseconds from the start of the step; `half`: which micro-batch."""

    name: str
    half: int
    begin: float
    duration: float


class Timeline:
    """Spans of the current stream of a GPU, by CUDA events, or of the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start: Any = None
        self._marks: list[tuple[str, int, Any, Any]] = []

    def start(self, hold: bool = False) -> None:
        """Forgets everything before. hold: the GPU waits until the host is well ahead, so that
        spans are of kernels and not of their launches."""
        self._marks.clear()
        if hold and self._on_gpu:
            torch.cuda._sleep(_HOLD_CYCLES)
        self._start = self._now()

    @contextmanager
    def span(self, name: str, half: int) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks.append((name, half, begin, self._now()))

    def spans(self) -> list[Span]:
        """Since the last start; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            Span(name, half, self._between(self._start, begin), self._between(begin, end))
            for name, half, begin, end in self._marks
        ]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._on_gpu:
            return float(begin.elapsed_time(end) * 1e3)
        return float((end - begin) * 1e6)


def write_trace(file: Path, ranks: list[list[Span]]) -> None:
    """A process per rank and a thread per micro-batch, in the format of chrome://tracing."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": str(rank)}})
        for span in spans:
            facts = asdict(span)
            events.append(
                {
                    "name": facts["name"],
                    "ph": "X",
                    "pid": rank,
                    "tid": facts["half"],
                    "ts": facts["begin"],
                    "dur": facts["duration"],
                }
            )
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def draw(file: Path, ranks: list[list[Span]]) -> None:
    """A row per rank and micro-batch; what waits for its peers' rows is left blank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(span.name for spans in ranks for span in spans))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    figure, axes = plt.subplots(figsize=(12, 1 + 0.7 * len(ranks)), layout="constrained")
    for rank, spans in enumerate(ranks):
        for span in spans:
            place = 2 * rank + span.half
            axes.barh(place, span.duration, left=span.begin, color=colors[span.name], height=0.8)
    places = range(2 * len(ranks))
    axes.set_yticks(places, [f"rank {i // 2}, micro-batch {i % 2}" for i in places])
    axes.invert_yaxis()
    axes.set_xlabel("µs of the step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axes.legend(handles, names, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(file, dpi=120)
    plt.close(figure)
