"""Running probes: all at once, each guarded and within its time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine, NotRecordedError


@dataclass(frozen=True)
class Probe:
    """One look at the machine.

    Attributes:
        name: the id of the finding that replaces its own where it raises or takes too long.
        area: packages, cuda, gpu, nvshmem, network or environment.
        look: yields findings; it only reads, and may raise.
        limit_s: longest time it may take, more than the commands it waits for may.
    """

    name: str
    area: str
    look: Callable[[Machine, Wish], Iterable[Finding]]
    limit_s: float


@dataclass(frozen=True)
class Examined:
    """What a probe found, and how long it took."""

    area: str
    findings: tuple[Finding, ...]
    seconds: float


def examine(machine: Machine, wish: Wish, probes: Sequence[Probe]) -> list[Examined]:
    """Runs every probe in a thread of its own.

    Returns:
        One entry per probe, in their order, after the longest limit at the latest. A probe that
        raises or is late is a finding too; the thread of a late one is left behind.
    """
    results: dict[str, Examined] = {}

    def run(probe: Probe) -> None:
        started = time.monotonic()
        findings = _guarded(probe, machine, wish)
        results[probe.name] = Examined(probe.area, findings, time.monotonic() - started)

    started = time.monotonic()
    threads = [threading.Thread(target=run, args=(probe,), daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    for probe, thread in zip(probes, threads, strict=True):
        thread.join(max(0.0, started + probe.limit_s - time.monotonic()))
    done = dict(results)  # late ones don't slip in while we look
    return [done.get(probe.name) or _late(probe) for probe in probes]


def _guarded(probe: Probe, machine: Machine, wish: Wish) -> tuple[Finding, ...]:
    try:
        return tuple(_needed(finding) for finding in probe.look(machine, wish))
    except NotRecordedError as error:
        return (Finding(probe.name, "not_applicable", f"not recorded: {error}"),)
    except TimeoutError as error:
        return (_no_answer(probe, str(error)),)
    except Exception as error:
        return (
            Finding(
                probe.name,
                "warning",
                f"could not be examined: {type(error).__name__}: {error}",
                "nothing is known about it",
                "if the message does not help, report it with the output of "
                "moe-ep doctor --record DIR",
            ),
        )


def _needed(finding: Finding) -> Finding:
    """Without reason and fix where there is nothing to fix."""
    if finding.level in ("warning", "failure"):
        return finding
    return replace(finding, why="", fix="")


def _no_answer(probe: Probe, seen: str) -> Finding:
    why = "a driver, file system or network that does not answer will hang the job as well"
    fix = "run it by hand; look at dmesg for driver errors (Xid); restart the host if need be"
    return Finding(probe.name, "failure", seen, why, fix)


def _late(probe: Probe) -> Examined:
    seen = f"no result within {probe.limit_s:g} s"
    return Examined(probe.area, (_no_answer(probe, seen),), probe.limit_s)
