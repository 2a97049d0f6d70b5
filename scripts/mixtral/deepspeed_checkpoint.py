"""Checkpoints of the DeepSpeed runs: DeepSpeed's own files, and the record a resumed run checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mixtral.resume import RECORD


def save(folder: Path, step: int, engine: Any, settings: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step`; collective. Without its record it counts as incomplete."""
    tag = f"step_{step:07d}"
    engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        record = {"step": step, "settings": settings}
        (folder / tag / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    return folder / tag


def load(checkpoint: Path, engine: Any) -> None:
    """Restores model, optimizer and step counters; collective.

    Raises:
        ValueError: DeepSpeed finds no checkpoint there.
    """
    found, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if found is None:
        raise ValueError(f"DeepSpeed could not load {checkpoint}")
