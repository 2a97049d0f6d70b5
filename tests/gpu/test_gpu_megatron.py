"""Megatron-core on backend cuda: its layers' rows and gradients, and its overlapped schedule."""

from __future__ import annotations

import megatron_scenarios
import pytest
from mps import MpsServer
from training_groups import NEEDS_MEGATRON

from moe_ep.testing import run_ranks

pytestmark = NEEDS_MEGATRON


@pytest.fixture(scope="module")
def found(_mps_session: MpsServer) -> dict[str, float]:
    """Largest differences of any rank, by check."""
    ranks = run_ranks(megatron_scenarios.check_all, 2, limit_s=150)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


# Of the largest value. Two numbers are added with one rounding by both. Of four, Megatron's sum
# rounds three times, ours twice; each by 2^-9 at most.
ROUNDING = {2: 0.0, 4: 5 * 2.0**-9}


@pytest.mark.parametrize("top_k", [2, 4])
def test_layer_equals_megatrons_alltoall(found: dict[str, float], top_k: int) -> None:
    """The rows themselves are compared bit for bit inside."""
    assert found[f"layer, top {top_k}"] <= ROUNDING[top_k], found


@pytest.mark.parametrize("name", ["overlap", "overlap, shared expert"])
def test_overlapped_micro_batches_change_nothing(found: dict[str, float], name: str) -> None:
    assert found[name] == 0, found
