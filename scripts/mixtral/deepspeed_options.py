"""The flags of `--framework deepspeed`, and which of the others it takes. Standard library only."""

from __future__ import annotations

import argparse
from typing import Any

DISPATCHERS = ("deepep", "alltoall")


def add_flags(group: Any) -> None:
    """Adds DeepSpeed's own flags to the parser."""
    group.add_argument(
        "--autoep",
        action="store_true",
        help="DeepSpeed only: train the Hugging Face Mixtral, made expert-parallel by DeepSpeed's "
        "AutoEP, in place of a model with DeepSpeed's MoE layers",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="DeepSpeed only: ZeRO stage; 1 not with --autoep, 3 only with it. Default: 0 in fp32, "
        "2 in bf16",
    )


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the flags for the chosen framework, or None."""
    if options.framework != "deepspeed":
        given = [f for f, v in (("--autoep", options.autoep), ("--zero", options.zero)) if v]
        return f"{given[0]} needs --framework deepspeed" if given else None
    if options.dispatcher not in DISPATCHERS:
        return (
            f"--dispatcher {options.dispatcher} is Megatron's; with --framework deepspeed use "
            "deepep (this library) or alltoall (DeepSpeed's own)"
        )
    for flag in ("tp", "expert_tp", "pp"):
        if getattr(options, flag) != 1:
            return (
                f"--{flag.replace('_', '-')} {getattr(options, flag)}: with --framework deepspeed "
                "this example divides the experts only (--ep); use --framework megatron"
            )
    if options.megatron_lm:
        return "--megatron-lm needs --framework megatron"
    if options.zero is None:
        options.zero = 0 if options.dtype == "fp32" else 2
    if options.zero == 3 and not options.autoep:
        return "--zero 3: DeepSpeed has no ZeRO 3 for its own MoE layers; add --autoep, or --zero 2"
    if options.zero == 1 and options.autoep:
        return "--zero 1 is not supported with --autoep; use 0, 2 or 3"
    return None
