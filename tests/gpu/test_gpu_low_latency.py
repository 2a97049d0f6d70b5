"""Low-latency mode on GPU tensors: the cases of the CPU tests, CUDA graphs, faults.

LOW_LATENCY_ROUNDS=1000 python3 -m pytest tests/gpu/test_gpu_low_latency.py -k random_rounds
"""

from __future__ import annotations

import os
import signal

import low_latency_scenarios
import low_latency_signals
import pytest
from low_latency_cases import common_cases

from moe_ep.testing import launch_ranks, run_ranks

ROUNDS = int(os.environ.get("LOW_LATENCY_ROUNDS", "150"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.timeout(240 + ROUNDS)
def test_case_21_random_rounds(num_ranks: int) -> None:
    """Two exchanges at a time, with delays of each rank's own."""
    run_ranks(low_latency_scenarios.check_rounds, num_ranks, ROUNDS, limit_s=120 + ROUNDS)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_equals_plain_computation(num_ranks: int) -> None:
    """Placement, FP8, sums, repeats, hooks and CUDA graphs."""
    outcomes = run_ranks(low_latency_scenarios.check_all, num_ranks, common_cases(), limit_s=240)
    for early, third in outcomes:
        assert early.startswith("OrderError: ") and "hook" in early
        assert third.startswith("OrderError: ") and "2 buffers" in third


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_large_rows(num_ranks: int) -> None:
    run_ranks(low_latency_scenarios.check_large, num_ranks, limit_s=120)


@pytest.mark.parametrize("what", ["tokens", "id", "one_expert"])
def test_bad_input_raises_on_all_ranks(what: str) -> None:
    *peers, culprit = run_ranks(low_latency_scenarios.check_bad_input, 3, what, limit_s=120)
    # The host finds too many tokens at once, the device bad ids a little later.
    found = 0 if what == "tokens" else 1
    assert culprit[found].startswith("ValueError"), culprit
    assert culprit[2].startswith("BrokenError"), culprit
    if what == "tokens":
        assert "x has 9 tokens; num_max_dispatch_tokens_per_rank=8" in culprit[0], culprit
    for told in peers:
        assert told[0] == "", told  # rows are on their way already
        assert told[1].startswith("PeerError") and "rank 2 gave bad input" in told[1], told
        assert told[2].startswith("BrokenError"), told


def test_bad_combine_raises_on_all_ranks() -> None:
    *peers, culprit = run_ranks(low_latency_scenarios.check_bad_combine, 3, limit_s=120)
    assert culprit[0].startswith("TypeError: topk_weights is torch.float64"), culprit
    assert culprit[1].startswith("BrokenError"), culprit
    for told in peers:
        assert told[0] == "" and told[1].startswith("PeerError"), told
        assert "rank 2 gave bad input" in told[1], told


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_case_22_poisoned_memory(num_ranks: int) -> None:
    run_ranks(low_latency_scenarios.check_poisoned, num_ranks, limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cases_12_and_18_sizes(num_ranks: int) -> None:
    run_ranks(low_latency_scenarios.check_sizes, num_ranks, limit_s=120)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_different_num_sms(num_ranks: int) -> None:
    run_ranks(low_latency_scenarios.check_uneven_sms, num_ranks, limit_s=120)


def test_a_lent_buffer_whose_memory_is_in_use() -> None:
    run_ranks(low_latency_scenarios.check_lent_again, 2, limit_s=120)


def test_case_11_different_limits() -> None:
    for told in run_ranks(low_latency_scenarios.check_other_limit, 2, limit_s=120):
        assert "num_max_dispatch_tokens_per_rank is 64 on rank 0 and 128 on rank 1" in told, told


def test_any_strides() -> None:
    run_ranks(low_latency_scenarios.check_unaligned, 2, limit_s=120)


def test_different_shapes_are_found() -> None:
    for told in run_ranks(low_latency_scenarios.check_other_shape, 2, limit_s=120):
        assert told.startswith("OrderError") and "another shape" in told, told


@pytest.mark.parametrize(("num_ranks", "blocks"), [(1, 1), (2, 1), (4, 2)])
def test_sends_start_before_the_gemm_ends(num_ranks: int, blocks: int) -> None:
    for ahead_ms in run_ranks(
        low_latency_signals.check_early_sends, num_ranks, blocks, limit_s=120
    ):
        assert ahead_ms > 0


def test_missing_block_signal_is_named() -> None:
    peer, culprit = run_ranks(low_latency_signals.check_missing_signal, 2, limit_s=120)
    assert culprit.startswith("PeerTimeoutError: rank 1 waited 3 s for its own signal"), culprit
    assert "local expert 2, block 0" in culprit and " | BrokenError: " in culprit, culprit
    assert peer.startswith("PeerTimeoutError: rank 0 waited 3 s for rank 1"), peer
    assert "low_latency_combine" in peer and " | BrokenError: " in peer, peer


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_block_signals_in_a_graph(num_ranks: int) -> None:
    run_ranks(low_latency_signals.check_captured, num_ranks, limit_s=120)


def test_nothing_of_ours_runs_between_send_and_hook() -> None:
    for names in run_ranks(low_latency_signals.check_free_between, 2, limit_s=120):
        ours = [i for i, name in enumerate(names) if "low_latency" in name]
        assert len(ours) == 2 and ours[1] - ours[0] == 5, names  # four products in between


@pytest.mark.usefixtures("fresh_mps")
@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_case_9_dead_peer(verb: str) -> None:
    outcomes = launch_ranks(low_latency_scenarios.check_dead_peer, 3, verb, limit_s=90)
    for outcome in outcomes[:2]:
        assert outcome.exitcode is not None and outcome.result is not None, outcome
        told = outcome.result
        assert told.startswith("PeerTimeoutError: "), told
        assert f"rank {outcome.rank} waited 2 s for rank 2 in low_latency_{verb}" in told, told
        assert " | BrokenError: " in told, told
    assert outcomes[2].exitcode == -signal.SIGKILL
