"""What happens to a Buffer's bad input, missing ranks and foreign handles, on gloo and the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import buffer_cases
import pytest
import torch
import torch.distributed as dist
from buffer_cases import Case, check_case, in_environment
from expected_errors import expect as expect_on_all

from moe_ep import (
    BrokenError,
    Buffer,
    CapacityError,
    LayoutMismatchError,
    OrderError,
    PeerError,
    PeerTimeoutError,
)
from moe_ep.testing import launch_ranks, run_ranks


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
    "no worst": (lambda a: {"num_worst_tokens": None}, TypeError, ("num_worst_tokens", "NoneType")),
    "half a row": (lambda a: {"num_worst_tokens": 0.5}, TypeError, ("num_worst_tokens", "float")),
    "config": (lambda a: {"config": 20}, TypeError, ("config is a int",)),
    "sparse": (lambda a: {"x": a["x"].to_sparse()}, ValueError, ("x is sparse or nested",)),
    "nested": (
        lambda a: {"x": torch.nested.nested_tensor([*a["x"]])},
        ValueError,
        ("x is sparse",),
    ),
}
# Tensors without data, of which torch itself complains where they are used.
BAD |= {
    f"{name} elsewhere": (
        lambda a, name=name: {name: a[name].to("meta")},
        ValueError,
        (f"{name} is on meta", "without values" if name == "x" else "must be on cpu"),
    )
    for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_rank", "is_token_in_rank")
}


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
        expect_on_all(
            rank, bad, name, lambda given=arguments: buffer.dispatch(**given), kind, parts
        )
        if number % 5 == 4:
            check_case(buffer, Case(dtype="fp32"), number)
    check_case(buffer, Case(dtype="fp8"), 1)


@pytest.mark.parametrize("first_use", [True, False])
def test_bad_input_raises_on_all_ranks(first_use: bool) -> None:
    run_ranks(in_environment, 3, _bad_input, first_use)


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
            expect_on_all(rank, bad, name, action, kind, parts)

        short, few = (x[:-1], rows[:-1]) if me else (x, rows)
        expect("tokens", lambda given=short: again(given), ValueError, "[4, 256]", "[5, 256]")
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
            given = x.to(dtype) if me else x
            expect("again", lambda given=given: again(given), TypeError, name, "bfloat16")
            given = rows.to(dtype) if me else rows
            expect("sums", lambda x=given: buffer.combine(x, handle), TypeError, name, "bfloat16")
        config = {"config": 20} if me else {}
        expect("config", lambda c=config: buffer.dispatch(x, handle, **c), TypeError, "config")
        expect("config", lambda c=config: buffer.combine(rows, handle, **c), TypeError, "config")
        expect("rows", lambda given=few: buffer.combine(given, handle), ValueError, "256")
        given = weights.half() if me else weights
        expect("w", lambda w=given: buffer.combine(rows, handle, w), TypeError, "float16")
        given = weights[:, :2] if me else weights
        expect("K", lambda w=given: buffer.combine(rows, handle, w), ValueError, ", 2]", ", 3]")
        there, back = (x.to("meta"), rows.to("meta")) if me else (x, rows)
        expect("there", lambda given=there: again(given), ValueError, "x is on meta")
        expect("back", lambda x=back: buffer.combine(x, handle), ValueError, "x is on meta")
        bias = torch.ones(4, 256).bfloat16() if me else None
        expect("b", lambda b=bias: buffer.combine(rows, handle, bias=b), ValueError, "[4, 256]")
        static = arguments | worst | ({"x": x[:-1]} if me else {})
        expect("static", lambda s=static: buffer.dispatch(**s), ValueError, "is_token_in_rank")
    many = _arguments(buffer, rank, tokens=(6 * size + 30,) if rank == 0 else (5,))
    expect_on_all(
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
    run_ranks(in_environment, 3, _bad_later)


def _bad_routing(rank: int) -> None:
    """What only the values of ids and is_token_in_rank tell, where they are looked at before rows
    travel (R=3 ranks, K=2 experts of a token), and in later dispatches of static shape."""
    buffer = Buffer(dist.group.WORLD)
    size = buffer.group_size
    good = _arguments(buffer, rank, tokens=(5,), top_k=2)
    high, low = good["topk_idx"].clone(), good["topk_idx"].clone()
    high[3, 1], low[4, 0] = 4 * size, -2
    everywhere = torch.ones(5, size, dtype=torch.bool)
    for worst in (0, 5 * size, 6 * size):
        static = {"num_worst_tokens": worst}
        expected = buffer.dispatch(**good, **static)[0]
        for bad in range(size):
            for name, change, part in (
                ("high", {"topk_idx": high}, f"num_experts={4 * size}"),
                ("low", {"topk_idx": low}, f"num_experts={4 * size}"),
                ("ranks", {"is_token_in_rank": everywhere}, "is_token_in_rank has more than 2"),
            ):
                given = good | static | (change if rank == bad else {})
                parts = ("is_token_in_rank has 3", "2 experts") if name == "ranks" else (part,)
                expect_on_all(
                    rank,
                    bad,
                    f"{name} {worst}",
                    lambda given=given: buffer.dispatch(**given),
                    ValueError,
                    (part,) if worst else parts,
                )
        assert torch.equal(buffer.dispatch(**good, **static)[0], expected)


def test_bad_routing_loses_no_rows() -> None:
    run_ranks(in_environment, 3, _bad_routing)


def _bad_with_new_static_rows(rank: int) -> None:
    """Peers that have not dispatched so many static rows yet compare notes first."""
    buffer = Buffer(dist.group.WORLD)
    arguments = _arguments(buffer, rank, tokens=(5,))
    for worst in (10, 12, 14):
        given = arguments | {"num_worst_tokens": worst}
        bad = given | ({"x": given["x"].double()} if rank == 1 else {})
        for _ in range(2):  # unknown, then known
            expect_on_all(
                rank, 1, "x", lambda bad=bad: buffer.dispatch(**bad), TypeError, ("float64",)
            )
            buffer.dispatch(**given)


def test_bad_input_beside_new_static_rows() -> None:
    run_ranks(in_environment, 2, _bad_with_new_static_rows)


def _reported_by_device(rank: int) -> None:
    """A backend that checks indices itself, at a later call, is handed bad slots for bad tokens;
    what it says is said of the arguments. Nothing is copied to the host for that."""
    buffer = Buffer(dist.group.WORLD)
    good = _arguments(buffer, rank, tokens=(5,), top_k=1)
    static = {"num_worst_tokens": 10}
    buffer.dispatch(**good, **static)
    backend = buffer._exchange._rows[True].backend
    prepare, handed = backend.prepare, []

    def record(slots: torch.Tensor, *args: Any) -> Any:
        handed.append(slots)
        return prepare(torch.where(slots < buffer.group_size, slots, -1), *args)

    def report(*_: Any) -> Any:
        raise ValueError("index 2")

    backend.checks_indices, backend.prepare = True, record
    bad_id, both = good["topk_idx"].clone(), good["is_token_in_rank"].clone()
    bad_id[2], both[4] = 8, True
    rows, _, _, _, handle, _ = buffer.dispatch(
        **good | {"topk_idx": bad_id, "is_token_in_rank": both}, **static
    )
    wanted = good["is_token_in_rank"].int().argmax(1)
    wanted[2] = wanted[4] = 2
    assert handed[0].flatten().tolist() == wanted.tolist()
    backend.prepare = backend.dispatch = backend.combine = report
    for action in (
        lambda: buffer.dispatch(**good, **static),
        lambda: buffer.dispatch(good["x"], handle=handle),
        lambda: buffer.combine(rows, handle),
    ):
        with pytest.raises(ValueError, match=r"num_experts=8.*is_token_in_rank"):
            action()


def test_bad_routing_that_the_device_reports() -> None:
    run_ranks(in_environment, 2, _reported_by_device)


def _fp8_handle(rank: int) -> None:
    """Beside a handle of FP8 rows, rows are FP8 with as many scales, or bf16."""
    buffer = Buffer(dist.group.WORLD)
    arguments = _arguments(buffer, rank, tokens=(5,), dtype="fp8")
    (data, scales), (rows, _, _, _, handle, _) = arguments["x"], buffer.dispatch(**arguments)
    again = buffer.dispatch((data, scales), handle=handle)[0]
    assert all(buffer_cases.same(a, b) for a, b in zip(again, rows, strict=True))
    wide = data.bfloat16()
    assert buffer_cases.same(buffer.dispatch(wide, handle=handle)[0], rows[0].bfloat16())
    given = arguments | {"x": (data, scales.to("meta") if rank else scales)}
    action = lambda: buffer.dispatch(**given)  # noqa: E731
    expect_on_all(rank, 1, "scales", action, ValueError, ("the scales is on meta",))
    given = (data, torch.ones(5, 3)) if rank else (data, scales)
    action = lambda: buffer.dispatch(given, handle=handle)  # noqa: E731
    expect_on_all(rank, 1, "scales", action, ValueError, ("3 scales", "had 2"))
    sums = rows[0].half() if rank else rows[0].bfloat16()
    action = lambda: buffer.combine(sums, handle)  # noqa: E731
    expect_on_all(rank, 1, "sums", action, TypeError, ("float16", "bfloat16"))
    buffer.combine(rows[0].bfloat16(), handle)


def test_handles_of_fp8_rows() -> None:
    run_ranks(in_environment, 2, _fp8_handle)


def _capacity(rank: int) -> str:
    buffer = Buffer(dist.group.WORLD)
    arguments = _arguments(buffer, rank, tokens=(5,), routing="one_expert")
    with pytest.raises(CapacityError) as caught:
        buffer.dispatch(**arguments, num_worst_tokens=9)
    check_case(buffer, Case(worst=True), 0)
    return str(caught.value)


def test_more_rows_than_num_worst_tokens() -> None:
    for message in run_ranks(in_environment, 2, _capacity):
        assert "rank 1 would receive 10 rows, num_worst_tokens is 9; raise it" in message


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
    for messages in run_ranks(in_environment, 3, _different_rows):
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
    run_ranks(in_environment, 2, _foreign_handles)


def _foreign_handle_of_one_rank(rank: int) -> None:
    """The rank that made the mistake is told of it. Its peers are, if they wait in the latest
    memory for rows; with a handle of narrower rows they time out."""
    os.environ["MOE_EP_TIMEOUT_S"] = "3"
    for wider, expected in ((False, PeerError), (True, PeerTimeoutError)):
        buffer = Buffer(dist.group.WORLD)
        rows, _, _, _, handle, _ = buffer.dispatch(**_arguments(buffer, rank))
        if wider:
            buffer.dispatch(**_arguments(buffer, rank, hidden=512))
        with pytest.raises(TypeError if rank == 0 else expected, match=r"handle|waited 3 s"):
            buffer.combine(rows, (1, 2) if rank == 0 else handle)


def test_foreign_handle_of_one_rank() -> None:
    run_ranks(in_environment, 2, _foreign_handle_of_one_rank)


def _weights_of_one_rank(rank: int) -> None:
    buffer = Buffer(dist.group.WORLD)
    rows, _, weights, _, handle, _ = buffer.dispatch(**_arguments(buffer, rank))
    with pytest.raises(OrderError, match=r"combine\.rows and weights"):
        buffer.combine(rows, handle, weights if rank == 0 else None)


def test_weights_of_one_rank() -> None:
    run_ranks(in_environment, 2, _weights_of_one_rank)


def _missing_rank(rank: int) -> tuple[str, float]:
    """A rank that stays away: the others raise in time and say who, when and where."""
    os.environ["MOE_EP_TIMEOUT_S"] = "3"
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
    outcomes = launch_ranks(in_environment, 3, _missing_rank, limit_s=60)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    answers = [outcomes[rank].result for rank in (0, 2)]
    for message, seconds in answers:
        assert "in dispatch.header" in message and 2.5 < seconds < 5, answers
    # Whoever gives up second may find the first one gone.
    assert any("for rank 1 in dispatch.header" in message for message, _ in answers), answers
