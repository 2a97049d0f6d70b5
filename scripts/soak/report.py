"""What a soak has shown: read from its state folder, judged, and written down."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak.driver import PHASES
from soak.events import events_of

LOSS_LIMIT = 1e-6
# Growth that is allowed in 1000 steps. A leaked row buffer a step, of 64 tokens x 64 columns x 4
# bytes, adds 16 MiB; a leaked handle some hundred objects a step. Resident memory also grows by
# what an allocator cannot use again between pieces of changing sizes.
LIMITS = {"rss": 16 << 20, "live": 8 << 20, "blocks": 50_000, "cuda": 1 << 20}
# Caches of torch and of the frameworks fill while shapes are new: expert loads differ in each step.
WARM_UP_STEPS = 130
LEAST_SAMPLES = 70  # fewer steps after it say nothing about growth


@dataclass
class Stretch:
    """Events of all ranks in one launch."""

    phase: str
    name: str
    end: str
    kill: dict[str, Any] | None
    ranks: list[list[dict[str, Any]]]

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(r, e) for r, events in enumerate(self.ranks) for e in events if e["event"] == kind]


@dataclass
class Findings:
    """The report: what was counted, and what holds. over: nothing more is to come."""

    over: bool = True
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, name: str, holds: bool, text: str) -> None:
        self.verdicts.append({"name": name, "holds": bool(holds), "text": text})

    @property
    def all_hold(self) -> bool:
        return all(verdict["holds"] for verdict in self.verdicts)

    def text(self) -> str:
        failed = "FAIL" if self.over else "not "
        lines = [
            f"{'ok  ' if verdict['holds'] else failed} {verdict['name']:<9} {verdict['text']}"
            for verdict in self.verdicts
        ]
        return "\n".join(lines)


def read(folder: Path) -> tuple[dict[str, Any], list[Stretch]]:
    """The state, and every stretch with its events."""
    state = json.loads((folder / "state.json").read_text())
    stretches = []
    for known in state["stretches"]:
        logs = folder / known["phase"] / known["logs"]
        kill = json.loads((logs / "plan.json").read_text())["kill"]
        ranks = [
            events_of(logs / f"rank_{rank}.jsonl") for rank in range(state["settings"]["ranks"])
        ]
        stretches.append(Stretch(known["phase"], known["logs"], known["end"], kill, ranks))
    return state, stretches


def judge(state: dict[str, Any], stretches: list[Stretch]) -> Findings:
    """Everything the soak is for, one verdict each."""
    found = Findings(over=state["phase"] not in PHASES)
    found.figures = {
        "settings": state["settings"],
        "steps": state["steps"],
        "seconds": round(state["seconds"], 1),
        "stretches": state["stretches"],
    }
    done = state["phase"] == "done"
    what = f"{len(stretches)} launches, {state['seconds']:.0f} s"
    text = f"{state['steps']} steps, {what}" if done else f"{what}; {state['phase']}"
    found.judge("finished", done, text)
    if not found.over:
        return found
    _judge_faults(found, state["settings"], stretches)
    _judge_losses(found, stretches)
    _judge_rows(found, stretches)
    _judge_memory(found, stretches)
    return found


def _judge_faults(found: Findings, settings: dict[str, Any], stretches: list[Stretch]) -> None:
    stalls = [event["seconds"] for stretch in stretches for _, event in stretch.of("stall")]
    kills, told, wrong = [], [], []
    for stretch in stretches:
        died = stretch.of("kill")
        for rank, event in died:
            kills.append({"rank": rank, "step": event["step"], "in": event["verb"]})
            errors = dict(stretch.of("error"))
            for other in range(settings["ranks"]):
                if other == rank:
                    continue
                error = errors.get(other)
                text = "no error" if error is None else error["text"]
                named = re.search(rf"\b(for|to) rank {rank}\b", text) is not None
                late = None if error is None else error["time"] - event["time"]
                told.append({"rank": other, "text": text, "named": named, "after_s": late})
        if not died:
            wrong += [event["text"] for _, event in stretch.of("error")]
    found.figures |= {
        "stalls": {"count": len(stalls), "seconds": round(sum(stalls), 2)},
        "kills": kills,
        "errors": told,
        "unexplained_errors": wrong,
    }
    found.judge(
        "faults",
        len(kills) == settings["kills"] and len(stalls) > 0,
        f"{len(stalls)} stalls ({sum(stalls):.1f} s), {len(kills)} of {settings['kills']} kills",
    )
    named = sum(error["named"] for error in told)
    slowest = max((e["after_s"] for e in told if e["after_s"] is not None), default=0.0)
    found.judge(
        "errors",
        named == len(told) == (settings["ranks"] - 1) * len(kills) and not wrong,
        f"{named} of {len(told)} survivors named the dead rank, within {slowest:.1f} s; "
        f"{len(wrong)} errors without a kill",
    )


def losses(stretches: list[Stretch], phase: str) -> tuple[dict[int, float], int, float]:
    """Of one training: the loss of each step, how many steps were done again, and the largest
    difference between their losses."""
    known: dict[int, float] = {}
    again, largest = 0, 0.0
    for stretch in stretches:
        for event in stretch.ranks[0] if stretch.phase == phase else []:
            if event["event"] == "step":
                step, loss = event["step"], event["loss"]
                if step in known:
                    again, largest = again + 1, max(largest, abs(loss - known[step]))
                known[step] = loss
    return known, again, largest


def _judge_losses(found: Findings, stretches: list[Stretch]) -> None:
    disturbed, again, apart = losses(stretches, PHASES[0])
    alone, *_ = losses(stretches, PHASES[1])
    common = sorted(disturbed.keys() & alone.keys())
    largest = max((abs(disturbed[s] - alone[s]) for s in common), default=0.0)
    last = common[-1] if common else None
    complete = bool(common) and disturbed.keys() == alone.keys() == set(range(1, last + 1))
    found.figures["losses"] = {
        "compared_steps": len(common),
        "largest_difference": largest,
        "bit_equal": bool(common) and largest == 0.0,
        "final_step": last,
        "final_disturbed": disturbed.get(last),
        "final_alone": alone.get(last),
        "steps_done_again": again,
        "largest_difference_when_done_again": apart,
    }
    text = "no step to compare"
    if common:
        equal = "bit for bit" if largest == 0.0 else f"within {largest:.1e}"
        text = (
            f"{len(common)} steps equal {equal}; step {last}: {disturbed[last]:.6f} disturbed, "
            f"{alone[last]:.6f} alone; {again} steps done again, {apart:.1e} apart"
        )
    found.judge("losses", complete and max(largest, apart) <= LOSS_LIMIT, text)


def _judge_rows(found: Findings, stretches: list[Stretch]) -> None:
    # Ranks compare what was routed with what arrived in every step, and stop if it differs.
    rows = [e["rows"] for s in stretches for rank, e in s.of("step") if rank == 0]
    found.figures["rows_dispatched"] = sum(rows)
    found.judge("rows", sum(rows) > 0, f"{sum(rows)} rows in {len(rows)} steps, none lost")


def growth(samples: list[tuple[int, int]]) -> float:
    """Bytes per 1000 steps: Theil's slope, the median over all pairs of samples (step, bytes).

    Unlike a fitted line it does not follow the few large steps of an allocator.
    """
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0])
        for number, a in enumerate(samples)
        for b in samples[number + 1 :]
    )
    return 1000 * slopes[len(slopes) // 2] if slopes else 0.0


def _judge_memory(found: Findings, stretches: list[Stretch]) -> None:
    processes, worst = [], dict.fromkeys(LIMITS, 0.0)
    for stretch in stretches:
        for rank, events in enumerate(stretch.ranks):
            steps = [event for event in events if event["event"] == "step"][WARM_UP_STEPS:]
            if len(steps) < LEAST_SAMPLES:
                continue
            thinned = steps[:: max(len(steps) // 400, 1)]
            one: dict[str, Any] = {"phase": stretch.phase, "stretch": stretch.name, "rank": rank}
            for kind in LIMITS:
                samples = [(event["step"], event[kind]) for event in thinned if kind in event]
                if samples:
                    one[kind] = {"last": samples[-1][1], "per_1000_steps": round(growth(samples))}
                    worst[kind] = max(worst[kind], growth(samples))
            processes.append(one)
    found.figures["memory"] = processes
    text = f"no process ran {WARM_UP_STEPS + LEAST_SAMPLES} steps: not judged"
    if processes:
        text = (
            f"{len(processes)} processes; largest growth in 1000 steps: "
            f"{worst['rss'] / 2**20:.1f} MiB resident, {worst['live'] / 2**20:.1f} MiB allocated, "
            f"{worst['blocks']:.0f} Python objects, {worst['cuda'] / 2**20:.2f} MiB of a GPU"
        )
    found.judge("memory", all(worst[kind] <= limit for kind, limit in LIMITS.items()), text)


def write(folder: Path, found: Findings, stretches: list[Stretch]) -> str:
    """report.json, report.txt and soak.png; returns what to print."""
    whole = {"holds": found.all_hold, "verdicts": found.verdicts, **found.figures}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    lines = [found.text(), f"report    {folder / 'report.json'}"]
    from soak import plot

    problem = plot.draw(folder / "soak.png", stretches)
    lines.append(problem or f"picture   {folder / 'soak.png'}")
    text = "\n".join(lines) + "\n"
    (folder / "report.txt").write_text(text)
    return text
