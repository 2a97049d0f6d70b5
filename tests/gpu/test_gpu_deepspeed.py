"""DeepSpeed's MoE layer on backend cuda equals the same layer on backend reference."""

from __future__ import annotations

import importlib.util

import deepspeed_scenarios
import pytest

from moe_ep.testing import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

LIMITS = {"torch.float32": 2e-6, "torch.bfloat16": 2.0**-7}


def test_native_layer_equals_reference() -> None:
    for found in run_ranks(deepspeed_scenarios.compare_backends, 2, limit_s=150):
        assert len(found) == 6
        for what, difference in found.items():
            assert difference <= LIMITS[what.split(",")[0]], found
