"""Dispatch and combine between hosts, simulated on one GPU: across their borders only NVSHMEM is
used. Results against the plain computation, bytes across the border against the formula."""

from __future__ import annotations

import fault_scenarios
import internode_scenarios as internode
import pytest
import scenarios
import stream_scenarios
from internode_scenarios import HostSettings

from moe_ep.testing import launch_ranks, run_ranks

SHAPES = [HostSettings(2, 2), HostSettings(2, 4), HostSettings(4, 2), HostSettings(3, 2)]


def shape_name(hosts: HostSettings) -> str:
    return f"{hosts.num_hosts}x{hosts.ranks_per_host}"


@pytest.mark.parametrize("hosts", SHAPES, ids=shape_name)
def test_equals_reference(hosts: HostSettings) -> None:
    steps = [
        (internode.check_border, (hosts,)),
        (scenarios.check_cases, (internode.exchange_cases(),)),
        (internode.check_repeats, ()),
        (scenarios.check_autograd, ()),
    ]
    run_ranks(
        internode.between_hosts, hosts.num_ranks, hosts, internode.check_all, steps, limit_s=300
    )


@pytest.mark.parametrize("hosts", [HostSettings(2, 2), HostSettings(3, 1)], ids=shape_name)
def test_order_of_operations(hosts: HostSettings) -> None:
    """Interleaved plans, streams, growing memory, static capacity, graphs, bad input."""
    steps = [
        (scenarios.check_interleaved, ()),
        (stream_scenarios.check_streams, ()),
        (scenarios.check_growth, ()),
        (internode.check_capacity, ()),
        (scenarios.check_graph, ()),
        (internode.check_bad_input, ()),
        (scenarios.check_fresh_objects, (6,)),
    ]
    run_ranks(
        internode.between_hosts, hosts.num_ranks, hosts, internode.check_all, steps, limit_s=240
    )


def test_one_rank_a_host_and_large_inboxes() -> None:
    hosts = HostSettings(4, 1, inbox_tokens=2048)
    cases = internode.exchange_cases()[::2]
    run_ranks(
        internode.between_hosts, hosts.num_ranks, hosts, scenarios.check_cases, cases, limit_s=180
    )


def test_buffer() -> None:
    hosts = HostSettings(2, 2)
    run_ranks(
        internode.between_hosts,
        hosts.num_ranks,
        hosts,
        internode.check_buffer,
        hosts.ranks_per_host,
        limit_s=180,
    )


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_bad_input_names_its_rank_on_every_host(verb: str) -> None:
    """Rows reach most ranks by way of another; that one is not to blame."""
    hosts = HostSettings(2, 2)
    *peers, culprit = run_ranks(
        internode.between_hosts, hosts.num_ranks, hosts, internode.check_culprit, verb, limit_s=120
    )
    assert culprit == "ValueError: of no use"
    for told in peers:
        assert told.startswith("PeerError") and "rank 3 gave bad input" in told, (verb, peers)


def test_exact_combine_is_refused() -> None:
    hosts = HostSettings(2, 1)
    told = run_ranks(
        internode.between_hosts, hosts.num_ranks, hosts, internode.check_refused, limit_s=90
    )
    assert all("exact_combine" in text and "reference" in text for text in told), told


@pytest.mark.usefixtures("fresh_mps")
def test_dead_rank_of_another_host() -> None:
    """Rank 3 dies: who waits for it directly names it, its host and the phase."""
    hosts = HostSettings(2, 2)
    outcomes = launch_ranks(
        internode.between_hosts, 4, hosts, fault_scenarios.check_dead_peer, limit_s=90
    )
    assert outcomes[3].exitcode == 3
    waits = {
        0: "rank 2 (host 1) in combine (sums from another host)",  # which itself waits for rank 3
        1: "rank 3 (host 1) in combine (sums from another host)",
        2: "rank 3 (host 1) in combine (partial sums)",
    }
    for rank, wait in waits.items():
        told = outcomes[rank].result
        assert told is not None, outcomes[rank]
        assert f"rank {rank} waited 2 s for {wait}" in told, told
        assert told.endswith("| broken"), told


@pytest.mark.usefixtures("fresh_mps")
def test_late_rank_of_another_host() -> None:
    hosts = HostSettings(2, 1)
    outcomes = launch_ranks(
        internode.between_hosts, 2, hosts, fault_scenarios.check_slow_peer, 2.0, 5.0, limit_s=90
    )
    told, seconds, *_ = outcomes[0].result
    assert "rank 0 waited 2 s for rank 1 (host 1) in dispatch.notify" in told, told
    assert "operation 2" in told and 2.0 <= seconds < 4.0
