"""Predicted times: each phase lasts as long as its slowest resource needs, phases add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ep.cost import traffic
from moe_ep.cost.cluster import Cluster
from moe_ep.cost.memory import symmetric_bytes
from moe_ep.cost.routing import Routing
from moe_ep.cost.traffic import Phase, Rows
from moe_ep.layout import EPLayout


@dataclass(frozen=True)
class Cost:
    """A dispatch or a combine.

    Attributes:
        parts: (phase, microseconds, what bounds it): "HBM", "SMs", "NVLink", "NIC" or "latency".
        fixed_us: what does not depend on bytes and belongs to no phase.
    """

    parts: tuple[tuple[Phase, float, str], ...]
    fixed_us: float = 0.0

    @property
    def us(self) -> float:
        return self.fixed_us + sum(time for _, time, _ in self.parts)

    @property
    def bound(self) -> str:
        """Of the longest phase."""
        _, longest, bound = max(self.parts, key=lambda part: part[1])
        return bound if longest >= self.fixed_us else "latency"

    @property
    def hbm_bytes(self) -> float:
        return sum(phase.hbm for phase, _, _ in self.parts)

    @property
    def nvlink_bytes(self) -> float:
        return sum(phase.nvlink for phase, _, _ in self.parts)

    @property
    def nic_bytes(self) -> float:
        return sum(phase.nic for phase, _, _ in self.parts)

    def part_us(self, *names: str) -> float:
        return sum(time for phase, time, _ in self.parts if phase.name in names)


@dataclass(frozen=True)
class Prediction:
    """Of one layout on one cluster, one call of each.

    Attributes:
        dispatch, combine: of moe_ep. peer_dispatch, peer_combine: of a plain all-to-all.
        buffer_bytes: symmetric memory of one rank; see `symmetric_bytes`.
        sms_that_suffice: SMs per rank above which something else bounds dispatch and combine.
    """

    layout: EPLayout
    cluster: Cluster
    tokens: int
    routing: Routing
    rows: Rows
    dispatch: Cost
    combine: Cost
    peer_dispatch: Cost
    peer_combine: Cost
    buffer_bytes: int | None
    sms_that_suffice: int

    @property
    def us(self) -> float:
        return self.dispatch.us + self.combine.us

    @property
    def peer_us(self) -> float:
        return self.peer_dispatch.us + self.peer_combine.us

    @property
    def result_rows(self) -> float:
        """Of the fullest rank, padding included."""
        return self.rows.arriving + self.routing.padding_rows


@dataclass(frozen=True)
class Step:
    """Everything a step exchanges, of one rank: every MoE layer once. See `step`."""

    backward: bool
    us: float
    peer_us: float
    hbm_bytes: float
    nvlink_bytes: float
    nic_bytes: float
    peer_hbm_bytes: float
    peer_nvlink_bytes: float
    peer_nic_bytes: float


def predict(
    layout: EPLayout,
    cluster: Cluster,
    tokens: int,
    imbalance: float = 1.0,
    host_limit: int | None = None,
) -> Prediction:
    """Costs of one dispatch and one combine.

    Args:
        tokens: of each rank, at least 1.
        imbalance: rows of the fullest rank over the mean, at least 1. Everybody waits for it.
        host_limit: see `Routing.uniform`.

    Raises:
        ValueError: an argument is out of range, or the cluster lacks a link that is needed.
    """
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}; a prediction needs at least 1 per rank")
    if not 1 <= imbalance < math.inf:
        raise ValueError(f"imbalance: {imbalance}; the fullest rank over the mean, at least 1")
    cluster.check(layout)
    routing = Routing.uniform(layout, tokens, cluster.ranks_per_host, host_limit)
    rows = Rows.of(layout, tokens, routing, imbalance)
    if layout.dispatch.mode == "low_latency":
        there = _cost(traffic.low_latency_dispatch(layout, rows), layout, cluster, routing)
        back = _cost(traffic.low_latency_combine(layout, rows), layout, cluster, routing)
        there, back = (Cost(cost.parts, cluster.low_latency_us) for cost in (there, back))
    else:
        there = _notified(traffic.dispatch(layout, rows), layout, cluster, rows)
        back = _cost(traffic.combine(layout, rows), layout, cluster, routing)
    peer = traffic.all_to_all_dispatch(layout, rows)
    if routing.ranks > 1:  # it has to exchange counts, too
        peer_there = _notified(peer, layout, cluster, rows)
    else:
        peer_there = _cost(peer, layout, cluster, routing)
    return Prediction(
        layout=layout,
        cluster=cluster,
        tokens=tokens,
        routing=routing,
        rows=rows,
        dispatch=there,
        combine=back,
        peer_dispatch=peer_there,
        peer_combine=_cost(traffic.all_to_all_combine(layout, rows), layout, cluster, routing),
        buffer_bytes=symmetric_bytes(layout, tokens),
        sms_that_suffice=_sms_that_suffice((there, back), layout, cluster),
    )


def step(prediction: Prediction) -> Step:
    """All MoE layers once, forward and backward; forward alone in low-latency mode.

    The backward of a dispatch is a combine, that of a combine a dispatch with a known routing and
    rows that are not quantised.
    """
    layout, cluster, rows = prediction.layout, prediction.cluster, prediction.rows
    where = (layout, cluster, prediction.routing)
    ours = [prediction.dispatch, prediction.combine]
    peers = [prediction.peer_dispatch, prediction.peer_combine]
    backward = layout.dispatch.mode == "throughput"
    if backward:
        plain = rows.unquantised
        ours += [prediction.combine, _cost(traffic.dispatch(layout, plain), *where)]
        peers += [
            prediction.peer_combine,
            _cost(traffic.all_to_all_dispatch(layout, plain), *where),
        ]
    layers = layout.model.num_moe_layers
    return Step(
        backward=backward,
        us=layers * sum(cost.us for cost in ours),
        peer_us=layers * sum(cost.us for cost in peers),
        hbm_bytes=layers * sum(cost.hbm_bytes for cost in ours),
        nvlink_bytes=layers * sum(cost.nvlink_bytes for cost in ours),
        nic_bytes=layers * sum(cost.nic_bytes for cost in ours),
        peer_hbm_bytes=layers * sum(cost.hbm_bytes for cost in peers),
        peer_nvlink_bytes=layers * sum(cost.nvlink_bytes for cost in peers),
        peer_nic_bytes=layers * sum(cost.nic_bytes for cost in peers),
    )


def phase_time(phase: Phase, layout: EPLayout, cluster: Cluster, hosts: int) -> tuple[float, str]:
    """Microseconds of a phase, and what bounds it."""
    sms = cluster.sms if phase.all_sms else min(layout.dispatch.num_sms, cluster.sms)
    needs = _needs(phase, layout, cluster)
    needs["SMs"] = _one_sm_us(phase, cluster) / sms
    bound = max(needs, key=lambda name: needs[name])
    signal = cluster.nvlink_signal_us if hosts == 1 else cluster.rdma_signal_us
    latency = phase.launches * cluster.launch_us + phase.waits * signal
    return needs[bound] + latency, bound if needs[bound] >= latency else "latency"


def _needs(phase: Phase, layout: EPLayout, cluster: Cluster) -> dict[str, float]:
    """Microseconds that each resource but the SMs needs. 1 GB/s is 1000 bytes a microsecond."""
    hbm = cluster.hbm_GBps * cluster.hbm_efficiency / cluster.ranks_per_gpu
    needs = {"HBM": phase.hbm / hbm / 1e3}
    on_one_gpu = layout.parallel.group_size <= cluster.ranks_per_gpu
    if phase.nvlink and not on_one_gpu:
        assert cluster.nvlink_GBps is not None
        needs["NVLink"] = phase.nvlink / (cluster.nvlink_GBps * cluster.nvlink_efficiency) / 1e3
    if phase.nic:
        assert cluster.nic_GBps is not None
        needs["NIC"] = phase.nic / (cluster.nic_GBps * cluster.nic_efficiency) / 1e3
    return needs


def _one_sm_us(phase: Phase, cluster: Cluster) -> float:
    return (phase.loads / cluster.sm_load_GBps + phase.stores / cluster.sm_store_GBps) / 1e3


def _cost(phases: list[Phase], layout: EPLayout, cluster: Cluster, routing: Routing) -> Cost:
    return Cost(
        tuple((phase, *phase_time(phase, layout, cluster, routing.hosts)) for phase in phases)
    )


def _notified(phases: list[Phase], layout: EPLayout, cluster: Cluster, rows: Rows) -> Cost:
    """With the exchange of counts before the phases."""
    parts = _cost([traffic.notify(layout, rows), *phases], layout, cluster, rows.routing).parts
    return Cost(parts, cluster.notify_us)


def _sms_that_suffice(costs: tuple[Cost, ...], layout: EPLayout, cluster: Cluster) -> int:
    wanted = 1
    for cost in costs:
        for phase, _, _ in cost.parts:
            slowest = max(_needs(phase, layout, cluster).values())
            if slowest > 0 and not phase.all_sms:
                wanted = max(wanted, math.ceil(_one_sm_us(phase, cluster) / slowest))
    return min(wanted, cluster.sms)
