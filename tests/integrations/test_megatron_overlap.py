"""`overlap_moe_expert_parallel_comm` with our dispatcher: the losses and gradients without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import megatron_layer
import megatron_overlap
import pytest
import torch

from moe_ep.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.timeout(240),
]


def _compare(rank: int, path: str, options: list[dict[str, Any]]) -> list[float]:
    with megatron_layer.megatron(path):
        from moe_ep.integrations import megatron

        megatron.install(backend="reference")
        try:
            return [
                megatron_overlap.compare_schedules(rank, torch.device("cpu"), seeds=2, **more)
                for more in options
            ]
        finally:
            megatron.uninstall()


@pytest.mark.parametrize("path", megatron_layer.megatron_versions())
def test_losses_and_gradients_do_not_change(path: str) -> None:
    options = [{}, {"moe_shared_expert_intermediate_size": 64}]
    for found in run_ranks(_compare, 2, path, options, limit_s=200):
        assert found == [0.0, 0.0], found


def _refusal_and_restoration(rank: int, path: str) -> str:
    with megatron_layer.megatron(path):
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


@pytest.mark.parametrize("path", megatron_layer.megatron_versions())
def test_patch_is_undone_and_a_layer_without_it_is_refused(path: str) -> None:
    for told in run_ranks(_refusal_and_restoration, 2, path, limit_s=120):
        assert "overlap_moe_expert_parallel_comm needs install()" in told, told
