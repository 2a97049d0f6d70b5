"""Tensor-parallel ranks hold the same tokens: ours against stock DeepSpeed on one set of groups."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_support import EXPERTS, HIDDEN, close, expert, quiet, seed_experts, start, tokens_of
from torch import Tensor, nn

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(120)

TP = 2


class Mpu:
    """A model-parallel unit: ranks 0 and 1, and 2 and 3, are tensor-parallel."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.model, self.data = None, None
        for first in range(0, world, TP):
            group = dist.new_group(list(range(first, first + TP)))
            self.model = group if first == rank // TP * TP else self.model
        for first in range(TP):
            group = dist.new_group(list(range(first, world, TP)))
            self.data = group if first == rank % TP else self.data

    def __getattr__(self, name: str) -> Any:
        for kind, group in (("data_parallel", self.data), ("model_parallel", self.model)):
            if name in (f"get_{kind}_group", f"get_tensor_{kind}_group"):
                return lambda: group
            if name in (f"get_{kind}_world_size", f"get_tensor_{kind}_world_size"):
                return lambda: dist.get_world_size(group)
            if name in (f"get_{kind}_rank", f"get_tensor_{kind}_rank"):
                return lambda: dist.get_rank(group)
        raise AttributeError(name)


class _CopyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ShardedExpert(nn.Module):
    """An expert of which each tensor-parallel rank holds half of the inner columns."""

    group: Any = None  # of the class: DeepSpeed deep-copies experts, and groups can't be copied

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN // TP, bias=False)
        self.down = nn.Linear(HIDDEN // TP, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = _CopyForward.apply(x, self.group)
        return _SumForward.apply(self.down(self.up(x).relu()), self.group)


def _step(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    output, aux_loss, _ = layer(leaf)
    (output.square().sum() + aux_loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"output": output.detach(), "x": leaf.grad, **grads}


def _gather_over_gloo(tensor: Tensor, dim: int = 0) -> Tensor:
    """In place of the stock function, whose flat buffer NCCL takes and gloo refuses."""
    from deepspeed.utils import groups

    parts = [torch.empty_like(tensor) for _ in range(TP)]
    dist.all_gather(parts, tensor.contiguous(), group=groups.mpu.model)
    return torch.cat(parts, dim)


def _compare(rank: int, sharded: bool) -> None:
    start()
    from deepspeed.moe import mappings
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    from moe_ep.integrations.deepspeed import convert

    groups.mpu = Mpu()
    mappings._gather_tokens = _gather_over_gloo
    ShardedExpert.group = groups.mpu.model
    ep = 2 if sharded else 4
    for top_k, drop, tokens in ((1, True, 16), (2, False, 16), (2, True, 16), (3, True, 15)):
        torch.manual_seed(0)
        with quiet():
            layer = MoE(
                HIDDEN, ShardedExpert() if sharded else expert(), num_experts=EXPERTS, ep_size=ep,
                k=top_k, drop_tokens=drop, capacity_factor=1.0, use_rts=False,
                top2_2nd_expert_sampling=False, enable_expert_tensor_parallelism=sharded,
            )  # fmt: skip
            layer.set_deepspeed_parallelism()
        if sharded:
            seed_experts(layer, rank, seed=500)  # other halves on other ranks
        else:
            seed_experts(layer, rank % ep)
        x = tokens_of(rank // TP, tokens)
        stock = _step(layer, x)
        conversion = convert(layer)
        mine = _step(layer, x)
        for name, value in mine.items():
            close(value, stock[name], name)
        # Each tensor-parallel rank sends its share: no token travels twice.
        moved = torch.tensor(conversion.rows_received)
        dist.all_reduce(moved)
        assert moved <= tokens * top_k * dist.get_world_size() // TP


def test_whole_experts_on_tensor_parallel_ranks(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_compare, 4, False)


def test_experts_sharded_over_tensor_parallel_ranks(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_compare, 4, True)
