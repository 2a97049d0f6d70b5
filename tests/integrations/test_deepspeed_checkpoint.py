"""Checkpoints: stock ones load into converted models and the other way round; runs resume."""

from pathlib import Path

import pytest
import torch
from deepspeed_support import Model, batch, config, engine_for, start, train

from moe_ep.testing import RankServer

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(120)


def _files(folder: Path) -> dict[str, dict]:
    return {
        str(path.relative_to(folder)): torch.load(path, weights_only=False)
        for path in sorted(folder.rglob("*.pt"))
    }


def _same(mine: object, other: object, where: str) -> int:
    """Compares two nested structures; returns the number of tensors in them."""
    assert type(mine) is type(other), where
    if isinstance(mine, dict):
        assert list(mine) == list(other), where
        return sum(_same(mine[key], other[key], f"{where}/{key}") for key in mine)
    if isinstance(mine, (list, tuple)):
        assert len(mine) == len(other), where
        pairs = enumerate(zip(mine, other, strict=True))
        return sum(_same(a, b, f"{where}/{i}") for i, (a, b) in pairs)
    if torch.is_tensor(mine):
        assert torch.equal(mine, other), where
        return 1
    return 0


def _stock_and_back(rank: int, folder: str) -> int:
    start()
    stock = engine_for(Model(2, rank), config(zero=1, ours=False))
    train(stock, rank, 3, tokens=8)
    stock.save_checkpoint(f"{folder}/stock", tag="t")
    converted = engine_for(Model(2, rank), config(zero=1))
    names = list(converted.module.state_dict())
    assert names == list(stock.module.state_dict())
    with torch.no_grad():
        for parameter in converted.module.parameters():
            parameter.fill_(-1.0)
    assert converted.load_checkpoint(f"{folder}/stock", tag="t")[0] is not None
    converted.save_checkpoint(f"{folder}/converted", tag="t")
    compared = 0
    if rank == 0:
        mine, other = _files(Path(folder) / "converted"), _files(Path(folder) / "stock")
        assert list(mine) == list(other) and mine
        for name, content in mine.items():
            content.pop("ds_config", None), other[name].pop("ds_config", None)
            compared += _same(content, other[name], name)
    # And back: the stock engine loads it, and both go on alike.
    assert stock.load_checkpoint(f"{folder}/converted", tag="t")[0] is not None
    curves = [train(engine, rank, 3, tokens=8) for engine in (converted, stock)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    return compared


def test_stock_checkpoint_and_back(deepspeed_ranks: RankServer, tmp_path: Path) -> None:
    compared = deepspeed_ranks.run(_stock_and_back, 2, str(tmp_path))[0]
    assert compared > 30


def _resume(rank: int, folder: str) -> None:
    start()
    variants = [(1, False), (2, True)]
    if not deepspeed.__version__.startswith("0.16."):  # there stock can't load its own without ZeRO
        variants.append((0, False))
    for zero, bf16 in variants:
        tag = f"zero{zero}"
        first = engine_for(Model(2, rank), config(zero, bf16, gradient_clipping=1.0))
        train(first, rank, 3, tokens=8, bf16=bf16)
        first.save_checkpoint(folder, tag=tag)
        through = train(first, rank, 3, tokens=8, bf16=bf16)
        second = engine_for(Model(2, rank), config(zero, bf16, gradient_clipping=1.0))
        second.load_checkpoint(folder, tag=tag)
        assert train(second, rank, 3, tokens=8, bf16=bf16) == through
        x, labels = batch(rank, 5, 8, torch.bfloat16 if bf16 else torch.float32)
        assert torch.isfinite(second(x, labels))


def test_resumed_run_repeats_the_uninterrupted_one(
    deepspeed_ranks: RankServer, tmp_path: Path
) -> None:
    deepspeed_ranks.run(_resume, 2, str(tmp_path))
