"""Low-latency mode between hosts, simulated on one GPU: across their borders only NVSHMEM is used.
Results against the plain computation, bytes across the border against the formula.

LOW_LATENCY_ROUNDS: how many random rounds, as in test_gpu_low_latency.py.
"""

from __future__ import annotations

import os
import signal

import low_latency_internode_scenarios as internode
import low_latency_scenarios
import low_latency_signals
import pytest
from low_latency_internode_scenarios import HostSettings

from moe_ep.testing import launch_ranks, run_ranks

ROUNDS = int(os.environ.get("LOW_LATENCY_ROUNDS", "100"))
SHAPES = [HostSettings(2, 2), HostSettings(2, 4), HostSettings(4, 2), HostSettings(3, 2)]
SHAPES += [HostSettings(3, 1), HostSettings(2, 2, "slots"), HostSettings(3, 2, "slots")]


@pytest.mark.parametrize("hosts", SHAPES, ids=lambda hosts: hosts.name)
@pytest.mark.timeout(300 + ROUNDS)
def test_equals_plain_computation(hosts: HostSettings) -> None:
    """Placement, FP8, sums, random rounds with delays, different num_sms, repeats, hooks, CUDA
    graphs, bytes."""
    outcomes = run_ranks(
        internode.between_hosts,
        hosts.num_ranks,
        hosts,
        internode.check_all,
        hosts,
        ROUNDS,
        limit_s=240 + ROUNDS,
    )
    for early, third in outcomes:
        assert early.startswith("OrderError: ") and "hook" in early
        assert third.startswith("OrderError: ") and "2 buffers" in third


@pytest.mark.parametrize("form", ["layered", "slots"])
def test_large_rows(form: str) -> None:
    hosts = HostSettings(2, 2, form)
    run_ranks(internode.between_hosts, 4, hosts, low_latency_scenarios.check_large, limit_s=120)


@pytest.mark.parametrize("what", ["tokens", "id", "one_expert"])
def test_bad_input_raises_on_all_hosts(what: str) -> None:
    hosts = HostSettings(2, 2, "slots" if what == "one_expert" else "layered")
    *peers, culprit = run_ranks(
        internode.between_hosts, 4, hosts, low_latency_scenarios.check_bad_input, what, limit_s=120
    )
    found = 0 if what == "tokens" else 1
    assert culprit[found].startswith("ValueError"), culprit
    for told in peers:
        assert told[0] == "", told
        assert told[1].startswith("PeerError") and "rank 3 gave bad input" in told[1], told
        assert told[2].startswith("BrokenError"), told


def test_bad_combine_raises_on_all_hosts() -> None:
    *peers, culprit = run_ranks(
        internode.between_hosts,
        4,
        HostSettings(2, 2),
        low_latency_scenarios.check_bad_combine,
        limit_s=120,
    )
    assert culprit[0].startswith("TypeError: topk_weights is torch.float64"), culprit
    for told in peers:
        assert told[0] == "" and told[1].startswith("PeerError"), told


def test_sends_start_before_the_gemm_ends() -> None:
    hosts = HostSettings(2, 2)
    for ahead_ms in run_ranks(
        internode.between_hosts, 4, hosts, low_latency_signals.check_early_sends, 2, limit_s=120
    ):
        assert ahead_ms > 0


def test_different_forms_are_refused() -> None:
    hosts = HostSettings(2, 1)
    for told in run_ranks(
        internode.between_hosts, 2, hosts, internode.check_other_form, limit_s=90
    ):
        assert "MOE_EP_LOW_LATENCY_FORM is slots on rank 0 and layered on rank 1" in told, told


def test_different_shapes_are_found() -> None:
    hosts = HostSettings(2, 1)
    for told in run_ranks(
        internode.between_hosts, 2, hosts, low_latency_scenarios.check_other_shape, limit_s=90
    ):
        assert told.startswith("OrderError") and "another shape" in told, told


def test_automatic_choice() -> None:
    hosts = HostSettings(2, 1)
    names = run_ranks(internode.between_hosts, 2, hosts, internode.check_automatic, limit_s=90)
    assert names == ["nvshmem", "nvshmem"]


@pytest.mark.usefixtures("fresh_mps")
@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_dead_rank_of_another_host(verb: str) -> None:
    """Rank 3, of host 1, dies: all wait for it directly."""
    outcomes = launch_ranks(
        internode.between_hosts,
        4,
        HostSettings(2, 2),
        low_latency_scenarios.check_dead_peer,
        verb,
        limit_s=90,
    )
    for outcome in outcomes[:3]:
        told = outcome.result
        assert told is not None, outcome
        wait = f"rank {outcome.rank} waited 2 s for rank 3 (host 1) in low_latency_{verb}"
        assert told.startswith("PeerTimeoutError: ") and wait in told, told
        assert " | BrokenError: " in told, told
    assert outcomes[3].exitcode == -signal.SIGKILL
