"""How NVSHMEM goes from host to host here, and the variables that tell it so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_ep.layout import InternodeOptions

REMOTE = "NVSHMEM_REMOTE_TRANSPORT"
IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
QP_DEPTH = "NVSHMEM_QP_DEPTH"
OLD_QP_DEPTH = "NVSHMEM_IBGDA_QP_DEPTH"
SERVICE_LEVEL = "NVSHMEM_IB_SL"
NVLS = "NVSHMEM_DISABLE_NVLS"
_VERBS = ("ibrc", "ibdevx")
_TRUE = ("1", "y", "yes", "t", "true", "on")


@dataclass(frozen=True)
class Transport:
    """A choice, and what to put into the environment for it before NVSHMEM starts.

    Attributes:
        name: "ibgda" (the GPU hands messages to the adapter), "ibrc" (a CPU thread does),
            "ibdevx", "libfabric", "ucx", or "p2p" (no network: one machine).
        why: for the log.
        problem: why ranks on several machines cannot use it; None where they can.
    """

    name: str
    why: str
    problem: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


def has_adapters() -> bool:
    """Whether there is an RDMA adapter that this process can open."""
    return any(Path("/dev/infiniband").glob("uverbs*"))


def choose(options: InternodeOptions, variables: Mapping[str, str], adapters: bool) -> Transport:
    """The transport between hosts.

    Args:
        options: of the layout. A variable that is set already wins over what they ask for.
        variables: the environment. adapters: as `has_adapters`.
    """
    wanted = _wanted(options, variables)
    given = {**wanted, **variables}
    wanted = {name: value for name, value in wanted.items() if name not in variables}
    remote = given.get(REMOTE, "ibrc").lower()
    asked = "the environment" if {REMOTE, IBGDA} & set(variables) else "the layout"
    if remote == "none":
        fix = f"unset {REMOTE}" if REMOTE in variables else "set internode.transport to auto"
        return Transport("p2p", f"{asked} asks for no network", fix, wanted)
    if remote not in _VERBS:
        return Transport(remote, f"{REMOTE}={remote}", None, wanted)
    if not adapters:
        # Without it NVSHMEM looks for adapters and complains that there are none.
        wanted.setdefault(REMOTE, "none")
        problem = "no RDMA adapter (/dev/infiniband/uverbs*); moe-ep doctor says what is missing"
        return Transport("p2p", "no RDMA adapter here", problem, wanted)
    if given.get(IBGDA, "").lower() in _TRUE:
        return Transport("ibgda", f"{asked} asks for IBGDA", None, wanted)
    why = f"a CPU thread sends every message; {IBGDA}=1 or internode.transport: ibgda spares it"
    return Transport(remote, why, None, wanted)


def _wanted(options: InternodeOptions, variables: Mapping[str, str]) -> dict[str, str]:
    wanted = {NVLS: "1"}  # multicast is of no use to this library
    if options.transport == "p2p":
        wanted[REMOTE] = "none"
    elif options.transport == "ibgda":
        wanted[IBGDA] = "1"
    elif options.transport == "ibrc":
        wanted |= {REMOTE: "ibrc", IBGDA: "0"}
    depth = variables.get(OLD_QP_DEPTH) or options.ibgda_qp_depth
    if depth:
        # The name that DeepEP's users know; NVSHMEM 3 reads the other one.
        wanted[QP_DEPTH] = str(depth)
    if options.ib_sl is not None:
        wanted[SERVICE_LEVEL] = str(options.ib_sl)
    return wanted
