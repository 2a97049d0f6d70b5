"""A small mixture-of-experts decoder for decode_demo.py: attention is left out, routing is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_BLOCK = 128


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    experts: int
    top_k: int
    vocabulary: int = 512


class Decoder:
    """All weights, the same on every rank; a rank of an expert-parallel run uses its share.

    Legend of shapes: T tokens, H hidden, K top-k, E experts, L local experts, N rows of an expert.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        h, wide = shape.hidden, shape.hidden // 2

        def weight(*size: int) -> Tensor:
            return (torch.randn(*size, generator=generator) * size[-2] ** -0.5).to(device)

        layers = range(shape.layers)
        self.embedding = torch.randn(shape.vocabulary, h, generator=generator).to(device)
        self.mixers = [weight(h, h) for _ in layers]
        self.routers = [weight(h, shape.experts) for _ in layers]
        self.up = [weight(shape.experts, h, wide).bfloat16() for _ in layers]
        self.down = [weight(shape.experts, wide, h).bfloat16() for _ in layers]

    def before_experts(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h [T, H] fp32 -> h, x [T, H] bf16 for the experts, topk_idx and topk_weights [T, K]."""
        h = h + torch.tanh(F.rms_norm(h, h.shape[1:]) @ self.mixers[layer])
        x = F.rms_norm(h, h.shape[1:])
        scores, idx = torch.softmax(x @ self.routers[layer], 1).topk(self.shape.top_k, 1)
        return h, x.bfloat16(), idx, scores / scores.sum(1, keepdim=True)

    def experts(self, layer: int, rows: Tensor, first: int) -> Tensor:
        """rows [L, N, H] bf16 of experts first, first + 1, ... -> [L, N, H] bf16."""
        share = slice(first, first + len(rows))
        return F.silu(rows @ self.up[layer][share]) @ self.down[layer][share]

    def next_tokens(self, h: Tensor) -> Tensor:
        """[T]: the likeliest ones."""
        return (F.rms_norm(h, h.shape[1:]) @ self.embedding.T).argmax(1)

    def step_alone(self, tokens: Tensor) -> Tensor:
        """One decode step without any communication: tokens [T] -> hidden states [T, H] fp32."""
        h = self.embedding[tokens]
        for layer in range(self.shape.layers):
            h, x, idx, weights = self.before_experts(layer, h)
            out = torch.zeros_like(h)
            for expert in range(self.shape.experts):
                share = (weights * (idx == expert)).sum(1, keepdim=True)
                out += share * self.experts(layer, x.unsqueeze(0), expert)[0].float()
            h = h + out.bfloat16().float()
        return h


def dequantized(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """What low_latency_dispatch returns, as bf16 [L, N, H]."""
    if isinstance(rows, Tensor):
        return rows
    q, scales = rows
    blocks = q.float().view(*scales.shape, FP8_BLOCK)
    return (blocks * scales.unsqueeze(3)).flatten(2).bfloat16()
