"""Checkpoints from which a run goes on as if it had never stopped.

A checkpoint is a folder ``step_0000020`` written by ``megatron.core.dist_checkpointing``: the
model, the optimizer, and each rank's random number states, beside ``run.json`` with the position
in the text and the settings that must not change. It is written under another name and renamed
when it is complete, so a killed run leaves no half checkpoint that looks whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mixtral.resume import RECORD


def _state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    while hasattr(model, "module"):  # names in a checkpoint shouldn't tell how it was wrapped
        model = model.module
    model_state = model.sharded_state_dict()
    rng = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        # The optimizer's state refers to the model's tensors by name, so they go together.
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(dict(model_state), is_loading=is_loading),
        "rng": ShardedObject("rng", rng, (world,), (rank,), replica_id=0),
    }


def save(folder: Path, step: int, model: Any, optimizer: Any, run_settings: dict[str, Any]) -> Path:
    """Writes the checkpoint of ``step``; collective over all ranks."""
    target = folder / f"step_{step:07d}"
    unfinished = folder / f"unfinished_{step:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(unfinished))
    dist.barrier()
    if dist.get_rank() == 0:
        record = {"step": step, "settings": run_settings}
        (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    dist.barrier()
    return target


def load(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Restores model, optimizer and random number states; collective over all ranks."""
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(checkpoint))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng = state["rng"]
    torch.set_rng_state(rng["cpu"])
    torch.cuda.set_rng_state(rng["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])
