"""Which rank is on which host. rank = host * ranks_per_host + local; a rail is one local index."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from moe_ep import env
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.errors import BackendUnavailableError

_NAME_LETTERS = 60


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group on their hosts: equally many on each, those of a host in a row."""

    rank: int
    num_ranks: int
    ranks_per_host: int
    simulated: bool = False
    """Whether MOE_EP_RANKS_PER_HOST draws the borders, within one machine."""

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // self.ranks_per_host

    @property
    def host(self) -> int:
        return self.host_of(self.rank)

    @property
    def local(self) -> int:
        return self.local_of(self.rank)

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def local_of(self, rank: int) -> int:
        return rank % self.ranks_per_host

    def rank_of(self, host: int, local: int) -> int:
        return host * self.ranks_per_host + local

    def same_host(self, rank: int) -> bool:
        return self.host_of(rank) == self.host

    def rail_peers(self) -> list[int]:
        """Ranks with this rank's local index on the other hosts, the next host's first."""
        return [self.rank_of(host, self.local) for host in staggered(self.host, self.num_hosts)]


def staggered(me: int, n: int) -> list[int]:
    """The others of n in the order in which `me` visits them: in no step do two visit the same.

    `staggered_peer` of csrc/shared/peer_order.h is the same for the device.
    """
    return [(me + 1 + step) % n for step in range(n - 1)]


def find_hosts(channel: Channel, call: Call) -> Hosts:
    """Exchanges host names and numbers the hosts. Collective.

    Raises:
        BackendUnavailableError: hosts have different numbers of ranks, or a host's ranks are not in
            a row (raised on all ranks).
        ValueError: MOE_EP_RANKS_PER_HOST is not a number (the peers get a PeerError), or differs
            between ranks.
    """
    simulated: int | None = None
    try:
        simulated = env.ranks_per_host()
    except ValueError as error:
        call = replace(call, error=error)
    mine = {"id": _host_id(), "name": socket.gethostname()[:_NAME_LETTERS]}
    mine["simulated"] = str(simulated or "")
    answers = exchange_json(channel, mine, call, "hosts")
    for rank, answer in enumerate(answers):
        if answer["simulated"] != answers[0]["simulated"]:
            raise ValueError(
                f"{env.RANKS_PER_HOST} is {answers[0]['simulated'] or 'not set'} on rank 0 and "
                f"{answer['simulated'] or 'not set'} on rank {rank}; give all ranks the same"
            )
    ids = [answer["id"] for answer in answers]
    names = [answer["name"] for answer in answers]
    return number_hosts(channel.rank, ids, names, simulated)


def number_hosts(
    rank: int, ids: list[str], names: list[str], simulated: int | None = None
) -> Hosts:
    """Ranks on hosts.

    Args:
        ids: equal for ranks of one machine, by rank. names: of the machines, for messages.
        simulated: ranks of a simulated host, or None.

    Raises:
        BackendUnavailableError: as `find_hosts`.
    """
    runs = [(name, len(list(run))) for (_, name), run in groupby(zip(ids, names, strict=True))]
    if len(runs) > len(set(ids)):
        where = ", ".join(f"rank {number} on {name}" for number, name in enumerate(names))
        raise BackendUnavailableError(
            f"the ranks of a host must be in a row, as torchrun numbers them: {where}"
        )
    sizes, what = runs, "hosts"
    if simulated is not None:
        sizes, what = [], f"hosts simulated by {env.RANKS_PER_HOST}={simulated}"
        for number, start in enumerate(range(0, len(ids), simulated)):
            machines = ids[start : start + simulated]
            sizes.append((f"host {number}", len(machines)))
            if len(set(machines)) > 1:
                raise BackendUnavailableError(
                    f"{env.RANKS_PER_HOST}={simulated} puts ranks of {len(set(machines))} machines "
                    f"on host {number}; a simulated host is a part of one machine"
                )
    if len({size for _, size in sizes}) > 1:
        counts = ", ".join(f"{size} on {name}" for name, size in sizes)
        raise BackendUnavailableError(
            f"{what} have different numbers of ranks ({counts}); rows go from host to host between "
            "ranks of equal local index: start equally many on every host, or use backend reference"
        )
    return Hosts(rank, len(ids), sizes[0][1], simulated is not None)


def _host_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
