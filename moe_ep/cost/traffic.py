"""Bytes that one rank moves in a dispatch and a combine, phase by phase.

Letters as in routing.py. A rank's loads from a peer's memory count as its own: all ranks do the
same, so that what it reads elsewhere is what others read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_ep.cost.memory import count_columns
from moe_ep.cost.routing import Routing
from moe_ep.layout import DTYPE_BYTES, FP8_BLOCK, EPLayout


@dataclass(frozen=True)
class Phase:
    """A part of a dispatch or combine that is over before the next begins. All in bytes.

    Attributes:
        loads, stores: by the SMs of one rank, in device memory, its own or a peer's.
        nvlink: one direction, of one rank. nic: likewise; dma: what network cards read and write in
            this GPU's memory.
        launches: kernels. waits: for peers, once or not at all.
        all_sms: not bound to the layout's `num_sms`.
    """

    name: str
    loads: float = 0.0
    stores: float = 0.0
    nvlink: float = 0.0
    nic: float = 0.0
    dma: float = 0.0
    launches: int = 1
    waits: bool = False
    all_sms: bool = False

    @property
    def hbm(self) -> float:
        return self.loads + self.stores + self.dma


@dataclass(frozen=True)
class Rows:
    """Bytes of a row in each of its forms, and how many there are.

    Attributes:
        tokens: of each rank (T).
        x: as the caller holds it, as dispatch and combine return it. wire: as dispatch sends it.
        imbalance: rows that the fullest rank gets, over the mean.
    """

    tokens: int
    x: float
    wire: float
    routing: Routing
    imbalance: float = 1.0

    @classmethod
    def of(cls, layout: EPLayout, tokens: int, routing: Routing, imbalance: float = 1.0) -> Rows:
        """FP8 layouts: of bf16 tokens, one fp32 scale per 128 columns."""
        hidden, dtype = layout.model.hidden, layout.dispatch.dtype
        if dtype == "fp8_e4m3":
            wire = hidden + hidden // FP8_BLOCK * 4
            return cls(tokens, hidden * DTYPE_BYTES["bf16"], wire, routing, imbalance)
        size = hidden * DTYPE_BYTES[dtype]
        return cls(tokens, size, size, routing, imbalance)

    @property
    def unquantised(self) -> Rows:
        """The same rows in a backward pass, where gradients travel as they are."""
        return replace(self, wire=self.x)

    @property
    def quantises(self) -> bool:
        return self.wire != self.x

    # What the fullest rank gets. No rank gets more than every row there is.

    @property
    def arriving(self) -> float:
        """Expert rows, without padding."""
        routing = self.routing
        return self.tokens * min(
            self.imbalance * routing.slots, float(routing.ranks * routing.max_slots)
        )

    @property
    def rank_rows(self) -> float:
        routing = self.routing
        return self.tokens * min(self.imbalance * routing.destinations, float(routing.ranks))

    @property
    def host_rows(self) -> float:
        """Through the network card, one way. A full rank is taken to be on an equally full host."""
        routing = self.routing
        return self.tokens * min(self.imbalance * routing.remote_hosts, routing.hosts - 1.0)


Verb = Callable[[EPLayout, Rows], list[Phase]]


def notify(layout: EPLayout, rows: Rows) -> Phase:
    """The counts a rank tells every other; its time also has a fixed part (`notify_us`)."""
    routing = rows.routing
    row = 8.0 * count_columns(routing.ranks * layout.num_local_experts, routing.ranks)
    return Phase(
        "notify",
        nvlink=row * routing.ranks * routing.slots_over_nvlink,
        nic=row * routing.ranks * (1 - routing.same_host),
        waits=routing.ranks > 1,
        launches=0,
    )


def dispatch(layout: EPLayout, rows: Rows) -> list[Phase]:
    """Rows are staged; each (token, rank) loads its row once and stores it to all its experts.

    Between hosts, a row goes once per (token, host) to the rank of the same local index there, and
    ranks of that host load it from its memory.
    """
    routing, tokens = rows.routing, rows.tokens
    result = (rows.arriving + routing.padding_rows) * rows.x
    phases = []
    if routing.ranks > 1 or rows.quantises:
        phases.append(Phase("stage", loads=tokens * rows.x, stores=tokens * rows.wire))
    if routing.ranks == 1:
        return [*phases, Phase("pull", loads=tokens * rows.wire, stores=result)]
    pull = Phase(
        "pull",
        loads=rows.rank_rows * rows.wire,
        stores=result,
        nvlink=rows.rank_rows * routing.over_nvlink * rows.wire,
        nic=rows.host_rows * rows.wire,
        dma=2 * rows.host_rows * rows.wire,
        waits=True,
    )
    return [*phases, pull]


def combine(layout: EPLayout, rows: Rows) -> list[Phase]:
    """Each rank sums its rows of a token and stores the sum at the token's rank, which adds them.

    Between hosts, the sums of a host meet at the rank of the token's local index and go on as one.
    With `exact_combine` every expert row travels itself.
    """
    routing, tokens, size = rows.routing, rows.tokens, rows.x
    if routing.ranks == 1:
        return [Phase("sum", loads=rows.arriving * size, stores=tokens * size)]
    elsewhere = 1 - routing.same_host
    if layout.dispatch.exact_combine:
        partials, passed_on, added = rows.arriving, 0.0, tokens * routing.slots
        across = rows.arriving * elsewhere
    else:
        partials, passed_on, across = rows.rank_rows, rows.rank_rows * elsewhere, rows.host_rows
        added = tokens * (routing.destinations * routing.same_host + routing.remote_hosts)
    host_sums = across if passed_on else 0.0
    return [
        Phase(
            "push",
            loads=(rows.arriving + passed_on) * size,
            stores=(partials + host_sums) * size,
            nvlink=partials * routing.over_nvlink * size,
            nic=across * size,
            dma=2 * across * size,
            waits=True,
        ),
        # The same kernel goes on.
        Phase("sum", loads=added * size, stores=tokens * size, launches=0),
    ]


def low_latency_dispatch(layout: EPLayout, rows: Rows) -> list[Phase]:
    """One row per (token, expert), straight to its rank, then packed there."""
    sent = rows.arriving * rows.wire
    return [
        replace(_direct("send", rows, sent), loads=rows.tokens * rows.x + sent),
        Phase("pack", loads=sent, stores=sent, launches=0, all_sms=True),
    ]


def low_latency_combine(layout: EPLayout, rows: Rows) -> list[Phase]:
    """Every expert row back to its token's rank, summed there."""
    back = rows.tokens * rows.routing.slots * rows.x
    total = Phase("sum", loads=back, stores=rows.tokens * rows.x, launches=0, all_sms=True)
    return [_direct("send", rows, rows.arriving * rows.x), total]


def all_to_all_dispatch(layout: EPLayout, rows: Rows) -> list[Phase]:
    """What frameworks do without such a library: permute, all-to-all of one row per (token,
    expert), sort by local expert. In the same row format, to be fair to it."""
    routing = rows.routing
    sent = rows.tokens * routing.slots * rows.wire
    received = rows.arriving * rows.wire
    padding = routing.padding_rows * rows.wire
    alone = routing.ranks == 1
    permute = Phase(
        "permute",
        loads=rows.tokens * rows.wire,
        stores=sent + (padding if alone else 0.0),
        all_sms=True,
    )
    if alone:
        return [permute]
    phases = [permute, _direct("all-to-all", rows, received)]
    if layout.num_local_experts > 1 or padding:
        phases.append(Phase("sort", loads=received, stores=received + padding, all_sms=True))
    return phases


def all_to_all_combine(layout: EPLayout, rows: Rows) -> list[Phase]:
    """The way back: sort by source rank, all-to-all, sum over a token's experts."""
    routing, size = rows.routing, rows.x
    sent, back = rows.arriving * size, rows.tokens * routing.slots * size
    unpermute = Phase("unpermute", loads=back, stores=rows.tokens * size, all_sms=True)
    if routing.ranks == 1:
        return [unpermute]
    phases = [_direct("all-to-all", rows, sent), unpermute]
    if layout.num_local_experts > 1 or routing.padding_rows:
        phases.insert(0, Phase("sort", loads=sent, stores=sent, all_sms=True))
    return phases


def _direct(name: str, rows: Rows, num_bytes: float) -> Phase:
    """Rows that go straight to their rank over whichever link leads there."""
    routing = rows.routing
    across = num_bytes * (1 - routing.same_host)
    return Phase(
        name,
        loads=num_bytes,
        stores=num_bytes,
        nvlink=num_bytes * routing.slots_over_nvlink,
        nic=across,
        dma=2 * across,
        waits=True,
        all_sms=True,
    )
