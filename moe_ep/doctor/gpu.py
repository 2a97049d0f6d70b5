"""Probes of the GPUs and of the ways between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moe_ep import env
from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.probe import Probe

OLDEST_CAPABILITY = (8, 0)
_SHOWN_PAIRS = 6
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_DEFAULT_MPS_PIPES = "/tmp/nvidia-mps"
_P2P_CAUSES = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a driver option",
    "NS": "not supported",
}
# What nvidia-smi says, and what mends it.
_SMI_FIXES = {
    "version mismatch": "reboot, or reload the kernel module: sudo rmmod nvidia_uvm nvidia_drm "
    "nvidia_modeset nvidia && sudo modprobe nvidia",
    "couldn't communicate": "sudo modprobe nvidia; if that fails: sudo dkms autoinstall",
    "No devices were found": "start the container with GPUs: docker run --gpus all ...",
}


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    memory_mib: str
    capability: tuple[int, int]
    mig: bool
    compute_mode: str
    driver: str


def gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; empty where it lists none or fails."""
    output = machine.command("nvidia-smi") if machine.has_gpus() else None
    if output is None or output.exit_code:
        return []
    return [_gpu(line) for line in output.text.strip().splitlines() if line[:1].isdigit()]


def _gpu(line: str) -> Gpu:
    index, name, memory, capability, mig, mode, driver = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(int(index), name, memory, (int(major), int(minor)), mig == "Enabled", mode, driver)


def pairs(text: str) -> dict[tuple[int, int], str]:
    """The cells of a matrix of `nvidia-smi topo`, by GPU of the row and of the column."""
    cells: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        numbers = [re.fullmatch(r"GPU(\d+)", word) for word in words]
        if not columns:
            columns = [int(number[1]) for number in numbers if number]
        elif numbers and numbers[0]:
            row = int(numbers[0][1])
            cells.update({(row, column): cell for column, cell in zip(columns, words[1:])})  # noqa: B905
    return {pair: cell for pair, cell in cells.items() if pair[0] != pair[1]}


def devices(machine: Machine, wish: Wish) -> Iterator[Finding]:
    level = wish.missing("cuda", machine)
    why = "backends cuda and nvshmem need NVIDIA GPUs"
    if not machine.has_gpus():
        if machine.list_dir("/proc/driver/nvidia/gpus"):
            yield Finding(
                "gpu.devices",
                "failure" if level == "failure" else "warning",
                "the driver has GPUs, but /dev/nvidia* is not here",
                "this container was started without GPUs",
                "docker run --gpus all ...   (Kubernetes: resources.limits nvidia.com/gpu)",
            )
        else:
            fix = "use a machine with GPUs, or backend: reference"
            yield Finding("gpu.devices", level, "no NVIDIA GPU", why, fix)
        return
    output = machine.command("nvidia-smi")
    if output is None:
        yield Finding(
            "gpu.devices",
            level,
            "/dev/nvidia* is here, nvidia-smi is not",
            "the driver's tools tell the kind of GPU and the ways between them",
            "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...   "
            "(on a host: install nvidia-utils of the driver's version)",
        )
        return
    found = gpus(machine)
    if not found:
        text = " ".join(output.text.split())
        fixes = (fix for part, fix in _SMI_FIXES.items() if part in text)
        fix = next(fixes, "run nvidia-smi; look at dmesg for lines with NVRM and Xid")
        yield Finding("gpu.devices", "failure", f"nvidia-smi: {text[:200]}", why, fix)
        return
    kinds = sorted({f"{g.name} ({g.capability[0]}.{g.capability[1]})" for g in found})
    seen = f"{len(found)} x {', '.join(kinds)}"
    if any(gpu.capability < OLDEST_CAPABILITY for gpu in found):
        fix = "use GPUs of compute capability 8.0 or newer, or backend: reference"
        yield Finding("gpu.devices", level, seen, "the kernels need 8.0 or newer", fix)
    else:
        yield Finding("gpu.devices", "ok", seen)
    exclusive = [str(gpu.index) for gpu in found if gpu.compute_mode not in ("Default", "[N/A]")]
    if exclusive:
        yield Finding(
            "gpu.compute_mode",
            "warning",
            f"GPU {', '.join(exclusive)}: {found[int(exclusive[0])].compute_mode}",
            "only one process may use such a GPU, so ranks cannot share it",
            "sudo nvidia-smi -c DEFAULT",
        )


def peer_access(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if len(gpus(machine)) < 2:
        yield Finding("gpu.p2p", "not_applicable", "fewer than two GPUs")
        return
    output = machine.command("nvidia-smi-p2p")
    cells = pairs(output.text) if output else {}
    bad = {pair: cell for pair, cell in cells.items() if cell != "OK"}
    if not cells:
        yield _no_table("gpu.p2p", "nvidia-smi topo -p2p w")
    elif bad:
        causes = sorted({f"{cell} ({_P2P_CAUSES.get(cell, 'unknown')})" for cell in bad.values()})
        yield Finding(
            "gpu.p2p",
            wish.missing("cuda", machine),
            f"{len(bad)} of {len(cells)} pairs cannot write to each other: {_some(list(bad))}, "
            f"{', '.join(causes)}",
            "backend cuda maps the memory of every other rank of the host",
            "disable ACS and the IOMMU in the firmware (kernel option iommu=pt); in a virtual "
            "machine pass the GPUs of one switch through together",
        )
    else:
        yield Finding("gpu.p2p", "ok", f"all {len(cells)} ordered pairs")


def nvlink(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if len(gpus(machine)) < 2:
        yield Finding("gpu.nvlink", "not_applicable", "fewer than two GPUs")
        return
    output = machine.command("nvidia-smi-topo")
    cells = pairs(output.text) if output else {}
    slow = {pair: cell for pair, cell in cells.items() if not cell.startswith("NV")}
    if not cells:
        yield _no_table("gpu.nvlink", "nvidia-smi topo -m")
    elif slow:
        kinds = ", ".join(sorted(set(slow.values())))
        yield Finding(
            "gpu.nvlink",
            "warning",
            f"{len(slow)} of {len(cells)} pairs are joined by {kinds}: {_some(list(slow))}",
            "these pairs exchange rows over PCIe, at a tenth of NVLink's rate",
            "if the machine has NVLink: nvidia-smi nvlink --status; "
            "sudo systemctl status nvidia-fabricmanager",
        )
    else:
        yield Finding("gpu.nvlink", "ok", f"all pairs: {', '.join(sorted(set(cells.values())))}")


def mig(machine: Machine, wish: Wish) -> Iterator[Finding]:
    found = gpus(machine)
    divided = [str(gpu.index) for gpu in found if gpu.mig]
    if divided:
        yield Finding(
            "gpu.mig",
            "warning",
            f"MIG is on: GPU {', '.join(divided)}",
            "slices of a GPU have neither peer access nor CUDA IPC to one another",
            f"sudo nvidia-smi -i {','.join(divided)} -mig 0",
        )
    else:
        yield Finding("gpu.mig", "ok" if found else "not_applicable", "MIG is off")


def mps(machine: Machine, wish: Wish) -> Iterator[Finding]:
    folder = machine.environment.get("CUDA_MPS_PIPE_DIRECTORY")
    running = machine.exists(f"{folder or _DEFAULT_MPS_PIPES}/control")
    if running:
        yield Finding("gpu.mps", "ok", f"an MPS daemon serves {folder or _DEFAULT_MPS_PIPES}")
    elif folder:
        yield Finding(
            "gpu.mps",
            "warning",
            f"CUDA_MPS_PIPE_DIRECTORY={folder}, where no MPS daemon is",
            "processes that share a GPU take turns in time slices of milliseconds without it",
            "nvidia-cuda-mps-control -d   # with the same CUDA_MPS_PIPE_DIRECTORY; or unset it",
        )
    else:
        yield Finding("gpu.mps", "not_applicable", "no MPS daemon")


def ipc(machine: Machine, wish: Wish) -> Iterator[Finding]:
    """Two processes: one owns memory on every GPU, the other maps it and writes to it."""
    if not machine.has_gpus():
        yield Finding("gpu.ipc", "not_applicable", "no NVIDIA GPU")
        return
    if machine.live and env.local_rank() > 0:
        yield Finding("gpu.ipc", "not_applicable", "tested by the first rank of the host")
        return
    facts = machine.facts("ipc")
    if facts.get("skipped"):
        yield Finding("gpu.ipc", "not_applicable", str(facts["skipped"]))
    elif facts["problems"]:
        yield _no_ipc("; ".join(facts["problems"])[:400], machine.environment.get(env.MEMORY))
    else:
        yield Finding(
            "gpu.ipc", "ok", f"memory of {facts['tested']} GPUs written by a second process"
        )


def _no_ipc(seen: str, memory: str | None) -> Finding:
    """CUDA IPC is what backend cuda falls back on, unless MOE_EP_MEMORY chooses."""
    fix = (
        "give the processes one IPC namespace (docker run --ipc=host ...) and one PID namespace; "
        "turn MIG off; see gpu.p2p"
    )
    if memory == "ipc":
        why = f"with {env.MEMORY}=ipc ranks of one host share memory only by CUDA IPC"
        fix = f"unset {env.MEMORY}, so that file descriptors are tried first; or {fix}"
        return Finding("gpu.ipc", "failure", seen, why, fix)
    second = (
        f"with {env.MEMORY}=fd does not fall back on it"
        if memory == "fd"
        else "falls back on CUDA IPC"
    )
    why = f"backend cuda shares memory by file descriptors (not tested here) and {second}"
    return Finding("gpu.ipc", "warning", seen, why, fix)


def _no_table(name: str, command: str) -> Finding:
    why = "the ways between GPUs are not known"
    return Finding(name, "warning", f"{command} gave no table", why, f"run it by hand: {command}")


def _some(found: list[tuple[int, int]]) -> str:
    shown = " ".join(f"{row}-{column}" for row, column in found[:_SHOWN_PAIRS])
    return shown + (" ..." if len(found) > _SHOWN_PAIRS else "")


PROBES = (
    Probe("gpu.devices", "gpu", devices, 70.0),
    Probe("gpu.p2p", "gpu", peer_access, 70.0),
    Probe("gpu.nvlink", "gpu", nvlink, 70.0),
    Probe("gpu.mig", "gpu", mig, 40.0),
    Probe("gpu.mps", "gpu", mps, 30.0),
    Probe("gpu.ipc", "gpu", ipc, 100.0),
)
