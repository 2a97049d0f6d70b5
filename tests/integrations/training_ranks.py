"""`train_mixtral` in ranks of a RankServer: as under torchrun, without its start."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ep.testing import RankServer

ROOT = Path(__file__).resolve().parents[2]


def import_training(framework: str = "megatron") -> None:
    """Imports the parts of the example that a rank with this framework runs."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from mixtral import quiet

    quiet.quiet()
    for part in (f"{framework}_run", f"{framework}_model", "checkpoint", "model", "plots"):
        if (ROOT / "scripts" / "mixtral" / f"{part}.py").exists():
            importlib.import_module(f"mixtral.{part}")
    importlib.import_module("matplotlib.pyplot")


def train(server: RankServer, num_ranks: int, out: Path, *flags: Any) -> list[dict[str, Any]]:
    """Trains to the end on `num_ranks` ranks; the metrics of each step."""
    arguments = [*map(str, flags), "--device", "cpu", "--out", str(out)]
    codes = server.run(_train, num_ranks, arguments, limit_s=200)
    assert codes == [0] * num_ranks
    return read_metrics(out)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """What a run has written, by step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _train(rank: int, arguments: list[str]) -> int:
    from mixtral import cli

    # The ranks meet again as torchrun lets them: at a store that waits for them on a free port.
    world = dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [store.port]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    options = cli.parse(arguments)
    module, function = cli.FRAMEWORKS[options.framework].split(":")
    return getattr(importlib.import_module(module), function)(options)
