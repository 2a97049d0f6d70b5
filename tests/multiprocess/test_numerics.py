"""Cases 26 and 31, gradients by differences, and combinations of what needs a gradient."""

import torch
import torch.distributed as dist
from reference_model import LocalExperts, Problem, check, close, make_layout

from moe_ep import ExpertParallel
from moe_ep.testing import run_ranks


def _wide_sum(rank: int) -> None:
    layout = make_layout(4, dispatch__dtype="bf16", model__top_k=4)
    ep = ExpertParallel(layout)
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    for big in range(4):
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            d = ep.dispatch(x, torch.tensor([order] * 3), torch.ones(3, 4))
            rows = d.tokens * (256.0 if rank == big else 1.0)
            expected = torch.full_like(x, 260.0)  # in bf16, 256 + 1 + 1 + 1 would be 256
            assert torch.equal(ep.combine(rows, d.handle), expected)
            assert torch.equal(ep.combine(rows, d.handle, weights=d.probs), expected)
    # the gradient of x is a sum of the same kind
    leaf = x.clone().requires_grad_()
    d = ep.dispatch(leaf, torch.tensor([[0, 1, 2, 3]] * 3))
    ep.combine(d.tokens * (256.0 if rank == 2 else 1.0), d.handle).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full_like(x, 259.0).add(1))


def test_case_26_sums_in_fp32() -> None:
    run_ranks(_wide_sum, 4)


def _probability_gradient(rank: int) -> None:
    """Router -> softmax -> top-k -> dispatch: the gradient of the router's logits."""
    ep = ExpertParallel(make_layout(2))
    problem = Problem(ep.layout, 3, [6, 5])
    for where in ("experts", "combine"):
        logits = torch.randn(len(problem.x[rank]), 4, generator=torch.Generator().manual_seed(rank))
        gradients = []
        for library in (True, False):
            leaf = logits.clone().double().requires_grad_(True)
            w, idx = leaf.softmax(1).topk(2)
            x = problem.x[rank]
            if library:
                d = ep.dispatch(x.float(), idx, w)
                assert d.probs is not None and d.probs.requires_grad
                rows = torch.tanh(d.tokens)
                if where == "experts":
                    out = ep.combine(rows * d.probs[:, None], d.handle)
                else:
                    out = ep.combine(rows, d.handle, d.probs)
                out = out.double()
            else:
                out = torch.tanh(x) * w.sum(1, keepdim=True)
            (out * problem.grad_out[rank]).sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
        close(gradients[0], gradients[1], 1e-6, where, 1.0)
    for weighted in ("experts", "combine"):
        check(ep, Problem(ep.layout, 4, [6, 5], unused=0.3), weighted, rtol=1e-6)


def test_case_31_gradient_of_probabilities() -> None:
    run_ranks(_probability_gradient, 2)


def _differences(rank: int, changes: dict) -> None:
    """Numeric against analytic gradients of one loss over all ranks; every step is collective."""
    layout = make_layout(2, model__hidden=3, dispatch__dtype="fp64", **changes)
    ep = ExpertParallel(layout)
    size = layout.parallel.group_size
    tokens = [2, 3, 0, 1][:size]
    problem = Problem(layout, 13, tokens, unused=0.2, distinct=False, ffn=2)
    experts = LocalExperts(problem, rank, torch.float64)
    for weighted in ("experts", "combine"):
        x = problem.x[rank].clone().requires_grad_()
        w = problem.weights[rank].clone().requires_grad_()

        def loss(x: torch.Tensor, w: torch.Tensor, weighted: str = weighted) -> torch.Tensor:
            d = ep.dispatch(x, problem.idx[rank], w)
            inside = d.probs if weighted == "experts" else None
            rows = experts(d.tokens, d.tokens_per_expert, inside)
            out = ep.combine(rows, d.handle, None if weighted == "experts" else d.probs)
            return (out.sin() * problem.grad_out[rank]).sum()

        gradients = torch.autograd.grad(loss(x, w), (x, w))
        step = 1e-6
        for owner in range(size):
            for which in range(2):
                for place in range([problem.x, problem.weights][which][owner].numel()):
                    ends = []
                    for sign in (1.0, -1.0):
                        inputs = [x.detach().clone(), w.detach().clone()]
                        if owner == rank:
                            inputs[which].view(-1)[place] += sign * step
                        with torch.no_grad():
                            total = loss(*inputs)
                        dist.all_reduce(total)
                        ends.append(total)
                    if owner == rank:
                        numeric = (ends[0] - ends[1]) / (2 * step)
                        error = (numeric - gradients[which].view(-1)[place]).abs().item()
                        assert error < 1e-7, (weighted, which, place, error)


def test_gradients_by_differences() -> None:
    run_ranks(_differences, 2, {"dispatch__row_alignment": 2})
    run_ranks(_differences, 4, {"parallel__expert_tensor": 2})


def _what_needs_a_gradient(rank: int) -> None:
    ep = ExpertParallel(make_layout(2))
    problem = Problem(ep.layout, 17, [5, 4])
    idx, grad_out = problem.idx[rank], problem.grad_out[rank].float()
    for needs_x, needs_w in ((True, False), (False, True), (True, True)):
        x = problem.x[rank].float().requires_grad_(needs_x)
        w = problem.weights[rank].float().requires_grad_(needs_w)
        for where in ("experts", "combine"):
            x.grad = w.grad = None
            d = ep.dispatch(x, idx, w)
            rows = d.tokens * d.probs[:, None] if where == "experts" else d.tokens
            out = ep.combine(rows, d.handle, d.probs if where == "combine" else None)
            loss = (out * grad_out).sum()
            loss.backward(retain_graph=True)
            first = [None if t.grad is None else t.grad.clone() for t in (x, w)]
            loss.backward()  # a second time through the same handle
            for once, leaf, needed in zip(first, (x, w), (needs_x, needs_w), strict=True):
                assert (once is not None) == needed
                assert once is None or torch.equal(leaf.grad, 2 * once)
            if needs_x:
                close(
                    first[0],
                    grad_out.double() * w.detach().double().sum(1, keepdim=True),
                    1e-6,
                    "x",
                )
            if needs_w:
                expected = (grad_out.double() * x.detach().double()).sum(1, keepdim=True)
                close(first[1], expected.expand(-1, 2), 1e-6, "w", 8.0)
    with torch.no_grad():
        d = ep.dispatch(x, idx, w)
        assert not ep.combine(d.tokens, d.handle, d.probs).requires_grad
    # unused outputs: the gradient is zero, and comes
    x, w = problem.x[rank].float().requires_grad_(), problem.weights[rank].float().requires_grad_()
    ep.dispatch(x, idx, w).tokens.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0)) and not w.grad.any()
    # rows and gradients that are not contiguous, and bf16 weights
    wide = problem.x[rank].float().repeat_interleave(2, 1)[:, ::2]
    turned = problem.x[rank].float().T.contiguous().T
    assert not wide.is_contiguous() and not turned.is_contiguous()
    expected = ep.dispatch(problem.x[rank].float(), idx, w)
    for strange in (wide, turned):
        d = ep.dispatch(strange, idx.T.contiguous().T, w.T.contiguous().T)
        assert torch.equal(d.tokens, expected.tokens) and torch.equal(d.probs, expected.probs)
        out = ep.combine(d.tokens.T.contiguous().T, d.handle)
        assert torch.equal(out, 2 * problem.x[rank].float())
    low = problem.weights[rank].bfloat16().requires_grad_()
    d = ep.dispatch(x, idx, low)
    assert d.probs.dtype == torch.float32
    d.probs.sum().backward()
    assert low.grad.dtype == torch.bfloat16 and torch.equal(low.grad, torch.ones_like(low))


def test_what_needs_a_gradient() -> None:
    run_ranks(_what_needs_a_gradient, 2)
