"""How much memory a rank needs, and how much there is: told before anything is allocated."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_GIB = 2**30


def parameters_per_rank(options: argparse.Namespace) -> int:
    """Parameters of the fullest rank, under the run's parallel sizes."""
    size = options.size
    attention = size.hidden * size.head_dim * (2 * size.num_heads + 2 * size.num_kv_heads)
    unsplit = size.hidden * (2 + size.num_experts)  # two norms and the router
    experts = size.num_experts * 3 * size.hidden * size.expert_hidden
    layer = attention // options.tp + unsplit + experts // (options.ep * options.expert_tp)
    # With pipeline stages the embedding and the output layer lie on different ranks.
    tables = (2 if options.pp == 1 else 1) * size.vocab * size.hidden // options.tp
    return size.num_layers // options.pp * layer + tables


def bytes_per_rank(options: argparse.Namespace) -> int:
    """Estimated memory of the fullest rank: weights, gradients, Adam, and activations."""
    size = options.size
    # Weights, fp32 gradients, two fp32 Adam moments, and with bf16 an fp32 copy of the weights.
    per_parameter = 4 + 4 + 8 if options.dtype == "fp32" else 2 + 4 + 4 + 8
    element = 4 if options.dtype == "fp32" else 2
    tokens = options.micro_batch * options.seq_len
    per_token = 16 * size.hidden + options.top_k * (2 * size.hidden + 4 * size.expert_hidden)
    scores = 3 * options.micro_batch * size.num_heads * options.seq_len**2
    layer = (tokens * per_token + scores) * element // options.tp
    in_flight = min(options.pp, options.num_micro_batches)
    logits = 2 * tokens * size.vocab * 4 // options.tp
    activations = size.num_layers // options.pp * layer * in_flight + logits
    return parameters_per_rank(options) * per_parameter + activations


def host_memory_available() -> int | None:
    """Bytes this process may still use on the host, its container's limit included."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        try:
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        except (ValueError, OSError):
            return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def refusal(options: argparse.Namespace, available: int | None, where: str) -> str | None:
    """What to tell the user if the run can't fit, else None.

    Args:
        available: bytes one rank may use; None if unknown, which refuses nothing.
        where: whose memory that is, for the message.
    """
    needed = bytes_per_rank(options)
    if available is None or needed <= available:
        return None
    return (
        f"--model {options.model} doesn't fit: about {needed / _GIB:.1f} GiB per rank are needed "
        f"and {available / _GIB:.1f} GiB per rank are available ({where}).\n"
        f"  Counted: {parameters_per_rank(options) / 1e9:.2f} billion parameters per rank with "
        f"--ep {options.ep} --tp {options.tp} --expert-tp {options.expert_tp} --pp {options.pp}, "
        f"their gradients and Adam states, and the activations of {options.micro_batch} x "
        f"{options.seq_len} tokens in {options.dtype}.\n"
        "  Use more ranks (--ep, --tp, --pp), a smaller --micro-batch or --seq-len, or a smaller "
        "--model."
    )
