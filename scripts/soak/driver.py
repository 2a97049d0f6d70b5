"""Runs the two trainings, stretch by stretch: a stretch ends at a kill, or when time is up.

Everything is in the state folder, so that a later call goes on:

state.json             settings, seconds used, stretches so far
disturbed/, alone/     of each training: metrics.jsonl, logs of every stretch, and checkpoints until
                       it is done
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from mixtral import resume
from soak import launch
from soak import options as soak_options
from soak.events import events_of

PHASES = ("disturbed", "alone")
_ENDLESS = 10_000_000  # steps
_START_S = 30.0  # what a stretch may need before its first step
_LAYOUT = """\
model: {{hidden: 64, num_experts: 8, top_k: 2}}
parallel: {{expert: 1}}
dispatch: {{num_sms: {num_sms}}}
"""


class SoakError(RuntimeError):
    """A stretch ended in a way that no disturbance explains."""


class Soak:
    """One soak in its state folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.state.resolve()
        self.file = self.folder / "state.json"
        self.state: dict[str, Any] = {
            "settings": soak_options.settings(options),
            "seconds": 0.0,
            "phase": PHASES[0],
            "steps": None,
            "stretches": [],
        }
        if self.file.exists():
            self.state = json.loads(self.file.read_text())
            self._adopt()

    def _adopt(self) -> None:
        """Takes in a stretch whose call was killed before it could note it."""
        known = {stretch["logs"] for stretch in self.state["stretches"]}
        for logs in sorted(self.folder.glob("*/stretch_*"), key=lambda path: path.name):
            if logs.name not in known:
                end = "kill" if self._victim_died(logs) else "interrupted"
                self.state["stretches"].append(
                    {"phase": logs.parent.name, "logs": logs.name, "seconds": None, "end": end}
                )

    def _victim_died(self, logs: Path) -> bool:
        """Whether the rank that was to be killed in this stretch has been."""
        ranks = range(self.options.ranks)
        events = [event for rank in ranks for event in events_of(logs / f"rank_{rank}.jsonl")]
        return any(event["event"] == "kill" for event in events)

    def mismatch(self) -> str | None:
        """Why this folder can't be continued with these options."""
        was, now = self.state["settings"], soak_options.settings(self.options)
        differ = [f"{k} was {was.get(k)!r}, is {now[k]!r}" for k in now if was.get(k) != now[k]]
        if not differ:
            return None
        return (
            f"{self.folder} holds a soak with other options ({'; '.join(differ)}): use the same, "
            "another --state, or remove the folder"
        )

    def run(self) -> bool:
        """Goes on until both trainings are done or time is up. Whether they are done."""
        started, options = time.time(), self.options
        limit = (options.limit_minutes or float("inf")) * 60
        budget = options.minutes * 60 - self.state["seconds"] if options.minutes else None
        self.call_ends = started + limit
        self.budget_ends = None if budget is None else started + budget
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "layout.yaml").write_text(_LAYOUT.format(num_sms=options.num_sms))
        self._save()
        used = self.state["seconds"]
        while self.state["phase"] in PHASES:
            try:
                is_over = self._stretch()
            finally:
                self.state["seconds"] = used + time.time() - started
                self._save()
            if is_over:
                return False
        return True

    def _stretch(self) -> bool:
        """One launch of all ranks. Whether the time of this call is up."""
        phase = self.state["phase"]
        plan = self._plan(phase)
        logs = Path(plan["logs"])
        logs.mkdir(parents=True)
        (logs / "plan.json").write_text(json.dumps(plan, indent=1))
        print(f"soak: {phase} training, {_what(plan)}", file=sys.stderr, flush=True)
        begin = time.time()
        codes = self._launch(logs)
        stretch = {"phase": phase, "logs": logs.name, "seconds": time.time() - begin}
        events = events_of(logs / "rank_0.jsonl")
        ended = [event for event in events if event["event"] == "end"]
        if self._victim_died(logs):
            self.state["stretches"].append(stretch | {"end": "kill"})
            return time.time() > self.call_ends
        if any(codes) or not ended:
            self.state["stretches"].append(stretch | {"end": "failure", "codes": codes})
            self.state["phase"] = "failed"
            tail = (logs / "output.txt").read_text()[-3000:]
            raise SoakError(f"{logs}: exit statuses {codes} without a kill\n{tail}")
        stops = [event["reason"] for event in events if event["event"] == "stop"]
        reason = stops[-1] if stops else "steps"
        self.state["stretches"].append(stretch | {"end": reason})
        if reason == "call":
            return True
        shutil.rmtree(self.folder / phase / "checkpoints")  # nothing goes on from them
        if phase == PHASES[0]:
            self.state["steps"] = ended[-1]["step"]
        self.state["phase"] = PHASES[1] if phase == PHASES[0] else "done"
        return False

    def _plan(self, phase: str) -> dict[str, Any]:
        """What the ranks of the next stretch are told."""
        options, folder = self.options, self.folder / phase
        number = len(self.state["stretches"])
        disturbed = phase == PHASES[0]
        steps = self.state["steps"] or options.steps or _ENDLESS
        checkpoints = folder / "checkpoints"
        flags = ["--steps", steps, "--save", checkpoints, "--save-every", options.save_every,
                 "--out", folder, "--device", options.device, "--nproc", options.ranks,
                 "--ep", options.ranks, "--layout", self.folder / "layout.yaml",
                 "--micro-batch", 2, "--seq-len", 64, "--warmup", 5, "--eval-every", 0,
                 "--seed", options.seed, "--timeout-s", 300,
                 "--backend", "cuda" if options.device == "cuda" else "reference"]  # fmt: skip
        with contextlib.suppress(ValueError):  # nothing to go on from yet
            flags += ["--resume", resume.latest(checkpoints)]
        return {
            "flags": [str(flag) for flag in flags],
            "seed": options.seed,
            "timeout_s": options.timeout_s,
            "disturbed": disturbed,
            "logs": str(folder / f"stretch_{number:03d}"),
            "kill": self._kill() if disturbed else None,
            "call_ends": self.call_ends if self.call_ends != float("inf") else 1e12,
            "budget_ends": self.budget_ends if disturbed else None,
            "start_s": _START_S,
        }

    def _kill(self) -> dict[str, Any] | None:
        """The next rank to die, after an equal share of the steps, or of the time."""
        options = self.options
        kills = sum(stretch["end"] == "kill" for stretch in self.state["stretches"])
        if kills >= options.kills:
            return None
        share = (kills + 1) / (options.kills + 1)
        at_step, at_time = options.save_every, 0.0
        if options.steps:
            at_step = max(at_step, int(share * options.steps) // options.save_every
                          * options.save_every)  # fmt: skip
        else:
            # The undisturbed training gets the other half of the time.
            still = share * options.minutes * 60 / 2 - self.state["seconds"]
            at_time = time.time() + still
        rank = (options.seed + kills) % options.ranks
        return {"rank": rank, "at_step": at_step, "at_time": at_time, "every": options.save_every}

    def _launch(self, logs: Path) -> list[int]:
        """Runs all ranks to their end; their exit statuses, or on a GPU that of the launcher."""
        options, plan, output = self.options, logs / "plan.json", logs / "output.txt"
        os.environ.update(
            OMP_NUM_THREADS="1",
            CUDA_DEVICE_MAX_CONNECTIONS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
            LOCAL_WORLD_SIZE=str(options.ranks),
        )
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        deadline = time.monotonic() + self._patience()
        if options.device == "cuda":
            return [launch.with_mps(options.ranks, plan, output, deadline)]
        return launch.forked(options.ranks, plan, output, deadline)

    def _patience(self) -> float:
        """Seconds after which ranks that have not stopped by themselves are stopped."""
        ends = min(self.call_ends, self.budget_ends or float("inf"))
        left = max(ends - time.time(), 0.0) if ends != float("inf") else 3600.0
        return left + 4 * self.options.timeout_s + 120.0

    def _save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.rename(self.file)


def _what(plan: dict[str, Any]) -> str:
    kill = plan["kill"]
    begins = "from a checkpoint" if "--resume" in plan["flags"] else "from the start"
    return begins + ("" if kill is None else f"; rank {kill['rank']} will be killed")
