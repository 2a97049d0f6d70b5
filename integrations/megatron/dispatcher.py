"""Megatron's six-step token dispatcher on ExpertParallel.

Shapes: S sequence, B micro batch, H hidden, E experts, L local experts, T = S/TP*B tokens of this
rank, K top-k, N rows that arrive here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from moe_ep.dispatcher import ExpertParallel
from moe_ep.handle import DispatchHandle


class MoEEPTokenDispatcher(MoETokenDispatcher):
    """Routes by the router's map: a chosen pair (token, expert) travels even with probability 0.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: as Megatron passes them.
        ep: the exchange over `pg_collection.tp_ep`, shared with other layers.

    Attributes:
        layer: the MoELayer it is in, once there is one; its number names it in statistics.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any,
        ep: ExpertParallel,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.ep = ep
        self.layer: Any = None
        self.shared_experts = None
        self.hidden_shape: torch.Size | None = None
        self.topk_idx: Tensor | None = None
        self.handle: DispatchHandle | None = None
        # Outputs of a captured router + preprocess graph that later steps read.
        self.cudagraph_attrs = ["topk_idx"]
        self.valid_cudagraph_attrs = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        super().set_shared_experts(shared_experts)
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")
        self.cudagraph_attrs.append("shared_experts.cached_fc1_input")

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S/TP, B, H], bool map and probs [T, E] -> tokens [T, H], their weights [T, K]."""
        self.hidden_shape = hidden_states.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.topk_idx = experts_of_map(routing_map, self.ep.layout.model.top_k)
        weights = probs.gather(1, self.topk_idx.clamp(min=0))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return tokens, weights.masked_fill(self.topk_idx < 0, 0)

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """tokens [T, H], weights [T, K] -> rows [N, H] expert-major, their probs [N]."""
        self._shared_experts_wait()
        self._read_here(self.topk_idx)
        number = getattr(self.layer, "layer_number", None)
        dispatched = self.ep.dispatch(hidden_states, self.topk_idx, probs, layer=number)
        self.handle = dispatched.handle
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(dispatched.tokens)
        assert dispatched.probs is not None
        return dispatched.tokens, dispatched.probs.to(probs.dtype)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows are in the experts' order already. -> rows, tokens_per_expert [L] CPU, probs."""
        assert self.handle is not None
        self._read_here(hidden_states, probs)
        return hidden_states, self.handle.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing to reorder."""
        return hidden_states

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Expert outputs [N, H], already weighted by the experts -> sums [T, H]."""
        self._shared_experts_wait()
        assert self.handle is not None
        combined = self.ep.combine(hidden_states, self.handle)
        self.handle = None
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(combined)
            self.shared_experts.post_forward_comm()
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [S/TP, B, H], with the overlapped shared experts' output added."""
        assert self.hidden_shape is not None
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Experts write to buffers of their own."""
        return None, None

    def _read_here(self, *tensors: Tensor | None) -> None:
        """Where micro-batches overlap, dispatch and combine run on a stream of their own: memory
        that one stream made and another reads must not be used anew before it has been read."""
        if self.config.overlap_moe_expert_parallel_comm:
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())

    def _shared_experts_wait(self) -> None:
        wait = getattr(self.shared_experts, "wait_current_stream", None)  # megatron-core 0.19
        if wait is not None:
            wait()


def experts_of_map(routing_map: Tensor, num_slots: int) -> Tensor:
    """The experts of each token in ascending order, padded with -1.

    Args:
        routing_map: [T, E] bool. num_slots: most experts a token may have.

    Returns:
        [T, num_slots] int64.

    Raises:
        ValueError: a token has more experts. Looked for on a CPU only, where it needs no
            synchronisation: Megatron's routers choose top-k, and padding to capacity gets a slot
            per expert.
    """
    num_experts = routing_map.shape[1]
    descending = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    keys = (routing_map * descending).topk(num_slots, dim=1).values
    experts = torch.where(keys > 0, num_experts - keys.long(), -1)
    if routing_map.device.type == "cpu" and num_slots < num_experts:
        most = int(routing_map.sum(1).max()) if routing_map.shape[0] else 0
        if most > num_slots:
            raise ValueError(f"a token is routed to {most} experts; at most {num_slots} fit")
    return experts
