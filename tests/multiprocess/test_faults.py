"""Cases 6, 8, 9 and 46: ranks that are late, absent or dead, and endings without destroy."""

import multiprocessing
import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from reference_model import Problem, check, make_layout

from moe_ep import BrokenError, ExpertParallel, PeerTimeoutError
from moe_ep.testing import launch_ranks, run_ranks

PHASES = {  # where rank 1 dies, and the phase the others name
    "setup": "setup",
    "metadata": "dispatch.metadata",
    "rows": "dispatch.rows",
    "combine": "combine.rows",
    "combine backward": "combine.backward",
    "dispatch backward": "dispatch.backward",
}


def _skips_one(rank: int) -> tuple[str, float, str]:
    ep = ExpertParallel(make_layout(2))
    for seed in range(2):
        check(ep, Problem(ep.layout, seed, [3, 2]), backward=False)
    ep.set_timeouts(steady_s=1.5)
    x, idx = torch.zeros(2, 128), torch.zeros(2, 1, dtype=torch.int64)
    started = time.monotonic()
    message = again = ""
    if rank == 0:
        try:
            ep.dispatch(x, idx)
        except PeerTimeoutError as error:
            message = str(error)
        taken = time.monotonic() - started
        try:
            ep.dispatch(x, idx)
        except BrokenError as error:
            again = str(error)
        dist.distributed_c10d._get_default_store().set("done", "1")
        return message, taken, again
    dist.distributed_c10d._get_default_store().wait(["done"])  # alive, and not dispatching
    return "", 0.0, ""


def test_case_06_a_rank_skips_a_dispatch() -> None:
    message, taken, again = run_ranks(_skips_one, 2, limit_s=20)[0]
    assert "rank 1" in message and "operation 5" in message and "dispatch" in message, message
    assert "1.5 s" in message
    assert 1.4 <= taken < 3.0
    assert "earlier fault" in again and "operation 5" in again


DELAYS = (  # one pair of ranks each: the time-out, and the operation that rank 1 comes 5 s late to
    (2.0, "first dispatch"),
    (2.0, "combine"),
    (10.0, "dispatch"),
)


def _slow(rank: int) -> tuple[str, float]:
    groups = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(len(DELAYS))]
    timeout_s, verb = DELAYS[rank // 2]
    ep = ExpertParallel(make_layout(2, timeouts__first_s=30.0), groups[rank // 2])
    x, idx = torch.ones(2, 128), torch.tensor([[0, 2]] * 2)
    if verb == "first dispatch":
        ep.set_timeouts(first_s=timeout_s, steady_s=0.1)
    else:
        d = ep.dispatch(x, idx)
        ep.set_timeouts(steady_s=timeout_s)
    if rank % 2 == 1:
        time.sleep(5)
    started = time.monotonic()
    try:
        if verb == "combine":
            assert torch.equal(ep.combine(d.tokens, d.handle), 2 * x)
        else:
            ep.dispatch(x, idx)
    except PeerTimeoutError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def test_case_08_a_slow_rank() -> None:
    first, _, combine, _, patient, late = run_ranks(_slow, 6, limit_s=40)
    for message, taken in (first, combine):
        assert "rank 1" in message and "2 s" in message, message
        assert 2 <= taken < 4
    assert first[0].startswith("rank 0 waited 2 s for rank 1 in "), first
    named = "rank 0 (global rank 2) waited 2 s for rank 1 (global rank 3) in "  # of their group
    assert combine[0].startswith(named), combine
    assert patient[0] == late[0] == ""
    assert 3 <= patient[1] < 10


def _dies(rank: int, phase: str) -> None:
    """Rank 1 ends without a word in the given phase; an operation before it went well."""
    layout = make_layout(3, model__num_experts=6, timeouts__first_s=4.0, timeouts__steady_s=4.0)

    def die(*_args: Any, **_kwargs: Any) -> Any:
        os._exit(1)

    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} has joined", "1")
    store.wait([f"rank {peer} has joined" for peer in range(3)])
    if phase == "setup":
        if rank == 1:
            die()
        ExpertParallel(layout)
    ep = ExpertParallel(layout)
    problem = Problem(layout, 1, [4, 3, 2])
    check(ep, problem)
    if rank == 1 and phase == "metadata":
        die()
    if rank == 1 and phase == "rows":
        ep.backend.dispatch = die  # type: ignore[method-assign]
    x = problem.x[rank].float().requires_grad_()
    d = ep.dispatch(x, problem.idx[rank])
    if rank == 1 and phase == "combine":
        die()
    out = ep.combine(d.tokens, d.handle)
    if rank == 1 and phase == "combine backward":
        die()
    if rank == 1 and phase == "dispatch backward":
        ep.backend.combine = die  # type: ignore[method-assign]
    out.sum().backward()


def test_case_09_a_rank_dies() -> None:
    for phase, named in PHASES.items():
        started = time.monotonic()
        outcomes = launch_ranks(_dies, 3, phase, limit_s=30)
        assert time.monotonic() - started < 9 + 6, phase  # time-out + 5 s, and the start
        assert not multiprocessing.active_children(), phase
        assert outcomes[1].exitcode == 1
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.exitcode == 1, (phase, outcome)  # raised, neither aborted nor killed
            assert "PeerTimeoutError: rank" in str(outcome.error), (phase, outcome)
            assert f" in {named}, operation" in str(outcome.error), (phase, outcome)
        errors = [str(outcomes[rank].error) for rank in (0, 2)]
        assert any("to rank 1 in" in e or "for rank 1 in" in e for e in errors), errors


def _out_of_memory(rank: int, phase: str) -> tuple[list[str], float]:
    """Both ranks run out of memory while their messages travel, in the given phase."""
    ep = ExpertParallel(make_layout(2))
    x, idx = torch.ones(3, 128), torch.tensor([[0, 2]] * 3)
    d = ep.dispatch(x, idx)
    name = {"dispatch.metadata": "argsort", "dispatch.rows": "index_select"}.get(phase, "cat")

    def no_memory(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    setattr(torch, name, no_memory)
    messages = []
    started = time.monotonic()
    for kind in (torch.OutOfMemoryError, BrokenError):
        try:
            if phase == "combine.rows":
                ep.combine(d.tokens, d.handle)
            else:
                ep.dispatch(x, idx)
        except kind as error:
            messages.append(str(error))
    return messages, time.monotonic() - started


def test_an_error_between_messages_breaks_the_object() -> None:
    """The next call says why, at once, and blames no peer."""
    for phase in ("dispatch.metadata", "dispatch.rows", "combine.rows"):
        for messages, seconds in run_ranks(_out_of_memory, 2, phase, limit_s=30):
            assert len(messages) == 2 and seconds < 15, (phase, messages, seconds)
            assert f"{phase}, operation 2, was left halfway" in messages[1], messages
            assert "OutOfMemoryError: no memory left" in messages[1], messages


def _no_room(rank: int) -> list[str]:
    """Rank 1 alone has no room for its rows, once counts were exchanged."""
    ep = ExpertParallel(make_layout(2))
    ep.set_timeouts(steady_s=3)
    x, idx = torch.ones(3, 128), torch.tensor([[0, 2]] * 3)
    ep.dispatch(x, idx)
    full = torch.OutOfMemoryError("no memory left")
    told = []
    for _ in range(2):
        scatter = ep.backend._scatter if rank == 0 else mock.Mock(side_effect=full)
        with mock.patch.object(ep.backend, "_scatter", scatter):
            try:
                ep.dispatch(x, idx)
            except (RuntimeError, PeerTimeoutError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_no_room_for_rows_on_one_rank() -> None:
    peer, culprit = run_ranks(_no_room, 2, limit_s=30)
    assert culprit[0] == "OutOfMemoryError: no memory left", culprit
    assert culprit[1].startswith("BrokenError") and "left halfway: OutOfMemory" in culprit[1]
    assert peer[0].startswith("PeerTimeoutError") and "rank 1 in dispatch.rows" in peer[0], peer


def _ends(rank: int, how: str) -> str:
    layout = make_layout(2, timeouts__first_s=30.0)
    ep = ExpertParallel(layout)
    problem = Problem(layout, 1, [3, 2])
    check(ep, problem)
    d = ep.dispatch(problem.x[rank].float(), problem.idx[rank])  # in flight
    if how == "destroy twice":
        ep.destroy()
        ep.destroy()
    elif how == "destroy after the group":
        ep.combine(d.tokens, d.handle)
        dist.destroy_process_group()
        ep.destroy()
    elif how == "group only":
        dist.destroy_process_group()
    elif how == "after a time-out":
        ep.set_timeouts(steady_s=0.5)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:  # stays, but does not combine
            store.wait(["timed out"])
        else:
            try:
                ep.combine(d.tokens, d.handle)
            except PeerTimeoutError:
                store.set("timed out", "1")
    globals()["kept until exit"] = (ep, d)
    return how


def test_case_46_endings() -> None:
    for how in (
        "no destroy",
        "destroy twice",
        "destroy after the group",
        "group only",
        "after a time-out",
    ):
        for outcome in launch_ranks(_ends, 2, how, limit_s=30):
            assert outcome.exitcode == 0 and outcome.result == how, outcome
            assert outcome.seconds < 15, outcome


def _dead_first(rank: int) -> str:
    """After a fault, another object on another group of the same processes works."""
    fresh = dist.new_group()
    ep = ExpertParallel(make_layout(2, timeouts__steady_s=0.5))
    check(ep, Problem(ep.layout, 1, [3, 2]))
    message = ""
    if rank == 0:
        try:
            ep.dispatch(torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int64))
        except PeerTimeoutError as error:
            message = str(error)
    other = ExpertParallel(make_layout(2), fresh)
    check(other, Problem(other.layout, 2, [3, 2]))
    return message


def test_a_new_group_works_after_a_fault() -> None:
    assert "rank 1" in run_ranks(_dead_first, 2, limit_s=30)[0]
