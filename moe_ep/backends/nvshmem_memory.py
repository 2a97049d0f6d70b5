"""Memory of backend nvshmem: a host's, which its ranks set up among themselves, and NVSHMEM's."""

from __future__ import annotations

from typing import Any

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda_memory import Memory
from moe_ep.backends.hosts import Hosts
from moe_ep.backends.nvshmem_runtime import NvshmemRuntime

# Added to a channel's number: other tags than the channel's own, and a status that names it.
_HOST_CHANNELS = 64 + 128


class HostChannel(Channel):
    """The channel of the ranks of this host, counted from 0 on each."""

    def __init__(self, channel: Channel, hosts: Hosts) -> None:
        super().__init__(channel.group, channel.number + _HOST_CHANNELS)
        self.rank, self.size = hosts.local, hosts.ranks_per_host
        self._first_rank = hosts.rank_of(hosts.host, 0)

    def group_rank(self, peer: int) -> int:
        return self._first_rank + peer


class HostsMemory:
    """Symmetric memory of both kinds: what the ranks of a host share, and a block of NVSHMEM's.

    Args:
        shared: connected. rail: `_C_nvshmem.RailExchange`.
    """

    def __init__(self, shared: Memory, runtime: NvshmemRuntime, rail: Any, call: Call) -> None:
        self._shared, self._runtime, self._rail = shared, runtime, rail
        self.broken = False
        """Whether a wait for a peer has expired: then NVSHMEM is not asked to free anything."""
        self._block: Any = None
        self._attach(call)

    @property
    def max_tokens(self) -> int:
        """Of any rank, that there is room for."""
        return self._shared.max_tokens

    def grow(self, needed_tokens: int, call: Call) -> None:
        """All ranks of all hosts come here in the same operation."""
        self._shared.grow(needed_tokens, call)
        self._runtime.free(self._block, call)
        self._attach(call)

    def release(self) -> None:
        """As `SharedMemory.release`; bounded where a peer stays away."""
        self._shared.release()
        self._runtime.release(self.broken)

    def _attach(self, call: Call) -> None:
        num_bytes = self._rail.block_bytes(self.max_tokens)
        self._block = self._runtime.allocate(num_bytes, call)
        self._rail.attach(self._block.address, self.max_tokens)
