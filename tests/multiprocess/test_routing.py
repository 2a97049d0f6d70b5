"""Cases 1 to 4 and 12 to 18: which tokens go where, and how many."""

import torch
from reference_model import Problem, check, close, distributed, make_layout
from torch import Tensor

from moe_ep import EPLayout, ExpertParallel, LayoutError
from moe_ep.testing import run_ranks

MODES = {
    "throughput": {},
    "low_latency": {"dispatch__mode": "low_latency"},
    "aligned": {"dispatch__row_alignment": 8},
    "capacity": {"dispatch__capacity": 40},
    "fp64": {"dispatch__dtype": "fp64"},
}


def _uneven(rank: int) -> None:
    for seed, (name, changes) in enumerate(MODES.items()):
        ep = ExpertParallel(make_layout(4, **changes))
        for tokens in ([0, 5, 3, 0], [1, 0, 0, 0], [0, 0, 0, 0], [2, 1, 5, 4]):
            problem = Problem(ep.layout, seed, tokens, unused=0.2)
            weighted = "combine" if seed % 2 else "experts"
            mine = check(ep, problem, weighted)
            assert mine.out.shape == (tokens[rank], 128), name
            check(ep, problem, "no", backward=False)
        ep.destroy()


def test_case_01_uneven_tokens() -> None:
    run_ranks(_uneven, 4)


def _uneven_fp8(rank: int) -> None:
    for scale in ("fp32", "power_of_two"):
        ep = ExpertParallel(make_layout(4, dispatch__dtype="fp8_e4m3", dispatch__scale=scale))
        for tokens in ([0, 5, 3, 0], [0, 0, 0, 0]):
            problem = Problem(ep.layout, 3, tokens)
            d = ep.dispatch(problem.x[rank].float(), problem.idx[rank])
            out = ep.combine(d.tokens, d.handle)
            close(out, 2 * problem.x[rank], 1 / 14, f"{scale} {tokens}")


def test_case_01_uneven_tokens_fp8() -> None:
    run_ranks(_uneven_fp8, 4)


def _one_sided(rank: int) -> list[float]:
    ep = ExpertParallel(make_layout(2))
    problem = Problem(ep.layout, 11, [6, 5], only_experts=[0, 1])
    rounds = ep.rounds
    mine = check(ep, problem)
    assert ep.rounds - rounds == 5  # counts, rows, rows back, and the two backwards
    assert mine.x is not None and mine.x.abs().sum() > 0
    if rank == 1:
        assert mine.up is not None and not mine.up.any()
    one = Problem(ep.layout, 12, [6, 5], slots=1, only_experts=[0])
    mine = check(ep, one)
    parameters = [torch.nn.Parameter(up.clone()) for up in torch.unbind(one.up.float())]
    local = parameters[2 * rank : 2 * rank + 2]
    optimizer = torch.optim.AdamW(local, lr=0.1, weight_decay=0.0)
    before = [p.detach().clone() for p in local]
    x = one.x[rank].float().requires_grad_()
    d = ep.dispatch(x, one.idx[rank])
    blocks = d.tokens.split(d.tokens_per_expert.tolist())
    rows = torch.cat([b @ p @ p.T for b, p in zip(blocks, local, strict=True)])
    ep.combine(rows, d.handle).sum().backward()
    for index, parameter in enumerate(local):
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (rank == 0 and index == 0)
    optimizer.step()
    for index, (old, new) in enumerate(zip(before, local, strict=True)):
        assert torch.equal(old, new) == (not (rank == 0 and index == 0))
    return [float(optimizer.state[p]["step"]) for p in local]


def test_case_02_03_one_sided_routing_and_optimizer_step() -> None:
    assert run_ranks(_one_sided, 2) == [[1.0, 1.0]] * 2


def _token_dropping(rank: int) -> None:
    """The router drops what is over an expert's capacity, which is that of the whole group."""
    tokens = [7, 4]
    for changes in ({}, {"dispatch__capacity": 22}, {"dispatch__row_alignment": 4}):
        ep = ExpertParallel(make_layout(2, **changes))
        for factor in (None, 1.0, 2.0):  # no dropping, training capacity, evaluation capacity
            problem = Problem(ep.layout, 21, tokens)
            if factor is not None:
                limit = int(factor * sum(tokens) * 2 / 4)
                _drop(problem.idx, limit)
            check(ep, problem)
            check(ep, problem, "combine", backward=False)


def _drop(idx: list[Tensor], limit: int) -> None:
    taken = [0] * 4
    for row in idx:
        for place, expert in enumerate(row.flatten().tolist()):
            taken[expert] += 1
            if taken[expert] > limit:
                row.view(-1)[place] = -1


def test_case_04_token_dropping() -> None:
    run_ranks(_token_dropping, 2)


def _token_counts(rank: int) -> None:
    for num_sms in (1, 24, 132):
        ep = ExpertParallel(make_layout(2, model__hidden=16, dispatch__num_sms=num_sms))
        for tokens in (1, 2, 31, 32, 33, 127, 128, 129, 256):
            x = torch.randn(tokens, 16)
            idx = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
            d = ep.dispatch(x, idx)
            assert torch.equal(ep.combine(d.tokens, d.handle), x + x)
            d = ep.dispatch(x, idx[:, :1])
            assert torch.equal(ep.combine(d.tokens, d.handle), x)


def test_case_12_exact_round_trip() -> None:
    run_ranks(_token_counts, 2)


def _hidden_sizes(rank: int) -> None:
    for hidden in (1, 3, 64, 1536, 2880, 3584, 7168):
        ep = ExpertParallel(make_layout(2, model__hidden=hidden))
        x, w = torch.randn(5, hidden), torch.rand(5, 2)
        idx = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
        d = ep.dispatch(x, idx, w)
        expected = x.double() * w.double().sum(1, keepdim=True)
        close(ep.combine(d.tokens, d.handle, weights=d.probs), expected, 1e-6, f"H={hidden}")
        assert d.probs is not None
        out = ep.combine(d.tokens * d.probs.unsqueeze(1), d.handle)
        close(out, expected, 1e-6, f"H={hidden}")


def test_case_13_hidden_sizes() -> None:
    run_ranks(_hidden_sizes, 2)


def _top_k(rank: int) -> None:
    base = make_layout(2, model__num_experts=48)
    for top_k in (1, 7, 9, 12, 16, 32):
        ep = ExpertParallel(base.replace(**{"model.top_k": top_k, "model.hidden": 24}))
        check(ep, Problem(ep.layout, top_k, [9, 4]), rtol=4e-6)
        if top_k > 1:  # fewer slots than top_k, and not as many on each rank
            problem = Problem(ep.layout, top_k, [5, 6], slots=top_k)
            keep = 1 if rank == 0 else top_k - 1
            for other, count in ((0, 1), (1, top_k - 1)):
                problem.idx[other][:, count:] = -1
            x = problem.x[rank].float()
            whole = ep.dispatch(x, problem.idx[rank])
            cut = ep.dispatch(x, problem.idx[rank][:, :keep])
            assert torch.equal(whole.tokens, cut.tokens)
            assert torch.equal(
                ep.combine(whole.tokens, whole.handle), ep.combine(cut.tokens, cut.handle)
            )


def test_case_14_top_k() -> None:
    run_ranks(_top_k, 2)


def _rank_counts(rank: int, experts: int) -> None:
    size = experts // 2
    ep = ExpertParallel(make_layout(size, model__num_experts=experts, model__hidden=8))
    check(ep, Problem(ep.layout, 5, [(3 * r) % 5 for r in range(size)], unused=0.1))


def test_case_15_three_and_six_ranks() -> None:
    run_ranks(_rank_counts, 3, 6)
    run_ranks(_rank_counts, 6, 12)


def _wrong_group(rank: int, expert: int) -> str:
    try:
        ExpertParallel(
            EPLayout(model={"hidden": 8, "num_experts": 8, "top_k": 2}, parallel={"expert": expert})
        )
    except LayoutError as error:
        return str(error)
    return ""


def test_case_15_group_that_does_not_fit() -> None:
    for message in run_ranks(_wrong_group, 3, 4, limit_s=20):
        for part in ("4 ranks", "has 3", "1, 2, 4, 8"):
            assert part in message, message


def _same_expert_twice(rank: int) -> None:
    ep = ExpertParallel(make_layout(2))
    for distinct_experts in ([1, 1], [0, 0], [3, 3]):
        problem = Problem(ep.layout, 31, [1, 1])
        for idx, w in zip(problem.idx, problem.weights, strict=True):
            idx[:] = torch.tensor([distinct_experts])
            w[:] = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
        mine = check(ep, problem)
        assert mine.weights is not None
        assert mine.weights[0, 0] == mine.weights[0, 1] != 0
        check(ep, problem, "combine")
    check(ep, Problem(ep.layout, 32, [8, 9], distinct=False, unused=0.2))


def test_case_16_same_expert_twice() -> None:
    run_ranks(_same_expert_twice, 2)


def _index_types(rank: int) -> list[str]:
    messages = []
    for copies, changes in ((1, {}), (2, {"parallel__expert_tensor": 2})):
        ep = ExpertParallel(make_layout(2 // copies, **changes))
        problem = Problem(ep.layout, 41, [9, 4], unused=0.2)
        wide = distributed(ep, problem)
        problem.idx = [idx.int() for idx in problem.idx]
        narrow = distributed(ep, problem)
        assert torch.equal(wide.out, narrow.out) and torch.equal(wide.x, narrow.x)
        assert torch.equal(wide.weights, narrow.weights)
        for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
            try:
                ep.dispatch(problem.x[rank].float(), problem.idx[rank].to(dtype))
            except TypeError as error:
                messages.append(str(error))
    return messages


def test_case_18_index_types() -> None:
    for messages in run_ranks(_index_types, 2):
        assert len(messages) == 8
        assert all("int32 or int64" in message for message in messages)
