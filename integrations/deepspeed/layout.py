"""The EP layout of a DeepSpeed MoE layer: made from the layer, or a file's checked against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.errors import LayoutError
from moe_ep.integrations.deepspeed.config import MoEEPConfig
from moe_ep.layout import EPLayout

_DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class LayerShape:
    """What the layout must know of one MoE layer.

    Attributes:
        name: path of the layer in the model, for messages.
        hidden, num_experts, top_k, ep_size: as DeepSpeed has them.
        num_moe_layers: MoE layers of this rank's model.
        tokens_per_rank: the layer's own limit of tokens, None without one.
        copies: tokens of the exchange for each token of the layer, which then have one choice each.
    """

    name: str
    hidden: int
    num_experts: int
    top_k: int
    ep_size: int
    num_moe_layers: int
    tokens_per_rank: int | None = None
    copies: int = 1


def layout_for(
    shape: LayerShape, dtype: torch.dtype, options: MoEEPConfig, named: EPLayout | None
) -> EPLayout:
    """The layout for one layer whose token rows have `dtype`.

    Args:
        named: the user's layout; its FP8, time-outs, backend and the like are kept.

    Raises:
        LayoutError: the user's layout is for another model; every differing key is listed.
    """
    if dtype not in _DTYPE_NAMES:
        known = ", ".join(map(str, _DTYPE_NAMES))
        raise LayoutError(f"{shape.name}: token rows are {dtype}; supported are {known}")
    if named is None:
        layout = EPLayout(
            model={
                "hidden": shape.hidden,
                "num_experts": shape.num_experts,
                "top_k": shape.top_k,
                "num_moe_layers": shape.num_moe_layers,
            },
            parallel={"expert": shape.ep_size},
            tokens_per_rank=shape.tokens_per_rank,
        )
    else:
        _check_fit(shape, named)
        layout = named
        if layout.tokens_per_rank is None:
            layout = layout.replace(tokens_per_rank=shape.tokens_per_rank)
    changes = options.changes()
    if layout.dispatch.dtype != "fp8_e4m3":
        # Not compared: the dtype of rows is a matter of the engine's precision.
        changes["dispatch.dtype"] = _DTYPE_NAMES[dtype]
    layout = layout.replace(**changes)
    if shape.copies > 1:
        limit = layout.tokens_per_rank
        layout = layout.replace(
            **{"model.top_k": 1, "tokens_per_rank": limit and limit * shape.copies}
        )
    return layout


def _check_fit(shape: LayerShape, named: EPLayout) -> None:
    expected = {
        "model.hidden": shape.hidden,
        "model.num_experts": shape.num_experts,
        "model.top_k": shape.top_k,
        "parallel.expert": shape.ep_size,
        # A tensor-parallel expert adds up its own parts; every row goes to one rank.
        "parallel.expert_tensor": 1,
    }
    different = named.differences(named.replace(**expected))
    if different:
        raise LayoutError(
            f"the layout does not fit the MoE layer {shape.name} (layout and model): "
            + "; ".join(different)
        )
