"""Probes of the CUDA driver, of the runtime that torch brings, and of the toolkit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.gpu import gpus
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.probe import Probe

# Oldest driver branch of a CUDA major version, from NVIDIA's table of minor version compatibility.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_VERSION = re.compile(r"\b(\d{3,}(?:\.\d+)+)\b")
_TORCH_INDEX = "https://download.pytorch.org/whl"
# What CUDA's initialisation says, and what mends it.
_INIT_FIXES = {
    "system not yet initialized": "sudo systemctl start nvidia-fabricmanager",
    "Error 802": "sudo systemctl start nvidia-fabricmanager",
    "driver on your system is too old": "update the driver, or install a torch for an older CUDA",
    "No CUDA GPUs are available": "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist",
    "busy or unavailable": "end the process that holds the GPU (nvidia-smi lists it), or restart "
    "the MPS daemon: echo quit | nvidia-cuda-mps-control",
    "out of memory": "end the processes that fill the GPU's memory; nvidia-smi lists them",
}


def driver_version(machine: Machine) -> str | None:
    """The version of the loaded driver; None where there is none."""
    text = machine.read_text("/proc/driver/nvidia/version") or ""
    match = _VERSION.search(text)
    if match:
        return match[1]
    return next((gpu.driver for gpu in gpus(machine)), None)


def driver(machine: Machine, wish: Wish) -> Iterator[Finding]:
    version = driver_version(machine)
    if version is not None:
        kind = " (open kernel module)" if is_open_module(machine) else ""
        yield Finding("cuda.driver", "ok", f"driver {version}{kind}")
        return
    level = wish.missing("cuda", machine)
    fix = "install NVIDIA's driver, 525 or newer"
    yield Finding("cuda.driver", level, "no NVIDIA driver", "CUDA needs it", fix)


def is_open_module(machine: Machine) -> bool:
    return "Open Kernel Module" in (machine.read_text("/proc/driver/nvidia/version") or "")


def runtime(machine: Machine, wish: Wish) -> Iterator[Finding]:
    """Whether torch can compute on the GPUs; that it can beats every table of versions."""
    level = wish.missing("cuda", machine)
    if level == "not_applicable":
        yield Finding("cuda.runtime", level, "no NVIDIA GPU")
        return
    facts = machine.facts("torch")
    seen = f"torch {facts['version']}"
    why = "torch owns the tensors and streams that the GPU backends work on"
    version = driver_version(machine)
    if facts["cuda"] is None:
        index = f"{_TORCH_INDEX}/{'cu130' if _major(version) >= _OLDEST_DRIVERS[13] else 'cu126'}"
        fix = f"pip install --force-reinstall torch --index-url {index}"
        yield Finding("cuda.runtime", level, f"{seen} is a build without CUDA", why, fix)
        return
    seen = f"torch {facts['version']} with CUDA {facts['cuda']}"
    error = facts.get("error")
    if not error:
        yield Finding("cuda.runtime", "ok", f"{seen} uses {len(facts['devices'])} GPUs")
        return
    oldest = _OLDEST_DRIVERS.get(int(facts["cuda"].split(".")[0]), 0)
    if version is not None and _major(version) < oldest:
        seen = f"{seen} needs driver {oldest} or newer, this is {version}"
        fix = f"update the driver, or: pip install torch --index-url {_TORCH_INDEX}/cu126"
    else:
        seen = f"{seen} cannot use the GPUs: {error[:200]}"
        fixes = (fix for part, fix in _INIT_FIXES.items() if part in error)
        fix = next(fixes, "run nvidia-smi; look at dmesg for lines with NVRM and Xid")
    yield Finding("cuda.runtime", "failure", seen, why, fix)


def toolkit(machine: Machine, wish: Wish) -> Iterator[Finding]:
    output = machine.command("nvcc")
    match = re.search(r"release (\d+)\.(\d+)", output.text) if output else None
    if match is None:
        yield Finding("cuda.toolkit", "not_applicable", "no nvcc; only a build needs it")
        return
    seen = f"nvcc {match[1]}.{match[2]}"
    version, oldest = driver_version(machine), _OLDEST_DRIVERS.get(int(match[1]), 0)
    if version is not None and _major(version) < oldest:
        yield Finding(
            "cuda.toolkit",
            "warning",
            f"{seen}, driver {version}",
            f"what it compiles needs driver {oldest} or newer",
            "update the driver, or build moe_ep with the toolkit of an older CUDA",
        )
    else:
        yield Finding("cuda.toolkit", "ok", seen)


def _major(version: str | None) -> int:
    return int((version or "0").split(".")[0])


PROBES = (
    Probe("cuda.driver", "cuda", driver, 40.0),
    Probe("cuda.runtime", "cuda", runtime, 100.0),
    Probe("cuda.toolkit", "cuda", toolkit, 50.0),
)
