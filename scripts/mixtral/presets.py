"""The sizes of Mixtral this example can build. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    """One Mixtral: grouped-query attention, RoPE, SwiGLU experts, RMSNorm, top-k routing.

    Lengths are in elements; ``seq_len``, ``lr`` and ``dtype`` are what a run uses when its flags
    say nothing else.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_hidden: int
    num_experts: int
    vocab: int
    rope_base: int
    seq_len: int
    lr: float
    dtype: str


# The text is bytes, so 256 words are enough. The real Mixtral keeps its own vocabulary, so that
# its memory and its speed are the real ones.
MODELS = {
    size.name: size
    for size in (
        ModelSize("tiny", 2, 64, 4, 2, 16, 128, 8, 256, 10_000, 128, 3e-3, "fp32"),
        ModelSize("small", 8, 512, 8, 4, 64, 1024, 8, 256, 10_000, 512, 1e-3, "fp32"),
        ModelSize("mixtral_8x7b", 32, 4096, 32, 8, 128, 14336, 8, 32_000, 1_000_000, 4096, 1e-5,
                  "bf16"),
    )
}  # fmt: skip
