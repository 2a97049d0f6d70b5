"""What the DeepSpeed tests share: a small model, its dense reference, and the start of a rank.

Each rank keeps its own batch; experts are drawn by their global number, so that models of different
expert-parallel sizes are the same model.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import training_ranks
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, EXPERTS, CLASSES = 128, 4, 8


def import_deepspeed() -> None:
    """Imports what the ranks of the tests need, Hugging Face's Mixtral with it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.moe.layer  # noqa: F401

    if importlib.util.find_spec("transformers") is not None:
        from transformers import MixtralForCausalLM  # noqa: F401
    training_ranks.import_training("deepspeed")


def start() -> None:
    """Lets DeepSpeed join the process group that the rank is in."""
    os.environ.setdefault("LOCAL_RANK", "0")  # one device, the CPU, on each rank
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from moe_ep.integrations.deepspeed.cpu import no_op_compilation

    logging.disable(logging.WARNING)
    with no_op_compilation():
        deepspeed.init_distributed(dist_backend="gloo")


def expert(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, 2 * HIDDEN, bias=bias), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN, bias)
    )


def seed_experts(moe: nn.Module, rank_in_group: int, seed: int = 100) -> None:
    layer = moe.deepspeed_moe
    for local, module in enumerate(layer.experts.deepspeed_experts):
        generator = torch.Generator().manual_seed(
            seed + rank_in_group * layer.num_local_experts + local
        )
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


class Model(nn.Module):
    """A linear layer, an MoE layer with a skip, and a classifier: forward gives the loss."""

    def __init__(self, ep: int, rank: int, bias: bool = True, **moe: Any) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        moe = {"k": 2, "use_rts": False, "top2_2nd_expert_sampling": False, **moe}
        self.inlet = nn.Linear(HIDDEN, HIDDEN)
        with quiet():
            self.moe = MoE(HIDDEN, expert(bias), num_experts=EXPERTS, ep_size=ep, **moe)
        self.outlet = nn.Linear(HIDDEN, CLASSES)
        seed_experts(self.moe, rank % ep)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inlet(x)
        output, aux_loss, _ = self.moe(hidden)
        scores = self.outlet(hidden + output).float()
        return F.cross_entropy(scores.flatten(0, -2), labels.flatten()) + 0.01 * aux_loss


def batch(rank: int, step: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Vectors whose class can be learned: [2, tokens, H], and labels."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(2, tokens, HIDDEN, generator=generator)
    labels = x[..., :CLASSES].argmax(-1)
    return x.to(dtype), labels


def config(zero: int = 0, bf16: bool = False, ours: bool = True, **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if bf16:
        content["bf16"] = {"enabled": True}
    if ours:
        content["moe_ep"] = {"enabled": True}
    return {**content, **more}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )


def engine_for(model: nn.Module, content: dict[str, Any], **arguments: Any) -> Any:
    from moe_ep.integrations.deepspeed import initialize

    arguments.setdefault("model_parameters", groups(model))
    with quiet():
        # A copy: DeepSpeed takes keys out of the config it is given.
        return initialize(model=model, config=copy.deepcopy(content), **arguments)[0]


def train(engine: Any, rank: int, steps: int, tokens: int, bf16: bool = False) -> list[float]:
    """Losses of this rank."""
    losses = []
    for step in range(steps):
        x, labels = batch(rank, step, tokens, torch.bfloat16 if bf16 else torch.float32)
        loss = engine(x, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed prints while it makes groups."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# -- one MoE layer against its dense reference ----------------------------------------------------


def moe_layer(ep: int, rank: int, experts: int = EXPERTS, **moe: Any) -> nn.Module:
    """A converted layer with its groups made."""
    from deepspeed.moe.layer import MoE

    from moe_ep.integrations.deepspeed import convert

    torch.manual_seed(0)
    moe = {"k": 2, "use_rts": False, "top2_2nd_expert_sampling": False, **moe}
    with quiet():
        layer = MoE(HIDDEN, expert(), num_experts=experts, ep_size=ep, **moe)
        layer.set_deepspeed_parallelism()
    seed_experts(layer, rank % ep)
    convert(layer)
    return layer


class Dense(nn.Module):
    """All experts in one process, each on all tokens, with the converted layer's own gate weights.

    `decide` is DeepSpeed's gate for one rank's tokens, dense and without any group.
    """

    def __init__(self, layer: nn.Module, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate = layer.deepspeed_moe.gate
        self.wg = nn.Parameter(self.gate.wg.weight.detach().clone())
        self.experts = nn.ModuleList(expert() for _ in range(experts))
        for number, module in enumerate(self.experts):
            generator = torch.Generator().manual_seed(100 + number)
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """One rank's tokens [T, H] to outputs and balance loss."""
        if not x.shape[0]:
            return x * 1.0, 0.0
        weights, aux_loss = self.decide(x)
        stacked = torch.stack([module(x) for module in self.experts], dim=1)
        return (stacked * weights.unsqueeze(2)).sum(1), aux_loss

    def decide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] weights, zero where a token does not go, and the balance loss."""
        from deepspeed.moe.sharded_moe import top1gating, top2gating

        gate = self.gate
        factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
        logits = F.linear(x.float(), self.wg.float())
        least = min(gate.min_capacity, x.shape[0])  # more would be refused, and drops nothing
        if gate.k == 1:
            answer = top1gating(logits, factor, least, drop_tokens=gate.drop_tokens, use_rts=False)
        else:
            answer = top2gating(
                logits,
                factor,
                least,
                drop_tokens=gate.drop_tokens,
                top2_2nd_expert_sampling=False,
            )
        return answer[1].sum(2), answer[0]


def tokens_of(rank: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * seed + rank)
    return torch.randn(count, HIDDEN, generator=generator)


def check_against_dense(layer: nn.Module, counts: list[int], experts: int = EXPERTS) -> None:
    """Forward and backward of a converted layer, T = counts[rank], against `Dense`.

    Outputs, the gradient of x, of the gate and of every local expert: to 1e-6 of their largest
    value. No gradient is None.
    """
    rank = dist.get_rank()
    core = layer.deepspeed_moe
    dense = Dense(layer, experts)
    dense.train(layer.training)
    pulls = [tokens_of(r, n, seed=1) for r, n in enumerate(counts)]
    inputs = [tokens_of(r, n).requires_grad_() for r, n in enumerate(counts)]
    expected = [dense(x) for x in inputs]
    total = sum(((o * p).sum() + aux for (o, aux), p in zip(expected, pulls, strict=True)))
    total.backward()

    x = tokens_of(rank, counts[rank]).requires_grad_()
    layer.zero_grad()
    output, aux_loss, exp_counts = layer(x)
    ((output * pulls[rank]).sum() + aux_loss).backward()
    close(output, expected[rank][0], "output")
    close(x.grad, inputs[rank].grad, "gradient of x")
    assert int(exp_counts.sum()) <= counts[rank] * core.gate.k
    gate_grad = core.gate.wg.weight.grad.clone()
    dist.all_reduce(gate_grad)
    close(gate_grad, dense.wg.grad, "gradient of the gate")
    first = rank % core.ep_size * core.num_local_experts
    for local, module in enumerate(core.experts.deepspeed_experts):
        theirs = dense.experts[first + local].named_parameters()
        for (name, mine), (_, other) in zip(module.named_parameters(), theirs, strict=True):
            assert mine.grad is not None, f"expert {first + local} {name}: no gradient"
            close(mine.grad, other.grad, f"expert {first + local} {name}")


def close(mine: Tensor, other: Tensor | None, what: str, tolerance: float = 2e-6) -> None:
    if other is None:
        other = torch.zeros_like(mine)
    assert torch.isfinite(mine).all(), what
    mine, other = mine.detach(), other.detach()
    bound = tolerance * max(1.0, float(other.abs().max()) if other.numel() else 0.0)
    error = float((mine - other).abs().max()) if mine.numel() else 0.0
    assert error <= bound, f"{what}: off by {error:g}, allowed {bound:g}"
