"""One MoE layer through ExpertParallel on any device, against the dense model in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from reference_model import DTYPES, Answer, LocalExperts, Problem, close, dense, padding_rows
from torch import Tensor

from moe_ep import EPLayout, ExpertParallel

FP32_ERROR = 5e-6  # of the largest value: products of 128 columns, summed in any order
POISONED_BYTES = (1 << 26, 1 << 24, 1 << 22, 1 << 20, 1 << 16)


@dataclass(frozen=True)
class Target:
    """Where checks run: the GPU with backend cuda, or elsewhere to try the checks themselves."""

    device: str = "cuda"
    backend: str = "cuda"

    def layout(self, **changes: Any) -> EPLayout:
        """The layout of the cases (H=128, K=2, fp32, two experts a rank); `__` for a dot."""
        ranks = dist.get_world_size()
        base = EPLayout(
            model={"hidden": 128, "num_experts": 2 * ranks, "top_k": 2},
            parallel={"expert": ranks},
            dispatch={"dtype": "fp32", "num_sms": 8},
            backend=self.backend,
            timeouts={"first_s": 20.0, "steady_s": 20.0},
        )
        return base.replace(**{key.replace("__", "."): value for key, value in changes.items()})

    def used_bytes(self) -> int:
        """Memory of the whole device that is taken, once every rank has given back what it can."""
        if self.device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        dist.barrier()
        return total - free

    def poison(self) -> None:
        """Leaves NaN in the memory that the next results will be given."""
        blocks = [torch.full((n // 4,), torch.nan, device=self.device) for n in POISONED_BYTES]
        del blocks


def run_layer(
    target: Target, ep: ExpertParallel, problem: Problem, poison_padding: bool = False
) -> Answer:
    """Forward and backward on this rank, weights applied by the experts; everything on the CPU."""
    dtype = DTYPES[problem.layout.dispatch.dtype]
    x = problem.x[ep.rank].to(target.device, dtype).requires_grad_()
    w = problem.weights[ep.rank].to(target.device, torch.float32).requires_grad_()
    d = ep.dispatch(x, problem.idx[ep.rank].to(target.device), w)
    experts = LocalExperts(problem, ep.rank, dtype)
    experts.up, experts.down = (
        p.detach().to(target.device).requires_grad_() for p in (experts.up, experts.down)
    )
    rows = experts(d.tokens, d.tokens_per_expert, d.probs)
    if poison_padding:
        mask = padding_rows(d.handle).to(target.device)
        rows = torch.where(mask.unsqueeze(1), torch.nan, rows)
    out = ep.combine(rows, d.handle)
    target.poison()
    (out * problem.grad_out[ep.rank].to(target.device, dtype)).sum().backward()
    parts = (out.detach(), x.grad, w.grad, experts.up.grad, experts.down.grad)
    assert all(part is not None for part in parts), "a gradient is None"
    return Answer(*(part.cpu() for part in parts if part is not None))


def check_layer(
    target: Target,
    ep: ExpertParallel,
    problem: Problem,
    error: float = FP32_ERROR,
    **options: Any,
) -> Answer:
    """Output and all gradients of this rank equal the dense model's."""
    mine = run_layer(target, ep, problem, **options)
    theirs = dense(problem)[ep.rank]
    up, down = LocalExperts(problem, ep.rank, torch.float64).slice(theirs)
    width = problem.layout.model.hidden**0.5  # a probability's gradient is a sum of H products
    pairs: list[tuple[str, Tensor | None, Tensor | None, float]] = [
        ("out", mine.out, theirs.out, 1e-3),
        ("gradient of x", mine.x, theirs.x, 1e-3),
        ("gradient of the weights", mine.weights, theirs.weights, width),
        ("gradient of up", mine.up, up, 1e-3),
        ("gradient of down", mine.down, down, 1e-3),
    ]
    for what, value, expected, scale in pairs:
        assert expected is not None
        close(value, expected, error, f"rank {ep.rank}, {what}", scale)
    return mine
