"""What a probe says, and what the user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_ep.layout import EPLayout

if TYPE_CHECKING:
    from moe_ep.doctor.machine import Machine

Level = Literal["ok", "warning", "failure", "not_applicable"]

EXIT_CODES: dict[Level, int] = {"ok": 0, "not_applicable": 0, "warning": 1, "failure": 2}

# Backends that cannot run without what the key's backend needs.
_DEPENDENTS = {"cuda": ("cuda", "nvshmem"), "nvshmem": ("nvshmem",)}
_WITHOUT_NVSHMEM = ("cuda", "reference")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        id: stable name, "area.thing"; docs/doctor.md lists them.
        seen: what was found, with the value.
        why: what it is needed for, or what goes wrong; empty where `level` is ok.
        fix: the commands or the setting that would fix it; empty where nothing is to be done.
    """

    id: str
    level: Level
    seen: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Wish:
    """What the user wants to run.

    Attributes:
        backend: asked for by name, or None ("auto" is no demand: it falls back).
        layout: judged against the machine, or None.
        asked_by: where `backend` comes from, for messages.
    """

    backend: str | None = None
    layout: EPLayout | None = None
    asked_by: str = ""

    def missing(self, needed_by: str, machine: Machine) -> Level:
        """How bad it is that something which a backend needs is not there.

        Args:
            needed_by: "cuda" or "nvshmem".

        Returns:
            A failure where a backend that needs it was asked for; "not_applicable" on a machine
            without GPUs, and for "nvshmem" where another backend was asked for or one host is
            enough; else a warning.
        """
        if self.backend in _DEPENDENTS[needed_by]:
            return "failure"
        if needed_by == "nvshmem" and (self.backend in _WITHOUT_NVSHMEM or self._fits_one_host()):
            return "not_applicable"
        return "warning" if machine.has_gpus() else "not_applicable"

    def _fits_one_host(self) -> bool:
        """Whether the layout, if there is one, needs no way between hosts."""
        if self.layout is None:
            return False
        parallel = self.layout.parallel
        return parallel.group_size <= parallel.ranks_per_host


def worst(findings: list[Finding]) -> Level:
    """The level that decides the exit code."""
    levels: list[Level] = ["failure", "warning"]
    present = {finding.level for finding in findings}
    return next((level for level in levels if level in present), "ok")
