"""Probes of NVSHMEM: the library, our module that links it, and the transports it can load."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.probe import Probe

_HEADER = "include/non_abi/nvshmem_version.h"
_MACRO = re.compile(r"#define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION (\d+)")
_WHY = "backend nvshmem is built and run with it"
CPU_ASSISTED_SINCE = (3, 4, 5)
"""From this version on IBGDA can do without driver options and GDRCopy (its release notes)."""


def version_in(machine: Machine, folder: str) -> str | None:
    """The version that the headers of an NVSHMEM installation give; None without headers."""
    header = machine.read_text(f"{folder.rstrip('/')}/{_HEADER}") or ""
    numbers = [number for _, number in _MACRO.findall(header)]
    return ".".join(numbers) or None


def package(machine: Machine, wish: Wish) -> Iterator[Finding]:
    facts = machine.facts("packages")
    wheels = facts["nvshmem_wheels"]
    folder = machine.environment.get("NVSHMEM_DIR")
    seen = ", ".join(f"{name} {version}" for name, version in wheels.items())
    if folder:
        version = version_in(machine, folder)
        seen += f"{', ' if seen else ''}NVSHMEM_DIR={folder} ({version or 'no headers there'})"
        if version is None:
            fix = f"unset NVSHMEM_DIR, or set it to the folder that holds {_HEADER}"
            yield Finding("nvshmem.package", "failure", seen, _WHY, fix)
            return
        if wheels and version not in wheels.values():
            fix = "unset NVSHMEM_DIR, or uninstall the wheel: one version on every rank"
            why = "device code of one version must not meet the host library of another"
            yield Finding("nvshmem.package", "warning", seen, why, fix)
            return
    if len(wheels) > 1:
        fix = "pip uninstall the wheel that is not of nvcc's CUDA version"
        yield Finding("nvshmem.package", "warning", seen, "which one loads is left to chance", fix)
    elif not seen:
        level = wish.missing("nvshmem", machine)
        fix = "pip install nvidia-nvshmem-cu12   # or -cu13: the CUDA version of nvcc"
        yield Finding("nvshmem.package", level, "NVSHMEM is not installed", _WHY, fix)
    else:
        yield Finding("nvshmem.package", "ok", seen)


def module(machine: Machine, wish: Wish) -> Iterator[Finding]:
    facts = machine.facts("nvshmem")
    level = wish.missing("nvshmem", machine)
    why = "backend nvshmem is this module"
    fix = (
        "install NVSHMEM, then: pip install . --force-reinstall --no-deps   "
        "# in the sources of moe_ep, nvcc on the PATH"
    )
    built, loaded = facts.get("built"), facts.get("loaded")
    if not facts["backend"]:
        seen = "this version of moe_ep has no nvshmem backend"
        level = "failure" if wish.backend == "nvshmem" else "not_applicable"
        fix = "use backend: cuda within a host, or backend: reference"
        yield Finding("nvshmem.module", level, seen, why, fix)
    elif not facts["found"]:
        yield Finding("nvshmem.module", level, "moe_ep._C_nvshmem was not built", why, fix)
    elif facts.get("error"):
        seen = f"moe_ep._C_nvshmem cannot be loaded: {facts['error']}"
        yield Finding("nvshmem.module", "failure", seen, why, fix)
    elif built and loaded and built != loaded:
        seen = f"built with NVSHMEM {built}, loads {loaded} ({facts['library']})"
        why = "device code of one version must not meet the host library of another"
        yield Finding("nvshmem.module", "failure", seen, why, fix)
    else:
        seen = f"moe_ep._C_nvshmem, NVSHMEM {built or loaded or 'of unknown version'}"
        yield Finding("nvshmem.module", "ok", seen)


def transports(machine: Machine, wish: Wish) -> Iterator[Finding]:
    names = machine.facts("nvshmem").get("transports")
    if names is None:
        yield Finding("nvshmem.transports", "not_applicable", "no NVSHMEM library to look at")
    elif "ibgda" not in names:
        seen = f"transports: {', '.join(names) or 'none'}"
        why = "without ibgda a CPU thread sends every message between hosts"
        fix = "use the wheel nvidia-nvshmem-cu12 or -cu13, or build NVSHMEM with IBGDA support"
        yield Finding("nvshmem.transports", wish.missing("nvshmem", machine), seen, why, fix)
    else:
        yield Finding("nvshmem.transports", "ok", f"transports: {', '.join(names)}")


def library_version(machine: Machine) -> tuple[int, ...]:
    """Of the newest NVSHMEM found; () without one."""
    versions = list(machine.facts("packages")["nvshmem_wheels"].values())
    folder = machine.environment.get("NVSHMEM_DIR")
    if folder:
        versions.append(version_in(machine, folder) or "")
    numbers = (tuple(map(int, re.findall(r"\d+", version))) for version in versions)
    return max(numbers, default=())


PROBES = (
    Probe("nvshmem.package", "nvshmem", package, 40.0),
    Probe("nvshmem.module", "nvshmem", module, 40.0),
    Probe("nvshmem.transports", "nvshmem", transports, 40.0),
)
