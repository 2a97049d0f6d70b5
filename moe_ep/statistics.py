"""What an exchange has moved and how long it took: on one rank, and side by side for its group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round

VERBS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
LINKS = ("own_rank", "own_host", "other_hosts")
MAX_RANKS_NAMED = 16  # in `GroupStatistics.scalars`


@dataclass(frozen=True)
class Link:
    """Token rows that took one kind of way, and their bytes (FP8 scales included).

    Attributes:
        rows: token rows.
        bytes: theirs.
    """

    rows: int = 0
    bytes: int = 0

    def __add__(self, other: Link) -> Link:
        return Link(self.rows + other.rows, self.bytes + other.bytes)


@dataclass(frozen=True)
class VerbStatistics:
    """One verb of one layer, or of several added up.

    Attributes:
        calls: how often it ran.
        timed: calls whose time is known: on a GPU only those that have finished.
        us: time of those, in microseconds; of a dispatch with its exchange of counts. On backend
            cuda between two events of the GPU, elsewhere of the host.
        wait_us: of it, waiting for the peer that came last.
        waited_for_us: wait_us by that peer.
        links: rows between the experts of this rank and the ranks of their tokens: `own_rank`,
            `own_host` and `other_hosts`.
    """

    calls: int = 0
    timed: int = 0
    us: float = 0.0
    wait_us: float = 0.0
    waited_for_us: dict[int, float] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=lambda: {name: Link() for name in LINKS})

    @property
    def us_per_call(self) -> float:
        """Microseconds of a timed call, on average; 0 if there was none."""
        return self.us / self.timed if self.timed else 0.0

    def __add__(self, other: VerbStatistics) -> VerbStatistics:
        peers = self.waited_for_us.keys() | other.waited_for_us.keys()
        return VerbStatistics(
            self.calls + other.calls,
            self.timed + other.timed,
            self.us + other.us,
            self.wait_us + other.wait_us,
            {
                p: self.waited_for_us.get(p, 0.0) + other.waited_for_us.get(p, 0.0)
                for p in sorted(peers)
            },
            {name: self.links[name] + other.links[name] for name in LINKS},
        )


@dataclass(frozen=True)
class LayerStatistics:
    """One layer, or several added up.

    Attributes:
        tokens_per_expert: [L] rows that each local expert got in forward dispatches, padding left
            out.
        verbs: `dispatch`, `combine`, `dispatch_backward` and `combine_backward`.
    """

    tokens_per_expert: list[int]
    verbs: dict[str, VerbStatistics] = field(
        default_factory=lambda: {name: VerbStatistics() for name in VERBS}
    )

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        tokens = zip(self.tokens_per_expert, other.tokens_per_expert, strict=True)
        return LayerStatistics(
            [a + b for a, b in tokens],
            {name: self.verbs[name] + other.verbs[name] for name in VERBS},
        )

    @property
    def wait_us(self) -> float:
        """Microseconds waited for the peer that came last, all verbs added up."""
        return sum(verb.wait_us for verb in self.verbs.values())


@dataclass(frozen=True)
class Statistics:
    """Of one rank, since statistics were switched on or last reset.

    Attributes:
        rank: in the group.
        num_local_experts: L.
        layers: by the name their dispatches gave; "" without a name.
    """

    rank: int
    num_local_experts: int
    layers: dict[str, LayerStatistics]

    @property
    def total(self) -> LayerStatistics:
        """All layers added up."""
        return sum(self.layers.values(), LayerStatistics([0] * self.num_local_experts))

    @property
    def imbalance(self) -> float:
        """Fullest local expert over the mean of the local experts; 1 is even, 0 means no row."""
        return imbalance(self.total.tokens_per_expert)

    def to_json(self) -> str:
        """All of it as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        """From the `text` of `to_json`."""
        data = json.loads(text)
        layers = {name: _layer(layer) for name, layer in data["layers"].items()}
        return cls(data["rank"], data["num_local_experts"], layers)


@dataclass(frozen=True)
class GroupStatistics:
    """Of all ranks of a group, by rank.

    Attributes:
        by_rank: one Statistics per rank.
        expert_tensor: ranks that share each expert.
    """

    by_rank: list[Statistics]
    expert_tensor: int = 1

    @property
    def layers(self) -> list[str]:
        """Names of all layers that some rank has counted, layer 10 after layer 9."""
        return sorted({name for one in self.by_rank for name in one.layers}, key=_natural)

    def tokens_per_expert(self, layer: str | None = None) -> list[int]:
        """[E] rows of every expert of the group, of one layer or of all."""
        # Ranks that share an expert get the same rows: the first of them speaks.
        parts = [self._of(one, layer) for one in self.by_rank[:: self.expert_tensor]]
        return [count for part in parts for count in part.tokens_per_expert]

    def imbalance(self, layer: str | None = None) -> float:
        """Fullest expert of the group over the mean, of one `layer` or of all; 1 is even, 0 means
        no row."""
        return imbalance(self.tokens_per_expert(layer))

    def waited_for_us(self) -> list[float]:
        """[R] microseconds that other ranks have waited for each rank, as the last to come."""
        total = [0.0] * len(self.by_rank)
        for one in self.by_rank:
            for verb in one.total.verbs.values():
                for peer, us in verb.waited_for_us.items():
                    total[peer] += us
        return total

    def scalars(self, prefix: str = "moe_ep") -> dict[str, float]:
        """Values for a log, by name behind `prefix`; docs/operating.md lists the names."""
        totals = [one.total for one in self.by_rank]
        values = {"imbalance": self.imbalance()}
        for name in VERBS:
            times = [total.verbs[name].us_per_call for total in totals]
            values[f"{name}_us"] = sum(times) / len(times)
            values[f"{name}_us_max"] = max(times)
        values["wait_us"] = sum(map(_wait_per_dispatch, totals)) / len(totals)
        for link in LINKS:
            ways = [verb.links[link] for total in totals for verb in total.verbs.values()]
            values[f"rows_{link}"] = sum(way.rows for way in ways)
            values[f"bytes_{link}"] = sum(way.bytes for way in ways)
        if len(totals) <= MAX_RANKS_NAMED:
            for rank, us in enumerate(self.waited_for_us()):
                values[f"rank_{rank}/wait_us"] = _wait_per_dispatch(totals[rank])
                values[f"rank_{rank}/waited_for_us"] = us / max(_dispatches(totals[rank]), 1)
                values[f"rank_{rank}/rows"] = sum(totals[rank].tokens_per_expert)
        for layer in self.layers:
            if layer:
                parts = [self._of(one, layer) for one in self.by_rank]
                values[f"layer_{layer}/imbalance"] = self.imbalance(layer)
                for verb in ("dispatch", "combine"):
                    times = [part.verbs[verb].us_per_call for part in parts]
                    values[f"layer_{layer}/{verb}_us"] = sum(times) / len(times)
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}

    def _of(self, one: Statistics, layer: str | None) -> LayerStatistics:
        if layer is None:
            return one.total
        return one.layers.get(layer) or LayerStatistics([0] * one.num_local_experts)


def imbalance(tokens_per_expert: list[int]) -> float:
    """The fullest over the mean; 1 is even, 0 means no row."""
    total = sum(tokens_per_expert)
    return max(tokens_per_expert) * len(tokens_per_expert) / total if total else 0.0


def gather(channel: Channel, call: Call, mine: Statistics | None) -> list[Statistics]:
    """Every rank's statistics, by rank. Two rounds of messages, bounded as any other.

    Args:
        mine: None only together with `call.error`.

    Raises:
        PeerError, PeerTimeoutError: as for a dispatch. `call.error`: this rank's own.
    """
    data = bytearray(mine.to_json().encode()) if mine is not None else bytearray(1)
    device = channel.device()
    payload = torch.frombuffer(data, dtype=torch.uint8).to(device)
    peers = [peer for peer in range(channel.size) if peer != channel.rank]
    sizes = {peer: torch.empty(1, dtype=torch.int64, device=device) for peer in peers}
    size = torch.tensor([payload.numel()], device=device)
    _round(channel, call, "size", sizes, size)
    arrived = {
        peer: torch.empty(int(sizes[peer]), dtype=torch.uint8, device=device) for peer in peers
    }
    _round(channel, call, "content", arrived, payload)
    assert mine is not None
    found = {peer: Statistics.from_json(bytes(t.tolist()).decode()) for peer, t in arrived.items()}
    return [mine if rank == channel.rank else found[rank] for rank in range(channel.size)]


def _round(
    channel: Channel,
    call: Call,
    what: str,
    into: dict[int, torch.Tensor],
    mine: torch.Tensor,
) -> None:
    with Round(channel, call, f"{call.phase}.{what}") as exchange:
        for peer in exchange.peers():
            exchange.recv(peer, into[peer])
        for peer in exchange.peers():
            exchange.send(peer, mine)
    exchange.finish()


def _layer(data: dict[str, Any]) -> LayerStatistics:
    verbs = {}
    for name, verb in data["verbs"].items():
        links = {link: Link(**way) for link, way in verb.pop("links").items()}
        waits = {int(peer): us for peer, us in verb.pop("waited_for_us").items()}
        verbs[name] = VerbStatistics(**verb, waited_for_us=waits, links=links)
    return LayerStatistics(data["tokens_per_expert"], verbs)


def _dispatches(total: LayerStatistics) -> int:
    return total.verbs["dispatch"].calls


def _wait_per_dispatch(total: LayerStatistics) -> float:
    return total.wait_us / max(_dispatches(total), 1)


def _natural(name: str) -> tuple[Iterable[Any], str]:
    """Layer 10 after layer 9."""
    return (0, int(name)) if name.isdecimal() else (1, 0), name
