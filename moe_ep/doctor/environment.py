"""Probes of environment variables and of the limits of this process."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.names import OURS
from moe_ep.doctor.network import ADAPTERS, capabilities
from moe_ep.doctor.probe import Probe
from moe_ep.doctor.variables import RULES, Rule

_SMALL_SHM_MIB = 1024


def unknown_variables(machine: Machine, wish: Wish) -> Iterator[Finding]:
    """MOE_EP_* that moe_ep does not read: most likely misspelled."""
    unknown = [n for n in machine.environment if n.startswith("MOE_EP_") and n not in OURS]
    if unknown:
        advice = []
        for name in unknown:
            close = difflib.get_close_matches(name, sorted(OURS), 1)
            advice.append(f"unset {name}" + (f" (meant {close[0]}?)" if close else ""))
        yield Finding(
            "env.unknown",
            "warning",
            ", ".join(unknown),
            f"moe_ep reads only {', '.join(sorted(OURS))}",
            "; ".join(advice),
        )
    else:
        count = sum(1 for name in machine.environment if name in RULES)
        yield Finding("env.unknown", "ok", f"no unknown MOE_EP_*; {count} set variables judged")


def variable_probe(name: str, rule: Rule) -> Probe:
    """A probe that judges one variable, and says nothing where it is not set."""

    def look(machine: Machine, wish: Wish) -> Iterator[Finding]:
        value = machine.environment.get(name)
        if value is None:
            return
        problem = rule.check(value, machine, wish)
        seen = f"{name}={value}"
        if problem is None:
            yield Finding(f"env.{name}", "ok", seen)
        else:
            seen = f"{seen}: {problem.text}"
            yield Finding(f"env.{name}", problem.level, seen, rule.why, problem.fix)

    return Probe(f"env.{name}", "environment", look, 40.0)


def shared_memory(machine: Machine, wish: Wish) -> Iterator[Finding]:
    output = machine.command("df")
    words = output.text.strip().splitlines()[-1].split() if output and not output.exit_code else []
    if len(words) < 4 or not words[1].isdigit():
        yield Finding("host.shm", "not_applicable", "no /dev/shm")
        return
    size = int(words[1]) // 1024
    if size < _SMALL_SHM_MIB and machine.has_gpus():
        yield Finding(
            "host.shm",
            "warning",
            f"/dev/shm has {size} MiB",
            "NCCL, NVSHMEM and data loaders exchange data of the ranks of a host there",
            "docker run --ipc=host ...   (or --shm-size=16g)",
        )
    else:
        yield Finding("host.shm", "ok", f"/dev/shm has {size} MiB")


def locked_memory(machine: Machine, wish: Wish) -> Iterator[Finding]:
    limits = machine.read_text("/proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.M)
    if match is None or not machine.has_gpus() or not machine.list_dir(ADAPTERS):
        yield Finding("host.memlock", "not_applicable", "no RDMA adapter for GPUs")
    elif match[1] == "unlimited" or "CAP_IPC_LOCK" in capabilities(machine):
        yield Finding("host.memlock", "ok", f"locked memory: {match[1]}")
    else:
        yield Finding(
            "host.memlock",
            wish.missing("nvshmem", machine),
            f"locked memory is limited to {int(match[1]) // 1024} KiB",
            "memory that an adapter reads or writes is locked; registering more than this fails",
            "ulimit -l unlimited (/etc/security/limits.conf: * - memlock unlimited); "
            "docker run --ulimit memlock=-1:-1 --cap-add=IPC_LOCK ...",
        )


PROBES = (
    Probe("env.unknown", "environment", unknown_variables, 30.0),
    *(variable_probe(name, rule) for name, rule in RULES.items()),
    Probe("host.shm", "environment", shared_memory, 30.0),
    Probe("host.memlock", "environment", locked_memory, 30.0),
)
