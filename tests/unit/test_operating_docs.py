"""docs/operating.md names every scalar that is logged."""

from __future__ import annotations

import re
from pathlib import Path

from moe_ep.statistics import VERBS, GroupStatistics, LayerStatistics, Statistics

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()


def group(ranks: int) -> GroupStatistics:
    layers = {"12": LayerStatistics([3, 1]), "9": LayerStatistics([1, 1])}
    return GroupStatistics([Statistics(rank, 2, dict(layers)) for rank in range(ranks)])


def test_every_logged_name_is_documented() -> None:
    names = set()
    for name in group(2).scalars():
        name = name.removeprefix("moe_ep/")
        name = re.sub(r"^rank_\d+/", "rank_N/", name)
        name = re.sub(r"^layer_\d+/", "layer_NAME/", name)
        names.add(name.removesuffix("_max"))
    assert len(names) > 12
    assert not [name for name in sorted(names) if f"`{name}`" not in TEXT]


def test_by_rank_up_to_a_limit() -> None:
    assert any("/rank_15/" in name for name in group(16).scalars())
    assert not any("/rank_" in name for name in group(17).scalars())


def test_numbers_without_any_call() -> None:
    nothing = GroupStatistics([Statistics(0, 2, {}), Statistics(1, 2, {})])
    assert set(nothing.scalars().values()) == {0.0}
    assert nothing.tokens_per_expert() == [0, 0, 0, 0] and nothing.layers == []


def test_layers_in_the_order_of_their_numbers() -> None:
    assert group(1).layers == ["9", "12"]
    assert group(2).imbalance("12") == 1.5
    layers = {name: LayerStatistics([0]) for name in ("²", "10", "9", "a")}  # ² is a digit, too
    assert GroupStatistics([Statistics(0, 1, layers)]).layers == ["9", "10", "a", "²"]
    assert all(f"`{verb}`" in TEXT for verb in VERBS)


def test_experts_shared_by_tensor_parallel_ranks_count_once() -> None:
    whole = group(4)
    assert len(whole.tokens_per_expert()) == 8
    assert GroupStatistics(whole.by_rank, expert_tensor=2).tokens_per_expert("9") == [1, 1, 1, 1]
