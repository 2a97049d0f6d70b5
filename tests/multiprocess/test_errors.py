"""Bad input: the rank's own error, a PeerError that names it elsewhere, and life goes on."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from expected_errors import expect as expect_on_all
from reference_model import Problem, check, make_layout

from moe_ep import (
    BackendUnavailableError,
    BrokenError,
    ExpertParallel,
    LayoutError,
    LayoutMismatchError,
    OrderError,
)
from moe_ep.testing import run_ranks

X, IDX, W = torch.zeros(5, 128), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested tensors are a prototype
    NESTED = torch.nested.nested_tensor([X])

# what the bad rank passes -> (its error, words of the message)
BAD_DISPATCHES: dict[str, tuple[tuple[Any, ...], type[Exception], tuple[str, ...]]] = {
    "too many tokens": ((X.repeat(2, 1), IDX.repeat(2, 1), None), ValueError, ("10", "8")),
    "hidden": ((X[:, :64], IDX, None), ValueError, ("64", "128")),
    "one dimension": ((X[0], IDX, None), ValueError, ("128",)),
    "dtype of x": ((X.double(), IDX, None), TypeError, ("float64", "fp32")),
    "id too large": ((X, IDX + 4, None), ValueError, ("4", "3")),
    "id too small": ((X, IDX - 2, None), ValueError, ("-2", "-1")),
    "dtype of ids": ((X, IDX.float(), None), TypeError, ("float32", "int64")),
    "tokens of ids": ((X, IDX[:4], None), ValueError, ("[4, 2]", "[5, 128]")),
    "dimensions of ids": ((X, IDX[:, 0], None), ValueError, ("[5]",)),
    "top-k": ((X, IDX.repeat(1, 2), None), ValueError, ("4", "2")),
    "no slot": ((X, IDX[:, :0], None), ValueError, ("0",)),
    "shape of weights": ((X, IDX, W[:, :1]), ValueError, ("[5, 1]", "[5, 2]")),
    "dtype of weights": ((X, IDX, W.long()), TypeError, ("int64",)),
    "neither ids nor handle": ((X, None, None), ValueError, ("topk_idx",)),
    "x without values": ((X.to("meta"), IDX, None), ValueError, ("x is on meta",)),
    "ids without values": ((X, IDX.to("meta"), None), ValueError, ("topk_idx is on meta", "cpu")),
    "weights elsewhere": ((X, IDX, W.to("meta")), ValueError, ("weights are on meta", "cpu")),
    "sparse x": ((X.to_sparse(), IDX, None), ValueError, ("x is sparse",)),
    "sparse ids": ((X, IDX.to_sparse(), None), ValueError, ("topk_idx is sparse",)),
    "sparse weights": ((X, IDX, W.to_sparse()), ValueError, ("weights are sparse",)),
    "nested x": ((NESTED, IDX, None), ValueError, ("nested",)),
}
NO_TENSORS: dict[str, tuple[tuple[Any, ...], type[Exception], tuple[str, ...]]] = {
    "x is a list": (([1.0], IDX, None), TypeError, ("list",)),
    "weights are a list": ((X, IDX, [[0.5, 0.5]] * 5), TypeError, ("list",)),
    "ids are a list": ((X, [[0, 1]] * 5, None), TypeError, ("list",)),
}


def _dispatches(rank: int, no_tensors: bool) -> None:
    ep = ExpertParallel(make_layout(3, model__num_experts=6, tokens_per_rank=8))
    ep.set_timeouts(first_s=5, steady_s=5)
    for number, (name, (args, kind, parts)) in enumerate(
        (NO_TENSORS if no_tensors else BAD_DISPATCHES).items()
    ):
        bad = number % 3
        if name.startswith("id too large"):
            args, parts = (X, IDX + 6, None), ("6", "5")
        good = (X, IDX, W if args[2] is not None else None)
        given = args if rank == bad else good
        expect_on_all(rank, bad, name, lambda given=given: ep.dispatch(*given), kind, parts)
        if number % 4 == 0:
            check(ep, Problem(ep.layout, number, [5, 0, 2]), weighted="no", backward=False)
    check(ep, Problem(ep.layout, 3, [4, 8, 2]))


def test_case_11_bad_dispatch() -> None:
    run_ranks(_dispatches, 3, False)


def test_arguments_that_are_no_tensors() -> None:
    run_ranks(_dispatches, 3, True)


def _with_handles(rank: int, dtype: str, weighted: bool) -> None:
    for bad in (0, 1):
        _beside_a_handle(rank, bad, dtype, weighted)


def _beside_a_handle(rank: int, bad: int, dtype: str, weighted: bool) -> None:
    """Peers already send rows here: the bad rank must take them, and send what they expect."""
    ep = ExpertParallel(make_layout(2, dispatch__dtype=dtype))
    ep.set_timeouts(first_s=5, steady_s=5)
    problem = Problem(ep.layout, 4, [5, 4])
    x, w = problem.x[rank].float(), problem.weights[rank].float()
    d = ep.dispatch(x, problem.idx[rank], w)
    rows = d.tokens

    def short(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1] if rank == bad else tensor

    def expect(name: str, action: Callable[[], object], kind: type[Exception], part: str) -> None:
        expect_on_all(rank, bad, name, action, kind, (part,))

    def bad_rows(wrong: Any) -> torch.Tensor:
        return wrong if rank == bad else rows

    expect("tokens", lambda: ep.dispatch(short(x), handle=d.handle), ValueError, "handle")
    expect("rows", lambda: ep.combine(short(rows), d.handle), ValueError, "128")
    expect("a list", lambda: ep.combine(bad_rows([1]), d.handle), TypeError, "list")
    expect("long", lambda: ep.combine(bad_rows(rows.long()), d.handle), TypeError, "int64")
    expect("meta", lambda: ep.combine(bad_rows(rows.to("meta")), d.handle), ValueError, "meta")
    expect("sparse", lambda: ep.combine(bad_rows(rows.to_sparse()), d.handle), ValueError, "sparse")
    event = x if rank == bad else None
    idx = problem.idx[rank]
    for name, action in (
        ("event", lambda: ep.dispatch(x, idx, previous_event=event)),
        ("event beside a handle", lambda: ep.dispatch(x, handle=d.handle, previous_event=event)),
        ("event of combine", lambda: ep.combine(rows, d.handle, previous_event=event)),
    ):
        expect(name, action, TypeError, "previous_event is a Tensor")
    ep.dispatch(x, idx, previous_event=mock.Mock(spec=["event", "current_stream_wait"]))
    elsewhere = x.to("meta") if rank == bad else x
    expect("meta x", lambda: ep.dispatch(elsewhere, handle=d.handle), ValueError, "meta")
    if weighted:
        again = functools.partial(ep.dispatch, handle=d.handle)
        expect("x", lambda: again(short(x), topk_weights=w), ValueError, "handle")
        expect("weights", lambda: again(x, topk_weights=short(w)), ValueError, "weights")
        weights = w.to_sparse() if rank == bad else w
        expect("sparse", lambda: again(x, topk_weights=weights), ValueError, "sparse")
        probs = d.probs.to("meta") if rank == bad else d.probs
        expect("meta", lambda: ep.combine(rows, d.handle, probs), ValueError, "meta")
        expect("rows", lambda: ep.combine(short(rows), d.handle, d.probs), ValueError, "128")
        expect("probs", lambda: ep.combine(rows, d.handle, short(d.probs)), ValueError, "weights")
    torch.testing.assert_close(ep.combine(rows, d.handle), 2 * x, rtol=0.08, atol=0.02)
    if dtype == "fp32":
        check(ep, problem)


def test_bad_input_beside_a_handle() -> None:
    run_ranks(_with_handles, 2, "fp32", False)


def test_bad_input_beside_a_handle_with_weights() -> None:
    run_ranks(_with_handles, 2, "fp32", True)


def test_bad_input_beside_a_handle_fp8() -> None:
    run_ranks(_with_handles, 2, "fp8_e4m3", False)


def _foreign_handle(rank: int) -> str:
    """A handle of another object, on all ranks: every rank says so, and both objects go on."""
    first, second = (ExpertParallel(make_layout(2, model__hidden=h)) for h in (128, 256))
    a = first.dispatch(torch.ones(2, 128), torch.tensor([[0, 2]] * 2))
    messages = []
    for action in (
        lambda: second.combine(torch.ones(len(a.tokens), 256), a.handle),
        lambda: second.combine(torch.ones(len(a.tokens), 256), "no handle"),
        lambda: second.dispatch(torch.ones(2, 256), handle=a.handle),
        lambda: second.dispatch(torch.ones(2, 256), handle="no handle"),
    ):
        try:
            action()
        except (ValueError, TypeError, OrderError) as error:
            messages.append(str(error))
    assert len(messages) == 4, messages
    for ep in (first, second):
        check(ep, Problem(ep.layout, 1, [3, 2]))
    return messages[2]


def test_handle_of_another_object() -> None:
    for message in run_ranks(_foreign_handle, 2):
        assert "another" in message or "not from" in message, message


def _ranks_disagree(rank: int, what: str) -> str:
    """Ranks that call different things: an error soon, never an abort of the process."""
    ep = ExpertParallel(make_layout(2))
    ep.set_timeouts(first_s=2, steady_s=2)
    problem = Problem(ep.layout, 6, [5, 4])
    x, idx, w = problem.x[rank].float(), problem.idx[rank], problem.weights[rank]
    d = ep.dispatch(x, idx, w)
    other = ep.dispatch(x[:1], torch.zeros(1, 2, dtype=torch.int64), w[:1])
    actions = {
        "weights on one rank": (lambda: ep.dispatch(x, idx, w), lambda: ep.dispatch(x, idx)),
        "verbs": (lambda: ep.dispatch(x, idx, w), lambda: ep.combine(d.tokens, d.handle)),
        "handles": (
            lambda: ep.combine(d.tokens, d.handle),
            lambda: ep.combine(other.tokens, other.handle),
        ),
        "handle on one rank": (
            lambda: ep.dispatch(x, idx),
            lambda: ep.dispatch(x, handle=d.handle),
        ),
    }
    try:
        actions[what][rank]()
        ep.dispatch(x, idx)
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_ranks_that_disagree_do_not_abort() -> None:
    failures = []
    for what in ("weights on one rank", "verbs", "handles", "handle on one rank"):
        try:
            kinds = run_ranks(_ranks_disagree, 2, what, limit_s=20)
        except AssertionError as error:
            failures.append(f"{what}: {error}")
            continue
        allowed = {"OrderError", "PeerTimeoutError", "PeerError", "ValueError", "BrokenError"}
        if not set(kinds) <= allowed:
            failures.append(f"{what}: {kinds}")
    assert not failures, "\n".join(failures)


def _mismatch(rank: int) -> str:
    changes = {"tokens_per_rank": 64 if rank == 0 else 128, "dispatch__num_sms": 20 + rank // 2}
    try:
        ExpertParallel(make_layout(3, model__num_experts=6, **changes))
    except LayoutMismatchError as error:
        return str(error)
    return "no error"


def test_case_11_layouts_differ() -> None:
    messages = run_ranks(_mismatch, 3)
    for message in messages[:2]:
        assert "tokens_per_rank" in message and "64" in message and "128" in message, message
    assert all("rank" in m and ("tokens_per_rank" in m or "num_sms" in m) for m in messages)


def _one_layout_for_another_group(rank: int) -> str:
    try:
        ExpertParallel(make_layout(2 if rank == 0 else 4))
    except LayoutError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_layout_for_another_group_on_one_rank() -> None:
    messages = run_ranks(_one_layout_for_another_group, 2)
    assert messages[0].startswith("LayoutMismatchError") and "rank 1" in messages[0], messages
    assert "4 ranks" in messages[0] and "has 2" in messages[0], messages
    assert "4 ranks" in messages[1] and "has 2" in messages[1], messages


def _bad_environment(rank: int) -> None:
    """On one rank: an error on both, long before the time-out, and the group can be used again."""
    layout = make_layout(2)
    for bad, (name, value) in enumerate(
        {"MOE_EP_BACKEND": "cude", "MOE_EP_TIMEOUT_S": "soon", "MOE_EP_NVTX": "yes"}.items()
    ):
        if rank == bad % 2:
            os.environ[name] = value
        try:
            ExpertParallel(layout)
        except ValueError as error:
            kinds = (LayoutError, ValueError, ValueError)
            kind = kinds[bad] if rank == bad % 2 else LayoutMismatchError
            assert type(error) is kind and value in str(error), (name, error)
        else:
            raise AssertionError(f"{name}: no error")
        os.environ.pop(name, None)
    check(ExpertParallel(layout), Problem(layout, 1, [3, 2]))


def test_bad_environment_on_one_rank() -> None:
    run_ranks(_bad_environment, 2, limit_s=30)


def _backends(rank: int) -> list[str]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moe_ep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    messages = []
    for name in ("cuda", "nvshmem"):
        try:
            ExpertParallel(make_layout(2, backend=name))
        except BackendUnavailableError as error:
            messages.append(f"{name}: {error}")
    assert not records
    ep = ExpertParallel(make_layout(2, backend="auto"))
    check(ep, Problem(ep.layout, 1, [3, 2]))
    assert ep.backend.name == "reference"
    return [*messages, *(["logged: " + record for record in records])]


def test_case_40_backend_asked_for_by_name() -> None:
    first, second = run_ranks(_backends, 2)
    for messages in (first, second):
        for name, message in zip(("cuda", "nvshmem"), messages[:2], strict=True):
            assert message.startswith(name) and "cannot run" in message and "reference" in message
    logged = [message for message in first if message.startswith("logged: ")]
    assert len(logged) == 1 and all(w in logged[0] for w in ("auto", "reference", "cuda"))


def _without_collectives(rank: int) -> None:
    """Set-up and use need send and receive of the given group only: no collective, no NCCL."""
    import torch.distributed as dist

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a collective call")

    names = "all_reduce all_gather all_gather_object all_gather_into_tensor barrier broadcast "
    names += "broadcast_object_list all_to_all all_to_all_single new_group gather scatter "
    for name in (names + "reduce_scatter monitored_barrier").split():
        setattr(dist, name, refuse)
        setattr(dist.distributed_c10d, name, refuse)
    ep = ExpertParallel(make_layout(2))
    check(ep, Problem(ep.layout, 1, [3, 2]))
    assert ep.group._get_backend(torch.device("cpu")).name() == "gloo"
    assert ep.channel.device() == torch.device("cpu")
    ep.destroy()
    ep.destroy()
    for action in (
        lambda: ep.dispatch(X, IDX),
        lambda: ep.combine(X, IDX),  # type: ignore[arg-type]
    ):
        try:
            action()
        except BrokenError as error:
            assert "destroy" in str(error)
        else:
            raise AssertionError("usable after destroy()")


def test_case_53_set_up_needs_no_collective() -> None:
    run_ranks(_without_collectives, 2)
