"""Hands a run over to a Megatron-LM checkout's `pretrain_gpt.py`, with moe_ep's dispatcher."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mixtral.cli import ROOT


def arguments(options: argparse.Namespace) -> list[str]:
    """What torchrun is to start: our Megatron launcher, the script, and its flags.

    Raises:
        ValueError: there is no such script, or Megatron-LM can't do what was asked.
    """
    script = options.megatron_lm / "pretrain_gpt.py"
    if not script.is_file():
        raise ValueError(f"--megatron-lm {options.megatron_lm}: there is no pretrain_gpt.py in it")
    if options.framework != "megatron":
        raise ValueError(f"--megatron-lm goes with --framework megatron, not {options.framework}")
    if options.data is not None:
        raise ValueError(
            "--data is text, and Megatron-LM reads its own preprocessed format: leave --data out, "
            "and give -- --data-path PREFIX and the tokenizer flags"
        )
    launcher = ["-m", "moe_ep.integrations.megatron"]
    if options.layout is not None:
        launcher += ["--moe-ep-layout", str(options.layout)]
    if options.backend != "auto":
        launcher += ["--moe-ep-backend", options.backend]
    return [*launcher, str(script), *flags(options), *options.extra]


def flags(options: argparse.Namespace) -> list[str]:
    """This run's model, parallel sizes and schedule as Megatron-LM flags."""
    size = options.size
    valued = {
        "--num-layers": size.num_layers,
        "--hidden-size": size.hidden,
        "--ffn-hidden-size": size.expert_hidden,
        "--num-attention-heads": size.num_heads,
        "--num-query-groups": size.num_kv_heads,
        "--kv-channels": size.head_dim,
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--rotary-base": size.rope_base,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--num-experts": size.num_experts,
        "--moe-ffn-hidden-size": size.expert_hidden,
        "--moe-router-topk": options.top_k,
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": 0.02,
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": options.dispatcher,
        "--tensor-model-parallel-size": options.tp,
        "--pipeline-model-parallel-size": options.pp,
        "--expert-model-parallel-size": options.ep,
        "--expert-tensor-parallel-size": options.expert_tp,
        "--micro-batch-size": options.micro_batch,
        "--global-batch-size": options.global_batch,
        "--seq-length": options.seq_len,
        "--max-position-embeddings": options.seq_len,
        "--train-iters": options.steps,
        "--lr": options.lr,
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": min(options.warmup, options.steps - 1),
        "--clip-grad": 1.0,
        "--seed": options.seed,
        "--distributed-timeout-minutes": -(-options.timeout_s // 60),
        "--eval-interval": options.eval_every or options.steps + 1,
        "--eval-iters": 8 if options.eval_every else 0,
        "--log-interval": 1,
    }
    if options.save is not None:
        valued |= {"--save": options.save, "--save-interval": options.save_every or options.steps}
    if options.resume is not None:
        valued["--load"] = options.resume
    switches = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    if options.tp > 1:
        switches.append("--sequence-parallel")
    if options.dtype == "bf16":
        switches.append("--bf16")
    if not any(flag.split("=")[0] == "--data-path" for flag in options.extra):
        # The null tokenizer adds one word of its own, for the end of a document.
        switches += ["--mock-data", "--tokenizer-type", "NullTokenizer"]
        valued["--vocab-size"] = size.vocab - 1
    return [*switches, *(part for pair in valued.items() for part in map(str, pair))]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables for the ranks: both checkouts must be importable from any working folder, and
    `--timeout-s`, where it was given, is for moe_ep too."""
    given = {"MOE_EP_TIMEOUT_S": str(options.timeout_s)} if options.timeout_given else {}
    paths = [str(Path(options.megatron_lm).resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return given | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
