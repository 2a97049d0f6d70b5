"""DeepSpeed's own MoE layer, with its exchange replaced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe.sharded_moe import (
    FIRST_ALLTOALL_TIMER,
    MOE_TIMER,
    SECOND_ALLTOALL_TIMER,
    MOELayer,
)
from torch import Tensor, nn
from torch.nn.functional import pad

from moe_ep.errors import PeerError
from moe_ep.integrations.deepspeed import routes, tensor_parallel

if TYPE_CHECKING:
    from moe_ep.integrations.deepspeed.conversion import LayerExchange

MAX_COPIES = 2  # choices of a token that travel as tokens of their own
_IN_COPIES = re.compile(r"(\d+) tokens; tokens_per_rank=(\d+)")
_GAP = 8  # elements between strided rows: 16 bytes, so that they stay aligned


class CoreMOELayer(MOELayer):
    """An `MOELayer` whose tokens travel through moe_ep.

    Never constructed: an existing layer becomes one by its class, so that its gate, its experts,
    their parameters and their names stay the same objects. It computes what `MOELayer` does, with
    weights applied and summed in fp32, but only rows that a token chose are moved.
    """

    moe_ep: LayerExchange

    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:
        """Args as of `MOELayer`: hidden states [..., H] and the `used_token` mask [T] or None."""
        hidden = input[0]
        used_token = input[1] if len(input) > 1 else None
        with self._timed(MOE_TIMER, "time_moe"):
            tokens = hidden.reshape(-1, hidden.shape[-1])
            chosen = routes.decide(self.gate, tokens, used_token, self.moe_ep.gate_names_routes)
            self.l_aux, self.exp_counts = chosen.l_aux, chosen.exp_counts
            topk_idx, weights = chosen.topk_idx, chosen.weights
            if tensor_parallel.world_size() == 1:
                output = self._exchange(tokens, topk_idx, weights)
            else:
                share = self._exchange(
                    tensor_parallel.own_share(tokens),
                    tensor_parallel.own_share(topk_idx, filler=-1),
                    tensor_parallel.own_share(weights),
                )
                output = tensor_parallel.whole(share, tokens.shape[0])
            return output.reshape(hidden.shape)

    def _exchange(self, tokens: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        """[T, H] to [T, H] through the experts of all ranks. Collective over the EP group."""
        num_slots = topk_idx.shape[1]
        if num_slots > MAX_COPIES:
            rows, result_dtype = self._through_experts(tokens, topk_idx, weights)
            return rows.to(result_dtype)
        # Every choice travels as a token of its own, first choices first: experts then see their
        # rows in the order of the stock layer, and gradients sum up as there, bit for bit. Weights
        # stay here, as they do there.
        copies = tokens if num_slots == 1 else torch.cat([tokens] * num_slots)
        rows, result_dtype = self._through_experts(copies, topk_idx.t().reshape(-1, 1), None)
        rows = rows.view(num_slots, *tokens.shape) * weights.t().unsqueeze(2)
        return rows.sum(0).to(result_dtype)

    def _through_experts(
        self, tokens: Tensor, topk_idx: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, torch.dtype]:
        """The sum over a token's experts, and the dtype in which the experts answered."""
        ep = self.moe_ep.expert_parallel(self.ep_group, tokens.dtype)
        with self._timed(FIRST_ALLTOALL_TIMER, "time_falltoall"):
            try:
                arrived = ep.dispatch(tokens, topk_idx, weights, layer=self.moe_ep.shape.name)
            except (ValueError, PeerError) as error:
                copies = self.moe_ep.shape.copies
                error.args = tuple(
                    _in_tokens(a, copies) if isinstance(a, str) else a for a in error.args
                )
                raise
        self.moe_ep.count(arrived.handle)
        rows = self._run_experts(arrived.tokens, arrived.tokens_per_expert)
        with self._timed(SECOND_ALLTOALL_TIMER, "time_salltoall"):
            # Under autocast the experts answer in another dtype than they were asked in.
            output = ep.combine(rows.to(tokens.dtype), arrived.handle, weights=arrived.probs)
        return output, rows.dtype

    def _run_experts(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Expert-major rows [N, H] through the local experts."""
        experts = self.experts.deepspeed_experts
        if self.moe_ep.strided_rows and rows.dtype in (torch.bfloat16, torch.float16):
            rows = _strided(rows)
        if tensor_parallel.experts_are_sharded():
            shared = tensor_parallel.share_rows(rows, tokens_per_expert)
            return shared.own([_apply(e, b) for e, b in zip(experts, shared.blocks, strict=True)])
        sizes = tokens_per_expert.tolist()
        unused = rows.shape[0] - sum(sizes)  # the end of a buffer of fixed capacity
        blocks = rows.split([*sizes, unused]) if unused else rows.split(sizes)
        # An expert without rows takes part all the same: its gradient is zero, not None.
        outputs = [_apply(e, b) for e, b in zip(experts, blocks[: len(sizes)], strict=True)]
        if unused:
            outputs.append(outputs[0].new_zeros(unused, rows.shape[1]))
        return torch.cat(outputs)

    @contextlib.contextmanager
    def _timed(self, timer: str, attribute: str) -> Iterator[None]:
        """DeepSpeed's own timers, where the config has `wall_clock_breakdown`."""
        if not self.wall_clock_breakdown:
            yield
            return
        self.timers(timer).start()
        try:
            yield
        finally:
            self.timers(timer).stop()
        setattr(self, attribute, self.timers(timer).elapsed(reset=False))


def adds_biases(experts: nn.Module) -> bool:
    """Whether DeepSpeed's layer would round these experts' outputs before it adds their bias.

    It hands each expert a slice of the received buffer. Where that is not contiguous (several ranks
    and several local experts), torch multiplies and adds the bias in two steps, each rounded; for
    contiguous rows it does both in one. In 16 bits the difference shows.
    """
    return any(isinstance(m, nn.Linear) and m.bias is not None for m in experts.modules())


def _in_tokens(message: str, copies: int) -> str:
    """The message with the layer's numbers of tokens, where it has those of their copies."""
    return _IN_COPIES.sub(
        lambda found: (
            f"{int(found[1]) // copies} tokens; tokens_per_rank={int(found[2]) // copies}"
        ),
        message,
    )


def _strided(rows: Tensor) -> Tensor:
    """A copy of the rows [N, H] that is not contiguous; see `adds_biases`."""
    return pad(rows, (0, _GAP))[:, : rows.shape[1]]


def _apply(expert: nn.Module, rows: Tensor) -> Tensor:
    """One expert on [n, H], in the four dimensions in which DeepSpeed's layer gives them."""
    output = expert(rows.unsqueeze(0).unsqueeze(0))
    if isinstance(output, tuple):
        output = output[0]  # experts with a skipped bias return it beside the output
    return output.reshape(rows.shape)
