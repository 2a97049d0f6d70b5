"""Probes of Python and its packages, and of our CUDA module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.gpu import Gpu, gpus
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.probe import Probe

_REQUIRED = ("pydantic", "PyYAML", "tqdm")
_REBUILD = (
    "pip install . --force-reinstall --no-deps    # in the sources of moe_ep, nvcc on the PATH"
)


def python(machine: Machine, wish: Wish) -> Iterator[Finding]:
    facts = machine.facts("packages")
    seen = f"Python {facts['python']}"
    if facts["python_fits"] is False:
        why = "this Python is outside the range that moe_ep supports"
        yield Finding("python.version", "failure", seen, why, "use Python 3.10 or newer")
    else:
        yield Finding("python.version", "ok", seen)
    unfit = {name: facts["packages"][name] for name in _REQUIRED}
    unfit = {name: package for name, package in unfit.items() if _is_unfit(package)}
    if unfit:
        wanted = [f"'{name}{package['supported']}'" for name, package in unfit.items()]
        yield Finding(
            "python.dependencies",
            "failure",
            ", ".join(f"{name} {package['version']}" for name, package in unfit.items()),
            "moe_ep is not tested with these versions",
            f"pip install {' '.join(wanted)}",
        )
    else:
        versions = (f"{name} {facts['packages'][name]['version']}" for name in _REQUIRED)
        yield Finding("python.dependencies", "ok", ", ".join(versions))


def torch(machine: Machine, wish: Wish) -> Iterator[Finding]:
    package = machine.facts("packages")["packages"]["torch"]
    seen = f"torch {package['version']}"
    if _is_unfit(package):
        fix = f"pip install 'torch{package['supported']}'"
        yield Finding("python.torch", "failure", seen, "moe_ep needs another version", fix)
    else:
        yield Finding("python.torch", "ok", seen)


def frameworks(machine: Machine, wish: Wish) -> Iterator[Finding]:
    packages = machine.facts("packages")["packages"]
    for name, extra in (("megatron-core", "megatron"), ("deepspeed", "deepspeed")):
        package = packages[name]
        if package["version"] is None:
            yield Finding(f"python.{name}", "not_applicable", f"{name} is not installed")
        elif _is_unfit(package):
            yield Finding(
                f"python.{name}",
                "warning",
                f"{name} {package['version']}",
                f"the integration is tested with {package['supported']}",
                f"pip install 'moe-ep[{extra}]'",
            )
        else:
            checked = "" if package["fits"] else " (range not checked: no package 'packaging')"
            yield Finding(f"python.{name}", "ok", f"{name} {package['version']}{checked}")


def core(machine: Machine, wish: Wish) -> Iterator[Finding]:
    facts = machine.facts("core")
    level = wish.missing("cuda", machine)
    why = "backends cuda and nvshmem are its kernels"
    if not facts["found"]:
        yield Finding("python.core", level, "moe_ep._C was not built", why, _REBUILD)
        return
    if facts.get("error"):
        seen = f"moe_ep._C cannot be loaded: {facts['error']}"
        yield Finding("python.core", "failure", seen, why, _REBUILD)
        return
    architectures = facts.get("architectures")
    if not architectures:
        yield Finding("python.core", "ok", "moe_ep._C loads; it does not say for which GPUs")
        return
    numbers = _numbers(architectures)
    seen = f"moe_ep._C for {' '.join(architectures)}"
    lacking = sorted({gpu.capability for gpu in gpus(machine) if not _runs(numbers, gpu)})
    if lacking:
        names = " ".join(f"{major}.{minor}" for major, minor in lacking)
        yield Finding(
            "python.core",
            level,
            f"{seen}, not for {names}",
            f"GPUs of compute capability {names} cannot run its kernels",
            f'MOE_EP_CUDA_ARCHS="{names}" {_REBUILD}',
        )
    else:
        yield Finding("python.core", "ok", seen)


def _is_unfit(package: dict[str, Any]) -> bool:
    """Missing, or outside its range (a range that could not be checked counts as fitting)."""
    return package["version"] is None or package["fits"] is False


def _numbers(architectures: list[str]) -> list[tuple[int, int]]:
    """["9.0", "10.0"], as `_C.ARCHITECTURES`, in numbers that can be compared."""
    parts = (name.split(".") for name in architectures)
    return [(int(major), int(minor)) for major, minor in parts]


def _runs(numbers: list[tuple[int, int]], gpu: Gpu) -> bool:
    """Kernels run on GPUs of their architecture and, compiled anew by the driver, on later ones."""
    return any(number <= gpu.capability for number in numbers)


PROBES = (
    Probe("python", "packages", python, 40.0),
    Probe("python.torch", "packages", torch, 40.0),
    Probe("python.frameworks", "packages", frameworks, 40.0),
    Probe("python.core", "packages", core, 70.0),
)
