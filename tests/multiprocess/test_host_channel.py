"""Messages among the ranks of one host of a group, between messages of the whole group."""

from __future__ import annotations

import torch.distributed as dist

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.backends.hosts import Hosts
from moe_ep.backends.nvshmem_memory import HostChannel
from moe_ep.errors import PeerTimeoutError
from moe_ep.testing import run_ranks


def talk(rank: int) -> str:
    """Rounds of both kinds in turn; in the last one the other rank of the host stays away."""
    group = dist.group.WORLD
    channel = Channel(group, 3)
    host_channel = HostChannel(channel, Hosts(rank, 4, 2))
    call = Call(1, "setup", 20.0)
    for number in range(3):
        mine = {"value": f"{rank}.{number}"}
        everybody = exchange_json(channel, mine, call)
        assert [answer["value"] for answer in everybody] == [f"{r}.{number}" for r in range(4)]
        neighbors = exchange_json(host_channel, mine, call)
        first = rank // 2 * 2
        assert [answer["value"] for answer in neighbors] == [
            f"{r}.{number}" for r in (first, first + 1)
        ]
    store = dist.distributed_c10d._get_default_store()
    if rank % 2:
        store.wait([f"rank {rank - 1} has waited"])
        return ""
    try:
        exchange_json(host_channel, {}, Call(2, "setup", 0.5))
    except PeerTimeoutError as error:
        store.set(f"rank {rank} has waited", "1")
        return str(error)
    raise AssertionError("nobody was missed")


def test_ranks_of_one_host_talk_and_are_named_as_in_the_group() -> None:
    told = run_ranks(talk, 4, limit_s=60)
    assert "rank 0 waited 0.5 s for rank 1 in setup" in told[0]
    assert "rank 2 waited 0.5 s for rank 3 in setup" in told[2]
