"""DeepSpeed's own MoE layer, converted, on the GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN, EXPERTS = 128, 8


def start() -> None:
    """Lets DeepSpeed join the gloo group that `run_ranks` has made."""
    os.environ["LOCAL_RANK"] = "0"  # ranks share the first GPU
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")


def make_layer(dtype: torch.dtype, device: str, **options: Any) -> nn.Module:
    from deepspeed.moe.layer import MoE

    torch.manual_seed(3)
    expert = nn.Sequential(
        nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN, False)
    )
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, **options}
    size = dist.get_world_size()
    layer = MoE(HIDDEN, expert, num_experts=EXPERTS, ep_size=size, **options)
    layer.set_deepspeed_parallelism()
    for local, module in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + local)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    layer = layer.to(device)
    layer.deepspeed_moe.experts.to(dtype)
    return layer


def run(layer: nn.Module, seed: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    tokens = (40, 23)[(dist.get_rank() + seed) % 2]
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    pull = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
    layer.zero_grad()
    output, aux_loss, _ = layer(x)
    ((output * pull).sum() + aux_loss).backward()
    assert x.grad is not None
    results = {"output": output.detach(), "gradient of x": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad.clone()
    return results


def compare_backends(
    rank: int, device: str = "cuda", names: tuple[str, str] = ("cuda", "reference")
) -> dict[str, float]:
    """Forward and backward of one layer: the largest relative difference of two backends."""
    from moe_ep.integrations.deepspeed import convert

    start()
    found = {}
    variants: list[dict[str, Any]] = [
        {"k": 1, "drop_tokens": False},
        {"k": 2, "capacity_factor": 0.7, "min_capacity": 1},
        {"k": 4, "drop_tokens": False},
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for options in variants:
            layer = make_layer(dtype, device, **options)
            answers = []
            for name in names:
                conversion = convert(layer, {"backend": name})
                answers.append([run(layer, seed, dtype, device) for seed in range(3)])
                used = conversion.layers[0][1].moe_ep._by_dtype[dtype].backend.name
                assert used == name, used
                assert conversion.rows_received > 0
                conversion.restore()
            found[f"{dtype}, k {options['k']}"] = max(
                _difference(mine, theirs) for mine, theirs in zip(*answers, strict=True)
            )
    return found


def _difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    worst = 0.0
    for name, value in mine.items():
        other = theirs[name].float()
        assert value.isfinite().all(), name
        scale = max(float(other.abs().max()), 1e-3)
        worst = max(worst, float((value.float() - other).abs().max()) / scale)
    return worst
