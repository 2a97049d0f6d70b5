"""A dense model of one MoE layer in one process, in fp64, and the same layer over ranks.

Expert e maps a row to gelu(row @ up[e]) @ down[e]. The dense model computes every expert for every
token of every rank and then picks; it shares nothing with the library but torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep import EPLayout, ExpertParallel
from moe_ep.handle import DispatchHandle

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.float32,
}


def make_layout(expert: int, **changes: Any) -> EPLayout:
    """The layout of the cases: H=128, E=4, K=2, fp32. `changes` have `__` for a dot."""
    experts = changes.pop("model__num_experts", 4)
    base = EPLayout(
        model={"hidden": 128, "num_experts": experts, "top_k": min(2, experts)},
        parallel={"expert": expert},
        dispatch={"dtype": "fp32"},
        backend="reference",
        timeouts={"first_s": 20.0, "steady_s": 20.0},
    )
    return base.replace(**{key.replace("__", "."): value for key, value in changes.items()})


@dataclass
class Problem:
    """Inputs of all ranks, equal on every rank that builds it with the same arguments. All fp64.

    By rank: x [T, H], idx [T, K], weights [T, K], grad_out [T, H]. up: [E, H, F]. down: [E, F, H].
    """

    layout: EPLayout
    seed: int
    tokens: Sequence[int]
    slots: int | None = None
    unused: float = 0.0
    only_experts: Sequence[int] | None = None
    distinct: bool = True
    ffn: int = 8
    x: list[Tensor] = field(default_factory=list)
    idx: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    grad_out: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        model = self.layout.model
        hidden, experts = model.hidden, model.num_experts
        slots = self.slots or model.top_k
        dtype = DTYPES[self.layout.dispatch.dtype]

        def normal(*shape: int) -> Tensor:  # representable in the dtype that travels
            return torch.randn(*shape, generator=g).to(dtype).double()

        allowed = torch.tensor(self.only_experts or range(experts))
        for count in self.tokens:
            self.x.append(normal(count, hidden))
            if self.distinct:
                order = torch.rand(count, len(allowed), generator=g).argsort(1)[:, :slots]
            else:
                order = torch.randint(len(allowed), (count, slots), generator=g)
            idx = allowed[order]
            idx[torch.rand(count, slots, generator=g) < self.unused] = -1
            self.idx.append(idx)
            self.weights.append(torch.rand(count, slots, generator=g).double())
            self.grad_out.append(normal(count, hidden))
        self.up = torch.randn(experts, hidden, self.ffn, generator=g).double() / hidden**0.5
        self.down = torch.randn(experts, self.ffn, hidden, generator=g).double() / self.ffn**0.5


@dataclass
class Answer:
    """What one rank holds after forward and backward (None: not computed)."""

    out: Tensor
    x: Tensor | None = None
    weights: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


def dense(problem: Problem, weighted: bool = True, backward: bool = True) -> list[Answer]:
    """The answers of all ranks: out, gradients, and the whole [E, ...] gradients of the experts."""
    xs = [x.clone().requires_grad_() for x in problem.x]
    ws = [w.clone().requires_grad_() for w in problem.weights]
    up, down = problem.up.clone().requires_grad_(), problem.down.clone().requires_grad_()
    outs = []
    for x, w, idx in zip(xs, ws, problem.idx, strict=True):
        every = F.gelu(torch.einsum("th,ehf->etf", x, up)) @ down  # [E, T, H]
        picked = every[idx.clamp(min=0).T, torch.arange(len(x))].transpose(0, 1)  # [T, K, H]
        scale = (w if weighted else torch.ones_like(w)) * (idx >= 0)
        outs.append((picked * scale.unsqueeze(2)).sum(1))
    if not backward:
        return [Answer(out.detach()) for out in outs]
    sum((o * g).sum() for o, g in zip(outs, problem.grad_out, strict=True)).backward()
    return [
        Answer(o.detach(), x.grad, w.grad if weighted else None, up.grad, down.grad)
        for o, x, w in zip(outs, xs, ws, strict=True)
    ]


class LocalExperts:
    """The experts of one rank: a slice over experts, and over F where experts are shared."""

    def __init__(self, problem: Problem, rank: int, dtype: torch.dtype) -> None:
        copies, local = problem.layout.parallel.expert_tensor, problem.layout.num_local_experts
        part = problem.ffn // copies
        first, column = rank // copies * local, rank % copies * part
        self.experts = slice(first, first + local)
        self.columns = slice(column, column + part)
        self.up, self.down = (p.to(dtype).requires_grad_() for p in self.slice(problem))

    def slice(self, of: Any) -> tuple[Tensor, Tensor]:
        up = of.up[self.experts, :, self.columns]
        return up.clone(), of.down[self.experts, self.columns].clone()

    def __call__(self, rows: Tensor, blocks: Tensor, probs: Tensor | None) -> Tensor:
        """rows [N, H] in blocks [L]; rows behind the last block (capacity) give zeros."""
        sizes = blocks.tolist()
        pieces = rows.split([*sizes, rows.shape[0] - sum(sizes)])
        results = [
            F.gelu(piece @ u) @ d
            for piece, u, d in zip(pieces, self.up, self.down, strict=False)  # the tail: below
        ]
        out = torch.cat([*results, torch.zeros_like(pieces[-1])])
        return out if probs is None else out * probs.unsqueeze(1).to(out.dtype)


def distributed(
    ep: ExpertParallel,
    problem: Problem,
    weighted: str = "experts",
    backward: bool = True,
    handle: DispatchHandle | None = None,
    poison_padding: bool = False,
) -> Answer:
    """This rank's answer by the library.

    weighted: where the weights are applied: "experts", "combine", or "no" (nowhere).
    poison_padding: the experts leave NaN in padding rows.
    """
    dtype, rank = DTYPES[problem.layout.dispatch.dtype], ep.rank
    x = problem.x[rank].to(dtype, copy=True).requires_grad_(backward)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    w = (
        problem.weights[rank].to(wide, copy=True).requires_grad_(backward)
        if weighted != "no"
        else None
    )
    if handle is None:
        d = ep.dispatch(x, problem.idx[rank], w)
    else:
        d = ep.dispatch(x, handle=handle, topk_weights=w)
    experts = LocalExperts(problem, rank, dtype)
    rows = experts(d.tokens, d.tokens_per_expert, d.probs if weighted == "experts" else None)
    if poison_padding:
        rows = torch.where(padding_rows(d.handle).unsqueeze(1), torch.nan, rows)
    out = ep.combine(rows, d.handle, d.probs if weighted == "combine" else None)
    if not backward:
        return Answer(out)
    (out * problem.grad_out[rank].to(dtype)).sum().backward()
    return Answer(
        out.detach(), x.grad, None if w is None else w.grad, experts.up.grad, experts.down.grad
    )


def padding_rows(handle: DispatchHandle) -> Tensor:
    """[N] bool: rows that hold no token."""
    padding = torch.ones(handle.num_rows, dtype=torch.bool)
    start = 0
    blocks, valid = handle.tokens_per_expert.tolist(), handle.valid_tokens_per_expert.tolist()
    for block, used in zip(blocks, valid, strict=True):
        padding[start : start + used] = False
        start += block
    return padding


def close(
    mine: Tensor | None, reference: Tensor, rtol: float, what: str, scale: float = 1e-3
) -> None:
    """Equal to `rtol` of the reference's largest magnitude (at least of `scale`), and finite."""
    assert mine is not None, f"{what} is None"
    assert mine.shape == reference.shape, f"{what}: {mine.shape} and {reference.shape}"
    assert mine.isfinite().all(), f"{what} is not finite"
    if mine.numel():
        error = (mine.double() - reference).abs().max().item()
        limit = rtol * max(reference.abs().max().item(), scale)
        assert error <= limit, f"{what}: error {error:.3g}, allowed {limit:.3g}"


def check(
    ep: ExpertParallel,
    problem: Problem,
    weighted: str = "experts",
    backward: bool = True,
    rtol: float = 2e-6,
    **options: Any,
) -> Answer:
    """Runs the layer and compares everything on this rank with the dense model."""
    if problem.layout.dispatch.dtype == "fp64":
        rtol = 1e-13
    mine = distributed(ep, problem, weighted, backward, **options)
    theirs = dense(problem, weighted != "no", backward)[ep.rank]
    where = f"rank {ep.rank}, tokens {list(problem.tokens)}, weighted by {weighted}: "
    close(mine.out, theirs.out, rtol, where + "out")
    assert mine.out.dtype == DTYPES[problem.layout.dispatch.dtype]
    if backward:
        assert theirs.x is not None
        close(mine.x, theirs.x, rtol, where + "gradient of x")
        if weighted != "no":
            assert theirs.weights is not None
            # a sum of H products of both signs, so rounding is relative to their magnitudes
            width = problem.layout.model.hidden**0.5
            close(mine.weights, theirs.weights, rtol, where + "gradient of the weights", width)
        up, down = LocalExperts(problem, ep.rank, torch.float64).slice(theirs)
        close(mine.up, up, rtol, where + "gradient of up")
        close(mine.down, down, rtol, where + "gradient of down")
    return mine
