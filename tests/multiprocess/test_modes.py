"""Options of a layout: shared experts, alignment, capacity, low latency, FP8, cached handles."""

import pytest
import torch
from reference_model import Problem, check, close, make_layout, padding_rows

from moe_ep import CapacityError, ExpertParallel, OrderError, PeerError
from moe_ep.quant import dequantize_fp8, quantize_fp8
from moe_ep.testing import run_ranks


def _order_by_hand(rank: int) -> None:
    """Two ranks, experts 0 and 1 on rank 0, 2 and 3 on rank 1. Token t of rank r holds 10 r + t."""
    ep = ExpertParallel(make_layout(2, model__hidden=2, dispatch__row_alignment=2))
    idx = [[[1, 0], [0, 3], [1, -1]], [[0, 1], [2, 0]]]
    weights = [[[0.1, 0.2], [0.3, 0.4], [0.5, 9.0]], [[0.6, 0.7], [0.8, 0.9]]]
    x = torch.tensor([[10.0 * rank + t] * 2 for t in range(len(idx[rank]))])
    d = ep.dispatch(x, torch.tensor(idx[rank]), torch.tensor(weights[rank]))
    # expert, then source rank, then token; blocks padded to a multiple of two rows
    expected_rows = ([0.0, 1.0, 10.0, 11.0, 0.0, 2.0, 10.0, 0.0], [11.0, 0.0, 1.0, 0.0])
    expected_probs = ([0.2, 0.3, 0.6, 0.9, 0.1, 0.5, 0.7, 0.0], [0.8, 0.0, 0.4, 0.0])
    assert d.tokens[:, 0].tolist() == d.tokens[:, 1].tolist() == expected_rows[rank]
    assert d.probs is not None
    assert torch.equal(d.probs, torch.tensor(expected_probs[rank]))
    assert d.tokens_per_expert.tolist() == ([4, 4], [2, 2])[rank]
    assert d.tokens_per_expert.dtype == torch.int64 and d.tokens_per_expert.device.type == "cpu"
    assert d.handle.valid_tokens_per_expert.tolist() == ([4, 3], [1, 1])[rank]
    assert (d.handle.num_tokens, d.handle.num_rows) == (len(x), len(d.tokens))
    # row i of rank r returns 100 r + i
    answer = 100.0 * rank + torch.arange(len(d.tokens)).float().unsqueeze(1).expand(-1, 2)
    out = ep.combine(answer, d.handle)
    assert out[:, 0].tolist() == ([4.0 + 0.0, 1.0 + 102.0, 5.0], [2.0 + 6.0, 100.0 + 3.0])[rank]


def _equal_experts_by_hand(rank: int) -> None:
    """An expert named twice: the token's rows follow each other in slot order."""
    ep = ExpertParallel(make_layout(2, model__hidden=1))
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    d = ep.dispatch(torch.tensor([[0.0], [1.0]]) + 5 * rank, torch.full((2, 2), 2), weights)
    if rank == 1:
        assert d.probs is not None
        assert d.probs.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
        assert d.tokens.flatten().tolist() == [0, 0, 1, 1, 5, 5, 6, 6]
    assert d.tokens_per_expert.tolist() == ([0, 0], [8, 0])[rank]


def _order(rank: int) -> None:
    _order_by_hand(rank)
    _equal_experts_by_hand(rank)


def test_row_order_worked_by_hand() -> None:
    run_ranks(_order, 2)


def _shared_experts(rank: int) -> None:
    for dtype in ("fp64", "fp32"):
        layout = make_layout(2, parallel__expert_tensor=2, dispatch__dtype=dtype)
        ep = ExpertParallel(layout)
        for seed, weighted in enumerate(("experts", "combine", "no")):
            check(ep, Problem(layout, seed, [4, 0, 3, 6], unused=0.2), weighted)
        check(ep, Problem(layout, 9, [3, 1, 2, 4], only_experts=[2, 3]))
    x = torch.full((1, 128), float(rank + 1))
    d = ep.dispatch(x, torch.tensor([[0, 3]]))
    # both ranks of an EP rank hold the same rows
    assert d.tokens[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert d.tokens_per_expert.tolist() == ([4, 0] if rank < 2 else [0, 4])
    out = ep.combine(torch.full_like(d.tokens, 10.0**rank), d.handle)
    assert torch.equal(out, torch.full_like(x, 1111.0))


def test_expert_tensor_parallel() -> None:
    run_ranks(_shared_experts, 4)


def _alignment(rank: int) -> None:
    for alignment in (4, 16, 128):
        ep = ExpertParallel(make_layout(2, dispatch__row_alignment=alignment))
        for tokens, experts in (([7, 4], None), ([3, 0], [1, 2]), ([0, 0], None)):
            problem = Problem(ep.layout, alignment, tokens, only_experts=experts, unused=0.2)
            d = ep.dispatch(problem.x[rank].float(), problem.idx[rank], problem.weights[rank])
            assert (d.tokens_per_expert % alignment == 0).all()
            assert d.tokens_per_expert.sum() == len(d.tokens)
            counts = torch.cat(problem.idx).flatten()
            valid = torch.stack([(counts == e).sum() for e in (2 * rank, 2 * rank + 1)])
            assert torch.equal(d.handle.valid_tokens_per_expert, valid)
            assert ((d.tokens_per_expert - valid) < alignment).all()
            padding = padding_rows(d.handle)
            assert (
                not d.tokens[padding].any() and d.probs is not None and not d.probs[padding].any()
            )
            for weighted in ("experts", "combine"):
                check(ep, problem, weighted, backward=False, poison_padding=True)
                check(ep, problem, weighted)


def test_row_alignment() -> None:
    run_ranks(_alignment, 2)


def _poisoned_padding_gradients(rank: int) -> None:
    """What padding rows hold must not reach any gradient either."""
    ep = ExpertParallel(make_layout(2, dispatch__row_alignment=8))
    problem = Problem(ep.layout, 51, [7, 4])
    d = ep.dispatch(problem.x[rank].float(), problem.idx[rank], problem.weights[rank])
    poison = padding_rows(d.handle)
    assert poison.any() and d.probs is not None
    for bad_rows, bad_weights in ((True, False), (False, True), (True, True)):
        rows = torch.where(poison.unsqueeze(1) & bad_rows, torch.nan, d.tokens).requires_grad_()
        weights = torch.where(poison & bad_weights, torch.nan, d.probs).requires_grad_()
        ep.combine(rows, d.handle, weights).sum().backward()
        for grad in (rows.grad, weights.grad):
            assert grad is not None and grad.isfinite().all(), (bad_rows, bad_weights)
            assert not grad[poison].any()


def test_case_22_garbage_in_padding_rows_reaches_no_gradient() -> None:
    run_ranks(_poisoned_padding_gradients, 2)


def _capacity(rank: int) -> list[str]:
    ep = ExpertParallel(make_layout(2, dispatch__capacity=20, dispatch__row_alignment=4))
    messages = []
    for round_number in range(3):
        problem = Problem(ep.layout, round_number, [5, 4], unused=0.3)
        d = ep.dispatch(problem.x[rank].float(), problem.idx[rank], problem.weights[rank])
        assert d.tokens.shape == (20, 128) and d.probs is not None and d.probs.shape == (20,)
        padding = padding_rows(d.handle)
        assert padding.any() and not d.tokens[padding].any() and not d.probs[padding].any()
        check(ep, problem, "combine" if round_number else "experts")
        crowd = Problem(ep.layout, 7, [8, 3], only_experts=[2, 3])
        try:
            ep.dispatch(crowd.x[rank].float(), crowd.idx[rank])
        except CapacityError as error:
            messages.append(str(error))
    exact = Problem(ep.layout, 8, [5, 5], only_experts=[0, 1])  # 10 rows an expert: 12 with padding
    try:
        ep.dispatch(exact.x[rank].float(), exact.idx[rank])
    except CapacityError:
        messages.append("padding counts")
    full = Problem(ep.layout, 9, [4, 4], only_experts=[0, 1])
    check(ep, full)
    return messages


def test_capacity_mode() -> None:
    for messages in run_ranks(_capacity, 2):
        assert len(messages) == 4 and messages[3] == "padding counts", messages
        for message in messages[:3]:
            assert "rank 1" in message and "24" in message and "20" in message, message


def _cached_handle(rank: int) -> None:
    ep = ExpertParallel(make_layout(2, dispatch__row_alignment=4))
    problem = Problem(ep.layout, 61, [6, 3], unused=0.2)

    def rounds_of(action):  # type: ignore[no-untyped-def]
        before = ep.rounds
        result = action()
        return result, ep.rounds - before

    w = problem.weights[rank].float().requires_grad_()
    x = problem.x[rank].float().requires_grad_()
    d, rounds = rounds_of(lambda: ep.dispatch(x, problem.idx[rank], w))
    assert rounds == 2
    out, rounds = rounds_of(lambda: ep.combine(d.tokens * d.probs[:, None], d.handle))
    assert rounds == 1
    _, rounds = rounds_of(lambda: out.sum().backward())
    assert rounds == 2  # one for each verb's backward
    again, rounds = rounds_of(lambda: ep.dispatch(x, handle=d.handle, topk_weights=w))
    assert rounds == 1
    assert torch.equal(again.tokens, d.tokens) and torch.equal(again.probs, d.probs)
    assert torch.equal(again.tokens_per_expert, d.tokens_per_expert)
    plain = ep.dispatch(x.detach() * 2, handle=d.handle)
    assert plain.probs is None and torch.equal(plain.tokens, d.tokens * 2)
    for seed in (62, 63):  # other rows and weights on the old routing
        other = Problem(ep.layout, seed, [6, 3])
        other.idx = problem.idx
        check(ep, other, "experts", handle=d.handle)
        check(ep, other, "combine", handle=d.handle)


def test_cached_handle() -> None:
    run_ranks(_cached_handle, 2)


def _low_latency(rank: int) -> list[str]:
    ep = ExpertParallel(make_layout(2, dispatch__mode="low_latency"))
    problem = Problem(ep.layout, 71, [6, 3])
    x, idx = problem.x[rank].float(), problem.idx[rank]
    messages = []
    for _ in range(2):
        first, second = ep.dispatch(x, idx), ep.dispatch(x, idx)
        try:
            ep.dispatch(x, idx)
        except (OrderError, PeerError) as error:
            messages.append(str(error))
        a = ep.combine(first.tokens, first.handle)
        third = ep.dispatch(x, idx)
        b, c = ep.combine(second.tokens, second.handle), ep.combine(third.tokens, third.handle)
        assert torch.equal(a, b) and torch.equal(a, c)
    check(ep, problem)
    return messages


def test_case_21_more_in_flight_than_low_latency_allows() -> None:
    for messages in run_ranks(_low_latency, 2):
        assert len(messages) == 2 and all("2" in m and "flight" in m for m in messages), messages


def _fp8(rank: int) -> None:
    for scale in ("fp32", "power_of_two"):
        changes = {"dispatch__dtype": "fp8_e4m3", "dispatch__scale": scale, "model__hidden": 256}
        ep = ExpertParallel(make_layout(2, **changes, dispatch__row_alignment=4))
        problem = Problem(ep.layout, 81, [6, 3])
        problem.x[0][2] = 0
        x, idx, w = problem.x[rank], problem.idx[rank], problem.weights[rank]
        d = ep.dispatch(x.float(), idx, w, dequantize=False)
        rows = len(d.tokens)
        assert d.tokens.dtype == torch.float8_e4m3fn and d.tokens.shape == (rows, 256)
        assert d.tokens.stride() == (256, 1) and d.scales is not None
        assert d.scales.dtype == torch.float32 and d.scales.shape == (rows, 2)
        assert d.scales.stride() == (2, 1)
        exact = ep.dispatch(x.float(), handle=d.handle)
        assert torch.equal(dequantize_fp8(d.tokens, d.scales, torch.float32), exact.tokens)
        q, s = quantize_fp8(x.float(), scale)
        expected = dequantize_fp8(q, s, torch.float32).double()
        bound = x.abs() / 16 + s.repeat_interleave(128, 1) * 2.0**-10
        assert ((expected - x).abs() <= bound).all()
        out = ep.combine(exact.tokens, d.handle)
        assert torch.equal(out.double(), 2 * expected)
        assert rank or not out[2].any()
        assert not exact.tokens[padding_rows(d.handle)].any()
        for dtype in (torch.bfloat16, torch.float16):
            half = ep.dispatch(x.to(dtype), idx)
            assert half.tokens.dtype == dtype
            assert ep.combine(half.tokens, half.handle).dtype == dtype
        with pytest.raises(TypeError, match=r"float32, on|bfloat16, on"):
            ep.dispatch(x.bfloat16() if rank else x.float(), idx)
        # the gradients are those of a dispatch that does not quantise
        leaf, weights = x.float().requires_grad_(), w.float().requires_grad_()
        d = ep.dispatch(leaf, idx, weights)
        out = ep.combine(d.tokens * d.probs[:, None], d.handle)
        (out * problem.grad_out[rank].float()).sum().backward()
        close(leaf.grad, problem.grad_out[rank] * w.sum(1, keepdim=True), 1e-6, "gradient of x")
        expected_w = (problem.grad_out[rank] * expected).sum(1, keepdim=True).expand(-1, 2)
        close(weights.grad, expected_w, 1e-6, "gradient of the weights", 16.0)


def test_case_30_fp8() -> None:
    run_ranks(_fp8, 2)


def _half_types(rank: int) -> None:
    for dtype, rtol in (("bf16", 2.0**-7), ("fp16", 2.0**-10)):
        ep = ExpertParallel(make_layout(2, dispatch__dtype=dtype))
        problem = Problem(ep.layout, 91, [6, 3], unused=0.2)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float16
        x, idx = problem.x[rank].to(kind), problem.idx[rank]
        w = problem.weights[rank].float()
        d = ep.dispatch(x, idx, w)
        assert d.tokens.dtype == kind and d.probs is not None and d.probs.dtype == torch.float32
        out = ep.combine(d.tokens, d.handle, d.probs)
        # weights and sums in fp32, one rounding
        wide = x.float().unsqueeze(1) * w.where(idx >= 0, 0).unsqueeze(2)
        assert torch.equal(out, (wide[:, 0] + wide[:, 1]).to(kind))
        close(out, wide.double().sum(1), rtol, dtype)


def test_half_precision_rounds_once() -> None:
    run_ranks(_half_types, 2)


def _compiled(rank: int) -> None:
    ep = ExpertParallel(make_layout(2))

    def layer(x, idx, weights):  # type: ignore[no-untyped-def]
        d = ep.dispatch(x * 1.5, idx, weights, layer=rank)
        rows = torch.relu(d.tokens) * d.tokens_per_expert.sum()
        out, event = ep.combine(rows, d.handle, d.probs, previous_event=d.event, async_finish=True)
        event.current_stream_wait()
        return out * 3

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(layer, backend=backend)
        for seed in range(2):  # other numbers of tokens and of the operation
            problem = Problem(ep.layout, seed, [5 - seed, 2 * seed], unused=0.2)
            results = []
            for run in (layer, compiled):
                x = problem.x[rank].float().requires_grad_()
                weights = problem.weights[rank].float().requires_grad_()
                out = run(x, problem.idx[rank], weights)
                out.square().sum().backward()
                results.append((out.detach(), x.grad, weights.grad))
            for plain, traced in zip(*results, strict=True):
                assert torch.equal(plain, traced), (backend, seed)


def test_torch_compile_around_the_verbs() -> None:
    run_ranks(_compiled, 2)
