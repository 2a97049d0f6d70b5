"""The Mixtral of this example, built with Megatron-core."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

AUX_LOSS_COEFF = 0.02  # as Mixtral was trained
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RMSNorm(nn.RMSNorm):
    """The norm of all layers. Megatron's own without Apex or Transformer Engine refuses sequence
    parallelism, which only has to know that this weight's gradient is to be summed over TP ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def build_config(options: argparse.Namespace) -> TransformerConfig:
    """Megatron's description of the model and of how it is divided among the ranks."""
    size, dtype = options.size, _DTYPES[options.dtype]
    return TransformerConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.expert_hidden,
        num_attention_heads=size.num_heads,
        num_query_groups=size.num_kv_heads,
        kv_channels=size.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=size.num_experts,
        moe_ffn_hidden_size=size.expert_hidden,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=AUX_LOSS_COEFF,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=options.dispatcher,
        tensor_model_parallel_size=options.tp,
        sequence_parallel=options.tp > 1,  # Megatron's MoE layers ask for it with TP
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.expert_tp,
        pipeline_model_parallel_size=options.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=options.dtype == "bf16",
        # With CPU initialization all expert-parallel ranks would start from the same experts.
        use_cpu_initialization=False,
        # These fusions need kernels of Apex or Transformer Engine, or a compiler at run time.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(
    config: TransformerConfig, options: argparse.Namespace, device: torch.device
) -> DistributedDataParallel:
    """This rank's part of the model, wrapped in Megatron's data parallelism."""
    size = options.size
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_layers(config),
        vocab_size=size.vocab,
        max_sequence_length=options.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=size.rope_base,
    )
    model.to(device)
    if options.dtype == "bf16":
        model = Float16Module(config, model)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    ddp.broadcast_params()
    config.no_sync_func = ddp.no_sync
    return ddp


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    count = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def build_optimizer(
    config: TransformerConfig, model: DistributedDataParallel, options: argparse.Namespace
) -> tuple[Any, OptimizerParamScheduler]:
    """AdamW with clipping, and a learning rate that is constant after a linear warm-up.

    A constant rate doesn't depend on how many steps are still to come, so a run that is resumed
    for more steps repeats a longer one exactly.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=0.0,
            weight_decay=0.01,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=options.dtype == "bf16",
            params_dtype=_DTYPES[options.dtype],
            # Megatron-core 0.16 can save a distributed optimizer's state but not load it.
            use_distributed_optimizer=False,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr / (options.warmup + 1),  # the first step shouldn't be wasted
        max_lr=options.lr,
        min_lr=0.0,
        lr_warmup_steps=options.warmup,
        lr_decay_steps=options.warmup + 1,  # not used by a constant rate, but checked
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def routers(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(index in the whole model, router) of each MoE layer on this rank."""
    return [(m.layer_number - 1, m) for m in model.modules() if isinstance(m, Router)]
