"""The DeepSpeed config of a run: a ready file of configs/deepspeed with this run's sizes."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from mixtral import ep_layout
from mixtral.cli import ROOT


def build(options: argparse.Namespace, on_cpu: bool) -> dict[str, Any]:
    """What `deepspeed.initialize` gets for these flags, and for a run on the CPU or on GPUs."""
    kind = "autoep" if options.autoep else "native"
    precision = "zero0_fp32" if options.dtype == "fp32" else "zero2_bf16"
    path = ROOT / "configs" / "deepspeed" / f"{kind}_{precision}.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["train_micro_batch_size_per_gpu"] = options.micro_batch
    config["gradient_accumulation_steps"] = options.num_micro_batches
    config["optimizer"]["params"]["lr"] = options.lr
    config["zero_optimization"]["stage"] = options.zero
    ours = options.dispatcher == "deepep"
    if options.autoep:
        config["expert_parallel"] |= {
            "autoep_size": options.ep,
            "comm_backend": "deepep" if ours else "comm",
            "comm_max_tokens_per_rank": options.micro_batch * options.seq_len,
        }
    section = config.pop("moe_ep")
    if ours:
        section["timeouts"] = ep_layout.timeouts(options)
        if options.backend != "auto":
            section["backend"] = options.backend
        elif on_cpu:
            section["backend"] = "reference"  # also where there is a GPU that this run doesn't use
        else:
            section.pop("backend", None)  # the layout's
        if options.layout is not None:
            section["layout"] = str(layout_file(options))
        config["moe_ep"] = section
    if options.statistics_every and importlib.util.find_spec("tensorboard") is not None:
        config["tensorboard"] = {
            "enabled": True,
            "output_path": str(options.out),
            "job_name": "tensorboard",
        }
    return config


def layout_file(options: argparse.Namespace) -> Path:
    """Where `write_layout` puts the layout."""
    return options.out / "ep_layout.yaml"


def write_layout(options: argparse.Namespace, on_cpu: bool) -> None:
    """Writes the layout of `--layout` with this run's sizes, which the config then names."""
    import yaml

    layout = ep_layout.layout_of(options, not on_cpu)
    options.out.mkdir(parents=True, exist_ok=True)
    layout_file(options).write_text(yaml.safe_dump(layout.model_dump(), sort_keys=False))
