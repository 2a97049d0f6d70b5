"""The doctor's answer: for people, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_ep.doctor.finding import EXIT_CODES, Finding, Wish, worst
from moe_ep.doctor.probe import Examined
from moe_ep.doctor.verdicts import Verdict

SCHEMA = 1
_WIDTH = 100
_HEADLINES = ("gpu.devices", "python.version", "python.torch", "cuda.driver")


@dataclass(frozen=True)
class Report:
    """Attributes: source: "this machine" or the recorded tree. later: findings of no probe (the
    backend asked for, other ranks)."""

    version: str
    source: str
    wish: Wish
    examined: Sequence[Examined]
    later: Sequence[Finding]
    backends: Sequence[Verdict]

    def findings(self) -> list[Finding]:
        return [f for probe in self.examined for f in probe.findings] + list(self.later)

    def exit_code(self) -> int:
        """0: nothing is wrong; 1: warnings; 2: failures."""
        return EXIT_CODES[worst(self.findings())]


def as_json(report: Report) -> dict[str, Any]:
    """Everything; docs/doctor.md describes the keys."""
    findings = [
        {**asdict(finding), "area": probe.area, "probe_seconds": round(probe.seconds, 3)}
        for probe in report.examined
        for finding in probe.findings
    ]
    findings += [{**asdict(f), "area": "job", "probe_seconds": None} for f in report.later]
    return {
        "schema": SCHEMA,
        "moe_ep": report.version,
        "source": report.source,
        "backend_asked": report.wish.backend,
        "exit_code": report.exit_code(),
        "findings": findings,
        "backends": [asdict(verdict) for verdict in report.backends],
    }


def as_text(report: Report) -> str:
    """What runs here, what is well in one line, what isn't with its fix (JSON says why)."""
    findings = report.findings()
    headline = [f.seen for name in _HEADLINES for f in findings if f.id == name]
    lines = [f"moe-ep doctor {report.version}, {report.source}: {'; '.join(headline)}", ""]
    width = len("not needed ")
    lines.append(f"{'backend':<{width}}runs here")
    for verdict in report.backends:
        answer = "yes" if verdict.runs else f"no: {verdict.reason}"
        lines += _wrapped(f"{verdict.backend:<{width}}", answer)
    lines.append("")
    for level, label in (("ok", "ok"), ("not_applicable", "not needed")):
        names = _names(findings, level)
        if names:
            lines += _wrapped(f"{label:<{width}}", " ".join(names))
    for level in ("warning", "failure"):
        for finding in findings:
            if finding.level == level:
                lines += _problem(finding)
    counts = {level: sum(f.level == level for f in findings) for level in ("failure", "warning")}
    summary = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts.items())
    return "\n".join([*lines, f"{summary}; exit code {report.exit_code()}"])


def _names(findings: Sequence[Finding], level: str) -> list[str]:
    """Ids of one level; "area.*" where two or more of an area are all of it."""
    names = []
    for finding in findings:
        if finding.level != level:
            continue
        area = finding.id.partition(".")[0]
        levels = [f.level for f in findings if f.id.partition(".")[0] == area]
        name = f"{area}.*" if len(levels) > 1 and set(levels) == {level} else finding.id
        if name not in names:
            names.append(name)
    return names


def _problem(finding: Finding) -> list[str]:
    lines = _wrapped(f"{finding.level:<11}", f"{finding.id}: {finding.seen}")
    if finding.fix:
        lines.append(f"{'  fix':<11}{finding.fix}")  # whole, so that it can be copied
    return lines


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start]
