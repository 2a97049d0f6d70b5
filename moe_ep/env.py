"""The environment variables of moe_ep. They are read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

LAYOUT = "MOE_EP_LAYOUT"
BACKEND = "MOE_EP_BACKEND"
TIMEOUT_S = "MOE_EP_TIMEOUT_S"
MEMORY = "MOE_EP_MEMORY"
STATISTICS = "MOE_EP_STATISTICS"
NVTX = "MOE_EP_NVTX"
RANKS_PER_HOST = "MOE_EP_RANKS_PER_HOST"
LOW_LATENCY_FORM = "MOE_EP_LOW_LATENCY_FORM"
MAX_RDMA_TOKENS = "DEEP_EP_NUM_MAX_RDMA_TOKENS"


def layout_path() -> str | None:
    """Path of the EP layout file the integrations use when the call names none."""
    return os.environ.get(LAYOUT) or None


def backend() -> str | None:
    """Backend that replaces the layout's own `backend`."""
    return os.environ.get(BACKEND) or None


@contextmanager
def chosen_backend(name: str) -> Iterator[None]:
    """Makes `backend` return the name meanwhile; "auto" leaves the choice as it is."""
    before = os.environ.get(BACKEND)
    if name != "auto":
        os.environ[BACKEND] = name
    try:
        yield
    finally:
        if name != "auto":
            os.environ.pop(BACKEND)
        if before is not None:
            os.environ[BACKEND] = before


def timeout_s() -> float | None:
    """Seconds that replace both time-outs of the layout.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_S)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT_S}={text!r} is not a positive number of seconds")
    return seconds


def memory() -> str:
    """How the ranks of one host share memory: auto, ipc (CUDA IPC) or fd (file descriptors).

    Raises:
        ValueError: the variable is none of them.
    """
    choice = os.environ.get(MEMORY) or "auto"
    if choice not in ("auto", "ipc", "fd"):
        raise ValueError(f"{MEMORY}={choice!r} is none of auto, ipc, fd")
    return choice


def statistics() -> bool:
    """Whether every ExpertParallel collects statistics from its start."""
    return _switch(STATISTICS)


def nvtx() -> bool:
    """Whether dispatch and combine show under their names in profiles."""
    return _switch(NVTX)


def _switch(name: str) -> bool:
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def ranks_per_host() -> int | None:
    """Ranks of a simulated host: NVSHMEM alone goes from one to another, on one machine.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    return _positive(RANKS_PER_HOST)


def low_latency_form() -> str | None:
    """How rows of a low-latency dispatch go to other hosts: layered (once to each host) or slots
    (once to each expert). None: as the GPUs allow.

    Raises:
        ValueError: the variable is neither.
    """
    form = os.environ.get(LOW_LATENCY_FORM) or None
    if form not in (None, "layered", "slots"):
        raise ValueError(f"{LOW_LATENCY_FORM}={form!r} is neither layered nor slots")
    return form


def max_rdma_tokens() -> int | None:
    """Tokens that replace the layout's `internode.max_rdma_tokens`.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    return _positive(MAX_RDMA_TOKENS)


def _positive(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} is not a positive integer")
    return int(text)


def nvshmem_dir() -> str | None:
    """The NVSHMEM installation to load, in place of an installed wheel."""
    return os.environ.get("NVSHMEM_DIR") or None


def nvshmem_variables() -> dict[str, str]:
    """NVSHMEM's variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}


def set_for_nvshmem(variables: Mapping[str, str]) -> None:
    """Sets variables for NVSHMEM, which reads them when it starts; those already set stay."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def under_torchrun() -> bool:
    """Whether torchrun (or a launcher like it) has set this process's rank.

    Raises:
        ValueError: what is set is not a number.
    """
    names = ("RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return False
    for name in names:
        _number(name)
    return True


def local_rank() -> int:
    """This process's number on its host, as torchrun counts.

    Raises:
        ValueError: what is set is not a number; likewise of `local_size`.
    """
    return _number("LOCAL_RANK", "0")


def local_size() -> int:
    """How many processes torchrun has started on this host."""
    return _number("LOCAL_WORLD_SIZE", "1")


def _number(name: str, default: str = "") -> int:
    """Of a variable that a launcher sets."""
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number; the launcher sets it") from None


def named(names: Iterable[str]) -> dict[str, str]:
    """The variables of `names` that are set, and every one whose name begins with MOE_EP_."""
    chosen = set(names)
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in chosen or name.startswith("MOE_EP_")
    }
