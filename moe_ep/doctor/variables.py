"""What a value of each environment variable may be, and what contradicts the machine.

Names and values are those of the public documentation of NVSHMEM, NCCL, CUDA, PyTorch and DeepEP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from moe_ep.doctor.finding import Level, Wish
from moe_ep.doctor.gpu import gpus
from moe_ep.doctor.machine import Machine
from moe_ep.doctor.network import ADAPTERS, ports
from moe_ep.layout import EPLayout

QP_DEPTHS = (128, 32768)  # NVSHMEM's own bounds, in nvshmem_common_ibgda.h
_TRUE = ("1", "true", "yes", "y", "on")
_BACKENDS = get_args(EPLayout.model_fields["backend"].annotation)
_INTERFACES = "/sys/class/net"


@dataclass(frozen=True)
class Problem:
    """What is wrong with a value: `failure` where it cannot work, `warning` where it may hurt."""

    level: Level
    text: str
    fix: str


Check = Callable[[str, Machine, Wish], "Problem | None"]


@dataclass(frozen=True)
class Rule:
    why: str
    check: Check


def one_of(*values: str, any_case: bool = True) -> Check:
    def check(value: str, machine: Machine, wish: Wish) -> Problem | None:
        if (value.lower() if any_case else value) in values:
            return None
        return Problem("failure", "not a valid value", f"use one of: {', '.join(values)}")

    return check


def integer(least: int, most: int) -> Check:
    def check(value: str, machine: Machine, wish: Wish) -> Problem | None:
        if re.fullmatch(r"[+-]?\d+", value.strip()) and least <= int(value) <= most:
            return None
        text = f"not an integer from {least} to {most}"
        return Problem("failure", text, "correct the value, or unset the variable")

    return check


def positive_integer(value: str, machine: Machine, wish: Wish) -> Problem | None:
    if value.isdecimal() and int(value) >= 1:
        return None
    return Problem("failure", "not a positive integer", "correct the value, or unset the variable")


def hurts_if_true(text: str) -> Check:
    def check(value: str, machine: Machine, wish: Wish) -> Problem | None:
        if value.lower() in _TRUE and machine.has_gpus():
            return Problem("warning", text, "unset it, unless you are looking for a fault")
        return None

    return check


def positive_seconds(value: str, machine: Machine, wish: Wish) -> Problem | None:
    try:
        good = 0 < float(value) < float("inf")
    except ValueError:
        good = False
    fix = "set a number of seconds, or unset it"
    return None if good else Problem("failure", "not a positive number", fix)


def existing_file(value: str, machine: Machine, wish: Wish) -> Problem | None:
    if not machine.live:
        return None  # a recorded tree has no such file
    try:
        EPLayout.from_yaml(value)
    except ValueError as error:
        return Problem("failure", str(error), "correct the file or the path")
    return None


def gid_index(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = integer(-1, 1023)(value, machine, wish)
    if problem is not None or int(value) == -1:  # -1: chosen by the library
        return problem
    index = int(value)
    roce = [port for port in ports(machine) if port.ethernet and port.active]
    best = {port.roce_v2()[0] if port.roce_v2() else None for port in roce}
    fix = "show_gids; set it to the index of a RoCE v2 GID that all ports have, or unset it"
    if len(best) == 1 and None not in best:
        fix = f"set it to {best.pop()}"
    missing = [port.name for port in roce if index not in port.gids]
    if missing:
        return Problem("failure", f"no such GID on {', '.join(missing)}", fix)
    old = [port.name for port in roce if port.gids[index][1] != "RoCE v2"]
    if old:
        kind = next(port.gids[index][1] for port in roce if port.name == old[0])
        return Problem("failure", f"is a GID of type {kind} on {', '.join(old)}", fix)
    return None


def nvshmem_gid_index(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = gid_index(value, machine, wish)
    other = machine.environment.get("NCCL_IB_GID_INDEX", value)
    if problem is None and "-1" not in (value, other) and int(value) != int(other):
        text = f"contradicts NCCL_IB_GID_INDEX={other}: both send from the same ports"
        return Problem("warning", text, "set both to one index, or unset both")
    return problem


def adapter_list(value: str, machine: Machine, wish: Wish) -> Problem | None:
    present = machine.list_dir(ADAPTERS)
    wanted = [item.split(":")[0].strip(" ^=") for item in value.split(",")]
    missing = [name for name in wanted if not any(p.startswith(name) for p in present)]
    if not missing:
        return None
    fix = f"name some of: {', '.join(present)}" if present else "unset it: there is no RDMA adapter"
    return Problem("failure", f"no adapter {', '.join(missing)}", fix)


def interfaces(value: str, machine: Machine, wish: Wish) -> Problem | None:
    """A comma-separated list; NCCL and NVSHMEM take prefixes, "^" excludes, "=" is exact."""
    present = machine.list_dir(_INTERFACES)
    if not present or value.startswith("^"):
        return None
    wanted = [item.strip(" =") for item in value.split(",")]
    missing = [name for name in wanted if not any(p.startswith(name) for p in present)]
    if not missing:
        return None
    fix = f"name some of: {', '.join(present)}"
    return Problem("failure", f"no network interface {', '.join(missing)}", fix)


def queue_depth(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = integer(*QP_DEPTHS)(value, machine, wish)
    layout = wish.layout
    if problem is None and layout is not None and layout.dispatch.mode == "low_latency":
        # DeepEP's rule, for its low-latency kernels: twice the requests of one call.
        needed = 2 * ((layout.tokens_per_rank or 0) + 1)
        if int(value) < needed:
            text = f"too small for tokens_per_rank={layout.tokens_per_rank} in low_latency mode"
            return Problem("failure", text, f"set it to {needed} or more")
    return problem


def old_queue_depth(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = queue_depth(value, machine, wish)
    if problem is None and machine.environment.get("NVSHMEM_QP_DEPTH") != value:
        text = "NVSHMEM 3.4 reads NVSHMEM_QP_DEPTH"
        return Problem("warning", text, f"export NVSHMEM_QP_DEPTH={value}")
    return problem


def ibgda(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = one_of("0", "1", "true", "false", "yes", "no", "y", "n", "on", "off")(
        value, machine, wish
    )
    transport = machine.environment.get("NVSHMEM_REMOTE_TRANSPORT", "")
    if problem is None and value.lower() in _TRUE and transport.lower() == "none":
        text = "contradicts NVSHMEM_REMOTE_TRANSPORT=none"
        return Problem("warning", text, "unset one of the two")
    return problem


def nic_handler(value: str, machine: Machine, wish: Wish) -> Problem | None:
    problem = one_of("auto", "gpu", "cpu", "cpu_host_memory")(value, machine, wish)
    if problem is None and value.lower() == "cpu" and not machine.exists("/dev/gdrdrv"):
        text = "needs GDRCopy, and /dev/gdrdrv is not here"
        return Problem("failure", text, "use auto, or install GDRCopy (ibgda.gdrcopy)")
    return problem


def allocator(value: str, machine: Machine, wish: Wish) -> Problem | None:
    bad = [item for item in value.split(",") if item.strip() and ":" not in item]
    if bad:
        fix = "write option:value,option:value, as in expandable_segments:True"
        return Problem("failure", f"{bad[0]!r} is not option:value", fix)
    other = machine.environment.get("PYTORCH_ALLOC_CONF", value)
    if other != value:
        text = f"contradicts PYTORCH_ALLOC_CONF={other}"
        return Problem("warning", text, "set PYTORCH_ALLOC_CONF only; it is the newer name")
    return None


def visible_devices(value: str, machine: Machine, wish: Wish) -> Problem | None:
    if not machine.has_gpus():
        return None
    items = [item.strip() for item in value.split(",")]
    if value.strip() in ("", "-1", "NoDevFiles"):
        level = wish.missing("cuda", machine)
        return Problem(level, "hides all GPUs", "unset it, or name GPUs")
    if len(set(items)) < len(items):
        return Problem("failure", "names a GPU twice", "name every GPU once")
    count = len(gpus(machine))
    absent = [item for item in items if item.lstrip("-").isdigit() and not 0 <= int(item) < count]
    if absent and count:
        text = f"no GPU {', '.join(absent)}; CUDA ignores it and all after it"
        return Problem("failure", text, f"name GPUs from 0 to {count - 1}")
    return None


_EXCHANGE = "ranks find and reach each other over it"
_SLOW = "traffic takes a slower way"
_ADAPTERS = "it chooses the adapters for traffic between hosts"
_GID = "it chooses the address RoCE packets are sent from; a wrong one fails or hangs at connection"
_LEVEL = "it chooses the traffic class between hosts"
_QUEUE = "requests a queue to an adapter can hold"

RULES = {
    "MOE_EP_BACKEND": Rule("it replaces the layout's backend", one_of(*_BACKENDS, any_case=False)),
    "MOE_EP_MEMORY": Rule(
        "ranks of a host share memory by file descriptors (fd), else by CUDA IPC (ipc)",
        one_of("auto", "fd", "ipc", any_case=False),
    ),
    "MOE_EP_LOW_LATENCY_FORM": Rule(
        "rows of low-latency mode go to other hosts in this form",
        one_of("layered", "slots", any_case=False),
    ),
    "MOE_EP_RANKS_PER_HOST": Rule(
        "backend nvshmem simulates hosts of so many ranks on one machine", positive_integer
    ),
    "MOE_EP_TIMEOUT_S": Rule("it bounds every wait for a peer", positive_seconds),
    "MOE_EP_STATISTICS": Rule("statistics are collected from the start", one_of("0", "1")),
    "MOE_EP_NVTX": Rule("dispatch and combine show in profiles", one_of("0", "1")),
    "MOE_EP_LAYOUT": Rule("install() reads this layout", existing_file),
    "CUDA_VISIBLE_DEVICES": Rule("it chooses the GPUs a process sees", visible_devices),
    "CUDA_DEVICE_MAX_CONNECTIONS": Rule(
        "hardware queues of a GPU; Megatron's tensor parallelism wants 1 before Blackwell",
        integer(1, 32),
    ),
    "CUDA_LAUNCH_BLOCKING": Rule(
        "nothing overlaps with communication", hurts_if_true("every kernel is waited for")
    ),
    "PYTORCH_CUDA_ALLOC_CONF": Rule("torch's allocator reads it", allocator),
    "NCCL_NVLS_ENABLE": Rule("multicast over NVLink", one_of("0", "1", "2")),
    "NCCL_P2P_DISABLE": Rule(_SLOW, hurts_if_true("NCCL uses no peer memory")),
    "NCCL_SHM_DISABLE": Rule(_SLOW, hurts_if_true("NCCL uses no shared memory")),
    "NCCL_IB_DISABLE": Rule(_SLOW, hurts_if_true("NCCL uses no RDMA")),
    "NCCL_IB_GID_INDEX": Rule(_GID, gid_index),
    "NCCL_IB_HCA": Rule(_ADAPTERS, adapter_list),
    "NCCL_IB_SL": Rule(_LEVEL, integer(0, 15)),
    "NCCL_IB_TC": Rule(_LEVEL, integer(0, 255)),
    "NCCL_SOCKET_IFNAME": Rule(_EXCHANGE, interfaces),
    "GLOO_SOCKET_IFNAME": Rule(_EXCHANGE, interfaces),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": Rule(_EXCHANGE, interfaces),
    "NVSHMEM_REMOTE_TRANSPORT": Rule(
        "it chooses the way between hosts", one_of("ibrc", "ucx", "libfabric", "ibdevx", "none")
    ),
    "NVSHMEM_DISABLE_P2P": Rule(_SLOW, hurts_if_true("NVSHMEM uses no peer memory")),
    "NVSHMEM_IB_ENABLE_IBGDA": Rule("GPUs send to adapters themselves", ibgda),
    "NVSHMEM_IBGDA_NIC_HANDLER": Rule("it chooses who rings the adapter's doorbell", nic_handler),
    "NVSHMEM_IB_GID_INDEX": Rule(_GID, nvshmem_gid_index),
    "NVSHMEM_IB_SL": Rule(_LEVEL, integer(0, 15)),
    "NVSHMEM_IB_TRAFFIC_CLASS": Rule(_LEVEL, integer(0, 255)),
    "NVSHMEM_HCA_LIST": Rule(_ADAPTERS, adapter_list),
    "NVSHMEM_QP_DEPTH": Rule(_QUEUE, queue_depth),
    "NVSHMEM_IBGDA_QP_DEPTH": Rule(_QUEUE, old_queue_depth),
    "DEEP_EP_NUM_MAX_RDMA_TOKENS": Rule(
        "rows that an inbox for one remote host has room for", positive_integer
    ),
}
