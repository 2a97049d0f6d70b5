"""What an exchange tells about itself: rows, bytes, times, waits, and names in profiles."""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest
import torch
from reference_model import Problem, make_layout

from moe_ep import ExpertParallel, PeerError
from moe_ep.statistics import LINKS, Statistics
from moe_ep.testing import run_ranks

HIDDEN, EXPERTS, RANKS = 128, 8, 4
ROW_BYTES = 4 * HIDDEN


def expected_rows(problem: Problem, rank: int) -> torch.Tensor:
    """[source rank, local expert] rows for the experts of this rank, from all ranks' choices."""
    local = EXPERTS // RANKS
    counts = torch.zeros(RANKS, local, dtype=torch.int64)
    for source, idx in enumerate(problem.idx):
        for expert in idx.flatten().tolist():
            if expert >= 0 and expert // local == rank:
                counts[source, expert % local] += 1
    return counts


def _step(ep: ExpertParallel, problem: Problem, layer: str | int | None = None) -> None:
    x = problem.x[ep.rank].float().requires_grad_()
    weights = problem.weights[ep.rank].float().requires_grad_()
    d = ep.dispatch(x, problem.idx[ep.rank], weights, layer=layer)
    ep.combine(d.tokens * 2, d.handle, d.probs).sum().backward()


def _rows_and_bytes(rank: int) -> None:
    layout = make_layout(RANKS, model__num_experts=EXPERTS, parallel__ranks_per_host=2)
    ep = ExpertParallel(layout)
    first = Problem(layout, 1, [9, 0, 31, 4], unused=0.2)
    second = Problem(layout, 2, [5, 7, 2, 40], only_experts=[0, 1, 5])
    with pytest.raises(ValueError, match="collect_stats"):
        ep.stats()
    _step(ep, first)  # not counted
    ep.collect_stats()
    ep.collect_stats()  # a second time changes nothing
    _step(ep, first, layer=3)
    _step(ep, second, layer="last")
    _step(ep, second, layer="last")
    mine = ep.stats()
    group = ep.gather_stats()
    assert group.by_rank[rank] == mine == Statistics.from_json(mine.to_json())
    json.loads(mine.to_json())
    one, two = expected_rows(first, rank), expected_rows(second, rank)
    assert mine.layers["3"].tokens_per_expert == one.sum(0).tolist()
    assert mine.layers["last"].tokens_per_expert == (2 * two.sum(0)).tolist()
    from_peer = (one + 2 * two).sum(1).tolist()
    neighbour = rank ^ 1  # two ranks a host
    rows = {
        "own_rank": from_peer[rank],
        "own_host": from_peer[neighbour],
        "other_hosts": sum(from_peer) - from_peer[rank] - from_peer[neighbour],
    }
    for verb in ("dispatch", "combine", "dispatch_backward", "combine_backward"):
        figures = mine.total.verbs[verb]
        assert figures.calls == figures.timed == 3 and figures.us > 0
        assert {link: figures.links[link].rows for link in LINKS} == rows, verb
        assert {link: figures.links[link].bytes for link in LINKS} == {
            link: count * ROW_BYTES for link, count in rows.items()
        }
    every = torch.cat([(expected_rows(first, r) + 2 * expected_rows(second, r)).sum(0)
                       for r in range(RANKS)]).tolist()  # fmt: skip
    assert group.tokens_per_expert() == every
    assert group.imbalance() == pytest.approx(max(every) / (sum(every) / EXPERTS))
    assert group.layers == ["3", "last"]
    scalars = group.scalars()
    sent = sum(int((p.idx[r] >= 0).sum()) for p in (first, second, second) for r in range(RANKS))
    assert sum(scalars[f"moe_ep/rows_{link}"] for link in LINKS) == 4 * sent  # four verbs
    assert scalars["moe_ep/layer_3/imbalance"] == pytest.approx(group.imbalance("3"))
    assert scalars["moe_ep/rank_2/rows"] == sum(every[4:6])
    assert ep.stats(reset=True) == mine
    assert ep.stats().layers == {}
    assert ep.stats().imbalance == 0.0
    d = ep.dispatch(first.x[rank].float(), first.idx[rank], layer="again")
    ep.dispatch(first.x[rank].float(), handle=d.handle)
    assert ep.stats().layers["again"].verbs["dispatch"].calls == 2  # a handle passes its layer on


def _waits(rank: int) -> None:
    ep = ExpertParallel(make_layout(RANKS, model__num_experts=EXPERTS))
    problem = Problem(ep.layout, 3, [8] * RANKS)
    ep.collect_stats()
    _step(ep, problem)
    ep.stats(reset=True)
    slept = 0.3
    if rank == 2:
        time.sleep(slept)  # the others wait in the exchange of counts
    x = problem.x[rank].float()
    d = ep.dispatch(x, problem.idx[rank])
    if rank == 1:
        time.sleep(slept)  # and here in combine
    ep.combine(d.tokens, d.handle)
    group = ep.gather_stats()
    for other, one in enumerate(group.by_rank):
        for verb, late in (("dispatch", 2), ("combine", 1)):
            figures = one.total.verbs[verb]
            if other == late:
                assert figures.wait_us < slept / 2 * 1e6
            else:
                assert slept / 2 * 1e6 < figures.wait_us <= figures.us
                assert max(figures.waited_for_us, key=figures.waited_for_us.get) == late
    waited = group.waited_for_us()
    assert sorted(range(RANKS), key=waited.__getitem__)[-2:] in ([1, 2], [2, 1])


def _one_rank_is_off(rank: int) -> None:
    ep = ExpertParallel(make_layout(RANKS, model__num_experts=EXPERTS))
    if rank != 1:
        ep.collect_stats()
    with pytest.raises(ValueError if rank == 1 else PeerError, match="collect_stats"):
        ep.gather_stats()
    ep.collect_stats()
    assert len(ep.gather_stats().by_rank) == RANKS  # it can go on


def _names_in_a_profile(rank: int) -> None:
    problem = Problem(make_layout(RANKS, model__num_experts=EXPERTS), 4, [3] * RANKS)
    with contextlib.ExitStack() as stack:
        if rank == 0:  # starting a profiler takes long
            activities = [torch.profiler.ProfilerActivity.CPU]
            profile = stack.enter_context(torch.profiler.profile(activities=activities))
        for switch in ("0", "1"):
            os.environ["MOE_EP_NVTX"] = switch
            ep = ExpertParallel(problem.layout)
            _step(ep, problem, layer=f"of {switch}")
            with pytest.raises(ValueError, match="collect_stats"):
                ep.stats()  # names alone count nothing
    if rank == 0:
        phases = ("dispatch.metadata", "dispatch.rows", "dispatch.backward", "combine.rows",
                  "combine.backward")  # fmt: skip
        seen = {event.name for event in profile.events() if "moe_ep" in event.name}
        assert seen == {f"moe_ep.{phase} layer of 1" for phase in phases}
    os.environ["MOE_EP_NVTX"], os.environ["MOE_EP_STATISTICS"] = "0", "1"
    ep = ExpertParallel(problem.layout)
    _step(ep, problem)
    assert ep.stats().layers[""].verbs["combine_backward"].calls == 1
    ep.collect_stats(False)
    with pytest.raises(ValueError, match="MOE_EP_STATISTICS"):
        ep.stats()
    os.environ["MOE_EP_STATISTICS"] = "yes"
    with pytest.raises(ValueError, match="MOE_EP_STATISTICS='yes'"):
        ExpertParallel(problem.layout)


def _all(rank: int) -> None:
    for check in (_rows_and_bytes, _waits, _one_rank_is_off, _names_in_a_profile):
        check(rank)


def test_statistics_and_profiles() -> None:
    run_ranks(_all, RANKS)
