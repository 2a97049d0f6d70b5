"""Megatron MoE layers for the tests: one stock, one ours, the same weights, the same input.

Functions here run inside ranks, forked from a process in which `import_megatron` has chosen the
megatron-core by its path.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / "build" / "megatron-core-0.19.2"
HIDDEN, EXPERTS = 32, 8


def megatron_versions() -> list[Any]:
    """pytest parameters: the installed megatron-core ("") and the unpacked 0.19.2."""
    missing = pytest.mark.skipif(
        not UNPACKED.is_dir(), reason=f"{UNPACKED.name} is not unpacked: run scripts/test.sh"
    )
    return [
        pytest.param("", id="installed"),
        pytest.param(str(UNPACKED), id="0.19.2", marks=missing),
    ]


def import_megatron(path: str) -> None:
    """Imports what the layers need of the megatron-core under `path`; "" is the installed one."""
    if path:
        sys.path.insert(0, path)
    warnings.simplefilter("ignore")
    import megatron.core
    import megatron.core.models.gpt.gpt_layer_specs

    import moe_ep.integrations.megatron.cpu  # noqa: F401

    assert str(megatron.core.__file__).startswith(path)


@contextlib.contextmanager
def megatron(**parallel: int) -> Any:
    """megatron-core on the CPU, with its parallel state and seeds set up."""
    from moe_ep.integrations.megatron.cpu import cpu_shims

    with cpu_shims():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.get("tp", 1),
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=parallel.get("ep", 2),
            expert_tensor_parallel_size=parallel.get("etp", 1),
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def make_config(dispatcher: str, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": False,
        "params_dtype": torch.float32,
    }
    settings.update(options)
    settings["bf16"] = settings["params_dtype"] == torch.bfloat16
    return TransformerConfig(**settings)


def make_layer(config: Any, layer_class: Any = None) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer

    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    layer = (layer_class or MoELayer)(config, submodules, layer_number=1)
    return layer.to(config.params_dtype)


def run_layer(layer: Any, seed: int, tokens: int = 12, batch: int = 2) -> dict[str, torch.Tensor]:
    """Forward and backward on random input; output, input gradient and every weight gradient."""
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.config.params_dtype
    x = torch.randn(tokens, batch, HIDDEN, generator=generator).to(dtype).requires_grad_()
    torch.manual_seed(7)
    layer.zero_grad()
    output, _ = layer(x)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    results = {"output": output.detach(), "input.grad": x.grad}
    for name, parameter in layer.named_parameters():
        results[f"{name}.grad"] = parameter.grad
    return {name: None if value is None else value.clone() for name, value in results.items()}


def compare(ours: Any, stock: Any, seed: int, tolerance: float) -> None:
    """Asserts that two layers of equal weights do the same, to `tolerance` of the largest value."""
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    mine, theirs = run_layer(ours, seed), run_layer(stock, seed)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        value = mine[name]
        if expected is None:  # Megatron leaves out experts that got no token
            assert value is None or not value.any(), name
            continue
        assert value is not None, name
        scale = max(float(expected.abs().max()), 1e-3)
        error = float((value.double() - expected.double()).abs().max())
        assert error <= tolerance * scale, f"{name}: off by {error}, scale {scale}"
