"""Cases 34, 35 and 37: gradients, clipping and optimizers of converted models."""

import math

import pytest
import torch
import torch.distributed as dist
from deepspeed_support import EXPERTS, Model, batch, config, engine_for, groups, start, train

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(150)


def _update(rank: int, ep: int, zero: int, clipping: float) -> dict[str, torch.Tensor]:
    """The gradients of one step, seen in what SGD with a rate of 1 subtracts."""
    model = Model(ep, rank, drop_tokens=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(groups(model), lr=1.0)
    content = config(zero, gradient_clipping=clipping)
    content["moe_ep"]["exact_clipping"] = zero == 0
    del content["optimizer"]
    engine = engine_for(model, content, optimizer=optimizer, model_parameters=None)
    train(engine, rank, 1, tokens=12)
    change = {
        name: before[name] - p.detach().float() for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return change


def _expert_parallel_sizes(rank: int) -> None:
    start()
    for zero, clipping in ((0, 0.0), (1, 0.0), (2, 0.0), (0, 0.5), (1, 0.5)):
        alone, spread = (_update(rank, ep, zero, clipping) for ep in (1, 2))
        compared = 0
        for name, mine in spread.items():
            theirs = name
            if "deepspeed_experts." in name:
                head, tail = name.split("deepspeed_experts.")
                local, rest = tail.split(".", 1)
                number = rank * EXPERTS // 2 + int(local)
                theirs = f"{head}deepspeed_experts.{number}.{rest}"
            error = float((mine - alone[theirs]).abs().max())
            assert error <= 1e-6, f"ZeRO {zero}, {name}: gradients differ by {error:g}"
            compared += bool(mine.any())
        assert compared == len(spread)


def test_case_34_gradients_do_not_depend_on_ep(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_expert_parallel_sizes, 2)


def _clipping(rank: int) -> None:
    start()
    for zero, bf16 in ((0, False), (1, False), (2, False), (2, True)):
        model = Model(2, rank, drop_tokens=False)
        content = config(zero, bf16, gradient_clipping=1.0)
        # Without ZeRO, DeepSpeed takes the mean of the ranks' norms unless it is told otherwise.
        content["moe_ep"]["exact_clipping"] = zero == 0
        engine = engine_for(model, content)
        square = 20.0 if rank == 0 else 100.0
        expert = engine.module.moe.deepspeed_moe.experts.deepspeed_experts[0][0].weight
        scale = math.sqrt(square / expert.numel()) * 2  # averaged over two data-parallel ranks
        # A loss whose gradient is known: `scale` in one weight of each rank, zero in all others.
        engine(*batch(rank, 0, 4, torch.bfloat16 if bf16 else torch.float32))
        loss = expert.float().sum() * scale
        for parameter in engine.module.parameters():
            loss = loss + parameter.float().sum() * 0
        engine.backward(loss)
        engine.step()
        norm = float(engine.get_global_grad_norm())
        assert norm == pytest.approx(math.sqrt(120), rel=2e-3 if bf16 else 1e-5), (zero, bf16)
        dense = torch.cat([p.detach().float().flatten() for p in engine.module.inlet.parameters()])
        theirs = [torch.zeros_like(dense) for _ in range(2)]
        dist.all_gather(theirs, dense)
        assert torch.equal(theirs[0], theirs[1])
        engine.destroy()


def test_case_35_clipping_norm_counts_every_expert(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_clipping, 2)


def _early_optimizer(rank: int) -> None:
    start()
    from moe_ep.integrations.deepspeed import convert

    # The optimizer first, then the engine, which converts the model.
    model = Model(2, rank, drop_tokens=False)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    content = config()
    del content["optimizer"]
    engine = engine_for(model, content, optimizer=optimizer, model_parameters=None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(engine, rank, 1, tokens=64)
    for name, parameter in engine.module.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    # No engine at all: a plain optimizer on `model.parameters()`, made before the conversion.
    model = Model(2, rank, drop_tokens=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names, before = list(model.state_dict()), {n: p.clone() for n, p in model.named_parameters()}
    convert(model)
    model.moe.set_deepspeed_parallelism()  # the groups may come after the conversion
    assert list(model.state_dict()) == names
    model(*batch(rank, 0, 64)).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_case_37_optimizer_made_before_the_conversion(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_early_optimizer, 2)
