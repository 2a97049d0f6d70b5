"""A Mixtral trained over two simulated hosts of two ranks each, between which only NVSHMEM is used:
its losses are those of the same four ranks on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mps import MpsServer
from training_groups import (
    BF16_LIMIT,
    FP32_LIMIT,
    NEEDS_MEGATRON,
    Group,
    Records,
    call_script,
    largest_difference,
    tiny,
    train,
)

pytestmark = NEEDS_MEGATRON

STEPS = 50
TOKENS = 2 * 128  # of a rank
LIMITS = {"fp32": FP32_LIMIT, "bf16": BF16_LIMIT}
# A rank's tokens cross in four chunks.
HOSTS = {"nvshmem": {"MOE_EP_RANKS_PER_HOST": "2", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "128"}}


@pytest.fixture(scope="module")
def records(_mps_session: MpsServer, tmp_path_factory: Any) -> dict[tuple[str, str], Records]:
    """Of each dtype and backend: what every step reported. All train at once."""
    groups = {
        f"{dtype} {backend}": Group(
            4, {"tiny": tiny(4, dtype, backend, STEPS)}, HOSTS.get(backend, {})
        )
        for dtype in LIMITS
        for backend in ("cuda", "nvshmem")
    }
    return train(groups, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("dtype", LIMITS)
def test_losses_equal_those_of_one_host(
    records: dict[tuple[str, str], Records], dtype: str
) -> None:
    two, one = (records[f"{dtype} {backend}", "tiny"] for backend in ("nvshmem", "cuda"))
    assert two[-1]["lm_loss"] < two[0]["lm_loss"] * 2 / 3  # it learns
    assert largest_difference(two, one, STEPS) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
def test_rows_cross_once(records: dict[tuple[str, str], Records], dtype: str) -> None:
    """Two layers; dispatch and combine, forward and backward: at most one row a token in each."""
    rows = [record["border_rows"] for record in records[f"{dtype} nvshmem", "tiny"]]
    for before, after in zip([0, *rows], rows, strict=False):
        assert 0 < after - before <= 2 * 4 * TOKENS, rows


@pytest.mark.parametrize("dtype", LIMITS)
def test_memory_is_flat(records: dict[tuple[str, str], Records], dtype: str) -> None:
    held = [record["allocated_bytes"] for record in records[f"{dtype} nvshmem", "tiny"]]
    assert max(held[20:]) - held[20] < 1 << 20, held[20:]


@pytest.mark.usefixtures("mps")
def test_script(tmp_path: Path) -> None:
    """As docs/multi_node.md calls it."""
    flags = f"--device cuda --nproc 4 --backend nvshmem --steps 4 --out {tmp_path / 'run'}"
    printed = call_script(*flags.split(), MOE_EP_RANKS_PER_HOST="2")
    assert "4 ranks, EP=4" in printed and "validation loss" in printed, printed
