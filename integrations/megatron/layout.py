"""The EP layout of a Megatron model: made from its config, or a file's checked against it."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_ep.errors import LayoutError
from moe_ep.layout import MAX_TOP_K, EPLayout

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def layout_for(
    config: TransformerConfig, ep_size: int, tp_size: int, layout: EPLayout | None
) -> EPLayout:
    """The layout for an MoE layer of `config`.

    Args:
        ep_size, tp_size: expert-parallel and expert-tensor-parallel size of the layer's groups.
        layout: the user's; its time-outs, backend, FP8 and the like are kept. None: defaults.

    Raises:
        LayoutError: the user's layout is for another model; every differing key is listed.
        ValueError: the config has an option that cannot be honoured.
    """
    _refuse_unsupported(config, tp_size)
    dtype = _DTYPE_NAMES[config.params_dtype]
    model = {
        "model.hidden": getattr(config, "moe_latent_size", None) or config.hidden_size,
        "model.num_experts": config.num_moe_experts,
        "model.top_k": config.moe_router_topk,
        "parallel.expert": ep_size,
        "parallel.expert_tensor": tp_size,
    }
    if layout is None:
        layout = EPLayout(
            model={
                "hidden": model["model.hidden"],
                "num_experts": model["model.num_experts"],
                "top_k": model["model.top_k"],
                "num_moe_layers": config.num_layers,
            },
            parallel={"expert": ep_size, "expert_tensor": tp_size},
            dispatch={"dtype": dtype},
        )
    else:
        if layout.dispatch.dtype != "fp8_e4m3":
            model["dispatch.dtype"] = dtype
        different = layout.differences(layout.replace(**model))
        if different:
            raise LayoutError(
                "the layout does not fit the Megatron model (layout and model): "
                + "; ".join(different)
            )
    if config.moe_router_padding_for_quantization:
        # 0 where the model is not quantised (megatron-core 0.19)
        align = math.lcm(
            layout.dispatch.row_alignment, get_align_size_for_quantization(config) or 1
        )
        layout = layout.replace(**{"dispatch.row_alignment": align})
    if config.moe_pad_expert_input_to_capacity:
        # The routing map then holds each expert's `capacity` tokens, chosen or not.
        layout = layout.replace(**{"model.top_k": config.num_moe_experts})
    return layout


def _refuse_unsupported(config: TransformerConfig, tp_size: int) -> None:
    def refuse(option: str, instead: str) -> None:
        raise ValueError(
            f"moe_token_dispatcher_type=deepep cannot honour {option}={getattr(config, option)!r}; "
            + instead
        )

    if getattr(config, "transformer_impl", None) == "inference_optimized":
        refuse("transformer_impl", "use another dispatcher type for inference")
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        refuse("moe_expert_rank_capacity_factor", "set dispatch.capacity in the EP layout")
    most = MAX_TOP_K // tp_size
    if config.moe_pad_expert_input_to_capacity and config.num_moe_experts > most:
        refuse(
            "moe_pad_expert_input_to_capacity",
            f"a token may then be in all {config.num_moe_experts} experts, at most {most} fit; "
            "drop without padding",
        )
    if config.params_dtype not in _DTYPE_NAMES:
        refuse("params_dtype", f"use one of {', '.join(map(str, _DTYPE_NAMES))}")
    if config.cuda_graph_impl != "none":
        option = (
            "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
        )
        captured = {getattr(part, "name", str(part)) for part in getattr(config, option) or []}
        if not captured or "moe" in captured or "full_iteration" in captured:
            refuse(option, "capture attn, moe_router and moe_preprocess only")
