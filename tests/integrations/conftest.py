"""Processes that have imported a framework once; the ranks of each test are forked from them."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed_support
import megatron_layer
import pytest
import training_ranks

from moe_ep.testing import RankServer


@pytest.fixture(scope="session", params=megatron_layer.megatron_versions())
def megatron_ranks(request: pytest.FixtureRequest) -> Iterator[RankServer]:
    """Ranks that have imported megatron-core: each of the two versions in turn."""
    with RankServer(megatron_layer.import_megatron, request.param) as server:
        yield server


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[RankServer]:
    with RankServer(deepspeed_support.import_deepspeed) as server:
        yield server


@pytest.fixture(scope="session")
def training_server() -> Iterator[RankServer]:
    """Ranks that have imported what `train_mixtral --framework megatron` needs."""
    with RankServer(training_ranks.import_training) as server:
        yield server
