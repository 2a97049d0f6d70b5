"""One rank of several trainings, one after the other in one process, each as train_mixtral does it:

PYTHONPATH=.:scripts RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 python3 tests/gpu/training_runs.py F

F is a JSON file, a list of {"port": of this run's rendezvous, "flags": [of train_mixtral, ...]}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mixtral import cli, megatron_run
from moe_ep.integrations.megatron.integration import MegatronIntegration


class MeasuredTraining(megatron_run.Training):
    """Adds to each step's record what torch holds of the GPU's memory after it, and the rows that
    this rank has put to other hosts since the start."""

    def _train_step(self) -> dict[str, Any]:
        record = super()._train_step()
        record["allocated_bytes"] = torch.cuda.memory_allocated()
        installed = MegatronIntegration.installed()
        for ep in installed.pool if installed is not None else ():
            if ep.backend.name == "nvshmem":
                record["border_rows"] = ep.backend.border().rows
        return record


def main() -> int:
    megatron_run.Training = MeasuredTraining  # type: ignore[misc]
    for run in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        code = megatron_run.run(cli.parse(run["flags"]))
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
