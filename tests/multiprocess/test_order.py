"""Cases 21, 22, 24, 28, 42, 43: order, overlap, repeats, and what stays behind."""

import gc
import random
import threading
import time
import weakref
from pathlib import Path

import torch
from reference_model import LocalExperts, Problem, check, distributed, make_layout
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from moe_ep import ExpertParallel, ExpertParallelPool, OrderError, PeerTimeoutError
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, exchange_json
from moe_ep.testing import run_ranks


def _in_flight(rank: int) -> None:
    delays = random.Random(rank)
    for mode in ("throughput", "low_latency"):
        ep = ExpertParallel(make_layout(2, model__hidden=32, dispatch__mode=mode))
        for step in range(100):
            a = Problem(ep.layout, step, [step % 7, 3], unused=0.1)
            b = Problem(ep.layout, -1 - step, [4, step % 5])
            da = ep.dispatch(a.x[rank].float(), a.idx[rank])
            time.sleep(delays.random() * 2e-3)
            db = ep.dispatch(b.x[rank].float(), b.idx[rank])
            time.sleep(delays.random() * 2e-3)
            out_a, out_b = (
                ep.combine(da.tokens * 3, da.handle),
                ep.combine(db.tokens * 3, db.handle),
            )
            for problem, out in ((a, out_a), (b, out_b)):
                d = ep.dispatch(problem.x[rank].float(), problem.idx[rank])
                assert torch.equal(out, ep.combine(d.tokens * 3, d.handle)), step
                used = (problem.idx[rank] >= 0).sum(1, keepdim=True)
                torch.testing.assert_close(out, 3 * used * problem.x[rank].float())
    ep = ExpertParallel(make_layout(2, model__hidden=8))
    x, idx = torch.randn(3, 8), torch.randint(0, 4, (3, 2))
    many = [ep.dispatch(x * n, idx) for n in range(10)]  # throughput mode has no such limit
    for n, d in reversed(list(enumerate(many))):
        torch.testing.assert_close(ep.combine(d.tokens, d.handle), 2 * n * x)


def test_case_21_two_dispatches_in_flight() -> None:
    run_ranks(_in_flight, 2)


def _asynchronous(rank: int) -> None:
    """Chained by events, with gradients, the numbers are those of plain calls."""
    ep = ExpertParallel(make_layout(2))
    problem = Problem(ep.layout, 9, [5, 3])
    results = []
    for asynchronous in (False, True):
        x = problem.x[rank].float().requires_grad_()
        weights = problem.weights[rank].float().requires_grad_()
        d = ep.dispatch(x, problem.idx[rank], weights, async_finish=asynchronous)
        if asynchronous:
            out, event = ep.combine(
                d.tokens * 3, d.handle, d.probs, previous_event=d.event, async_finish=True
            )
            with event:
                pass
        else:
            assert d.event.event is None
            out = ep.combine(d.tokens * 3, d.handle, d.probs)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad))
    for plain, chained in zip(*results, strict=True):
        assert torch.equal(plain, chained)
    scale = 3 * problem.weights[rank].sum(1, keepdim=True)
    torch.testing.assert_close(
        results[1][0].double(), scale * problem.x[rank], rtol=1e-5, atol=1e-5
    )


def test_asynchronous_calls() -> None:
    run_ranks(_asynchronous, 2)


def _poisoned_memory(rank: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all() and torch.ones(3).new_empty(4).isnan().all()
    for changes in ({}, {"dispatch__row_alignment": 8}, {"dispatch__capacity": 40}):
        ep = ExpertParallel(make_layout(2, **changes))
        for weighted in ("experts", "combine", "no"):
            check(ep, Problem(ep.layout, 5, [7, 4], unused=0.3), weighted)
            check(ep, Problem(ep.layout, 6, [3, 0], only_experts=[1, 2]), weighted)


def test_case_22_uninitialised_memory_is_nan() -> None:
    run_ranks(_poisoned_memory, 2)


def _micro_batches(rank: int) -> None:
    """Forwards and backwards of three micro-batches, overlapped as a pipeline does."""
    ep = ExpertParallel(make_layout(2))
    problems = [Problem(ep.layout, seed, [5 - seed, 2 * seed], unused=0.1) for seed in range(3)]
    apart = [distributed(ep, problem) for problem in problems]

    def forward(problem):  # type: ignore[no-untyped-def]
        x = problem.x[rank].float().requires_grad_()
        w = problem.weights[rank].float().requires_grad_()
        d = ep.dispatch(x, problem.idx[rank], w)
        return x, w, d, problem.grad_out[rank].float()

    experts = [LocalExperts(problem, rank, torch.float32) for problem in problems]

    def finish(n, state):  # type: ignore[no-untyped-def]
        x, w, d, g = state
        out = ep.combine(experts[n](d.tokens, d.tokens_per_expert, d.probs), d.handle)
        return x, w, (out * g).sum()

    s0, s1 = forward(problems[0]), forward(problems[1])
    f0 = finish(0, s0)
    s2 = forward(problems[2])
    f0[2].backward()
    f2, f1 = finish(2, s2), finish(1, s1)
    f1[2].backward()
    f2[2].backward()
    for n, (x, w, _) in enumerate((f0, f1, f2)):
        assert torch.equal(x.grad, apart[n].x) and torch.equal(w.grad, apart[n].weights)
        assert torch.equal(experts[n].up.grad, apart[n].up)


def test_case_24_overlapped_micro_batches() -> None:
    run_ranks(_micro_batches, 2)


def _repeats(rank: int) -> None:
    ep = ExpertParallel(make_layout(3, model__num_experts=6, dispatch__row_alignment=4))
    problem = Problem(ep.layout, 7, [9, 0, 5], unused=0.1)
    first = distributed(ep, problem)
    for _ in range(20):
        again = distributed(ep, problem)
        for name in ("out", "x", "weights", "up", "down"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


def _recomputed(rank: int) -> None:
    ep = ExpertParallel(make_layout(2, dispatch__row_alignment=4))
    problem = Problem(ep.layout, 7, [9, 5], unused=0.1)
    counts = []

    def layer(x):  # type: ignore[no-untyped-def]
        d = ep.dispatch(x, problem.idx[rank], problem.weights[rank])
        counts.append(d.tokens_per_expert.tolist())
        return ep.combine(torch.tanh(d.tokens) * d.probs[:, None], d.handle)

    plain = problem.x[rank].float().requires_grad_()
    layer(plain).sum().backward()
    for reentrant in (True, False):
        x = problem.x[rank].float().requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(plain.grad, x.grad)
    assert len(counts) == 5 and all(count == counts[0] for count in counts)


def test_case_28_repeats_and_recomputation() -> None:
    run_ranks(_repeats, 3)
    run_ranks(_recomputed, 2)


def _tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def _shared_by_layers(rank: int) -> None:
    group = torch.distributed.group.WORLD
    before = _tensors_alive()
    pool = ExpertParallelPool()
    layouts = [make_layout(2, model__hidden=128), make_layout(2, model__hidden=256)]
    for model in layouts:
        layers = {
            pool.get(make_layout(2, model__hidden=model.model.hidden), group) for _ in range(48)
        }
        assert len(layers) == 1
    assert len(pool) == 2
    members = [pool.get(layout, group) for layout in layouts]
    for seed in range(4):  # two models interleaved, forward and backward
        for ep in members if seed % 2 else members[::-1]:
            check(ep, Problem(ep.layout, seed, [4, 3]))
    d = [
        ep.dispatch(torch.ones(2, ep.layout.model.hidden), torch.tensor([[0, 2]] * 2))
        for ep in members
    ]
    for ep, result in zip(members, d, strict=True):
        assert torch.equal(
            ep.combine(result.tokens, result.handle), torch.full((2, ep.layout.model.hidden), 2.0)
        )
    alive = [weakref.ref(ep) for ep in members]
    pool.destroy()
    pool.destroy()
    assert len(pool) == 0
    del members, ep, d, result, layers
    assert _tensors_alive() <= before
    assert all(reference() is None for reference in alive)


def test_case_42_layers_share_one_object() -> None:
    run_ranks(_shared_by_layers, 2)


def _two_threads(rank: int) -> None:
    """Two objects of one group: each has its own order, whatever the other does."""
    eps = [ExpertParallel(make_layout(2, model__hidden=hidden)) for hidden in (128, 256)]
    failures: list[BaseException] = []

    def work(ep: ExpertParallel, jitter: random.Random) -> None:
        try:
            for seed in range(15):
                time.sleep(jitter.random() * 1e-3)
                check(ep, Problem(ep.layout, seed, [4, 3]))
        except BaseException as error:
            failures.append(error)

    order = eps if rank == 0 else eps[::-1]
    threads = [threading.Thread(target=work, args=(ep, random.Random(rank))) for ep in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_two_objects_in_different_orders() -> None:
    run_ranks(_two_threads, 2)


def _opposite_order(rank: int) -> str:
    eps = [ExpertParallel(make_layout(2, model__hidden=hidden)) for hidden in (128, 256)]
    for ep in eps:
        check(ep, Problem(ep.layout, 1, [4, 3]))
        ep.set_timeouts(steady_s=1.0)
    try:
        for ep in eps if rank == 0 else eps[::-1]:
            ep.dispatch(
                torch.zeros(1, ep.layout.model.hidden), torch.zeros(1, 1, dtype=torch.int64)
            )
    except PeerTimeoutError as error:
        return str(error)
    return "no error"


def test_opposite_order_in_one_thread_is_named() -> None:
    """Neither garbage nor a hang: both ranks wait for each other, and say so."""
    messages = run_ranks(_opposite_order, 2, limit_s=20)
    assert all("dispatch" in message and "rank" in message for message in messages), messages


def _channels_that_share_tags(rank: int) -> str:
    group = torch.distributed.group.WORLD
    for number in (129, 129 + 128):
        exchange_json(Channel(group, number), {"rank": str(rank)}, Call(1, "setup", 20.0))
    try:
        exchange_json(Channel(group, 1 + 128 * rank), {}, Call(1, "setup", 20.0))
    except OrderError as error:
        return str(error)
    return "no error"


def test_objects_whose_tags_are_the_same_do_not_mix() -> None:
    for message in run_ranks(_channels_that_share_tags, 2, limit_s=30):
        assert "symmetric memory on channel 129" in message, message


def _memory(rank: int) -> None:
    ep = ExpertParallel(make_layout(2, model__hidden=512))
    problem = Problem(ep.layout, 8, [64, 48])
    x, idx, w = problem.x[rank].float(), problem.idx[rank], problem.weights[rank]

    def layer(rows):  # type: ignore[no-untyped-def]
        d = ep.dispatch(rows, idx, w)
        return ep.combine(torch.tanh(d.tokens) * d.probs[:, None], d.handle)

    def run(forwards: int, steps: int) -> tuple[int, int]:
        with torch.no_grad():
            for _ in range(forwards):
                layer(x)
        for _ in range(steps):
            CheckpointFunction.apply(layer, False, x.clone().requires_grad_()).sum().backward()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return _tensors_alive(), pages * 4096

    tensors, resident = run(20, 10)
    tensors_after, resident_after = run(200, 50)
    assert ep.live_handles == 0
    assert tensors_after == tensors
    grown = (resident_after - resident) / 2**20
    assert grown < 8, f"{grown:.1f} MiB more after 300 layers of {x.numel() * 4 / 2**20:.2f} MiB"


def test_case_43_memory_stays_flat() -> None:
    run_ranks(_memory, 2)
