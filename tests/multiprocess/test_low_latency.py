"""Low-latency mode against a plain computation, on gloo and the CPU."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import low_latency_cases
import low_latency_order
import pytest
import torch
import torch.distributed as dist
from low_latency_cases import Case, check_case, common_cases, make_buffer, make_inputs, send

from moe_ep import Buffer, PeerError, PeerTimeoutError
from moe_ep.testing import run_ranks


def _in_environment(rank: int, name: str, *args: Any) -> Any:
    """Runs a function of this file or of those it imports; the fork server keeps the environment
    that it was started with, so the rank itself sets what the Buffer reads."""
    os.environ["MOE_EP_BACKEND"] = "reference"
    os.environ["MOE_EP_TIMEOUT_S"] = "20"
    modules = (low_latency_cases, low_latency_order)
    functions = [getattr(module, name) for module in modules if hasattr(module, name)]
    function = functions[0] if functions else globals()[name]
    return function(rank, *args)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equals_plain_computation(num_ranks: int) -> None:
    run_ranks(_in_environment, num_ranks, "check_cases", common_cases(), limit_s=120)


def _by_hand(rank: int) -> None:
    """Two ranks, two experts each, three places a rank. Tokens of rank 0: a to experts 0 and 3,
    b to 0; of rank 1: c to 3 and 0."""
    hint = Buffer.get_low_latency_rdma_size_hint(3, 8, 2, 4)
    buffer = Buffer(dist.group.WORLD, 0, hint, True)
    x = torch.tensor([[1.0], [2.0]] if rank == 0 else [[4.0]]).expand(-1, 8).bfloat16()
    idx = torch.tensor([[0, 3], [-1, 0]] if rank == 0 else [[3, 0]])
    rows, count, handle, event, hook = buffer.low_latency_dispatch(x, idx, 3, 4, use_fp8=False)
    assert hook is None and event.event is None
    assert rows.shape == (2, 6, 8)
    src_info, layout_range, *rest = handle
    assert rest == [3, 8, 4]
    if rank == 0:  # expert 0: a and b of rank 0, c of rank 1; expert 1: nothing
        assert count.tolist() == [3, 0]
        assert rows[0, :3, 0].tolist() == [1, 2, 4]
        assert src_info[0, :3].tolist() == [0, 1, 0]
        assert layout_range.tolist() == [[2, (2 << 32) + 1], [0, 0]]
    else:  # expert 3: a of rank 0, c of rank 1
        assert count.tolist() == [0, 2]
        assert rows[1, :2, 0].tolist() == [1, 4]
        assert layout_range.tolist() == [[0, 0], [1, (1 << 32) + 1]]
    weights = torch.tensor([[0.5, 0.25], [9.0, 2.0]] if rank == 0 else [[1.0, 4.0]])
    # Expert 0 adds 1 to its rows, expert 3 triples them.
    y = rows + 1 if rank == 0 else rows * 3
    out, _, _ = buffer.low_latency_combine(y, idx, weights, handle)
    # a: 0.5*2 + 0.25*3; b: 2*3; c: 12 + 4*5
    assert out[:, 0].tolist() == ([1.75, 6.0] if rank == 0 else [32.0])
    assert torch.equal(out, out[:, :1].expand(-1, 8))
    buffer.destroy()


def test_worked_by_hand() -> None:
    run_ranks(_in_environment, 2, "_by_hand")


def _case_26(rank: int) -> None:
    """Expert outputs 256, 1, 1, 1 add up to 260; adding in bf16 would give 256."""
    hint = Buffer.get_low_latency_rdma_size_hint(4, 128, 3, 6)
    buffer = Buffer(dist.group.WORLD, 0, hint, True)
    idx = torch.tensor([[0, 2, 4, 5]])
    x = torch.ones(1, 128).bfloat16()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 6, use_fp8=False)
    if rank == 0:
        rows[0] *= 256
    out, _, _ = buffer.low_latency_combine(rows, idx, torch.ones(1, 4), handle)
    assert out.tolist() == [[260.0] * 128]
    buffer.destroy()


def test_case_26_sums_in_fp32() -> None:
    run_ranks(_in_environment, 3, "_case_26")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_case_21_two_at_a_time(num_ranks: int) -> None:
    run_ranks(_in_environment, num_ranks, "_rounds", limit_s=120)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_case_22_poisoned_memory(num_ranks: int) -> None:
    run_ranks(_in_environment, num_ranks, "check_poisoned", "cpu", limit_s=120)


def _rounds(rank: int) -> None:
    low_latency_order.check_rounds(
        rank, 25, "cpu", lambda generator: time.sleep(generator.choice([0, 0, 0.003]))
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_hooks(num_ranks: int) -> None:
    for rank, told in enumerate(run_ranks(_in_environment, num_ranks, "check_hooks", "cpu")):
        early, third = told
        assert early.startswith("OrderError: ") and "hook" in early
        assert third.startswith(f"OrderError: rank {rank}") and "2 buffers" in third
        assert "operation 3" in third  # the one to be received first


def _block_signals(rank: int) -> str:
    """A thread raises the signals while the combine waits; then one block stays away on rank 1."""
    os.environ["MOE_EP_TIMEOUT_S"] = "3"
    case = Case(tokens=(6, 7), mode="plain")
    buffer = make_buffer([case])
    for seed, blocks in ((1, 1), (2, 4)):
        flight = send(buffer, case, seed, "cpu")
        signals = torch.zeros(case.local, blocks, dtype=torch.int32)
        rows = flight.recv_x.clone()
        flight.recv_x.fill_(float("nan"))

        def compute(flight: Any = flight, signals: Any = signals, rows: Any = rows) -> None:
            for local in range(case.local):
                time.sleep(0.02)
                flight.recv_x[local] = 2 * rows[local]
                signals[local] = 2

        thread = threading.Thread(target=compute)
        thread.start()
        out, _, _ = buffer.low_latency_combine(
            flight.recv_x,
            flight.idx,
            flight.weights,
            flight.handle,
            block_signals=signals.squeeze(1) if blocks == 1 else signals,
            block_signal_value=2,
        )
        thread.join()
        mine = flight.inputs[rank]
        scale = torch.where(mine.idx >= 0, mine.weights, 0.0).sum(1, keepdim=True)
        assert torch.equal(out, (2 * mine.x.float() * scale).bfloat16())
    flight = send(buffer, case, 3, "cpu")
    signals = torch.ones(case.local, dtype=torch.int32)
    if rank == 1:
        signals[2] = 0
    try:
        buffer.low_latency_combine(
            flight.recv_x, flight.idx, flight.weights, flight.handle, block_signals=signals
        )
    except (PeerTimeoutError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_block_signals() -> None:
    peer, culprit = run_ranks(_in_environment, 2, "_block_signals")
    named = "rank 1 waited 3 s for its own signal of local expert 2, block 0"
    assert culprit.startswith(f"PeerTimeoutError: {named}"), culprit
    # It waits as long, so that it is told or has just given up.
    told, gave_up = "PeerError: rank 0: rank 1 gave bad", "PeerTimeoutError: rank 0 waited 3 s for"
    assert peer.startswith((told, gave_up)) and "rank 1" in peer, peer


def _alone_with_its_error(rank: int) -> str:
    """Rank 0 has gone before rank 1 gives up the wait for a signal of its own."""
    os.environ["MOE_EP_TIMEOUT_S"] = "2"
    case = Case(tokens=(6, 7), mode="plain")
    buffer = make_buffer([case])
    flight = send(buffer, case, 3, "cpu")
    if rank == 1:
        signals = torch.ones(case.local, dtype=torch.int32)
        signals[2] = 0
        arguments = (flight.recv_x, flight.idx, flight.weights, flight.handle)
        with pytest.raises(PeerTimeoutError) as raised:
            buffer.low_latency_combine(*arguments, block_signals=signals)
        return str(raised.value)
    return ""


def test_a_rank_without_peers_tells_its_own_error() -> None:
    culprit = run_ranks(_in_environment, 2, "_alone_with_its_error")[1]
    assert culprit.startswith("rank 1 waited 2 s for its own signal of local expert 2"), culprit


def _zero_copy(rank: int) -> None:
    """What counts is the buffer, not x, and a buffer serves one combine."""
    case = Case(tokens=(6, 7), mode="plain")
    buffer = make_buffer([case])
    flight = send(buffer, case, 1, "cpu")
    rows = buffer.get_next_low_latency_combine_buffer(flight.handle)
    rows.copy_(4 * flight.recv_x)
    arguments = (flight.recv_x, flight.idx, flight.weights, flight.handle)
    out, _, _ = buffer.low_latency_combine(*arguments, zero_copy=True)
    mine = flight.inputs[rank]
    scale = torch.where(mine.idx >= 0, mine.weights, 0.0).sum(1, keepdim=True)
    assert torch.equal(out, (4 * mine.x.float() * scale).bfloat16())
    with pytest.raises(ValueError, match="get_next_low_latency_combine_buffer"):
        buffer.low_latency_combine(*arguments, zero_copy=True)
    for signals, words in (
        (torch.zeros(3, dtype=torch.int32), r"\[4\]"),
        (torch.zeros(4, 5, dtype=torch.int32), "divide 32 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            buffer.low_latency_combine(*arguments, block_signals=signals)
    with pytest.raises(TypeError, match="int32"):
        buffer.low_latency_combine(*arguments, block_signals=torch.zeros(4))
    with pytest.raises(ValueError, match="block_signal_value=0"):
        signals = torch.ones(4, dtype=torch.int32)
        buffer.low_latency_combine(*arguments, block_signals=signals, block_signal_value=0)
    buffer.destroy()


def test_zero_copy_and_bad_signals() -> None:
    run_ranks(_in_environment, 2, "_zero_copy")


def _throughput_too(rank: int) -> None:
    """Both modes of one Buffer, one after the other and one within the other."""
    case = Case()
    buffer = make_buffer([case])
    flight = send(buffer, case, 1, "cpu")
    mine = make_inputs(case, 2, rank, buffer.group_size)
    layout = buffer.get_dispatch_layout(mine.idx, case.local * buffer.group_size)
    rows, _, _, _, handle, _ = buffer.dispatch(
        mine.x,
        num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
    )
    flight.hook()
    low_latency_cases.check_received(buffer, flight)
    total = buffer.combine(rows, handle)[0]
    times = layout[3].sum(1, keepdim=True)
    assert torch.equal(total.float(), (mine.x.float() * times).bfloat16().float())
    check_case(buffer, case, 3, "cpu")
    buffer.destroy()


def test_both_modes() -> None:
    run_ranks(_in_environment, 2, "_throughput_too")
