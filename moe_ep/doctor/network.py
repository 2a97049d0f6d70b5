"""Probes of RDMA adapters, and of what GPUs need to drive them (IBGDA)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moe_ep.doctor.cuda import is_open_module
from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.nvshmem import CPU_ASSISTED_SINCE, library_version
from moe_ep.doctor.probe import Probe

ADAPTERS = "/sys/class/infiniband"
DMABUF_KERNEL = (5, 12)
_PARAMS = "/proc/driver/nvidia/params"
_MODPROBE = "/etc/modprobe.d"
_CAPABILITIES = {"CAP_IPC_LOCK": 14, "CAP_SYS_ADMIN": 21}
_DRIVER_OPTIONS = 'NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
_OPTIONS_FIX = (
    f"echo 'options nvidia {_DRIVER_OPTIONS}' | sudo tee /etc/modprobe.d/nvidia-ibgda.conf && "
    "sudo update-initramfs -u && sudo reboot   # on the host; RHEL: dracut -f"
)
_DOCKER_RDMA = "--device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1:-1"
_BETWEEN_HOSTS = "backend nvshmem goes from host to host by RDMA"


@dataclass(frozen=True)
class Port:
    """One port of an RDMA adapter. `gids`: index to (address, type), without the unset ones."""

    adapter: str
    number: str
    state: str
    rate: str
    ethernet: bool
    gids: dict[int, tuple[str, str]]

    @property
    def name(self) -> str:
        return f"{self.adapter}:{self.number}"

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state

    def roce_v2(self) -> list[int]:
        """Indices of GIDs that routed RoCE can use, those of IPv4 addresses first."""
        found = [index for index, (_, kind) in self.gids.items() if kind == "RoCE v2"]
        return sorted(found, key=lambda index: ":ffff:" not in self.gids[index][0])


def ports(machine: Machine) -> list[Port]:
    """All ports in /sys/class/infiniband."""
    return [
        _port(machine, adapter, number)
        for adapter in machine.list_dir(ADAPTERS)
        for number in machine.list_dir(f"{ADAPTERS}/{adapter}/ports")
    ]


def _port(machine: Machine, adapter: str, number: str) -> Port:
    folder = f"{ADAPTERS}/{adapter}/ports/{number}"

    def read(name: str) -> str:
        return machine.read_text(f"{folder}/{name}") or ""

    gids = {}
    for index in machine.list_dir(f"{folder}/gids"):
        address = read(f"gids/{index}")
        if address.replace(":", "").strip("0"):
            gids[int(index)] = (address, read(f"gid_attrs/types/{index}"))
    link = read("link_layer")
    return Port(adapter, number, read("state"), read("rate"), link == "Ethernet", gids)


def devices(machine: Machine, wish: Wish) -> Iterator[Finding]:
    adapters = machine.list_dir(ADAPTERS)
    files = [name for name in machine.list_dir("/dev/infiniband") if name.startswith("uverbs")]
    level = wish.missing("nvshmem", machine)
    if files and adapters:
        yield Finding("rdma.devices", "ok", f"{len(adapters)} adapters: {', '.join(adapters)}")
    elif adapters:
        seen = f"adapters {', '.join(adapters)}, but no /dev/infiniband/uverbs*"
        fix = f"container: docker run {_DOCKER_RDMA} ...; host: sudo modprobe ib_uverbs"
        yield Finding("rdma.devices", level, seen, _BETWEEN_HOSTS, fix)
    else:
        seen = f"no RDMA adapter (nothing in {ADAPTERS}, no /dev/infiniband)"
        fix = (
            "one host needs none; else sudo modprobe mlx5_ib ib_uverbs on the host, and in a "
            f"container: docker run {_DOCKER_RDMA} ..."
        )
        yield Finding("rdma.devices", level, seen, _BETWEEN_HOSTS, fix)


def link_states(machine: Machine, wish: Wish) -> Iterator[Finding]:
    found = ports(machine)
    chosen = machine.environment.get("NVSHMEM_HCA_LIST", "")
    if chosen and not chosen.startswith("^"):
        names = [item.split(":")[0].strip() for item in chosen.split(",")]
        found = [port for port in found if any(port.adapter == name for name in names)] or found
    down = [port for port in found if not port.active]
    if not found:
        yield Finding("rdma.ports", "not_applicable", "no RDMA port")
    elif down:
        level = wish.missing("nvshmem", machine)
        if level == "failure" and len(down) < len(found):
            level = "warning"  # slower, but it runs
        yield Finding(
            "rdma.ports",
            level,
            ", ".join(f"{port.name} {port.state}" for port in down),
            f"{len(down)} of {len(found)} ports carry no data",
            "look at cable and switch (ibstat; ip link); for InfiniBand a subnet manager must run; "
            "leave unused ports out with NVSHMEM_HCA_LIST",
        )
    else:
        kinds = {(port.rate, "RoCE" if port.ethernet else "InfiniBand") for port in found}
        rates = ", ".join(sorted(f"{rate} {kind}" for rate, kind in kinds))
        yield Finding("rdma.ports", "ok", f"{len(found)} ports active, {rates}")


def gids(machine: Machine, wish: Wish) -> Iterator[Finding]:
    roce = [port for port in ports(machine) if port.ethernet and port.active]
    without = [port.name for port in roce if not port.roce_v2()]
    if not roce:
        yield Finding("rdma.gids", "not_applicable", "no active RoCE port")
    elif without:
        yield Finding(
            "rdma.gids",
            wish.missing("nvshmem", machine),
            f"no RoCE v2 GID on {', '.join(without)}",
            "RoCE v1 is not routed, and a port without an address has no GID at all",
            "give the port's network interface an IP address (ip addr add ... dev ...); show_gids",
        )
    else:
        best = ", ".join(f"{port.name} {port.roce_v2()[0]}" for port in roce)
        yield Finding("rdma.gids", "ok", f"RoCE v2 GID index: {best}")


def driver_params(machine: Machine) -> dict[str, str]:
    """Options the loaded driver runs with, from /proc/driver/nvidia/params."""
    lines = (machine.read_text(_PARAMS) or "").splitlines()
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }


def peer_mapping(machine: Machine) -> bool:
    return "PeerMappingOverride=1" in driver_params(machine).get("RegistryDwords", "")


def has_driver_options(machine: Machine) -> bool:
    return driver_params(machine).get("EnableStreamMemOPs") == "1" and peer_mapping(machine)


def driver_options(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if not machine.has_gpus():
        yield Finding("ibgda.driver_options", "not_applicable", "no NVIDIA GPU")
        return
    params = driver_params(machine)
    seen = f"EnableStreamMemOPs={params.get('EnableStreamMemOPs', 'unknown')}, "
    seen += "PeerMappingOverride=1" if peer_mapping(machine) else "PeerMappingOverride is not set"
    if has_driver_options(machine):
        yield Finding("ibgda.driver_options", "ok", seen)
        return
    files = [name for name in machine.list_dir(_MODPROBE) if "nv" in name.lower()]
    written = [
        name
        for name in files
        if "PeerMappingOverride=1" in (machine.read_text(f"{_MODPROBE}/{name}") or "")
    ]
    why = "with them the GPU rings the adapter's doorbell itself; " + _alternative(machine)
    fix = _OPTIONS_FIX
    if written:
        seen += f" (but written in {_MODPROBE}/{written[0]})"
        fix = "sudo update-initramfs -u && sudo reboot   # the running driver has not read the file"
    yield Finding("ibgda.driver_options", wish.missing("nvshmem", machine), seen, why, fix)


def _alternative(machine: Machine) -> str:
    if machine.exists("/dev/gdrdrv"):
        return "GDRCopy is here: NVSHMEM_IBGDA_NIC_HANDLER=cpu lets the CPU ring it"
    if library_version(machine) >= CPU_ASSISTED_SINCE:
        return "this NVSHMEM can let the CPU ring it: NVSHMEM_IBGDA_NIC_HANDLER=cpu_host_memory"
    return "without them IBGDA needs GDRCopy, or NVSHMEM 3.4.5 or newer"


def peer_memory(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if not machine.has_gpus():
        yield Finding("ibgda.peer_memory", "not_applicable", "no NVIDIA GPU")
        return
    release = machine.read_text("/proc/sys/kernel/osrelease") or ""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if _has_module(machine, name)]
    if modules:
        yield Finding("ibgda.peer_memory", "ok", f"{modules[0]} is loaded")
    elif is_open_module(machine) and numbers >= DMABUF_KERNEL:
        seen = f"DMA-BUF: open kernel module on Linux {release}"
        yield Finding("ibgda.peer_memory", "ok", seen)
    else:
        yield Finding(
            "ibgda.peer_memory",
            wish.missing("nvshmem", machine),
            f"nvidia_peermem is not loaded, no DMA-BUF (Linux {release or 'unknown'})",
            "an adapter reads and writes GPU memory by one of the two",
            "sudo modprobe nvidia_peermem   # on the host; or the driver's open kernel module with "
            "Linux 5.12 or newer",
        )


def _has_module(machine: Machine, name: str) -> bool:
    return machine.exists(f"/sys/module/{name}")


def capabilities(machine: Machine) -> set[str]:
    """Of `_CAPABILITIES`, those this process holds."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", machine.read_text("/proc/self/status") or "", re.M)
    mask = int(match[1], 16) if match else 0
    return {name for name, bit in _CAPABILITIES.items() if mask >> bit & 1}


def privileges(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if not machine.has_gpus():
        yield Finding("ibgda.privileges", "not_applicable", "no NVIDIA GPU")
    elif "CAP_SYS_ADMIN" in capabilities(machine):
        yield Finding("ibgda.privileges", "ok", "CAP_SYS_ADMIN")
    elif peer_mapping(machine):
        yield Finding("ibgda.privileges", "ok", "none needed with PeerMappingOverride=1")
    else:
        yield Finding(
            "ibgda.privileges",
            wish.missing("nvshmem", machine),
            "neither CAP_SYS_ADMIN nor the driver option PeerMappingOverride=1",
            "an unprivileged process may map the adapter's registers into the GPU only with it",
            "set the option (ibgda.driver_options), or: docker run --privileged ...",
        )


def gdrcopy(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if machine.exists("/dev/gdrdrv"):
        yield Finding("ibgda.gdrcopy", "ok", "/dev/gdrdrv")
        return
    if not machine.has_gpus():
        yield Finding("ibgda.gdrcopy", "not_applicable", "no NVIDIA GPU")
    elif has_driver_options(machine):
        yield Finding("ibgda.gdrcopy", "not_applicable", "not needed with the driver options")
    else:
        loaded = _has_module(machine, "gdrdrv")
        seen = "gdrdrv is loaded, but /dev/gdrdrv is not here" if loaded else "no /dev/gdrdrv"
        yield Finding(
            "ibgda.gdrcopy",
            wish.missing("nvshmem", machine),
            seen,
            "GDRCopy is the way to IBGDA without the driver options",
            "docker run --device=/dev/gdrdrv ..."
            if loaded
            else "install GDRCopy's driver on the host (package gdrdrv-dkms), then sudo modprobe "
            "gdrdrv; in a container: docker run --device=/dev/gdrdrv ...",
        )


PROBES = (
    Probe("rdma.devices", "network", devices, 30.0),
    Probe("rdma.ports", "network", link_states, 30.0),
    Probe("rdma.gids", "network", gids, 30.0),
    Probe("ibgda.driver_options", "network", driver_options, 40.0),
    Probe("ibgda.peer_memory", "network", peer_memory, 30.0),
    Probe("ibgda.privileges", "network", privileges, 30.0),
    Probe("ibgda.gdrcopy", "network", gdrcopy, 30.0),
)
