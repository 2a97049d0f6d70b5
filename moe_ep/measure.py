"""Measuring an exchange: a backend around the backend, there only while somebody wants figures.

Nothing here waits for a GPU, except `Measurement.read`: times come from pairs of CUDA events that
are read once they are done, and what arrived is added up on the device. While a CUDA graph is
captured nothing is measured, and replays are not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_ep.backends.base import Arrivals, Backend, Call, DispatchedRows, Plan
from moe_ep.backends.channel import Channel
from moe_ep.layout import FP8_BLOCK, EPLayout
from moe_ep.statistics import (
    LINKS,
    GroupStatistics,
    LayerStatistics,
    Link,
    Statistics,
    VerbStatistics,
    gather,
)

_STATISTICS_OFF = (
    "statistics are not being collected on this rank: call collect_stats() before the operations "
    "to be counted, or set MOE_EP_STATISTICS=1"
)

_VERBS = {
    "dispatch.rows": "dispatch",
    "combine.rows": "combine",
    "dispatch.backward": "dispatch_backward",
    "combine.backward": "combine_backward",
}


@dataclass
class _Meter:
    """One verb of one layer, with rows of one size."""

    calls: int = 0
    timed: int = 0
    ns: float = 0.0
    wait_ns: int = 0
    waited_for_ns: dict[int, int] = field(default_factory=dict)
    tally: Tensor | None = None  # sum of the backend's tallies, on its device

    def waited(self, ns: int, peer: int) -> None:
        self.wait_ns += ns
        self.waited_for_ns[peer] = self.waited_for_ns.get(peer, 0) + ns

    def add(self, tally: Tensor) -> None:
        if self.tally is None:
            self.tally = torch.zeros_like(tally, dtype=torch.int64)
        self.tally.add_(tally)


class _HostClock:
    """For backends whose work is done when a call returns."""

    def start(self) -> Any:
        return time.perf_counter_ns()

    def stop(self, start: Any, meter: _Meter) -> None:
        meter.ns += time.perf_counter_ns() - start
        meter.timed += 1

    def collect(self) -> None:
        """Nothing is pending."""


class _DeviceClock:
    """Pairs of events on the current stream, which nobody waits for."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, _Meter]] = deque()
        self._free: list[torch.cuda.Event] = []

    def start(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None
        return self._record()

    def stop(self, start: Any, meter: _Meter) -> None:
        if start is not None:
            self._pending.append((start, self._record(), meter))
            self.collect()

    def collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            start, end, meter = self._pending.popleft()
            meter.ns += start.elapsed_time(end) * 1e6
            meter.timed += 1
            self._free += [start, end]

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Measurement:
    """Counts and names what one backend does.

    Args:
        backend: that does the work.
        statistics: whether it is counted. ranges: whether it shows in profiles under its name.
    """

    def __init__(
        self, backend: Backend, layout: EPLayout, rank: int, *, statistics: bool, ranges: bool
    ) -> None:
        self.backend = backend
        self.layout = layout
        self.rank = rank
        self.statistics = statistics
        self.ranges = ranges
        self.on_gpu = backend.device is not None and backend.device.type == "cuda"
        self.clock = _DeviceClock() if self.on_gpu else _HostClock()
        self._meters: dict[tuple[str, str, int], _Meter] = {}
        self._layers: dict[str, MeasuredBackend] = {}

    def of(self, layer: str) -> MeasuredBackend:
        """The backend for the calls of one layer."""
        if layer not in self._layers:
            self._layers[layer] = MeasuredBackend(self, layer)
        return self._layers[layer]

    def meter(self, layer: str, verb: str, row_bytes: int) -> _Meter:
        key = (layer, verb, row_bytes)
        if key not in self._meters:
            self._meters[key] = _Meter()
        return self._meters[key]

    def read(self, *, reset: bool) -> Statistics:
        """What was counted so far. On a GPU it waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.backend.device)
        self.clock.collect()
        local = self.layout.num_local_experts
        layers: dict[str, LayerStatistics] = {}
        for (layer, verb, row_bytes), meter in self._meters.items():
            tokens, figures = self._figures(verb, row_bytes, meter)
            one = LayerStatistics(tokens)
            one.verbs[verb] = figures
            layers[layer] = layers.get(layer, LayerStatistics([0] * local)) + one
        if reset:
            self._meters.clear()
        return Statistics(self.rank, local, layers)

    def _figures(
        self, verb: str, row_bytes: int, meter: _Meter
    ) -> tuple[list[int], VerbStatistics]:
        tokens = [0] * self.layout.num_local_experts
        links = {name: Link() for name in LINKS}
        if meter.tally is not None:
            arrived = self.backend.arrivals(meter.tally)
            if verb == "dispatch":
                tokens = arrived.tokens_per_expert
            # What combines is the backward of dispatch, and the other way round.
            combines = verb in ("combine", "dispatch_backward")
            for peer, rows in enumerate(arrived.combined if combines else arrived.dispatched):
                links[self._link(peer)] += Link(rows, rows * row_bytes)
        return tokens, VerbStatistics(
            calls=meter.calls,
            timed=meter.timed,
            us=meter.ns / 1e3,
            wait_us=meter.wait_ns / 1e3,
            waited_for_us={peer: ns / 1e3 for peer, ns in sorted(meter.waited_for_ns.items())},
            links=links,
        )

    def _link(self, peer: int) -> str:
        if peer == self.rank:
            return "own_rank"
        size = self.layout.parallel.ranks_per_host
        on_host = self.backend.name in ("cuda", "nvshmem") or peer // size == self.rank // size
        return "own_host" if on_host else "other_hosts"


class MeasuredBackend:
    """See `moe_ep.backends.base.Backend`: does what the measured backend does, and notes it."""

    def __init__(self, measurement: Measurement, layer: str) -> None:
        self._measurement = measurement
        self._inner = measurement.backend
        self.name, self.checks_indices = self._inner.name, self._inner.checks_indices
        self._layer = layer
        self._opened: tuple[Plan, Any] | None = None  # a dispatch that has begun with `prepare`

    # What callers read and set of a backend is the measured one's.

    @property
    def num_sms(self) -> int:
        return self._inner.num_sms

    @num_sms.setter
    def num_sms(self, value: int) -> None:
        self._inner.num_sms = value

    @property
    def device(self) -> torch.device | None:
        return self._inner.device

    def check(self, call: Call) -> None:
        self._inner.check(call)

    def refuse(self, call: Call) -> NoReturn:
        self._inner.refuse(call)

    def destroy(self) -> None:
        self._inner.destroy()

    def last_wait(self) -> tuple[int, int] | None:
        return self._inner.last_wait()

    def rows_wait(self) -> tuple[int, int] | None:
        return self._inner.rows_wait()

    def tally(self, plan: Any) -> Tensor:
        return self._inner.tally(plan)

    def arrivals(self, tally: Tensor) -> Arrivals:
        return self._inner.arrivals(tally)

    def prepare(
        self,
        topk_idx: Tensor | None,
        call: Call,
        capacity: int | None = None,
        *,
        x: Tensor | None = None,
        probs: Tensor | None = None,
        fp8_scale: str | None = None,
    ) -> Plan:
        start = self._start()
        with self._range(call):
            plan = self._inner.prepare(
                topk_idx, call, capacity, x=x, probs=probs, fp8_scale=fp8_scale
            )
        self._opened = (plan, start)
        return plan

    def dispatch(
        self,
        plan: Any,
        x: Tensor,
        probs: Tensor | None,
        call: Call,
        fp8_scale: str | None = None,
        *,
        dequantize: bool = False,
    ) -> DispatchedRows:
        opened, self._opened = self._opened, None
        begun = opened is not None and opened[0] is plan
        start = opened[1] if begun and opened is not None else self._start()
        with self._range(call):
            arrived = self._inner.dispatch(plan, x, probs, call, fp8_scale, dequantize=dequantize)
        hidden = x.shape[1]
        row_bytes = hidden * x.element_size()
        if fp8_scale is not None:
            row_bytes = hidden + hidden // FP8_BLOCK * 4
        self._note(call, plan, row_bytes, start, counted=begun)
        return arrived

    def combine(
        self,
        plan: Any,
        rows: Tensor,
        call: Call,
        weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        start = self._start()
        with self._range(call):
            result = self._inner.combine(plan, rows, call, weights=weights, values=values)
        self._note(call, plan, rows.shape[1] * rows.element_size(), start)
        return result

    def _start(self) -> Any:
        return self._measurement.clock.start() if self._measurement.statistics else None

    def _note(
        self, call: Call, plan: Any, row_bytes: int, start: Any, counted: bool = False
    ) -> None:
        """counted: it began with an exchange of counts, where ranks wait for the last one."""
        if start is None:
            return
        meter = self._measurement.meter(self._layer, _VERBS[call.phase], row_bytes)
        self._measurement.clock.stop(start, meter)
        meter.calls += 1
        meter.add(self._inner.tally(plan))
        wait = self._inner.last_wait() if counted else self._inner.rows_wait()
        if wait is not None:
            meter.waited(*wait)

    @contextlib.contextmanager
    def _range(self, call: Call) -> Iterator[None]:
        """Names the work in profiles: of torch.profiler, and with a GPU of NVIDIA's tools."""
        if not self._measurement.ranges:
            yield
            return
        name = f"moe_ep.{call.phase}" + (f" layer {self._layer}" if self._layer else "")
        with torch.profiler.record_function(name), _nvtx(name, self._measurement.on_gpu):
            yield


@contextlib.contextmanager
def _nvtx(name: str, on_gpu: bool) -> Iterator[None]:
    if not on_gpu:
        yield
        return
    push: Callable[[str], Any] = torch.cuda.nvtx.range_push
    push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


class Measured:
    """What an ExpertParallel offers to be measured by."""

    backend: Backend
    channel: Channel
    layout: EPLayout
    rank: int
    _measurement: Measurement | None
    _call: Callable[[str], Call]  # the next operation

    def collect_stats(self, on: bool = True) -> None:
        """Begins or ends counting what is moved, how long it takes and who was waited for.

        On this rank alone; calls that run meanwhile are not disturbed. Off (the default, unless
        MOE_EP_STATISTICS=1) it costs nothing. docs/operating.md tells what it costs.

        Args:
            on: False ends it, and what was counted is gone.
        """
        if on != self.collects_stats:
            self._measure(on, self._measurement is not None and self._measurement.ranges)

    @property
    def collects_stats(self) -> bool:
        """Whether statistics are being collected."""
        return self._measurement is not None and self._measurement.statistics

    def stats(self, *, reset: bool = False) -> Statistics:
        """What this rank has counted since `collect_stats()`. No communication.

        On backend cuda it waits for the work queued on the device.

        Args:
            reset: begin anew afterwards.

        Raises:
            ValueError: statistics are not being collected.
        """
        if self._measurement is None or not self.collects_stats:
            raise ValueError(_STATISTICS_OFF)
        return self._measurement.read(reset=reset)

    def gather_stats(self, *, reset: bool = False) -> GroupStatistics:
        """The statistics of every rank, on every rank. Collective; two small rounds of messages.

        Args:
            reset: begin anew afterwards, on this rank.

        Raises:
            ValueError: this rank collects no statistics. The peers get a PeerError.
            PeerTimeoutError: as for `dispatch`.
        """
        call = self._call("statistics")
        mine = None
        try:
            mine = self.stats(reset=reset)
        except ValueError as error:
            call.error = error
        return GroupStatistics(gather(self.channel, call, mine), self.layout.parallel.expert_tensor)

    def _measure(self, statistics: bool, ranges: bool) -> None:
        self._measurement = None
        if statistics or ranges:
            self._measurement = Measurement(
                self.backend, self.layout, self.rank, statistics=statistics, ranges=ranges
            )

    def _backend_for(self, layer: str | int | None) -> Backend:
        if self._measurement is None:
            return self.backend
        return self._measurement.of("" if layer is None else str(layer))
