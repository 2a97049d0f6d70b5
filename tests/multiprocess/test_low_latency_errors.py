"""Low-latency mode on gloo and the CPU: bad input, ranks that disagree, ranks that stay away."""

from __future__ import annotations

import gc
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from low_latency_cases import Case, check_case, make_buffer, make_inputs, send

from moe_ep import (
    BackendUnavailableError,
    BrokenError,
    Buffer,
    LayoutMismatchError,
    OrderError,
    PeerError,
    PeerTimeoutError,
)
from moe_ep.backends.low_latency_reference import ReferenceLowLatencyBackend
from moe_ep.rank_exchange import RankExchange
from moe_ep.testing import launch_ranks, run_ranks


def _in_environment(rank: int, name: str, *args: Any) -> Any:
    """Runs a function of this file; the fork server keeps the environment that it was started
    with, so the rank itself sets what the Buffer reads."""
    os.environ["MOE_EP_BACKEND"] = "reference"
    os.environ["MOE_EP_TIMEOUT_S"] = "2" if name == "_missing_rank" else "20"
    return globals()[name](rank, *args)


def _expect(told: list[str], function: Any, *args: Any, **options: Any) -> None:
    try:
        function(*args, **options)
        told.append("")
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
        assert isinstance(error, (ValueError, TypeError)) or rank_is_good()


def rank_is_good() -> bool:
    return dist.get_rank() != dist.get_world_size() - 1


def _bad_dispatch(rank: int, change: dict[str, Any], known: bool) -> list[str]:
    """The last rank's arguments are changed, on the first use of a shape or on a later one."""
    case, told = Case(tokens=(6,), max_tokens=8), []
    buffer = make_buffer([Case(hidden=2048)])
    if known:
        check_case(buffer, case, 0, "cpu")
    mine = make_inputs(case, 1, rank, buffer.group_size)
    experts = case.local * buffer.group_size
    good = {
        "x": mine.x,
        "topk_idx": mine.idx,
        "num_max_dispatch_tokens_per_rank": case.max_tokens,
        "num_experts": experts,
        "use_fp8": False,
    }
    given = good if rank_is_good() else good | _changed(good, change)
    _expect(told, buffer.low_latency_dispatch, **given)
    check_case(buffer, case, 2, "cpu")  # all go on
    buffer.destroy()
    return told


def _changed(good: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: f(good) if callable(f) else f for name, f in change.items()}


def _nine_tokens(good: dict[str, Any]) -> torch.Tensor:
    return torch.zeros(9, 256).bfloat16()


def _nine_ids(good: dict[str, Any]) -> torch.Tensor:
    return torch.zeros(9, 3, dtype=torch.int64)


def _large_id(good: dict[str, Any]) -> torch.Tensor:
    idx = good["topk_idx"].clone()
    idx[2, 1] = good["num_experts"]
    return idx


def _low_id(good: dict[str, Any]) -> torch.Tensor:
    idx = good["topk_idx"].clone()
    idx[0, 0] = -2
    return idx


def _one_expert(good: dict[str, Any]) -> torch.Tensor:
    return torch.zeros_like(good["topk_idx"])  # 6 tokens name it three times each


def _half(good: dict[str, Any]) -> torch.Tensor:
    return good["x"].half()


# what the bad rank changes -> its error, words of the message
BAD: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "too many tokens": (
        {"x": _nine_tokens, "topk_idx": _nine_ids},
        "ValueError",
        ("x has 9 tokens", "num_max_dispatch_tokens_per_rank=8"),
    ),
    "dtype": ({"x": _half}, "TypeError", ("float16", "bfloat16")),
    "no tensor": ({"x": [1.0]}, "TypeError", ("list",)),
    "id too large": ({"topk_idx": _large_id}, "ValueError", ("12", "11")),
    "id too small": ({"topk_idx": _low_id}, "ValueError", ("-2", "-1")),
    "too many of one": ({"topk_idx": _one_expert}, "ValueError", ("expert 0 18 times", "=8")),
    "both endings": (
        {"async_finish": True, "return_recv_hook": True},
        "ValueError",
        ("async_finish", "return_recv_hook"),
    ),
    "packing without powers": ({"use_ue8m0": True}, "ValueError", ("use_ue8m0",)),
    "statistics": (
        {"cumulative_local_expert_recv_stats": torch.zeros(9, dtype=torch.int32)},
        "ValueError",
        ("[9]", "[4]"),
    ),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_on_all_ranks(what: str, known: bool) -> None:
    change, error, words = BAD[what]
    *peers, culprit = run_ranks(_in_environment, 3, "_bad_dispatch", change, known)
    assert culprit[0].startswith(error), culprit
    assert all(word in culprit[0] for word in words), culprit
    for told in peers:
        assert told[0].startswith("PeerError: ") and "rank 2 gave bad input" in told[0], told
        assert words[-1] in told[0], told


# What no rank can use.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "hidden": ({"hidden": 252}, ("hidden=252", "8")),
    "FP8 hidden": ({"hidden": 192, "use_fp8": True}, ("hidden=192", "128")),
    "packed hidden": (
        {"hidden": 384, "use_fp8": True, "round_scale": True, "use_ue8m0": True},
        ("hidden=384", "512"),
    ),
    "slots": ({"top_k": 9}, ("9 slots", "1 to 8")),
    "experts": ({"num_experts": 9}, ("num_experts=9", "2 ranks")),
    "memory": ({"max_tokens": 999}, ("999", "get_low_latency_rdma_size_hint(999, 256, 2, 8)")),
    "no tokens allowed": ({"max_tokens": 0}, ("num_max_dispatch_tokens_per_rank=0",)),
}


def _impossible(rank: int, what: dict[str, Any]) -> list[str]:
    told: list[str] = []
    buffer = make_buffer([Case(hidden=512)])
    options = {k: v for k, v in what.items() if k in ("use_fp8", "round_scale", "use_ue8m0")}
    _expect(
        told,
        buffer.low_latency_dispatch,
        torch.zeros(0, what.get("hidden", 256)).bfloat16(),
        torch.zeros(0, what.get("top_k", 2), dtype=torch.int64),
        what.get("max_tokens", 8),
        what.get("num_experts", 8),
        **({"use_fp8": False} | options),
    )
    check_case(buffer, Case(), 1, "cpu")
    buffer.destroy()
    return told


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_impossible_shapes(what: str) -> None:
    change, words = IMPOSSIBLE[what]
    for told in run_ranks(_in_environment, 2, "_impossible", change):
        assert told[0].startswith("ValueError: "), told
        assert all(word in told[0] for word in words), told


def _different(rank: int, known: bool) -> str:
    big = Case(max_tokens=128)
    buffer = make_buffer([big])
    if known:
        check_case(buffer, Case(max_tokens=128), 0, "cpu")
        check_case(buffer, Case(max_tokens=64), 0, "cpu")
    case = Case(max_tokens=64 if rank == 0 else 128, mode="plain")
    try:
        send(buffer, case, 1, "cpu")
    except (ValueError, OrderError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_case_11_different_limits() -> None:
    for told in run_ranks(_in_environment, 2, "_different", False):
        assert told.startswith("LayoutMismatchError"), told
        assert "num_max_dispatch_tokens_per_rank is 64 on rank 0 and 128 on rank 1" in told
    assert issubclass(LayoutMismatchError, ValueError)
    for told in run_ranks(_in_environment, 2, "_different", True):  # both were used before
        assert told.startswith("OrderError") and "128" in told, told


def _set_up(rank: int) -> list[str]:
    told: list[str] = []
    for sizes in ((1 << 20, 1 << 21), (1 << 20, 100)):
        try:
            Buffer(dist.group.WORLD, 0, sizes[rank], low_latency_mode=True)
            told.append("")
        except (ValueError, PeerError) as error:
            told.append(f"{type(error).__name__}: {error}")
    os.environ["MOE_EP_BACKEND"] = "cuda"
    try:
        Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True)
    except BackendUnavailableError as error:
        told.append(str(error))
    os.environ["MOE_EP_BACKEND"] = "reference"
    buffer = Buffer(dist.group.WORLD, 0, 1 << 20)
    for function in (buffer.low_latency_dispatch, buffer.low_latency_combine):
        try:
            function(*[None] * 4)
        except OrderError as error:
            told.append(str(error))
    return told


def test_set_up() -> None:
    for rank, told in enumerate(run_ranks(_in_environment, 2, "_set_up")):
        assert told[0].startswith("LayoutMismatchError") and "num_rdma_bytes is 1048576" in told[0]
        assert "2097152 on rank 1" in told[0]
        assert told[1].startswith("PeerError" if rank == 0 else "ValueError"), told
        assert "num_rdma_bytes=100" in told[1] and "cuda" in told[2]
        assert len(told) == 5 and all("low_latency_mode=True" in text for text in told[3:])


def _dropped(rank: int) -> None:
    """A Buffer that is dropped is freed, unless it is to be destroyed explicitly; one that cannot
    be built frees what it had."""
    world, freed = dist.group.WORLD, []
    with (
        mock.patch.object(ReferenceLowLatencyBackend, "destroy", lambda _: freed.append("rows")),
        mock.patch.object(RankExchange, "destroy", lambda _: freed.append("exchange")),
    ):
        for explicitly in (False, True):
            Buffer(world, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=explicitly)
            gc.collect()
        assert freed == ["rows"]
        with pytest.raises(LayoutMismatchError):
            Buffer(world, 0, (1 << 20) + rank, low_latency_mode=True)
    assert freed == ["rows", "exchange"]


def test_dropped() -> None:
    run_ranks(_in_environment, 2, "_dropped")


def _bad_combine(rank: int, what: str) -> str:
    case = Case(tokens=(6,))
    buffer = make_buffer([case])
    flight = send(buffer, case, 1, "cpu")
    flight.hook()
    x = buffer.get_next_low_latency_combine_buffer(flight.handle).zero_()
    given: dict[str, Any] = {"x": x, "topk_idx": flight.idx, "topk_weights": flight.weights}
    if not rank_is_good():
        given |= {
            "rows": {"x": x[:, :-1]},
            "dtype": {"x": x.float()},
            "weights": {"topk_weights": flight.weights.double()},
            "tokens": {"topk_idx": flight.idx[:5]},
            "out": {"out": x.new_empty(3, case.hidden)},
            "logfmt": {"use_logfmt": True},
        }[what]
    told: list[str] = []
    _expect(told, buffer.low_latency_combine, handle=flight.handle, **given)
    check_case(buffer, case, 2, "cpu")
    buffer.destroy()
    return told[0]


@pytest.mark.parametrize("what", ["rows", "dtype", "weights", "tokens", "out", "logfmt"])
def test_bad_combine_raises_on_all_ranks(what: str) -> None:
    *peers, culprit = run_ranks(_in_environment, 2, "_bad_combine", what)
    wrong = "TypeError" if what in ("dtype", "weights") else "ValueError"
    assert culprit.startswith(wrong), culprit
    assert all(told.startswith("PeerError") and wrong in told for told in peers), peers


def _handles(rank: int) -> list[str]:
    case, told = Case(), []
    one, other = make_buffer([case]), make_buffer([case])
    flight = send(one, case, 1, "cpu")
    flight.hook()
    x = one.get_next_low_latency_combine_buffer(flight.handle).zero_()
    for buffer, handle in ((other, flight.handle), (one, tuple(flight.handle))):
        try:
            buffer.low_latency_combine(x, flight.idx, flight.weights, handle)
        except (ValueError, TypeError) as error:
            told.append(type(error).__name__)
    one.destroy()
    try:
        one.low_latency_combine(x, flight.idx, flight.weights, flight.handle)
    except BrokenError:
        told.append("BrokenError")
    check_case(other, case, 2, "cpu")
    other.destroy()
    return told


def test_wrong_handles() -> None:
    for told in run_ranks(_in_environment, 2, "_handles"):
        assert told == ["ValueError", "TypeError", "BrokenError"]


def _late_hook(rank: int) -> str:
    """A hook that is called after destroy(); one that was called before does nothing."""
    case = Case()
    buffer = make_buffer([case])
    first, second = (send(buffer, case, seed, "cpu") for seed in (1, 2))
    first.hook()
    dist.barrier()
    buffer.destroy()
    first.hook()
    try:
        second.hook()
    except BrokenError as error:
        return str(error)
    return ""


def test_hook_after_destroy() -> None:
    for rank, told in enumerate(run_ranks(_in_environment, 2, "_late_hook")):
        assert f"rank {rank}: low_latency_dispatch, operation 2: its hook was called after" in told


def _missing_rank(rank: int) -> tuple[str, float]:
    """The last rank leaves after one exchange; the wait counts from the hook."""
    case = Case()
    buffer = make_buffer([case])
    check_case(buffer, case, 0, "cpu")
    store = dist.distributed_c10d._get_default_store()
    if not rank_is_good():
        store.wait(["done"])
        return "", 0.0
    flight = send(buffer, case, 1, "cpu")
    time.sleep(1.0)
    started = time.monotonic()
    told = ""
    try:
        flight.hook()
    except PeerTimeoutError as error:
        told = str(error)
    store.set("done", "1")
    return told, time.monotonic() - started


def test_missing_rank() -> None:
    outcomes = launch_ranks(_in_environment, 2, "_missing_rank", limit_s=60)
    told, seconds = outcomes[0].result
    assert "rank 0 waited 2 s for rank 1 in low_latency_dispatch" in told, told
    assert 1.9 <= seconds < 4.0
