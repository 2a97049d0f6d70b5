"""A Mixtral trained with Megatron-core on backend cuda: its losses, its memory, its speed.

Trainings whose losses are compared run at once: they share the GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from mps import MpsServer
from training_groups import (
    BF16_LIMIT,
    FP32_LIMIT,
    LAYOUT,
    NEEDS_MEGATRON,
    Group,
    Records,
    call_script,
    largest_difference,
    tiny,
    train,
)

pytestmark = NEEDS_MEGATRON

STEPS = 200


GROUPS = {
    f"{ranks} {dtype} {backend}": Group(ranks, {"tiny": tiny(ranks, dtype, backend, STEPS)})
    for ranks, dtype in ((1, "fp32"), (2, "fp32"), (2, "bf16"), (4, "fp32"))
    for backend in ("cuda", "reference")
}


@pytest.fixture(scope="module")
def records(_mps_session: MpsServer, tmp_path_factory: Any) -> dict[tuple[str, str], Records]:
    return train(GROUPS, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fp32_losses_equal_reference(records: dict[tuple[str, str], Records], ranks: int) -> None:
    mine, theirs = (records[f"{ranks} fp32 {name}", "tiny"] for name in ("cuda", "reference"))
    assert mine[-1]["lm_loss"] < mine[0]["lm_loss"] * 2 / 3  # it learns
    assert largest_difference(mine, theirs, STEPS) <= FP32_LIMIT


def test_bf16_losses_equal_reference(records: dict[tuple[str, str], Records]) -> None:
    mine, theirs = (records[f"2 bf16 {name}", "tiny"] for name in ("cuda", "reference"))
    assert mine[-1]["lm_loss"] < mine[0]["lm_loss"] * 2 / 3
    assert largest_difference(mine, theirs, STEPS) <= BF16_LIMIT


@pytest.mark.parametrize("group", [group for group in GROUPS if group.endswith("cuda")])
def test_memory_is_flat(records: dict[tuple[str, str], Records], group: str) -> None:
    held = [record["allocated_bytes"] for record in records[group, "tiny"]]
    assert max(held[20:]) - held[20] < 1 << 20, held[20:]


@pytest.mark.alone
@pytest.mark.usefixtures("mps")
def test_a_step_takes_less_than_with_megatrons_alltoall(tmp_path: Path) -> None:
    flags = "--model small --ep 1 --dtype bf16 --steps 20 --micro-batch 8 --global-batch 8"
    dispatchers = ("alltoall", "deepep")
    group = Group(1, {name: [*flags.split(), "--dispatcher", name] for name in dispatchers})
    records = train({"speed": group}, tmp_path)
    stock, mine = (
        median(record["step_ms"] for record in records["speed", name][5:]) for name in dispatchers
    )
    print(f"step of the small model on one rank: {mine:.1f} ms, alltoall {stock:.1f} ms")
    assert mine < stock


@pytest.mark.parametrize(("ranks", "dispatcher"), [(1, "deepep"), (2, "deepep"), (1, "alltoall")])
@pytest.mark.usefixtures("mps")
def test_script(ranks: int, dispatcher: str, tmp_path: Path) -> None:
    """It becomes torchrun and tells the step time."""
    flags = f"--device cuda --nproc {ranks} --ep {ranks} --steps 4 --eval-every 0 --dtype bf16"
    flags += f" --dispatcher {dispatcher} --out {tmp_path / 'run'}"
    if dispatcher == "deepep":
        (tmp_path / "layout.yaml").write_text(LAYOUT)
        flags += f" --backend cuda --layout {tmp_path / 'layout.yaml'}"
    printed = call_script(*flags.split())
    speed = re.search(r"speed +[0-9]+ ms a step.*", printed)
    assert "on 1 GPU(s)" in printed and speed, printed
    print(speed[0])
