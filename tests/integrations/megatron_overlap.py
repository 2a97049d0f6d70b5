"""Megatron's schedule that overlaps two micro-batches, against its plain one, on any device.

`overlap_moe_expert_parallel_comm` computes the forward of one micro-batch beside the backward of
the one before it; what is exchanged goes to a stream of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VOCAB, SEQUENCE, BATCH, MICRO_BATCHES, EXPERTS = 64, 32, 2, 5, 8


def make_config(dispatcher: str, overlap: bool, ep: int, **options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": dispatcher,
        "overlap_moe_expert_parallel_comm": overlap,
        "expert_model_parallel_size": ep,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "use_cpu_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
    }
    return TransformerConfig(**(settings | options))


def make_model(config: Any, device: torch.device) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    return model.to(device).bfloat16()


def run_schedule(model: Any, device: torch.device, rank: int, seed: int) -> dict[str, Tensor]:
    """Forward and backward of all micro-batches: the losses, and every gradient."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(100 * seed + rank)
    texts = torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, SEQUENCE + 1), generator=generator)

    def forward_step(batches: Iterator, model: Any, return_schedule_plan: bool = False) -> tuple:
        text = next(batches).to(device)
        positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
        call = model.build_schedule_plan if return_schedule_plan else model
        output = call(text[:, :-1], positions, None, labels=text[:, 1:].contiguous())

        def loss_function(losses: Tensor) -> tuple[Tensor, dict]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    model.zero_grad(set_to_none=True)
    answers = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(texts),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    results = {f"loss {i}": a["loss"].detach().clone() for i, a in enumerate(answers)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad.detach().clone()
    return results


def compare_schedules(
    rank: int, device: torch.device, dispatcher: str = "deepep", seeds: int = 3, **options: Any
) -> float:
    """The largest relative difference of a loss or a gradient between the two schedules."""
    ep = torch.distributed.get_world_size()
    plain = make_model(make_config(dispatcher, False, ep, **options), device)
    overlapped = make_model(make_config(dispatcher, True, ep, **options), device)
    overlapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    worst = 0.0
    for seed in range(seeds):
        expected = run_schedule(plain, device, rank, seed)
        actual = run_schedule(overlapped, device, rank, seed)
        assert actual.keys() == expected.keys()
        assert len(expected) > MICRO_BATCHES
        for name, value in expected.items():
            assert actual[name].isfinite().all(), (seed, name)
            scale = float(value.float().abs().max())
            error = float((actual[name].float() - value.float()).abs().max())
            worst = max(worst, error / max(scale, 1e-6))
    return worst
