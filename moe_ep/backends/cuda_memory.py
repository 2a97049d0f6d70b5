"""Symmetric memory of the CUDA backend: set-up, growth and release, all ranks together."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_ep import env
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.backends.fd_exchange import FdExchange, FdExchangeError
from moe_ep.errors import BackendUnavailableError

logger = logging.getLogger("moe_ep")

_GOODBYE_S = 2.0
_PROBLEM_LETTERS = 300
_FD_BYTES = 4


class Memory(Protocol):
    """What a backend needs of its symmetric memory once it is set up."""

    @property
    def max_tokens(self) -> int:
        """Of any rank, that there is room for."""

    def grow(self, needed_tokens: int, call: Call) -> None:
        """Replaces the memory by a larger one; all ranks come here in the same operation."""

    def release(self) -> None:
        """Frees everything once no peer uses it; never waits long for one that stays away."""


class SharedMemory:
    """The symmetric memory of a communicator (`_C.Communicator`) and its mappings.

    Memory is shared through file descriptors or, where some pair of ranks can't, through CUDA IPC
    handles, which several ranks on one GPU read more slowly; MOE_EP_MEMORY chooses one of them.

    Args:
        core: the module `moe_ep._C`. communicator: made by it.
        channel: carries handles and verdicts; not used once memory is set up.
        device: of this rank.
    """

    def __init__(
        self, core: Any, communicator: Any, channel: Channel, device: torch.device
    ) -> None:
        self._core, self._communicator = core, communicator
        self._channel, self._device = channel, device
        self._rank, self._size = channel.rank, channel.size
        self.kind: str | None = None  # "ipc" or "fd", once memory is set up
        self.ranks_on_gpu = 1  # of the group, on this rank's GPU
        self.max_tokens = 0  # of any rank, that there is room for

    def connect(self, max_tokens: int, call: Call) -> None:
        """Allocates memory, maps the peers' and checks every pair in both directions.

        Raises:
            BackendUnavailableError: on all ranks, if any pair can't share; names the pair.
            ValueError: MOE_EP_MEMORY is none of its values (the peers get a PeerError), or
                differs between ranks.
        """
        first = self.kind is None
        reasons: list[str] = []
        for kind in self._candidates(call):
            reason = self._set_up(kind, max_tokens, call)
            if not reason:
                self.kind, self.max_tokens = kind, max_tokens
                break
            reasons.append(f"{kind}: {reason}")
        else:
            raise BackendUnavailableError(
                f"symmetric memory cannot be shared. {'. '.join(reasons)}. CUDA IPC (ipc) needs "
                "ranks in one PID and IPC namespace, file descriptors (fd) in one network "
                "namespace, and both need peer access between the GPUs"
            )
        if first and self._rank == 0 and kind != next(iter(_OFFERS)):
            why = "; ".join(reasons) or f"{env.MEMORY}={kind}"
            logger.info("symmetric memory: CUDA IPC, not file descriptors (%s)", why)

    def grow(self, needed_tokens: int, call: Call) -> None:
        """Replaces the memory by a larger one; all ranks come here in the same operation."""
        torch.cuda.synchronize(self._device)
        self._exchange({}, call)  # nobody uses any of it any more
        self._communicator.memory().close()
        self._exchange({}, call)  # nobody has any of it mapped any more
        self.connect(needed_tokens + needed_tokens // 4, call)

    def release(self) -> None:
        """Frees everything once no peer uses it.

        Where a peer does not say so within two seconds, the memory stays until the process ends.
        """
        communicator, self._communicator = self._communicator, None
        try:
            torch.cuda.synchronize(self._device)
            if self._say_goodbye(communicator.memory()):
                communicator.release_memory()
        except RuntimeError:  # the CUDA context is gone, and the memory with it
            return

    def _say_goodbye(self, memory: Any) -> bool:
        """Tells the peers that their memory is no longer used; true when all have told us so."""
        goodbye = self._core.Signal.GOODBYE
        memory.mark(goodbye)
        deadline = time.monotonic() + _GOODBYE_S
        while any(memory.missing_marks(goodbye)):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True

    # -- set-up: every decision is the same on all ranks ------------------------------------------

    def _candidates(self, call: Call) -> list[str]:
        """Kinds of memory to try, in this order; checks what both of them need."""
        if self.kind is not None:
            return [self.kind]
        choice = ""
        try:
            choice = env.memory()
        except ValueError as error:
            call = replace(call, error=error)
        mine = {"host": _host_id(), "gpu": gpu_id(self._device.index), "choice": choice}
        answers = self._exchange(mine, call)
        for rank, answer in enumerate(answers):
            if answer["host"] != answers[0]["host"]:
                raise BackendUnavailableError(
                    f"ranks 0 and {rank} are on different hosts; backend cuda works within one"
                )
            if answer["choice"] != answers[0]["choice"]:
                raise ValueError(
                    f"{env.MEMORY} is {answers[0]['choice']} on rank 0 and {answer['choice']} on "
                    f"rank {rank}; give all ranks the same"
                )
        gpus = [answer["gpu"] for answer in answers]
        self.ranks_on_gpu = gpus.count(mine["gpu"])
        if len(set(gpus)) > 1:
            reason = self._agree(
                "access the GPU of",
                lambda: [_missing_access(self._device.index, gpu) for gpu in gpus],
                call,
            )
            if reason:
                raise BackendUnavailableError(
                    f"{reason}; put the ranks on GPUs with peer access (nvidia-smi topo -p2p rw)"
                )
        return list(_OFFERS) if choice == "auto" else [choice]

    def _set_up(self, kind: str, max_tokens: int, call: Call) -> str:
        """Empty where all pairs share memory of this kind; else why not, and none is left."""
        memory: Any = None
        offer: IpcOffer | FdOffer
        hello = self._core.Signal.HELLO
        with ExitStack() as resources:
            mine = {"offer": "", "problem": ""}
            try:
                memory = self._communicator.allocate(max_tokens, self._kinds()[kind])
                offer = _OFFERS[kind](memory, self._rank, self._size)
                resources.callback(offer.close)
                mine["offer"] = offer.text
            except Exception as error:  # peers wait for the verdict, whatever went wrong
                mine["problem"] = str(error)[:_PROBLEM_LETTERS]
            answers = self._exchange(mine, call)
            failed = [rank for rank, answer in enumerate(answers) if answer["problem"]]
            reason = f"rank {failed[0]}: {answers[failed[0]]['problem']}" if failed else ""
            offers = [answer["offer"] for answer in answers]
            # Peers come to the verdict in time although one of them was waited for in vain.
            steps: dict[str, Callable[[], list[str]]] = {
                "map the memory of": lambda: offer.open(memory, offers, call.timeout_s / 2),
                "write to": lambda: memory.mark(hello),
                "be written to by": lambda: memory.missing_marks(hello),
            }
            for what, step in steps.items():
                reason = reason or self._agree(what, step, call)
        if reason:
            if memory is not None:
                memory.close()
            self._exchange({}, call)  # nobody has any of it mapped any more
            self._communicator.release_memory()
        return reason

    def _kinds(self) -> dict[str, Any]:
        kinds = self._core.MemoryKind
        return {"ipc": kinds.IPC, "fd": kinds.FD}

    def _agree(self, what: str, step: Callable[[], list[str]], call: Call) -> str:
        """Takes a step and is a barrier.

        Args:
            step: returns one text per rank, empty where that pair has no problem.

        Returns:
            The first problem of any rank with any peer, or nothing; the same on all ranks.
        """
        try:
            problems = [f"rank {peer}: {text}" for peer, text in enumerate(step()) if text]
        except Exception as error:  # peers wait for the verdict, whatever went wrong
            problems = [f"any peer: {error}"]
        mine = {"problem": problems[0][:_PROBLEM_LETTERS] if problems else ""}
        for rank, answer in enumerate(self._exchange(mine, call)):
            if answer["problem"]:
                return f"rank {rank} cannot {what} {answer['problem']}"
        return ""

    def _exchange(self, value: dict[str, str], call: Call) -> list[dict[str, str]]:
        """Every rank's value, by rank."""
        return exchange_json(self._channel, value, call)


class IpcOffer:
    """What peers need to map this rank's memory through CUDA IPC: the handle itself.

    Args:
        memory: `_C.SymmetricMemory`.
    """

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self.text = memory.handle().hex()

    def open(self, memory: Any, offers: list[str], timeout_s: float) -> list[str]:
        """Maps the peers' memory; one text per rank: empty, or why it cannot be mapped."""
        return memory.open([bytes.fromhex(offer) for offer in offers])

    def close(self) -> None:
        """The memory stays mapped."""


class FdOffer:
    """The same through file descriptors: an address to send them to, and this rank's own one."""

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self._fd = -1
        self._sockets = FdExchange(rank, size)
        try:
            handle = memory.handle()  # none, if there are no peers
        except BaseException:
            self._sockets.close()
            raise
        if handle:
            self._fd = int.from_bytes(handle, sys.byteorder)
        self.text = self._sockets.address

    def open(self, memory: Any, offers: list[str], timeout_s: float) -> list[str]:
        try:
            fds = self._sockets.exchange(self._fd, offers, timeout_s)
        except FdExchangeError as error:
            return error.problems
        try:
            return memory.open(
                [
                    fds.get(rank, -1).to_bytes(_FD_BYTES, sys.byteorder, signed=True)
                    for rank in range(len(offers))
                ]
            )
        finally:
            for fd in fds.values():
                os.close(fd)

    def close(self) -> None:
        self._sockets.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# In the order in which they are tried. Rows that several ranks on one GPU read through IPC handles
# arrive at about half the rate (docs/performance.md).
_OFFERS: dict[str, type[IpcOffer] | type[FdOffer]] = {"fd": FdOffer, "ipc": IpcOffer}


def _host_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gpu_id(index: int) -> str:
    """The same in every process, whatever CUDA_VISIBLE_DEVICES is there."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _missing_access(index: int, gpu: str) -> str:
    """Why device `index` cannot reach the GPU `gpu`; empty where it can, or where that GPU is not
    visible to this process, so that only the attempt will tell."""
    for other in range(torch.cuda.device_count()):
        if other == index or gpu_id(other) != gpu:
            continue
        if not torch.cuda.can_device_access_peer(index, other):
            return f"GPU {gpu_id(index)} has no peer access to GPU {gpu}"
    return ""
