"""The Mixtral of this example for DeepSpeed: with its own MoE layers, or Hugging Face's by AutoEP.

Shapes: B sequences, S tokens of each, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixtral.presets import ModelSize

AUX_LOSS_COEFF = 0.02  # as Mixtral was trained
_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        width, kv_width = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        self.q = nn.Linear(size.hidden, width, bias=False)
        self.k = nn.Linear(size.hidden, kv_width, bias=False)
        self.v = nn.Linear(size.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, size.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [B, S, H]. rotation: cosines and sines, [S, head_dim] each."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        groups = q.shape[1] // k.shape[1]
        k, v = _rotate(k, rotation).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class SwiGLU(nn.Module):
    """One expert."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate_up = nn.Linear(size.hidden, 2 * size.expert_hidden, bias=False)
        self.down = nn.Linear(size.expert_hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, size: ModelSize, ep: int, top_k: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.attention = Attention(size)
        self.moe_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.moe = MoE(
            size.hidden,
            SwiGLU(size),
            num_experts=size.num_experts,
            ep_size=ep,
            k=top_k,
            drop_tokens=False,  # Mixtral drops none
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation)
        output, aux_loss, _ = self.moe(self.moe_norm(x))
        return x + output, aux_loss


class NativeMixtral(nn.Module):
    """Mixtral with `deepspeed.moe.layer.MoE`."""

    def __init__(self, size: ModelSize, ep: int, top_k: int) -> None:
        super().__init__()
        self.head_dim, self.rope_base = size.head_dim, size.rope_base
        self.embedding = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size, ep, top_k) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] int64 each; the language model loss and the mean balance loss of the layers."""
        x = self.embedding(tokens)
        rotation = self._rotation(tokens.shape[1], x)
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x, rotation)
            aux_losses.append(aux_loss)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), torch.stack(
            aux_losses
        ).mean()

    def _rotation(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=like.device) / self.head_dim
        angles = torch.arange(length, device=like.device)[:, None] / self.rope_base**steps
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def build_native(options: argparse.Namespace, rank: int) -> NativeMixtral:
    """This rank's part of the native model.

    The weights depend on the seed alone: every expert is drawn by its own number, so that neither
    the number of ranks nor the copies DeepSpeed makes of one expert show in them.
    """
    torch.manual_seed(options.seed)
    model = NativeMixtral(options.size, options.ep, options.top_k)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "deepspeed_experts" not in name:
            nn.init.normal_(parameter, std=_INIT_STD)
    num_local = options.size.num_experts // options.ep
    first = rank % options.ep * num_local
    for layer, block in enumerate(model.blocks):
        for local, expert in enumerate(block.moe.deepspeed_moe.experts.deepspeed_experts):
            number = layer * options.size.num_experts + first + local
            generator = torch.Generator().manual_seed(options.seed + 1 + number)
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=_INIT_STD, generator=generator)
    return model


def build_hugging_face(options: argparse.Namespace) -> nn.Module:
    """The whole Mixtral of `transformers`, with random weights; AutoEP then divides it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    size = options.size
    torch.manual_seed(options.seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.expert_hidden,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_kv_heads,
            head_dim=size.head_dim,
            max_position_embeddings=options.seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": float(size.rope_base)},
            num_local_experts=size.num_experts,
            num_experts_per_tok=options.top_k,
            output_router_logits=True,
            use_cache=False,
        )
    )


def losses_of(engine: Any, autoep: bool, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One forward: the language model loss and the balance loss without its coefficient."""
    if not autoep:
        return engine(tokens, labels)
    output = engine(input_ids=tokens, output_router_logits=True)
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten())
    return loss, output.aux_loss


def counted_modules(model: nn.Module, autoep: bool) -> list[tuple[int, nn.Module]]:
    """(layer, module) whose third output is the tokens per expert, for `LoadCounter`."""
    if autoep:
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

        layers = [m.router for m in model.modules() if isinstance(m, AutoEPMoELayer)]
    else:
        from deepspeed.moe.layer import MoE

        layers = [m for m in model.modules() if isinstance(m, MoE)]
    return list(enumerate(layers))
