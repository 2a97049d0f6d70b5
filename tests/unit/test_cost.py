"""The cost model against routings small enough to enumerate, and times worked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.cli.bench import traffic as measured
from moe_ep.cost import Cluster, Routing, predict, step, traffic
from moe_ep.cost.routing import expected_padding
from moe_ep.cost.times import phase_time
from moe_ep.cost.traffic import Phase, Rows
from moe_ep.layout import EPLayout

ROOT = Path(__file__).resolve().parents[2]

# Rates without efficiencies, so that a time is bytes over a rate; 1 GB/s is 1000 bytes a us.
PLAIN: dict[str, Any] = {
    "gpus_per_host": 2,
    "sms": 10,
    "hbm_GBps": 1.0,
    "nvlink_GBps": 0.5,
    "nic_GBps": 0.25,
    "hbm_efficiency": 1.0,
    "nvlink_efficiency": 1.0,
    "nic_efficiency": 1.0,
    "sm_load_GBps": 0.4,
    "sm_store_GBps": 0.2,
    "launch_us": 1.0,
    "nvlink_signal_us": 0.25,
    "rdma_signal_us": 0.5,
    "notify_us": 7.0,
    "low_latency_us": 3.0,
}


def make(
    experts: int, top_k: int, expert: int, copies: int = 1, hidden: int = 8, **dispatch: Any
) -> EPLayout:
    return EPLayout(
        model={"hidden": hidden, "num_experts": experts, "top_k": top_k},
        parallel={"expert": expert, "expert_tensor": copies},
        dispatch=dispatch,
    )


def every_token(experts: int, top_k: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(experts), top_k)


def ranks_of(choice: tuple[int, ...], local: int, copies: int) -> list[int]:
    """The rank of each expert row."""
    return [e // local * copies + part for e in choice for part in range(copies)]


SHAPES = [
    # experts, top-k, expert-parallel, expert-tensor, ranks per host
    (4, 2, 2, 1, 8),
    (6, 3, 3, 1, 2),  # hosts of 2 and 1
    (8, 2, 8, 1, 4),
    (8, 3, 4, 1, 2),
    (4, 2, 4, 2, 4),  # an expert's two ranks on one host
    (4, 2, 2, 4, 2),  # on two hosts
    (6, 2, 3, 2, 4),  # hosts of 4 and 2
    (4, 3, 4, 3, 4),  # an expert's three ranks here on one host, there on two
    (5, 1, 5, 1, 1),
    (6, 6, 2, 1, 1),
    (3, 2, 1, 1, 8),
]


@pytest.mark.parametrize(("experts", "top_k", "expert", "copies", "per_host"), SHAPES)
def test_expected_destinations(
    experts: int, top_k: int, expert: int, copies: int, per_host: int
) -> None:
    """Every token that there is, on every rank, counted."""
    layout = make(experts, top_k, expert, copies)
    routing = Routing.uniform(layout, 4, per_host)
    ranks, local = expert * copies, experts // expert
    sums = dict.fromkeys(("slots", "ranks", "hosts", "remote", "links", "near", "own"), 0.0)
    tokens = 0
    for source in range(ranks):
        home = source // per_host
        for choice in every_token(experts, top_k):
            tokens += 1
            rows = ranks_of(choice, local, copies)
            goes = set(rows)
            hosts = {rank // per_host for rank in goes}
            sums["slots"] += len(rows)
            sums["ranks"] += len(goes)
            sums["hosts"] += len(hosts)
            sums["remote"] += len(hosts - {home})
            sums["near"] += sum(rank // per_host == home for rank in rows)
            sums["own"] += rows.count(source)
            for rank in goes:  # over NVLink, unless it is its rows' holder itself
                first = rank // per_host * per_host
                size = min(per_host, ranks - first)
                if rank // per_host == home:
                    sums["links"] += rank != source
                elif ranks % per_host == 0:
                    sums["links"] += rank != first + source % per_host
                else:  # a short host has no rank for each local index: they take turns
                    sums["links"] += 1 - 1 / size
    mean = {name: value / tokens for name, value in sums.items()}
    assert routing.ranks == ranks and routing.hosts == math.ceil(ranks / per_host)
    assert routing.slots == mean["slots"]
    assert routing.destinations == pytest.approx(mean["ranks"])
    assert routing.host_destinations == pytest.approx(mean["hosts"])
    assert routing.remote_hosts == pytest.approx(mean["remote"])
    assert routing.same_host * routing.slots == pytest.approx(mean["near"])
    assert routing.slots_over_nvlink * routing.slots == pytest.approx(mean["near"] - mean["own"])
    assert routing.over_nvlink * routing.destinations == pytest.approx(mean["links"])


def test_with_replacement_would_be_wrong() -> None:
    """Two of four experts, two ranks: {01} and {23} stay on one rank, the other four pairs don't;
    drawing with replacement would give 2 (1 - 1/4) = 1.5."""
    routing = Routing.uniform(make(4, 2, 2), 3, 8)
    assert routing.destinations == pytest.approx((2 * 1 + 4 * 2) / 6)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_host_limit(limit: int) -> None:
    """Hosts first, then experts among theirs: 3 hosts of 2 ranks of 2 experts, top-2."""
    layout = make(12, 2, 6)
    routing = Routing.uniform(layout, 1, 2, limit)
    ranks, hosts, tokens = 0.0, 0.0, 0
    for chosen in itertools.combinations(range(3), limit):
        pool = [e for e in range(12) if e // 4 in chosen]
        for choice in itertools.combinations(pool, 2):
            ranks += len({e // 2 for e in choice})
            hosts += len({e // 4 for e in choice})
            tokens += 1
    assert routing.destinations == pytest.approx(ranks / tokens)
    assert routing.host_destinations == pytest.approx(hosts / tokens)
    assert routing.remote_hosts == pytest.approx(hosts / tokens * 2 / 3)


@pytest.mark.parametrize(
    ("layout", "per_host", "limit", "told"),
    [
        (make(12, 2, 6), 2, 4, "host limit 4: there are 3 hosts"),
        (
            make(12, 5, 6),
            2,
            1,
            "4 experts on so many hosts, fewer than model.top_k=5",
        ),
        (make(6, 2, 3), 2, 1, "hosts of [1, 2] ranks"),
        (make(4, 2, 2, 4), 2, 1, "each expert on one host"),
    ],
)
def test_impossible_host_limits(layout: EPLayout, per_host: int, limit: int, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        Routing.uniform(layout, 1, per_host, limit)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "share", "multiple"),
    [(6, 0.5, 4), (1, 0.25, 16), (40, 1 / 3, 1), (50, 0.1, 7), (3, 1.0, 2)],
)
def test_padding(tokens: int, share: float, multiple: int) -> None:
    mean = sum(
        math.comb(tokens, n) * share**n * (1 - share) ** (tokens - n) * (-n % multiple)
        for n in range(tokens + 1)
    )
    assert expected_padding(tokens, share, multiple) == pytest.approx(mean, abs=1e-9)


def test_every_routing_of_three_tokens() -> None:
    """R=2, E=4, K=2, T=3, rows padded to 2: all 6^6 routings of both ranks. The bytes are those
    that the benchmark counts from a routing, on average."""
    layout = make(4, 2, 2, hidden=8, dtype="bf16", row_alignment=2)
    routing = Routing.uniform(layout, 3, 8)
    rows = Rows.of(layout, 3, routing)
    pairs = list(every_token(4, 2))
    columns = [[int(e in pair) for e in range(4)] for pair in pairs]
    three = itertools.product(columns, repeat=3)
    triples = torch.tensor([[sum(c) for c in zip(*tokens, strict=True)] for tokens in three])
    counts = triples[:, None, :] + triples[None, :, :]  # of each expert, all 216 x 216 routings
    padding = (-counts[..., :2] % 2).sum(-1).double().mean().item()
    assert routing.padding_rows == pytest.approx(padding)
    # Rank 0's tokens, each triple; what arrives at rank 0 is 6 rows of the 12 on average.
    seen = []
    for triple in itertools.product(pairs, repeat=3):
        counted = measured.Counts.of(torch.tensor(triple), 0, 2, 2, arriving=6)
        seen.append(
            (
                measured.dispatch(counted, measured.RowBytes(16, 16), 16, 16),
                measured.combine(counted, 16, exact=False),
                measured.combine(counted, 16, exact=True),
            )
        )
    exact = layout.replace(**{"dispatch.exact_combine": True})
    ours = (
        traffic.dispatch(layout, rows),
        traffic.combine(layout, rows),
        traffic.combine(exact, rows),
    )
    for verb, phases in enumerate(ours):
        hbm = sum(moved[verb].hbm or 0 for moved in seen) / len(seen)
        link = sum(moved[verb].link for moved in seen) / len(seen)
        extra = padding * 16 if verb == 0 else 0  # the benchmark leaves padding out
        assert sum(phase.hbm for phase in phases) == pytest.approx(hbm + extra)
        assert sum(phase.nvlink for phase in phases) == pytest.approx(link)
        assert sum(phase.nic for phase in phases) == 0


def test_three_tokens_by_hand() -> None:
    """As above without padding, in numbers: D = 5/3, rows of 16 bytes.

    dispatch  stage 48 + 48; pull 3 D 16 = 80 loaded, 6 rows = 96 stored, half of 80 over NVLink
    combine   push 96 loaded, 80 stored, 40 over NVLink; sum 80 loaded, 48 stored
    """
    layout = make(4, 2, 2, hidden=8, num_sms=10)
    cluster = Cluster(**PLAIN)
    found = predict(layout, cluster, 3)
    assert found.rows.arriving == 6 and found.routing.padding_rows == 0
    parts = {phase.name: (phase, time, bound) for phase, time, bound in found.dispatch.parts}
    parts |= {phase.name: (phase, time, bound) for phase, time, bound in found.combine.parts}
    moved = {name: (p.loads, p.stores, p.nvlink, p.nic) for name, (p, _, _) in parts.items()}
    assert moved["stage"] == pytest.approx((48, 48, 0, 0))
    assert moved["pull"] == pytest.approx((80, 96, 40, 0))
    assert moved["push"] == pytest.approx((96, 80, 40, 0))
    assert moved["sum"] == pytest.approx((80, 48, 0, 0))
    # Pull: HBM 176 / 1000, NVLink 40 / 500, SMs (80 / 400 + 96 / 200) / 10 us; and 1.25 us latency.
    assert parts["pull"][1:] == (pytest.approx(0.176 + 1.25), "latency")
    assert parts["sum"][1:] == (pytest.approx(0.128), "HBM")
    # Counts: a row of 4 + 2 * 2 + 2 = 10 words to one other rank, 80 bytes at 500 a us.
    assert moved["notify"] == pytest.approx((0, 0, 80, 0))
    notify = 0.16 + 0.25
    assert found.dispatch.us == pytest.approx(7 + notify + (0.096 + 1) + (0.176 + 1.25))
    assert found.combine.us == pytest.approx((0.176 + 1.25) + 0.128)
    assert found.us == found.dispatch.us + found.combine.us
    # All-to-all: permute 48 + 96; 96 + 96, 48 over NVLink; sort 96 + 96. Back: the same, and sum.
    there = 7 + notify + (0.144 + 1) + (0.192 + 1.25) + (0.192 + 1)
    assert found.peer_dispatch.us == pytest.approx(there)
    assert found.peer_combine.us == pytest.approx((0.192 + 1) + (0.192 + 1.25) + (0.144 + 1))
    assert found.peer_dispatch.nvlink_bytes == pytest.approx(48 + 80)
    # One layer, forward and backward: the second dispatch exchanges no counts.
    whole = step(found)
    assert whole.us == pytest.approx(2 * found.us - 7 - notify)
    assert whole.peer_us == pytest.approx(2 * found.peer_us - 7 - notify)
    assert whole.nvlink_bytes == pytest.approx(2 * found.dispatch.nvlink_bytes + 80 - 80)


def test_between_hosts_by_hand() -> None:
    """Two hosts of two ranks, 4 experts, top-2, one token, rows of 16: D = 2, Q = 1 - 1/6."""
    layout = make(4, 2, 4, hidden=8)
    found = predict(layout, Cluster(**PLAIN), 1)
    assert (found.routing.ranks, found.routing.hosts) == (4, 2)
    assert found.routing.destinations == pytest.approx(2)
    assert found.routing.remote_hosts == pytest.approx(5 / 6)
    by_name = {phase.name: phase for phase, _, _ in found.dispatch.parts + found.combine.parts}
    pull, push, last = by_name["pull"], by_name["push"], by_name["sum"]
    assert pull.nic == push.nic == pytest.approx(16 * 5 / 6)
    assert pull.nvlink == push.nvlink == pytest.approx(2 * 16 / 2)
    assert pull.dma == pytest.approx(2 * 16 * 5 / 6)
    # Of the two partial sums one is for the other host's tokens: it is loaded again and summed.
    assert push.loads == pytest.approx((2 + 1) * 16)
    assert push.stores == pytest.approx((2 + 5 / 6) * 16)
    assert last.loads == pytest.approx((1 + 5 / 6) * 16)
    assert found.peer_dispatch.nic_bytes == pytest.approx(16 + by_name["notify"].nic)
    assert by_name["notify"].nic == 2 * 8 * (4 + 2 * 4 + 2)


def test_fp8_and_low_latency_rows() -> None:
    layout = make(4, 2, 2, hidden=256, dtype="fp8_e4m3")
    rows = Rows.of(layout, 1, Routing.uniform(layout, 1, 8))
    assert (rows.x, rows.wire) == (512, 256 + 2 * 4)
    stage, pull = traffic.dispatch(layout, rows)
    assert (stage.loads, stage.stores) == (512, 264)
    assert (pull.loads, pull.stores) == pytest.approx((264 * 5 / 3, 2 * 512))
    assert traffic.dispatch(layout, rows.unquantised)[1].loads == pytest.approx(512 * 5 / 3)
    # A backward pass sends gradients as they are: 264 and 512 there, 512 and 512 back, each 5/6.
    there = predict(layout, Cluster(**PLAIN), 1)
    counts = there.dispatch.nvlink_bytes - 264 * 5 / 6
    assert step(there).nvlink_bytes == pytest.approx(counts + (264 + 3 * 512) * 5 / 6)
    low = layout.replace(**{"dispatch.mode": "low_latency"})
    found = predict(low, Cluster(**PLAIN), 1)
    # One row per (token, expert): two, one of them to the other rank.
    assert found.dispatch.nvlink_bytes == pytest.approx(264)
    assert found.combine.nvlink_bytes == pytest.approx(512)
    assert found.dispatch.fixed_us == found.combine.fixed_us == 3
    assert not step(found).backward and step(found).us == pytest.approx(found.us)


def test_one_rank_exchanges_nothing() -> None:
    found = predict(make(4, 2, 1), Cluster(**PLAIN), 3)
    assert found.dispatch.nvlink_bytes == found.dispatch.nic_bytes == 0
    assert found.dispatch.hbm_bytes == (3 + 6) * 16 and found.combine.hbm_bytes == (6 + 3) * 16
    assert found.peer_dispatch.hbm_bytes == (3 + 6) * 16


def test_imbalance_is_bounded_by_all_rows() -> None:
    """At most every token of every rank: D up to R, expert rows up to R min(K, L)."""
    layout = make(4, 2, 2)
    routing = Routing.uniform(layout, 3, 8)
    uneven = Rows.of(layout, 3, routing, 1.1)
    assert uneven.arriving == pytest.approx(6.6) and uneven.rank_rows == pytest.approx(5.5)
    assert Rows.of(layout, 3, routing, 100.0).arriving == 3 * 2 * 2
    assert Rows.of(layout, 3, routing, 100.0).rank_rows == 3 * 2
    times = [predict(layout, Cluster(**PLAIN), 3, f).us for f in (1.0, 1.1, 1.2, 2.0)]
    assert times == sorted(times) and times[0] < times[-1]
    with pytest.raises(ValueError, match=r"imbalance: 0\.5"):
        predict(layout, Cluster(**PLAIN), 3, 0.5)
    with pytest.raises(ValueError, match="tokens: 0"):
        predict(layout, Cluster(**PLAIN), 0)


@pytest.mark.parametrize(
    ("phase", "bound", "time"),
    [
        (Phase("p", dma=50_000, launches=0), "HBM", 50.0),
        (Phase("p", nvlink=50_000, launches=0), "NVLink", 100.0),
        (Phase("p", nic=50_000, dma=100_000, launches=0), "NIC", 200.0),
        (Phase("p", stores=50_000, launches=0), "SMs", 125.0),  # two of them, 200 bytes a us
        (Phase("p", stores=50_000, launches=0, all_sms=True), "HBM", 50.0),  # ten
        (Phase("p", loads=500, waits=True), "latency", 0.625 + 1.5),
    ],
)
def test_the_slowest_resource_counts(phase: Phase, bound: str, time: float) -> None:
    layout = make(8, 2, 4, num_sms=2)
    assert phase_time(phase, layout, Cluster(**PLAIN), 2) == (pytest.approx(time), bound)


def test_shared_gpu_has_no_links() -> None:
    cluster = Cluster(**{**PLAIN, "gpus_per_host": 1, "ranks_per_gpu": 2, "nvlink_GBps": None})
    layout = make(4, 2, 2)
    phase = Phase("p", loads=1000, stores=1000, nvlink=1e9, launches=0, all_sms=True)
    assert phase_time(phase, layout, cluster, 1)[0] == pytest.approx(4.0)  # half of 1000 a us
    with pytest.raises(ValueError, match="no nvlink_GBps, but 4 ranks"):
        predict(make(4, 2, 4), cluster, 1)


def test_sms_that_suffice() -> None:
    """No fewer would do, no more would help."""
    layout = EPLayout.from_yaml(ROOT / "configs" / "qwen3_30b_a3b_ep8.yaml")
    cluster = Cluster.named("b200_cx7")
    wanted = predict(layout, cluster, 8192).sms_that_suffice
    assert 24 < wanted < cluster.sms
    times = {
        sms: predict(layout.replace(**{"dispatch.num_sms": sms}), cluster, 8192).us
        for sms in (wanted - 1, wanted, cluster.sms)
    }
    assert times[wanted - 1] > times[wanted] == pytest.approx(times[cluster.sms])
