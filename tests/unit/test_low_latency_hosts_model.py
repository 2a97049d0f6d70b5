"""The rules of low-latency mode between hosts (csrc/kernels/low_latency_signals.cuh), as a model: a
network that delivers in any order, ranks that stop anywhere, two buffers, sources that are read
when a put is delivered and not when it is made. Each rule is needed: without it the model fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

Steps = Generator[Callable[[], bool], None, None]
OPERATIONS, TOKENS, PER_HOST, HOSTS = 8, 3, 2, 3
RANKS = PER_HOST * HOSTS
ALL = range(RANKS)
WRAP = 4  # counts are compared modulo this; one operation puts fewer messages


class WrongRow(Exception):
    """A row of another operation was read."""


class Stuck(Exception):
    """All ranks wait, and nothing is on its way."""


@dataclass
class Buffer:
    """One of a rank's two, as peers write it; by rank."""

    stage: dict[int, list[int]] = field(default_factory=lambda: {r: [0] * TOKENS for r in ALL})
    arrived: dict[int, int] = field(default_factory=lambda: dict.fromkeys(ALL, 0))
    words: dict[int, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(ALL, (0, 0)))
    received: dict[int, int] = field(default_factory=lambda: dict.fromkeys(ALL, 0))


def rail(source: int, host: int) -> int:
    return host * PER_HOST + source % PER_HOST


class World:
    """seed: of all that is left to chance. without: the rule that nobody keeps."""

    def __init__(self, seed: int, without: str) -> None:
        self.chance, self.without = random.Random(seed), without
        self.memory = [[Buffer(), Buffer()] for _ in ALL]
        self.network: list[Callable[[], None]] = []
        self.put = [[dict.fromkeys(range(HOSTS), 0) for _ in range(2)] for _ in ALL]
        self.sent: dict[tuple[int, int, int], list[int]] = {}  # (operation, source, host): tokens

    def deliver(self, near: bool, write: Callable[[], None]) -> None:
        if near:
            write()
        else:
            self.network.append(write)

    def send(self, me: int, operation: int) -> Steps:
        which, here = operation % 2, me // PER_HOST
        mine = self.memory[me][which]
        waited_for = [rail(me, h) for h in range(HOSTS)] if self.without == "all ranks" else ALL
        yield lambda: all(mine.received[r] >= operation - 2 for r in waited_for)
        for token in range(TOKENS):
            mine.stage[me][token] = operation
            yield at_once
        for host in range(HOSTS):
            tokens = [t for t in range(TOKENS) if host == here or self.chance.random() < 0.6]
            self.sent[operation, me, host] = tokens
            if host != here:
                self.put[me][which][host] += len(tokens)
                for token in tokens:
                    self.network.append(self.row(me, rail(me, host), which, token))
            word = (operation, self.put[me][which][host] % WRAP)
            for peer in range(host * PER_HOST, (host + 1) * PER_HOST):
                self.deliver(host == here, self.word(me, peer, which, word))
            yield at_once

    def row(self, source: int, target: int, which: int, token: int) -> Callable[[], None]:
        def write() -> None:
            to = self.memory[target][which]
            to.stage[source][token] = self.memory[source][which].stage[source][token]
            to.arrived[source] += 1  # a put's own signal never comes before it

        return write

    def word(self, me: int, peer: int, which: int, word: tuple[int, int]) -> Callable[[], None]:
        return lambda: self.memory[peer][which].words.__setitem__(me, word)

    def receive(self, me: int, operation: int) -> Steps:
        which, here = operation % 2, me // PER_HOST
        mine = self.memory[me][which]
        for source in self.chance.sample(ALL, RANKS):
            yield lambda s=source: mine.words[s][0] == operation
            far = source // PER_HOST != here
            at = self.memory[rail(source, here)][which]
            if far and self.without != "rows":
                expected = mine.words[source][1]
                yield lambda a=at, s=source, e=expected: a.arrived[s] % WRAP == e
            for token in self.sent[operation, source, here]:
                if at.stage[source][token] != operation:
                    raise WrongRow(f"{operation}: rank {me} reads {at.stage[source][token]}")
                yield at_once
        for peer in ALL:
            self.deliver(peer // PER_HOST == here, self.receipt(me, peer, which, operation))

    def receipt(self, me: int, peer: int, which: int, operation: int) -> Callable[[], None]:
        return lambda: self.memory[peer][which].received.__setitem__(me, operation)

    def rank(self, me: int) -> Steps:
        """Up to two operations are in flight and received in either order."""
        flying: list[int] = []
        for operation in range(1, OPERATIONS + 1):
            while flying and (flying[0] <= operation - 2 or self.chance.random() < 0.5):
                yield from self.receive(me, flying.pop(self.chance.randrange(len(flying))))
            yield from self.send(me, operation)
            flying.append(operation)
        for operation in self.chance.sample(flying, len(flying)):
            yield from self.receive(me, operation)

    def run(self) -> None:
        ranks: dict[int, Any] = {me: self.rank(me) for me in ALL}
        waits = {me: next(steps) for me, steps in ranks.items()}
        while ranks:
            ready = [me for me in ranks if waits[me]()]
            choices = len(ready) + (len(self.network) > 0)
            if choices == 0:
                raise Stuck(f"{len(ranks)} ranks wait for ever")
            pick = self.chance.randrange(choices)
            if pick == len(ready):
                self.network.pop(self.chance.randrange(len(self.network)))()
                continue
            try:
                waits[ready[pick]] = next(ranks[ready[pick]])
            except StopIteration:
                del ranks[ready[pick]]


def at_once() -> bool:
    return True  # whoever is ready may go first


def test_every_row_is_of_its_operation() -> None:
    for seed in range(150):
        World(seed, "").run()


@pytest.mark.parametrize("rule", ["all ranks", "rows"])
def test_each_rule_is_needed(rule: str) -> None:
    """A buffer is free once all ranks have received it, not the rail alone; rows have their own
    signals."""
    with pytest.raises((WrongRow, Stuck)):
        for seed in range(150):
            World(seed, rule).run()
