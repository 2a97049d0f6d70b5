"""Which backends run here, and why the others don't."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ep.backends import reasons
from moe_ep.doctor.commands import Command, run_command
from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine
from moe_ep.layout import EPLayout

_LIMIT_S = 60.0

# Findings that must be "ok" for a backend to run, when a recorded machine is judged.
_NEEDS = {
    "nvshmem": ("gpu.devices", "python.core", "cuda.runtime", "nvshmem.module"),
    "cuda": ("gpu.devices", "python.core", "cuda.runtime"),
    "reference": ("python.torch",),
}


@dataclass(frozen=True)
class Verdict:
    """Whether a backend runs here, and why not."""

    backend: str
    runs: bool
    reason: str = ""


def verdicts(machine: Machine, wish: Wish, findings: Sequence[Finding]) -> list[Verdict]:
    """One per backend, fastest first. A live machine is asked (`moe_ep.backends.reasons`), a
    recorded one judged by its findings."""
    if not machine.live:
        return _from_findings(findings)
    layout = wish.layout or EPLayout(
        model={"hidden": 1024, "num_experts": 8, "top_k": 2}, parallel={"expert": 1}
    )
    try:
        answer = _ask(layout) if machine.has_gpus() else reasons(layout)
    except TimeoutError as error:
        return [Verdict(name, False, str(error)) for name in _NEEDS]
    except ValueError:  # it crashed
        return _from_findings(findings)
    return [Verdict(name, reason is None, reason or "") for name, reason in answer.items()]


def _ask(layout: EPLayout) -> dict[str, str | None]:
    """`reasons`, in another process: a GPU's driver may hang or crash it."""
    argv = (sys.executable, "-m", "moe_ep.doctor.live", "backends", layout.model_dump_json())
    output = run_command(Command(argv, _LIMIT_S))
    lines = output.text.strip().splitlines() if output else []
    answer: dict[str, str | None] = json.loads(lines[-1] if lines else "")
    return answer


def _from_findings(findings: Sequence[Finding]) -> list[Verdict]:
    by_id = {finding.id: finding for finding in findings}
    answers = []
    for backend, needs in _NEEDS.items():
        bad = [by_id[name] for name in needs if name in by_id and by_id[name].level != "ok"]
        unknown = [name for name in needs if name not in by_id]
        reason = bad[0].seen if bad else f"{unknown[0]} is not known" if unknown else ""
        answers.append(Verdict(backend, not reason, reason))
    return answers


def of_wish(wish: Wish, answers: Sequence[Verdict]) -> list[Finding]:
    """A finding about the backend that was asked for by name; none where none was."""
    return [
        Finding(f"backend.{answer.backend}", "ok", f"runs here, as {wish.asked_by} asks")
        if answer.runs
        else Finding(
            f"backend.{answer.backend}",
            "failure",
            f"cannot run: {answer.reason}",
            f"{wish.asked_by} asks for it by name, so nothing falls back",
            "mend what the reason says, or set backend: auto",
        )
        for answer in answers
        if answer.backend == wish.backend
    ]
