"""Runs the benchmark: one measurement for each layout, its table, the JSON file and the plot."""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

import moe_ep
from moe_ep.cli.bench import clocks, report
from moe_ep.cli.bench.cases import Case, Session, Workload
from moe_ep.cli.bench.clocks import Spread
from moe_ep.cli.bench.low_latency import LowLatencyMeasurement
from moe_ep.cli.bench.options import check, layouts, wants_gpu
from moe_ep.cli.bench.peers import PEERS, whole_way
from moe_ep.cli.bench.plot import draw
from moe_ep.cli.bench.ranks import Guard, Ranks, open_ranks
from moe_ep.cli.bench.report import Timing
from moe_ep.cli.bench.traffic import floor_us
from moe_ep.layout import EPLayout

_HOST_TIMED = ("dispatch, cached", "combine")
_IN_GRAPHS = ("notify", "dispatch", "dispatch, cached", "combine", "whole way")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if any case or peer failed.

    Raises:
        ValueError: the flags or the layout are not valid.
    """
    check(options)
    with open_ranks(wants_gpu(options)) as ranks:
        plans = layouts(options, ranks.size)
        rate = clocks.copy_rate(ranks) if ranks.on_gpu else None
        shared = _environment(ranks, options, rate)
        runs: list[dict[str, Any]] = []
        for layout in plans:
            kind = MEASUREMENTS[options.mode]
            runs.append(kind(layout, ranks, options, rate).run())
            if ranks.rank == 0:
                print(report.table(shared, runs[-1]), flush=True)
                if options.json is not None:  # after each: a later fault must not lose this one
                    report.write(options.json, shared, runs, complete=len(runs) == len(plans))
        if ranks.rank == 0:
            if options.plot is not None:
                draw(options.plot, shared, runs)
            for file in filter(None, (options.json, options.plot)):
                print(f"written: {file}")
        ranks.barrier()  # a launcher may end all ranks when one of them has failed
    return 1 if any(run["errors"] for run in runs) else 0


class Measurement:
    """Of one layout: its backend's cases, and the peers'.

    Args:
        rate: bytes a second of a device copy; None on a CPU, where there is no floor.
    """

    def __init__(
        self, layout: EPLayout, ranks: Ranks, options: argparse.Namespace, rate: float | None
    ) -> None:
        self.layout, self.ranks, self.options, self.rate = layout, ranks, options, rate
        self.timings: dict[str, Timing] = {}
        self.errors: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.backend: str = layout.backend
        self.work: Workload

    def run(self) -> dict[str, Any]:
        work, error = self.ranks.attempt(
            lambda: Workload.random(self.layout, self.ranks, self.options.seed)
        )
        if error is not None:
            self.errors["workload"] = error
            return self._result()
        self.work = work
        session = self._open(f"backend {self.layout.backend}")
        if session is not None:
            self.backend = session.name
        if self.ranks.on_gpu:
            self._on_gpu(session)
        else:
            self._on_cpu(session)
        return self._result()

    def _open(self, what: str, capacity: int | None = None) -> Session | None:
        session: Session | None
        session, error = self.ranks.attempt(lambda: Session(self.work, capacity))
        if error is None:
            return session
        self.errors[what] = error
        if session is not None:
            session.destroy()
        return None

    def _peers(self) -> list[Case]:
        names = list(self.options.peer)
        if self.ranks.is_native:
            names = list(dict.fromkeys(["all_to_all", *names]))
        cases: list[Case] = []
        for name in names:
            built, error = self.ranks.attempt(partial(PEERS[name], self.work))
            if error is not None:
                self.errors[f"peer {name}"] = error
                continue
            self.versions[name] = built[0]
            cases += built[1]
        return cases

    def _each(
        self, session: Session | None, visit: Callable[[Case, Session], object]
    ) -> Session | None:
        """Visits every case of the backend; returns the session that is good afterwards."""
        for name in [case.name for case in session.cases()] if session is not None else []:
            assert session is not None
            visit(next(case for case in session.cases() if case.name == name), session)
            if name in self.errors:  # it may have broken the session
                session.destroy()
                session = self._open(f"backend {self.layout.backend}, after {name}")
                if session is None:
                    break
        return session

    def _try(self, case: Case) -> bool:
        """Calls it once; what fails is not timed."""
        guard = Guard(case.action)
        guard()
        if self.ranks.on_gpu:
            guard.run(torch.cuda.synchronize)
        error = self.ranks.first_error(guard.error)
        if error is not None:
            self._failed(case, error)
        return error is None

    # -- a CPU ------------------------------------------------------------------------------------

    def _on_cpu(self, session: Session | None) -> None:
        session = self._each(session, lambda case, _: self._try(case))
        peers = self._peers()
        for case in peers:
            self._try(case)
        own = session.cases() if session is not None else []
        cases = [case for case in (*peers, *own) if case.name not in self.errors]
        guards = {case.name: Guard(case.action) for case in cases}
        options = self.options
        spreads = clocks.in_turns(guards, self.ranks, options.iterations, options.warmup)
        for case in cases:
            self._keep(case, guards[case.name], spreads[case.name])
        if session is not None:
            session.destroy()

    # -- a GPU ------------------------------------------------------------------------------------

    def _on_gpu(self, session: Session | None) -> None:
        session = self._each(
            session,
            lambda case, now: self._time_on_gpu(case, now.line_up, case.name in _HOST_TIMED),
        )
        for case in self._peers():
            self._time_on_gpu(case, session.line_up if session is not None else _nothing, False)
        if session is not None:
            session.destroy()
            if session.ep.backend.device is not None:
                self._static(session.num_rows)

    def _time_on_gpu(self, case: Case, line_up: Callable[[], object], host: bool) -> None:
        ranks, options = self.ranks, self.options
        if not self._try(case):
            return
        guard = Guard(case.action)
        spread = clocks.back_to_back(guard, ranks, options.iterations, options.warmup)
        alone = clocks.alone(guard, ranks, options.iterations, line_up)
        host_us = clocks.on_host(guard, ranks) if host else None
        self._keep(case, guard, spread, alone_us=asdict(alone), host_us=host_us)

    def _static(self, num_rows: int) -> None:
        """What a static capacity allows: CUDA graphs, and a dispatch that never waits."""
        capacity = self.layout.dispatch.capacity or max(self.ranks.gather(num_rows))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            session = self._open("static capacity", capacity)
            if session is None:
                return
            cases = {case.name: case for case in session.cases()}
            guard = Guard(cases["dispatch"].action)
            host_us = clocks.on_host(guard, self.ranks)
            self._add("dispatch", "host", guard, host_us=host_us)
            for name in _IN_GRAPHS:
                guard = Guard(cases[name].action)
                spread = clocks.in_graph(guard, self.ranks, self.options.iterations, stream)
                if not self._add(name, "graph", guard, graph_us=asdict(spread)):
                    break  # a failed capture may leave the session unusable
            torch.cuda.synchronize()
            session.destroy()

    # -- results ----------------------------------------------------------------------------------

    def _failed(self, case: Case, error: str) -> None:
        self.errors[case.name] = error
        self.timings[case.name] = Timing(case.name, case.by, error=error)

    def _keep(self, case: Case, guard: Guard, spread: Spread, **more: Any) -> None:
        error = self.ranks.first_error(guard.error)
        if error is not None:
            self._failed(case, error)
            return
        timing = Timing(case.name, case.by, spread.median, spread.min, spread.max, **more)
        every = [traffic for traffic in self.ranks.gather(case.traffic) if traffic is not None]
        if every:
            hbm = [traffic.hbm for traffic in every if traffic.hbm is not None]
            timing = replace(
                timing,
                payload_bytes=max(traffic.payload for traffic in every),
                hbm_bytes=max(hbm, default=None),
                link_bytes=max(traffic.link for traffic in every),
            )
            if hbm and self.rate is not None:
                floor = floor_us(hbm, self.ranks.device_ids, self.rate)
                timing = replace(timing, floor_us=floor, ratio_to_floor=spread.median / floor)
        self.timings[case.name] = timing

    def _add(self, name: str, what: str, guard: Guard, **figures: Any) -> bool:
        error = self.ranks.first_error(guard.error)
        if error is not None:
            self.errors[f"{name}, {what}"] = error
        elif name in self.timings and self.timings[name].error is None:
            self.timings[name] = replace(self.timings[name], **figures)
        return error is None

    def _result(self) -> dict[str, Any]:
        medians = {name: t.median_us for name, t in self.timings.items() if t.error is None}
        ratios = _ratios(medians, self.timings)
        there, back = medians.get("dispatch"), medians.get("combine")
        return {
            "layout": self.layout.model_dump(),
            "backend": self.backend,
            "tokens": self.layout.tokens_per_rank,
            "peers": self.versions,
            "timings": [asdict(timing) for timing in self.timings.values()],
            "whole_way_us": there + back if there is not None and back is not None else None,
            "ratio_to_all_to_all": ratios.get("all_to_all"),
            "ratios": ratios,
            "errors": self.errors,
        }


def _ratios(medians: dict[str, Any], timings: dict[str, Timing]) -> dict[str, float]:
    """Dispatch and combine together, as a multiple of the floor and of each peer."""
    ratios: dict[str, float] = {}
    ours = medians.get("whole way")
    if ours is not None and timings["whole way"].ratio_to_floor is not None:
        ratios["floor"] = timings["whole way"].ratio_to_floor
    parts = ("dispatch", "combine", "all_to_all there", "all_to_all back")
    if all(name in medians for name in parts):
        there, back, bare_there, bare_back = (medians[name] for name in parts)
        ratios["all_to_all"] = (there + back) / (bare_there + bare_back)
    for peer in PEERS:
        theirs = medians.get(whole_way(peer))
        if ours is not None and theirs:
            ratios[peer] = ours / theirs
    return ratios


def _environment(ranks: Ranks, options: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """What is the same for all measurements of one run."""
    return {
        "ranks": ranks.size,
        "devices": len(set(ranks.device_ids)),
        "device": _device_name(ranks),
        "driver": _driver() if ranks.on_gpu and ranks.rank == 0 else None,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "moe_ep": moe_ep.__version__,
        "all_to_all_backend": ranks.transport,
        "threads_per_rank": torch.get_num_threads(),
        "iterations": options.iterations,
        "copy_GBps": None if rate is None else rate / 1e9,
    }


def _device_name(ranks: Ranks) -> str:
    if ranks.on_gpu:
        return str(torch.cuda.get_device_name(ranks.device))
    cores = torch.multiprocessing.cpu_count()
    return f"{platform.processor() or platform.machine()} CPU, {cores} cores"


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return next(iter(done.stdout.splitlines()), None)


def _nothing() -> None:
    pass


MEASUREMENTS: dict[str, type[Measurement] | type[LowLatencyMeasurement]] = {
    "throughput": Measurement,
    "low_latency": LowLatencyMeasurement,
}
