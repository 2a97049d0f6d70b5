"""Runs the two trainings, stretch by stretch: a stretch ends at a kill, or when time is up.

Everything is in the state folder, so that a later call goes on:

state.json             settings, seconds used, stretches so far
disturbed/, alone/     of each training: metrics.jsonl, checkpoints, and logs of every stretch
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mixtral import resume
from soak import options as soak_options
from soak.options import ROOT

PHASES = ("disturbed", "alone")
_ENDLESS = 10_000_000  # steps
_START_S = 30.0  # what a stretch may need before its first step
_KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}
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
        events = [
            json.loads(line)
            for line in (logs / "rank_0.jsonl").read_text().splitlines()
        ] if (logs / "rank_0.jsonl").exists() else []  # fmt: skip
        ended = [event for event in events if event["event"] == "end"]
        if plan["kill"] is not None and any(self._died(logs, rank) for rank in range(len(codes))):
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

    def _died(self, logs: Path, rank: int) -> bool:
        file = logs / f"rank_{rank}.jsonl"
        return file.exists() and '"event": "kill"' in file.read_text()

    def _launch(self, logs: Path) -> list[int]:
        """Runs all ranks to their end; their exit statuses."""
        options = self.options
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        command = [sys.executable, "-m", "soak.worker", str(logs / "plan.json")]
        with (logs / "output.txt").open("w") as output:
            if options.device == "cuda" and options.ranks > 1:
                command = ["bash", str(ROOT / "scripts" / "with_mps.sh"), str(options.ranks),
                           *command]  # fmt: skip
                processes = [_start(command, environment, output)]
            else:
                environment |= {
                    "WORLD_SIZE": str(options.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(_free_port()),
                }
                processes = [
                    _start(command, environment | {"RANK": str(r), "LOCAL_RANK": str(r)}, output)
                    for r in range(options.ranks)
                ]
            return _finish(processes, self._patience())

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


def _start(command: list[str], environment: dict[str, str], output: Any) -> subprocess.Popen:
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )


def _finish(processes: list[subprocess.Popen], limit_s: float) -> list[int]:
    """Exit statuses; no process outlives the call."""
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        return [124 if p.returncode is None else p.returncode for p in processes]
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(30)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
