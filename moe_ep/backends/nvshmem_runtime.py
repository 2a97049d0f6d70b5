"""NVSHMEM for the ranks of one group: set-up with bounded waits, symmetric memory, release."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.backends import cuda_limits, nvshmem_library, nvshmem_transport, nvshmem_turn
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.backends.hosts import Hosts, find_hosts
from moe_ep.backends.nvshmem_transport import Transport
from moe_ep.errors import BackendUnavailableError, PeerTimeoutError
from moe_ep.layout import EPLayout

logger = logging.getLogger("moe_ep")

_HELLO, _GOODBYE = 1, 1 << 40  # numbers of pings; they must grow
_GOODBYE_S = 2.0
_PROBLEM_LETTERS = 600
_KIND = "nvshmem set-up"


def unavailable_reason(layout: EPLayout) -> str | None:
    """Why backend nvshmem cannot run `layout` in this process, with the fix; None where it can."""
    try:
        core = nvshmem_library.load()
    except (ImportError, OSError) as error:
        return f"moe_ep/_C_nvshmem cannot be loaded ({error}); {nvshmem_library.INSTALL}"
    return nvshmem_library.problem(core) or cuda_limits.unavailable_reason(layout)


class SymmetricBuffer:
    """Symmetric memory: zeroed, aligned to 256 bytes.

    Attributes:
        address: of this rank's copy; for NVSHMEM's calls it names every rank's copy.
    """

    def __init__(self, host: Any, hosts: Hosts, address: int, num_bytes: int) -> None:
        self._host, self._hosts = host, hosts
        self.address, self.num_bytes = address, num_bytes

    def peer_address(self, rank: int) -> int:
        """Where this rank's kernels can load and store `rank`'s copy; 0 on another host."""
        if not self._hosts.same_host(rank):
            return 0
        if rank == self._hosts.rank:
            return self.address
        return self._host.peer_address(self.address, rank)


class NvshmemRuntime:
    """NVSHMEM, whose PE r is rank r of the group.

    NVSHMEM is one per process and keeps its ranks until the process ends: several objects over the
    same ranks share it, or follow each other; one over other ranks is refused.

    Args:
        layout: its section `internode`.
        channel: of the group; carries the set-up and comes before every collective call.
        device: this rank's.
        core: the module moe_ep._C_nvshmem, if not the one that is installed.

    Attributes:
        core: that module.
        hosts: which rank is where.
        transport: as `Transport.name`, once NVSHMEM has started.
        max_rdma_tokens: rows that an inbox for one remote host has room for.

    Raises:
        BackendUnavailableError: it cannot run between these ranks (raised on all of them); with
            backend auto also where all ranks are on one host.
        PeerTimeoutError: a rank did not come in time.
        ValueError: variables that must be equal on all ranks are not.
    """

    def __init__(
        self,
        layout: EPLayout,
        channel: Channel,
        device: torch.device,
        call: Call,
        core: Any = None,
    ) -> None:
        self.core = nvshmem_library.load() if core is None else core
        self._channel = channel
        self._host: Any = None
        self._ping_block = 0
        self._buffers: list[SymmetricBuffer] = []
        self.hosts = find_hosts(channel, call)
        if layout.backend == "auto" and self.hosts.num_hosts == 1:
            raise BackendUnavailableError(
                "backend 'nvshmem' is for several hosts, and all ranks are on one"
            )
        transport = nvshmem_transport.choose(
            layout.internode, env.nvshmem_variables(), nvshmem_transport.has_adapters()
        )
        env.set_for_nvshmem(transport.variables)
        first = channel.rank == 0
        turn = nvshmem_turn.to_start(call.timeout_s / 2) if first else nullcontext("")
        with turn as problem:
            unique_id = self._agree(layout, transport, call, problem)
            self._start(device, unique_id, call)
        self._greet(call)
        self.transport = self._report(transport)

    # -- symmetric memory -------------------------------------------------------------------------

    def allocate(self, num_bytes: int, call: Call) -> SymmetricBuffer:
        """Collective: the same number of bytes on every rank.

        Raises:
            ValueError: ranks ask for different numbers (raised on all).
            BackendUnavailableError: a rank has no room (raised on all).
            PeerTimeoutError: a rank did not come in time.
        """
        answers = exchange_json(self._channel, {"num_bytes": str(num_bytes)}, call, "allocation")
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise ValueError(
                    f"rank 0 asks for {answers[0]['num_bytes']} bytes of symmetric memory, rank "
                    f"{rank} for {answer['num_bytes']}; all must ask for the same"
                )
        problem, address = "", 0
        try:
            address = self._in_time(self._host.allocate(num_bytes, call.timeout_s), call)
        except RuntimeError as error:
            problem = str(error)
        self._raise_first(problem, call)  # and a barrier: everybody's copy is zeroed
        buffer = SymmetricBuffer(self._host, self.hosts, address, num_bytes)
        self._buffers.append(buffer)
        return buffer

    def free(self, buffer: SymmetricBuffer, call: Call) -> None:
        """Collective; kernels of all ranks must have ended."""
        self._buffers.remove(buffer)
        exchange_json(self._channel, {}, call, "release of symmetric memory")
        self._in_time(self._host.free(buffer.address, call.timeout_s) or None, call)

    def release(self, broken: bool = False) -> None:
        """Leaves NVSHMEM once no rank uses the memory any more. Idempotent.

        Where a peer does not say so within two seconds, or with `broken` (a wait for a peer has
        expired), everything stays until the process ends.
        """
        host, self._host = self._host, None
        if host is None or broken:
            return
        try:
            # First: no kernel of this rank uses the memory any more. Second: it has heard so from
            # all. A rank that gives up says the first alone, so that nobody frees without it.
            for number in (_GOODBYE, _GOODBYE + 1):
                if not host.ping(self._ping_block, number, _GOODBYE_S):
                    return
                if self._missing(host, number, _GOODBYE_S):
                    return
            for address in [buffer.address for buffer in self._buffers] + [self._ping_block]:
                if not host.free(address, _GOODBYE_S):
                    return
            with nvshmem_turn.to_leave(_GOODBYE_S):
                host.finish(_GOODBYE_S)
        except RuntimeError:  # the CUDA context is gone, and the memory with it
            return

    # -- set-up: every decision is the same on all ranks ------------------------------------------

    def _agree(
        self, layout: EPLayout, transport: Transport, call: Call, problem: str = ""
    ) -> bytes:
        """Compares what must be equal; returns the unique id of rank 0. A barrier, too: all ranks
        are here and alive, so that NVSHMEM's own start, which cannot be bounded, need not wait."""
        mine = {"problem": "", "running": "", "id": "", "tokens": ""}
        mine["version"] = self.core.loaded_version()
        mine["transport"] = transport.name
        try:
            mine["tokens"] = str(env.max_rdma_tokens() or layout.internode.max_rdma_tokens)
            mine["running"] = "in use" if self.core.is_running() else ""
            mine["problem"] = self._misfit(transport) or problem
            if self._channel.rank == 0 and not mine["problem"] and not mine["running"]:
                mine["id"] = self.core.unique_id().hex()
        except ValueError as error:
            call = replace(call, error=error)
        except RuntimeError as error:
            mine["problem"] = str(error)
        mine["problem"] = mine["problem"][:_PROBLEM_LETTERS]
        answers = exchange_json(self._channel, mine, call, _KIND)
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                raise BackendUnavailableError(f"rank {rank}: {answer['problem']}")
        for key, name, fix in _MUST_BE_EQUAL:
            for rank, answer in enumerate(answers):
                if answer[key] != answers[0][key]:
                    raise BackendUnavailableError(
                        f"{name} is {answers[0][key] or 'none'} on rank 0 and "
                        f"{answer[key] or 'none'} on rank {rank}; {fix}"
                    )
        self.max_rdma_tokens = int(answers[0]["tokens"])
        return bytes.fromhex(answers[0]["id"])

    def _misfit(self, transport: Transport) -> str | None:
        spans = self.core.members()
        if spans and spans != self._members():
            return (
                f"NVSHMEM of this process spans {spans} until it ends; it cannot span "
                f"{self._members()}: give one of the two groups another backend"
            )
        several = not self.hosts.simulated and self.hosts.num_hosts > 1
        return nvshmem_library.problem(self.core) or (transport.problem if several else None)

    def _members(self) -> str:
        ranks = dist.get_process_group_ranks(self._channel.group)
        return f"ranks {', '.join(map(str, ranks))}"

    def _start(self, device: torch.device, unique_id: bytes, call: Call) -> None:
        host = self.core.NvshmemHost(
            device.index or 0, self.hosts.rank, self.hosts.num_ranks, self._members()
        )
        problem = ""
        try:
            self._in_time(host.start(unique_id, call.timeout_s) or None, call)
            self._host = host
            self._ping_block = self._in_time(
                host.allocate(host.ping_block_bytes(), call.timeout_s), call
            )
        except RuntimeError as error:
            problem = str(error)
        self._raise_first(problem, call)

    def _greet(self, call: Call) -> None:
        """Every rank puts a message into every other's memory: the transport works, or which pair
        it does not work between."""
        problem = ""
        try:
            self._in_time(self._host.ping(self._ping_block, _HELLO, call.timeout_s) or None, call)
            missing = self._missing(self._host, _HELLO, call.timeout_s / 2)
            if missing:
                far = [rank for rank in missing if not self.hosts.same_host(rank)]
                problem = (
                    f"no message has come from rank {missing[0]} (host "
                    f"{self.hosts.host_of(missing[0])}, this is host {self.hosts.host}); "
                    f"{len(missing)} ranks are missing, {len(far)} of them on other hosts: "
                    "moe-ep doctor looks at the adapters, NVSHMEM_DEBUG=INFO says what NVSHMEM does"
                )
        except RuntimeError as error:
            problem = str(error)
        self._raise_first(problem, call)

    def _missing(self, host: Any, number: int, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while (missing := host.missing_pings(self._ping_block, number)) and (
            time.monotonic() < deadline
        ):
            time.sleep(1e-3)
        return missing

    def _report(self, transport: Transport) -> str:
        name, why = transport.name, transport.why
        if name == "ibgda" and not self._host.gpu_sends():
            name = "ibrc"
            why = f"{why}, which NVSHMEM could not set up (moe-ep doctor): a CPU thread sends"
        if self._channel.rank == 0:
            hosts = self.hosts
            logger.info(
                "nvshmem %s: %d %shosts of %d ranks, transport %s (%s)",
                self.core.loaded_version(),
                hosts.num_hosts,
                "simulated " if hosts.simulated else "",
                hosts.ranks_per_host,
                name,
                why,
            )
        return name

    def _raise_first(self, problem: str, call: Call) -> None:
        """The first problem of any rank, on all of them. A barrier, too."""
        mine = {"problem": problem[:_PROBLEM_LETTERS]}
        for rank, answer in enumerate(exchange_json(self._channel, mine, call, _KIND)):
            if answer["problem"]:
                raise BackendUnavailableError(f"rank {rank}: {answer['problem']}")

    def _in_time(self, result: Any, call: Call) -> Any:
        """What a bounded call of NVSHMEM returned; None: it has not come back."""
        if result is None:
            self._host = None
            raise PeerTimeoutError(
                f"rank {self.hosts.rank} waited {call.timeout_s:g} s for NVSHMEM in {call.phase}, "
                f"operation {call.operation}: a rank that was there just before has ended or hangs "
                "(see the logs of all ranks); this process must be restarted"
            )
        return result


_MUST_BE_EQUAL = (
    ("version", "NVSHMEM's version", "install one version on all hosts"),
    ("transport", "NVSHMEM's transport", "give all ranks the same variables and adapters"),
    ("tokens", env.MAX_RDMA_TOKENS, "give all ranks the same"),
    ("running", "NVSHMEM of an earlier object", "destroy objects on all ranks, in the same order"),
)
