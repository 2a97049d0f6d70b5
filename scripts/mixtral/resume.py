"""Finds the checkpoint to go on from, and whether this run may. Standard library only."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{7})")
# A resumed run repeats an uninterrupted one only if none of these has changed.
_FIXED = (
    "model",
    "top_k",
    "dtype",
    "seq_len",
    "micro_batch",
    "global_batch",
    "seed",
    "lr",
    "warmup",
    "world",
    "ep",
    "tp",
    "expert_tp",
    "pp",
)
RECORD = "run.json"


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in ``folder``, or ``folder`` itself if it is one.

    Raises:
        ValueError: there is none.
    """
    candidates = [folder, *folder.glob("step_*")]
    found = [p for p in candidates if _NAME.fullmatch(p.name) and (p / RECORD).is_file()]
    if not found:
        raise ValueError(f"no checkpoint in {folder} (expected a folder like step_0000020)")
    return max(found, key=lambda p: p.name)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint records about its run's flags, and `check` compares."""
    return {name: getattr(options, name) for name in _FIXED}


def check(checkpoint: Path, wanted: dict[str, Any], steps: int) -> int:
    """The step a checkpoint was written after, once its settings are known to be this run's.

    Args:
        wanted: this run's settings; those not named are not compared.
        steps: how far this run is to go.

    Raises:
        ValueError: settings differ (the message names each with both values), or nothing is left
            to do.
    """
    record = json.loads((checkpoint / RECORD).read_text())
    differ = [
        f"{name} was {record['settings'].get(name)!r}, is {value!r}"
        for name, value in wanted.items()
        if record["settings"].get(name) != value
    ]
    if differ:
        raise ValueError(
            f"cannot resume from {checkpoint}: {'; '.join(differ)}. "
            "Use the same flags as the run that wrote it, or start anew without --resume"
        )
    if record["step"] >= steps:
        raise ValueError(
            f"{checkpoint} is at step {record['step']}, so --steps {steps} are already done: "
            "ask for more steps"
        )
    return record["step"]
