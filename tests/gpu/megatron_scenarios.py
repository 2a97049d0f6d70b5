"""Megatron-core's MoE layers on the GPU: ours against its own all-to-all, and its overlap."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import megatron_layer
import megatron_overlap
import torch
import torch.distributed as dist
from torch import Tensor

LAYER = {"hidden_size": 256, "moe_ffn_hidden_size": 128}


@contextlib.contextmanager
def megatron(device: torch.device, backend: str) -> Iterator[None]:
    """Megatron's parallel state with all ranks in one EP group, and our dispatcher installed."""
    from megatron.core import parallel_state

    from moe_ep.integrations import megatron as moe_ep_megatron

    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    moe_ep_megatron.install(backend=backend)
    try:
        yield
    finally:
        moe_ep_megatron.uninstall()
        parallel_state.destroy_model_parallel()


def check_all(rank: int, device_name: str = "cuda", backend: str = "cuda") -> dict[str, float]:
    """Largest differences found, by check; rows that must be equal are asserted."""
    device = torch.device(device_name)
    with megatron(device, backend):
        # Schedules first: Megatron keeps the scale of the balance loss, and they give it its shape.
        found = {
            "overlap": megatron_overlap.compare_schedules(
                rank, device, hidden_size=512, moe_ffn_hidden_size=1024
            ),
            "overlap, shared expert": megatron_overlap.compare_schedules(
                rank, device, moe_shared_expert_intermediate_size=64
            ),
        }
        found |= {f"layer, top {k}": check_layer(device, k) for k in (2, 4)}
    return found


def check_layer(device: torch.device, top_k: int) -> float:
    """Ours and Megatron's "alltoall" on one input, bf16.

    The dispatched rows, their order and their counts are equal bit for bit. Returns the largest
    difference of the output and of the gradients, of their largest values.
    """
    layers = []
    for dispatcher in ("deepep", "alltoall"):
        config = megatron_layer.make_config(
            dispatcher,
            expert_model_parallel_size=dist.get_world_size(),
            params_dtype=torch.bfloat16,
            moe_router_topk=top_k,
            **LAYER,
        )
        layers.append(megatron_layer.make_layer(config).to(device))
    ours, stock = layers
    assert type(ours.token_dispatcher).__name__ == "MoEEPTokenDispatcher"
    assert type(stock.token_dispatcher).__name__ == "MoEAlltoAllTokenDispatcher"
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    worst = 0.0
    for seed, tokens in enumerate((64, 17, 1)):
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        x, pull = (
            torch.randn(tokens, 2, LAYER["hidden_size"], generator=generator).bfloat16().to(device)
            for _ in range(2)
        )
        rows = [_dispatched(layer, x) for layer in (ours, stock)]
        for name, mine, theirs in zip(("rows", "counts", "probs"), *rows, strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu()), (top_k, seed, name)
        results = [_run(layer, x, pull) for layer in (ours, stock)]
        worst = max(worst, _difference(*results))
    return worst


def _dispatched(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the experts get: rows, tokens per expert, probabilities."""
    with torch.no_grad():
        probs, routing_map = layer.router(x)
        dispatcher = layer.token_dispatcher
        tokens, weights = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(tokens, weights)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        done = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        dispatcher.combine_postprocess(done)
    return rows, counts, row_probs


def _run(layer: Any, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(leaf)
    output.backward(pull)
    assert leaf.grad is not None
    results = {"output": output.detach(), "gradient of x": leaf.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:  # Megatron leaves out experts that got no token
            results[name] = parameter.grad.clone()
    return results


def _difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    worst = 0.0
    for name in mine.keys() | theirs.keys():
        present = mine.get(name, theirs.get(name))
        assert present is not None
        zero = torch.zeros_like(present)
        a, b = (side.get(name, zero).float() for side in (mine, theirs))
        assert a.isfinite().all(), name
        scale = max(float(b.abs().max()), 1e-3)
        worst = max(worst, float((a - b).abs().max()) / scale)
    return worst
