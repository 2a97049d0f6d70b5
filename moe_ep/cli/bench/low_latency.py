"""Times the low-latency verbs of `moe_ep.Buffer`, beside the bytes that they move.

Legend of shapes: see `moe_ep.low_latency`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_ep import env
from moe_ep.buffer import Buffer
from moe_ep.cli.bench import clocks
from moe_ep.cli.bench.cases import Workload
from moe_ep.cli.bench.ranks import Guard, Ranks
from moe_ep.cli.bench.report import Timing
from moe_ep.cli.bench.traffic import Counts, RowBytes, Traffic, floor_us
from moe_ep.layout import EPLayout

GRAPH_CALLS = 40


@dataclass(frozen=True)
class Case:
    """One line of the table. floor: bytes that any implementation must move; None: not counted."""

    name: str
    action: Callable[[], object]
    traffic: Traffic | None = None
    floor: int | None = None


class Verbs:
    """A Buffer in low-latency mode and one rank's part in its operations. Collective."""

    def __init__(self, work: Workload) -> None:
        layout, ranks = work.layout, work.ranks
        self.x, self.idx, self.weights = work.x, work.topk_idx, work.weights
        self.experts, self.max_tokens = layout.model.num_experts, len(work.x)
        self.fp8 = layout.dispatch.dtype == "fp8_e4m3"
        Buffer.set_num_sms(layout.dispatch.num_sms)
        hint = Buffer.get_low_latency_rdma_size_hint(
            self.max_tokens, layout.model.hidden, ranks.size, self.experts
        )
        with env.chosen_backend(layout.backend):
            self.buffer = Buffer(ranks.new_group(), 0, hint, low_latency_mode=True)
        rows, self.count, self.handle, _, _ = self.dispatch()
        shape = rows[0].shape if isinstance(rows, tuple) else rows.shape
        self.rows = torch.randn(shape, device=self.x.device).bfloat16()
        self.combine()
        for _ in range(2):  # both buffers get random rows
            self.buffer.get_next_low_latency_combine_buffer(self.handle).copy_(self.rows)
            self.combine(zero_copy=True)

    def dispatch(self, hook: bool = False) -> tuple[Any, ...]:
        return self.buffer.low_latency_dispatch(
            self.x,
            self.idx,
            self.max_tokens,
            self.experts,
            use_fp8=self.fp8,
            return_recv_hook=hook,
        )

    def combine(self, handle: Any = None, **options: Any) -> tuple[Any, ...]:
        return self.buffer.low_latency_combine(
            self.rows, self.idx, self.weights, handle or self.handle, **options
        )

    def zero_copy(self, handle: Any = None) -> None:
        self.buffer.get_next_low_latency_combine_buffer(handle or self.handle)
        self.combine(handle, zero_copy=True)

    def both(self, combine: Callable[[Any], object]) -> None:
        combine(self.dispatch()[2])

    def halves(self) -> None:
        """With hooks, called at once."""
        _, _, handle, _, hook = self.dispatch(hook=True)
        hook()
        self.combine(handle, return_recv_hook=True)[2]()


class LowLatencyMeasurement:
    """Of one layout. Arguments: see `moe_ep.cli.bench.runner.Measurement`."""

    def __init__(
        self, layout: EPLayout, ranks: Ranks, options: argparse.Namespace, rate: float | None
    ) -> None:
        self.layout, self.ranks, self.options, self.rate = layout, ranks, options, rate
        self.timings: list[Timing] = []
        self.errors: dict[str, str] = {}
        self.backend: str = layout.backend
        self.round_trip_us: float | None = None

    def run(self) -> dict[str, Any]:
        one = self.layout.replace(**{"tokens_per_rank": 1, "model.hidden": 128})
        for layout, suffix in ((self.layout, ""), (one, ", one token")):
            made, error = self.ranks.attempt(
                lambda layout=layout: Verbs(  # type: ignore[misc]
                    Workload.random(layout, self.ranks, self.options.seed)
                )
            )
            if error is not None:
                self.errors[f"low-latency buffer{suffix}"] = error
            else:
                assert made.buffer._low_latency is not None
                self.backend = made.buffer._low_latency.backend_name
                if not suffix:
                    self.round_trip_us = self._round_trip(made)
                for case in self._cases(made, suffix):
                    self._time(case)
            if made is not None:
                made.buffer.destroy()
        return self._result()

    def _cases(self, verbs: Verbs, suffix: str) -> list[Case]:
        there, back = Case("dispatch", verbs.dispatch), Case("combine", verbs.combine)
        if not suffix:
            there, back = self._counted(verbs)
        if suffix:
            tiny = torch.zeros(1, device=self.ranks.device)
            return [
                *(Case(c.name + suffix, c.action) for c in (there, back)),
                Case("a kernel of torch", lambda: tiny.add_(1)),
            ]
        return [
            there,
            back,
            Case("combine, zero copy", verbs.zero_copy, None, back.floor),
            Case("dispatch + combine", lambda: verbs.both(verbs.combine)),
            Case("dispatch + combine, zero copy", lambda: verbs.both(verbs.zero_copy)),
            Case("dispatch + combine, hooks", verbs.halves),
        ]

    def _counted(self, verbs: Verbs) -> tuple[Case, Case]:
        """Dispatch and combine with their bytes."""
        ranks, row = self.ranks, RowBytes.of(self.layout)
        arriving = int(verbs.count.sum())
        counts = Counts.of(
            verbs.idx, ranks.rank, ranks.size, self.layout.num_local_experts, arriving
        )
        x = counts.tokens * row.x
        there_floor = x + arriving * row.wire
        back_floor = arriving * row.x + x
        staged = (counts.tokens + counts.destinations) * row.wire
        there = Traffic(
            counts.slots * row.wire, there_floor + staged, counts.remote_destinations * row.wire
        )
        # Rows for other ranks are written to their slots and read there.
        copied = arriving - (counts.slots - counts.remote_slots) + counts.remote_slots
        back = Traffic(
            counts.slots * row.x, back_floor + copied * row.x, counts.remote_slots * row.x
        )
        return (
            Case("dispatch", verbs.dispatch, there, there_floor),
            Case("combine", verbs.combine, back, back_floor),
        )

    def _round_trip(self, verbs: Verbs) -> float | None:
        assert verbs.buffer._low_latency is not None
        took, error = self.ranks.attempt(verbs.buffer._low_latency.round_trip_us)
        if error is not None:
            self.errors["signal there and back"] = error
        return max((us for us in self.ranks.gather(took) if us is not None), default=None)

    def _time(self, case: Case) -> None:
        ranks, options = self.ranks, self.options
        guard = Guard(case.action)
        guard()
        error = ranks.first_error(guard.error)
        graph = None
        if error is None and ranks.on_gpu:
            # A first look; the figures that count are those of the graph.
            spread = clocks.back_to_back(guard, ranks, min(options.iterations, 50), options.warmup)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph = asdict(
                    clocks.in_graph(guard, ranks, options.iterations, stream, GRAPH_CALLS)
                )
                torch.cuda.synchronize()
        elif error is None:
            guards = {case.name: guard}
            spread = clocks.in_turns(guards, ranks, options.iterations, options.warmup)[case.name]
        error = error or ranks.first_error(guard.error)
        if error is not None:
            self.errors[case.name] = error
            self.timings.append(Timing(case.name, self.backend, error=error))
            return
        traffic = ranks.gather((case.traffic, case.floor))
        floor = None
        if case.floor is not None and self.rate is not None:
            floor = floor_us([value for _, value in traffic], ranks.device_ids, self.rate)
        counted = [one for one, _ in traffic if one is not None]
        took = spread.median if graph is None else graph["median"]
        self.timings.append(
            Timing(
                case.name,
                self.backend,
                spread.median,
                spread.min,
                spread.max,
                graph_us=graph,
                payload_bytes=max((one.payload for one in counted), default=None),
                hbm_bytes=max((one.hbm for one in counted if one.hbm is not None), default=None),
                link_bytes=max((one.link for one in counted), default=None),
                floor_us=floor,
                ratio_to_floor=None if floor is None else took / floor,
            )
        )

    def _result(self) -> dict[str, Any]:
        return {
            "layout": self.layout.model_dump(),
            "backend": self.backend,
            "tokens": self.layout.tokens_per_rank,
            "peers": {},
            "timings": [asdict(timing) for timing in self.timings],
            "whole_way_us": None,
            "signal_round_trip_us": self.round_trip_us,
            "ratio_to_all_to_all": None,
            "ratios": {},
            "errors": self.errors,
        }
