"""The routing between hosts, modelled in plain Python: what the kernels of csrc/nvshmem are to do.

Every rank of a host is the source of its own tokens and of those that ranks of its rail (the same
place on another host) have put into its inbox. The model numbers these tokens, experts and chunks
as the kernels do, and the test compares what comes out with the definition: rows by expert, source
rank and token, every sum complete, and one row across the border for each token and remote host.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class World:
    """n hosts of m ranks with L experts each; C tokens of a rank move at once.

    topk: [rank][token][k], -1 unused."""

    hosts: int
    ranks: int
    local: int
    chunk: int
    topk: list[list[list[int]]]

    @property
    def most_tokens(self) -> int:
        return max(len(tokens) for tokens in self.topk)

    def host_of(self, expert: int) -> int:
        return expert // (self.ranks * self.local)


def random_world(generator: random.Random, hosts: int, ranks: int) -> World:
    local, slots = generator.randint(1, 3), generator.randint(1, 4)
    experts = hosts * ranks * local
    topk = []
    for _ in range(hosts * ranks):
        tokens = generator.choice([0, 1, generator.randint(2, 14)])
        topk.append(
            [[generator.randint(-1, experts - 1) for _ in range(slots)] for _ in range(tokens)]
        )
    return World(hosts, ranks, local, generator.choice([1, 3, 4, 16]), topk)


def host_topk(world: World, host: int, place: int) -> list[list[int]]:
    """What rank `place` of `host` counts: expert ids of its rail's tokens, chunk by chunk, within a
    chunk by host. An id is expert * n + source host, so that rows of one expert sort by host."""
    n, first = world.hosts, host * world.ranks * world.local
    num_chunks = max(-(-world.most_tokens // world.chunk), 1)
    slots = max((len(s) for tokens in world.topk for s in tokens), default=1)
    ids = []
    for v in range(num_chunks * n * world.chunk):
        source = v // world.chunk % n
        token = v // (world.chunk * n) * world.chunk + v % world.chunk
        tokens = world.topk[source * world.ranks + place]
        row = tokens[token] if token < len(tokens) else [-1] * slots
        here = [e - first if 0 <= e - first < world.ranks * world.local else -1 for e in row]
        ids.append([-1 if e < 0 else e * n + source for e in here])
    return ids


def rows_of_host(world: World, host: int) -> list[list[tuple[int, int, int]]]:
    """[rank of the host] -> (place, token v, k) of its rows: what the notify kernel of one host
    makes of the ids, that is by id, then by source rank within the host, then by token."""
    topk = [host_topk(world, host, place) for place in range(world.ranks)]
    blocks = world.local * world.hosts
    result = []
    for rank in range(world.ranks):
        rows = []
        for block in range(rank * blocks, (rank + 1) * blocks):
            for place, tokens in enumerate(topk):
                for v, ids in enumerate(tokens):
                    rows += [(place, v, k) for k, found in enumerate(ids) if found == block]
        result.append(rows)
    return result


def token_of(world: World, v: int) -> tuple[int, int]:
    """(host, token) of host token v."""
    span = world.hosts * world.chunk
    return v // world.chunk % world.hosts, v // span * world.chunk + v % world.chunk


def defined_rows(world: World, rank: int) -> list[tuple[int, int, int]]:
    """(source rank, token, k) by expert, source rank, token: Megatron's order."""
    return [
        (source, token, k)
        for expert in range(rank * world.local, (rank + 1) * world.local)
        for source, tokens in enumerate(world.topk)
        for token, row in enumerate(tokens)
        for k, found in enumerate(row)
        if found == expert
    ]


SHAPES = [(2, 2), (2, 4), (4, 2), (3, 2), (4, 1), (1, 3)]


@pytest.mark.parametrize(("hosts", "ranks"), SHAPES)
def test_rows_come_in_the_order_of_one_host(hosts: int, ranks: int) -> None:
    generator = random.Random(hosts * 10 + ranks)
    for _ in range(20):
        world = random_world(generator, hosts, ranks)
        for host in range(hosts):
            for place, rows in enumerate(rows_of_host(world, host)):
                named = []
                for source_place, v, k in rows:
                    source_host, token = token_of(world, v)
                    named.append((source_host * ranks + source_place, token, k))
                assert named == defined_rows(world, host * ranks + place)


def put_rows(world: World) -> Counter[tuple[int, int]]:
    """Rows put from rank to rank, chunk by chunk, as send_rows does."""
    rows: Counter[tuple[int, int]] = Counter()
    for rank, tokens in enumerate(world.topk):
        host, place = divmod(rank, world.ranks)
        for row in tokens:
            for step in range(world.hosts - 1):
                peer = (host + 1 + step) % world.hosts
                if any(e >= 0 and world.host_of(e) == peer for e in row):
                    rows[rank, peer * world.ranks + place] += 1
    return rows


@pytest.mark.parametrize(("hosts", "ranks"), SHAPES)
def test_one_row_for_each_token_and_remote_host(hosts: int, ranks: int) -> None:
    generator = random.Random(hosts * 10 + ranks)
    for _ in range(20):
        world = random_world(generator, hosts, ranks)
        rows = put_rows(world)
        pairs = {
            (rank, token, world.host_of(e))
            for rank, tokens in enumerate(world.topk)
            for token, row in enumerate(tokens)
            for e in row
            if e >= 0 and world.host_of(e) != rank // ranks
        }
        assert sum(rows.values()) == len(pairs)
        for (source, target), count in rows.items():
            assert source % ranks == target % ranks and source != target  # along the rail
            host = target // ranks
            assert count == sum(1 for rank, _, h in pairs if (rank, h) == (source, host))


@pytest.mark.parametrize(("hosts", "ranks"), SHAPES)
def test_sums_over_hosts_are_complete(hosts: int, ranks: int) -> None:
    """A rank sums its rows of a host token, the rail's rank the ranks' sums, the token's rank the
    hosts' sums: every slot is counted once."""
    generator = random.Random(hosts * 10 + ranks)
    for _ in range(20):
        world = random_world(generator, hosts, ranks)
        arrived: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for host in range(hosts):
            sums: Counter[tuple[int, int]] = Counter()
            for rows in rows_of_host(world, host):
                for place, v, k in rows:
                    sums[place, v] += 10**k  # the slot's digit
            for (place, v), value in sums.items():
                source_host, token = token_of(world, v)
                key = source_host * ranks + place, token
                arrived.setdefault(key, []).append((host, value))
        for rank, tokens in enumerate(world.topk):
            for token, row in enumerate(tokens):
                parts = arrived.get((rank, token), [])
                assert sum(value for _, value in parts) == sum(
                    10**k for k, e in enumerate(row) if e >= 0
                )
                # As add_sums expects them: in order of hosts, those of its slots' experts.
                assert [h for h, _ in parts] == sorted({world.host_of(e) for e in row if e >= 0})


def test_worked_by_hand() -> None:
    """Two hosts of one rank, one expert each: token 1 of rank 0 goes to both."""
    world = World(2, 1, 1, 2, [[[0], [1, 0], [1]], [[0]]])
    assert put_rows(world) == {(0, 1): 2, (1, 0): 1}
    # Chunk 0: tokens 0, 1 of host 0, then of host 1; chunk 1 the same.
    assert [v for _, v, _ in rows_of_host(world, 0)[0]] == [0, 1, 2]
    assert [v for _, v, _ in rows_of_host(world, 1)[0]] == [1, 4]
