"""Buffer against a plain computation on gloo and the CPU, and what happens to bad input."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import buffer_cases
import pytest
import torch
import torch.distributed as dist
from buffer_cases import Case, check_case, common_cases

from moe_ep import (
    BackendUnavailableError,
    BrokenError,
    Buffer,
    CapacityError,
    LayoutMismatchError,
    OrderError,
    PeerError,
    PeerTimeoutError,
)
from moe_ep.testing import launch_ranks, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equals_plain_computation(num_ranks: int) -> None:
    run_ranks(_in_environment, num_ranks, "check_cases", common_cases(), limit_s=120)


def _in_environment(rank: int, name: str, *args: Any) -> Any:
    """Runs a function of this file or of buffer_cases; the fork server keeps the environment that
    it was started with, so the rank itself sets what the Buffer reads."""
    os.environ["MOE_EP_BACKEND"] = "reference"
    os.environ["MOE_EP_TIMEOUT_S"] = "3" if name in _SHORT_WAITS else "20"
    function = getattr(buffer_cases, name, None) or globals()[name]
    return function(rank, *args)


_SHORT_WAITS = ("_missing_rank",)


def _order(rank: int) -> None:
    """Handles held together and used in another order, also of a Buffer that was replaced."""
    narrow, wide = Case(hidden=64), Case(hidden=256, tokens=(3, 8))
    world = dist.group.WORLD
    buffer = Buffer(world)
    held = []
    for number, case in enumerate((narrow, wide, narrow, wide)):
        inputs = [buffer_cases.make_inputs(case, number, r, 2) for r in range(2)]
        mine = inputs[rank]
        layout = buffer.get_dispatch_layout(mine.idx, 8)
        out = buffer.dispatch(
            mine.x,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        held.append((mine.x, layout[3], out[0], out[4]))
        if number == 1:
            del buffer
            gc.collect()
            buffer = Buffer(world)
    for number in (2, 0, 3, 1):
        x, in_rank, recv_x, handle = held[number]
        total = buffer.combine(recv_x, handle)[0]
        assert torch.equal(total.float(), (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    backends = [handle.plan.owner._backends for _, _, _, handle in held]
    assert backends[0] is not backends[2] and all(backends)
    del held, handle
    gc.collect()
    assert not backends[0] and backends[2]  # the first Buffer's memory went with its last handle


def test_handles_in_any_order() -> None:
    run_ranks(_in_environment, 2, "_order")


def _arguments(buffer: Buffer, rank: int, seed: int = 0, **case: Any) -> dict[str, Any]:
    mine = buffer_cases.make_inputs(Case(**case), seed, rank, buffer.group_size)
    layout = buffer.get_dispatch_layout(mine.idx, 4 * buffer.group_size)
    return {
        "x": mine.given("cpu"),
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
        "topk_idx": mine.idx,
        "topk_weights": mine.weights,
    }


Change = Callable[[dict[str, Any]], dict[str, Any]]

# what the bad rank changes -> its error, words of the message
BAD: dict[str, tuple[Change, type[Exception], tuple[str, ...]]] = {
    "x is a list": (lambda a: {"x": [1.0]}, TypeError, ("list",)),
    "dtype of x": (lambda a: {"x": a["x"].double()}, TypeError, ("float64",)),
    "FP8 without scales": (
        lambda a: {"x": a["x"].to(torch.float8_e4m3fn)},
        TypeError,
        ("float8", "without"),
    ),
    "BF16 with scales": (lambda a: {"x": (a["x"], torch.ones(5, 2))}, TypeError, ("with scales",)),
    "dimensions": (lambda a: {"x": a["x"][0]}, ValueError, ("256",)),
    "row bytes": (lambda a: {"x": a["x"][:, :251].contiguous()}, ValueError, ("502", "16")),
    "tokens": (lambda a: {"x": a["x"][:-1]}, ValueError, ("is_token_in_rank", "[5, ", "[4, ")),
    "no layout": (lambda a: {"is_token_in_rank": None}, ValueError, ("get_dispatch_layout",)),
    "ranks": (lambda a: {"num_tokens_per_rank": torch.ones(9).int()}, ValueError, ("[9]",)),
    "experts": (lambda a: {"num_tokens_per_expert": torch.ones(7).int()}, ValueError, ("7",)),
    "dtype of ids": (lambda a: {"topk_idx": a["topk_idx"].short()}, TypeError, ("int16",)),
    "id too large": (lambda a: {"topk_idx": a["topk_idx"] + 1000}, ValueError, ("num_experts=",)),
    "id too small": (lambda a: {"topk_idx": a["topk_idx"] - 20}, ValueError, ("num_experts=",)),
    "ids alone": (lambda a: {"topk_weights": None}, ValueError, ("together",)),
    "weights": (lambda a: {"topk_weights": a["topk_weights"].half()}, TypeError, ("float16",)),
    "alignment": (lambda a: {"expert_alignment": 0}, ValueError, ("expert_alignment=0",)),
    "worst": (lambda a: {"num_worst_tokens": -1}, ValueError, ("-1",)),
}


def _expect(
    rank: int,
    bad: int,
    name: str,
    action: Callable[[], Any],
    kind: type[Exception],
    parts: tuple[str, ...],
) -> None:
    try:
        action()
    except Exception as error:
        wanted = kind if rank == bad else PeerError
        assert type(error) is wanted, f"{name}: {error!r}"
        assert all(part in str(error) for part in parts), f"{name}: {error}"
        assert rank == bad or f"rank {bad}" in str(error), f"{name}: {error}"
        return
    raise AssertionError(f"{name}: no error on rank {rank}")


def _bad_input(rank: int, first_use: bool) -> None:
    """All ranks raise what they should, which is no time-out, and can go on; also when it is the
    first thing a Buffer is given."""
    buffer = Buffer(dist.group.WORLD)
    if not first_use:
        check_case(buffer, Case(), 0)
    for number, (name, (change, kind, parts)) in enumerate(BAD.items()):
        bad = number % buffer.group_size
        arguments = _arguments(buffer, rank, tokens=(5,))
        if rank == bad:
            arguments |= change(arguments)
        _expect(rank, bad, name, lambda given=arguments: buffer.dispatch(**given), kind, parts)
        if number % 5 == 4:
            check_case(buffer, Case(dtype="fp32"), number)
    check_case(buffer, Case(dtype="fp8"), 1)


@pytest.mark.parametrize("first_use", [True, False])
def test_bad_input_raises_on_all_ranks(first_use: bool) -> None:
    run_ranks(_in_environment, 3, "_bad_input", first_use)


def _bad_later(rank: int) -> None:
    """Beside a handle, in combine, and in dispatches of static shape."""
    buffer = Buffer(dist.group.WORLD)
    size = buffer.group_size
    arguments = _arguments(buffer, rank, tokens=(5,))
    x, (rows, _, weights, _, handle, _) = arguments["x"], buffer.dispatch(**arguments)
    worst = {"num_worst_tokens": 5 * size}
    buffer.dispatch(**arguments, **worst)

    def again(given: Any) -> Any:
        return buffer.dispatch(given, handle=handle)

    for bad in range(size):
        me = rank == bad

        def expect(name: str, action: Any, kind: Any, *parts: str, bad: int = bad) -> None:
            _expect(rank, bad, name, action, kind, parts)

        short, few = (x[:-1], rows[:-1]) if me else (x, rows)
        expect("tokens", lambda given=short: again(given), ValueError, "[4, 256]", "[5, 256]")
        wide = x.float() if me else x
        expect("wider", lambda given=wide: again(given), TypeError, "float32")
        expect("rows", lambda given=few: buffer.combine(given, handle), ValueError, "256")
        wide = rows.float() if me else rows
        expect("dtype", lambda given=wide: buffer.combine(given, handle), TypeError, "float32")
        given = weights.half() if me else weights
        expect("w", lambda w=given: buffer.combine(rows, handle, w), TypeError, "float16")
        bias = torch.ones(4, 256).bfloat16() if me else None
        expect("b", lambda b=bias: buffer.combine(rows, handle, bias=b), ValueError, "[4, 256]")
        static = arguments | worst | ({"x": x[:-1]} if me else {})
        expect("static", lambda s=static: buffer.dispatch(**s), ValueError, "is_token_in_rank")
    many = _arguments(buffer, rank, tokens=(6 * size + 30,) if rank == 0 else (5,))
    _expect(
        rank,
        0,
        "room",
        lambda: buffer.dispatch(**many, **worst),
        ValueError,
        (f"{6 * size + 30} tokens", "num_worst_tokens"),
    )
    torch.testing.assert_close(again(x)[0], rows)
    check_case(buffer, Case(), 3)


def test_bad_input_later() -> None:
    run_ranks(_in_environment, 3, "_bad_later")


def _capacity(rank: int) -> str:
    buffer = Buffer(dist.group.WORLD)
    arguments = _arguments(buffer, rank, tokens=(5,), routing="one_expert")
    with pytest.raises(CapacityError) as caught:
        buffer.dispatch(**arguments, num_worst_tokens=9)
    check_case(buffer, Case(worst=True), 0)
    return str(caught.value)


def test_more_rows_than_num_worst_tokens() -> None:
    for message in run_ranks(_in_environment, 2, "_capacity"):
        assert "rank 1 would receive 10 rows" in message and "9" in message


def _different_rows(rank: int) -> list[str]:
    buffer = Buffer(dist.group.WORLD)
    messages = []
    for changes in ({"hidden": 64}, {"dtype": "fp32"}, {"top_k": 2}, {"dtype": "fp8"}):
        case = changes if rank == 1 else {}
        with pytest.raises(LayoutMismatchError) as caught:
            buffer.dispatch(**_arguments(buffer, rank, **case))
        messages.append(str(caught.value))
    check_case(buffer, Case(), 0)
    return messages


def test_ranks_that_send_different_rows() -> None:
    for messages in run_ranks(_in_environment, 3, "_different_rows"):
        for message, name in zip(messages, ("hidden", "dtype", "num_topk", "dtype"), strict=True):
            assert name in message and "ranks 0 and 1" in message, message
        assert "256 and 64" in messages[0]


def _foreign_handles(rank: int) -> None:
    world = dist.group.WORLD
    other = dist.new_group([0, 1])
    buffer, second = Buffer(world), Buffer(other)
    arguments = _arguments(second, rank)
    rows, _, _, _, handle, _ = second.dispatch(**arguments)
    for action, kind in (
        (lambda: buffer.combine(rows, handle), OrderError),
        (lambda: buffer.dispatch(arguments["x"], handle=handle), OrderError),
        (lambda: buffer.combine(rows, (1, 2)), TypeError),
    ):
        with pytest.raises(kind, match="handle"):
            action()
    check_case(buffer, Case(), 0)
    second.destroy()
    second.destroy()
    for action in (lambda: second.combine(rows, handle), lambda: second.dispatch(**arguments)):
        with pytest.raises(BrokenError, match="destroy"):
            action()


def test_foreign_handles_and_destroy() -> None:
    run_ranks(_in_environment, 2, "_foreign_handles")


def _missing_rank(rank: int) -> tuple[str, float]:
    """A rank that stays away: the others raise in time and say who, when and where."""
    buffer = Buffer(dist.group.WORLD)
    check_case(buffer, Case(), 0)
    started = time.monotonic()
    if rank == 1:
        time.sleep(6)
        return "", 0.0
    with pytest.raises(PeerTimeoutError) as caught:
        buffer.dispatch(**_arguments(buffer, rank))
    return str(caught.value), time.monotonic() - started


def test_missing_rank() -> None:
    for outcome in launch_ranks(_in_environment, 3, "_missing_rank", limit_s=60):
        assert outcome.error is None, outcome.error
        message, seconds = outcome.result
        if outcome.rank != 1:
            assert "rank 1" in message and "dispatch.header" in message, message
            assert 2.5 < seconds < 5


def _construction(rank: int) -> None:
    world = dist.group.WORLD
    with pytest.raises(BackendUnavailableError, match="low_latency_mode"):
        Buffer(world, 0, 1 << 20, low_latency_mode=True)
    with pytest.raises(ValueError, match="group"):
        Buffer(None)
    buffer = Buffer(
        world,
        1 << 12,
        64,
        False,
        num_qps_per_rank=4,
        allow_nvlink_for_low_latency_mode=False,
        allow_mnnvl=True,
        use_fabric=True,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, 2, world)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 12, 64)
    local = buffer.get_local_buffer_tensor(torch.bfloat16)
    assert local.shape == (2048,) and local.dtype == torch.bfloat16
    local.fill_(1)
    part = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), offset=16)
    assert part.shape == (4, 8) and part.data_ptr() == local.data_ptr() + 32 and (part == 1).all()
    assert buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True).shape == (8,)
    with pytest.raises(ValueError, match="4096 bytes"):
        buffer.get_local_buffer_tensor(torch.float32, torch.Size([1025]))
    check_case(buffer, Case(), 0)
    backends = buffer._exchange._backends
    del buffer
    gc.collect()
    assert len(backends) == 2  # explicitly_destroy


def test_construction() -> None:
    run_ranks(_in_environment, 2, "_construction")
