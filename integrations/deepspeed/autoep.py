"""DeepSpeed's AutoEP layer (Hugging Face models made expert-parallel), with its exchange replaced.

AutoEP has a seam for another transport: a layer with `comm_backend` "deepep" gives its routed
tokens to `_deepep_route` and takes them back summed. That method is replaced, and with it the
limits of the transport it was made for: fp32 and fp16 work, and rows arrive in an order that
repeats, so that activation checkpointing needs no record of earlier handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.module_inject.auto_ep_comm import COMM_BACKEND, DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, apply_deepep_row_weights
from torch import Tensor

if TYPE_CHECKING:
    from moe_ep.integrations.deepspeed.conversion import LayerExchange

__all__ = ["COMM_BACKEND", "DEEPEP_BACKEND", "AutoEPMoELayer", "CoreAutoEPLayer", "refusal"]


class CoreAutoEPLayer(AutoEPMoELayer):
    """An `AutoEPMoELayer` whose tokens travel through moe_ep. Made from one by its class."""

    moe_ep: LayerExchange

    def _deepep_route(self, tokens: Tensor, ro: Any) -> Tensor:
        """Tokens [T, H] to the weighted sum [T, H] of their experts' outputs.

        Args:
            ro: the router's answer: top_scores [T, K] and selected_experts [T, K].
        """
        ep = self.moe_ep.expert_parallel(self.ep_group, tokens.dtype)
        arrived = ep.dispatch(
            tokens, ro.selected_experts, ro.top_scores, layer=self.moe_ep.shape.name
        )
        self.moe_ep.count(arrived.handle)
        rows, weights = arrived.tokens, arrived.probs
        assert weights is not None
        if self.score_apply == "pre":
            rows = apply_deepep_row_weights(rows, weights.unsqueeze(1), self.row_weighting_impl)
            weights = None
        counts = arrived.tokens_per_expert.to(device=rows.device, dtype=torch.int32)
        return ep.combine(self.experts(rows, counts), arrived.handle, weights=weights)


def refusal(layer: AutoEPMoELayer) -> str | None:
    """Why this layer can't be converted, or None."""
    folding = layer.folding_group_handles
    if folding is not None and folding.spec.tp_size > 1:
        return (
            f"tensor_parallel.autotp_size is {folding.spec.tp_size}; DeepSpeed divides such a "
            'layer\'s tokens itself: set expert_parallel.comm_backend to "comm", or autotp_size '
            "to 1"
        )
    return None
