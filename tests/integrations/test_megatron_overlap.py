"""`overlap_moe_expert_parallel_comm` with our dispatcher: the losses and gradients without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import megatron_layer
import megatron_overlap
import pytest
import torch

from moe_ep.testing import RankServer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.timeout(240),
]


def _compare(rank: int, options: list[dict[str, Any]]) -> list[float]:
    with megatron_layer.megatron():
        from moe_ep.integrations import megatron

        megatron.install(backend="reference")
        try:
            return [
                megatron_overlap.compare_schedules(rank, torch.device("cpu"), seeds=2, **more)
                for more in options
            ]
        finally:
            megatron.uninstall()


def test_losses_and_gradients_do_not_change(megatron_ranks: RankServer) -> None:
    options = [{}, {"moe_shared_expert_intermediate_size": 64}]
    for found in megatron_ranks.run(_compare, 2, options, limit_s=200):
        assert found == [0.0, 0.0], found


def _refusal_and_restoration(rank: int) -> str:
    with megatron_layer.megatron():
        from moe_ep.integrations import megatron
        from moe_ep.integrations.megatron.integration import MegatronIntegration
        from moe_ep.integrations.megatron.overlap import InputsKept

        original = InputsKept()._original
        integration = megatron.install(backend="reference")
        device = torch.device("cpu")
        megatron_overlap.make_model(megatron_overlap.make_config("deepep", True, 2), device)
        assert InputsKept()._original is not original
        megatron.uninstall()
        assert InputsKept()._original is original
        layer_class = MegatronIntegration(integration.layout, "reference").layer_class()
        config = megatron_overlap.make_config("alltoall", True, 2)
        try:
            megatron_layer.make_layer(config, layer_class)
        except ValueError as error:
            return str(error)
    return ""


def test_patch_is_undone_and_a_layer_without_it_is_refused(megatron_ranks: RankServer) -> None:
    for told in megatron_ranks.run(_refusal_and_restoration, 2, limit_s=120):
        assert "overlap_moe_expert_parallel_comm needs install()" in told, told
