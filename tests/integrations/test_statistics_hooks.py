"""What dispatch and combine did, in the frameworks' own logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from moe_ep.testing import RankServer


class Writer:
    """TensorBoard's interface, as Megatron uses it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))


class WandB:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((values, step))


def _megatron(rank: int) -> None:
    from megatron_layer import EXPERTS, HIDDEN, make_config, make_layer, megatron, run_layer

    from moe_ep.integrations import megatron as ours

    with pytest.raises(RuntimeError, match="install"):
        ours.log_statistics(None, 0)
    with megatron():
        ours.install()
        layer = make_layer(make_config("deepep", num_layers=5))
        layer.set_layer_number(5)
        writer, wandb = (Writer(), WandB()) if rank == 1 else (None, None)
        assert ours.log_statistics(writer, 1, wandb) == {}  # switches on
        assert ours.log_statistics(writer, 2, wandb) == {}  # nothing happened
        run_layer(layer, seed=rank)
        run_layer(layer, seed=rank)
        scalars = ours.log_statistics(writer, 3, wandb)
        assert ours.log_statistics(writer, 4, wandb) == {}  # it has begun anew
        rows = 2 * 2 * 24 * 2  # twice, two ranks, 24 tokens, two experts each
        links = ("own_rank", "own_host", "other_hosts")
        assert sum(scalars[f"moe_ep/rows_{link}"] for link in links) == 4 * rows
        assert sum(scalars[f"moe_ep/rank_{r}/rows"] for r in (0, 1)) == rows
        assert sum(scalars[f"moe_ep/bytes_{link}"] for link in links) == 4 * rows * HIDDEN * 4
        assert 1 <= scalars["moe_ep/imbalance"] == scalars["moe_ep/layer_5/imbalance"] <= EXPERTS
        if writer is not None and wandb is not None:
            assert writer.seen == [(name, value, 3) for name, value in scalars.items()]
            assert wandb.seen == [(scalars, 3)]
        ours.uninstall()


def test_megatron(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_megatron, 2, limit_s=150)


def _deepspeed(rank: int, folder: str) -> None:
    from deepspeed_support import Model, config, engine_for, start, train

    start()
    content: dict[str, Any] = config(0)
    content["moe_ep"]["statistics_every"] = 2
    content["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine = engine_for(Model(2, rank, drop_tokens=False), content)
    train(engine, rank, 5, tokens=12)
    engine.destroy()


def test_deepspeed(deepspeed_ranks: RankServer, tmp_path: Path) -> None:
    deepspeed_ranks.run(_deepspeed, 2, str(tmp_path), limit_s=150)
    files = {path.name: path for path in tmp_path.rglob("*.csv") if "moe_ep" in path.name}
    (imbalance,) = (path for name, path in files.items() if name.endswith("moe_ep_imbalance.csv"))
    with imbalance.open() as file:
        _, *lines = csv.reader(file)
    assert [int(float(samples)) for samples, _ in lines] == [8, 16]  # steps 2 and 4, 2 x 2 each
    assert all(float(value) >= 1 for _, value in lines)
    rows = 0.0
    for link in ("own_rank", "own_host", "other_hosts"):
        (path,) = (path for name, path in files.items() if name.endswith(f"rows_{link}.csv"))
        with path.open() as file:
            rows += sum(float(value) for _, value in list(csv.reader(file))[1:])
    # Four steps, two ranks, 2 x 12 tokens, two experts each, forward and backward of both verbs.
    assert rows == 4 * 4 * 2 * 24 * 2
