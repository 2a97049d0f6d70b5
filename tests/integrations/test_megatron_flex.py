"""Megatron's own flex dispatcher, backend "deepep", on our deep_ep and a CPU, against alltoall."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_layer import (
    compare,
    import_megatron,
    make_config,
    make_layer,
    megatron,
    megatron_versions,
)

import moe_ep.deep_ep
from moe_ep.testing import RankServer

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 180.0


def _install_first(path: str) -> None:
    """Our deep_ep before megatron-core is imported: that is when Megatron looks for one."""
    os.environ["MOE_EP_BACKEND"] = "reference"
    moe_ep.deep_ep.install()
    import_megatron(path)


@pytest.fixture(scope="module", params=megatron_versions())
def ranks(request: pytest.FixtureRequest) -> Iterator[RankServer]:
    with RankServer(_install_first, request.param) as server:
        yield server


def _flex(**options: Any) -> Any:
    return make_config("flex", moe_flex_dispatcher_backend="deepep", **options)


def _check_options(rank: int) -> None:
    variants: dict[str, dict[str, Any]] = {
        "top-1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        "top-2": {},
        "top-4": {"moe_router_topk": 4},
        "bf16": {"params_dtype": torch.bfloat16},
        "drop": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "probs"},
        "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "shared experts": {"moe_shared_expert_intermediate_size": 24},
    }
    with megatron():
        from megatron.core.transformer.moe import fused_a2a
        from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

        assert fused_a2a.Buffer is moe_ep.Buffer and not fused_a2a.HAVE_HYBRIDEP
        for number, (name, options) in enumerate(variants.items()):
            options["moe_router_dtype"] = "fp32"
            ours, stock = (
                make_layer(_flex(**options)),
                make_layer(make_config("alltoall", **options)),
            )
            assert type(ours.token_dispatcher) is MoEFlexTokenDispatcher
            try:
                tolerance = 2e-2 if options.get("params_dtype") == torch.bfloat16 else 2e-6
                compare(ours, stock, seed=100 * number + rank, tolerance=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
        assert fused_a2a._buffer.group_size == 2  # one Buffer for all the layers


def test_flex_equals_alltoall(ranks: RankServer) -> None:
    ranks.run(_check_options, 2, limit_s=LIMIT_S)


def _check_interleaved(rank: int) -> None:
    """A second layer with wider rows makes Megatron replace its Buffer before the first layer's
    backward; handles of the old one go on."""
    with megatron():
        from megatron.core import parallel_state
        from megatron.core.transformer.moe import fused_a2a

        group = parallel_state.get_expert_model_parallel_group()
        generator = torch.Generator().manual_seed(rank)
        kept = []
        for hidden in (32, 64, 48):
            x = torch.randn(7, hidden, generator=generator, requires_grad=True)
            idx = torch.rand(7, 8, generator=generator).argsort(1)[:, :3]
            probs = torch.rand(7, 3, generator=generator, requires_grad=True)
            rows, local, row_probs, counts, handle = fused_a2a.fused_dispatch(
                x, idx, probs, 8, group, async_finish=True, allocate_on_comm_stream=True
            )
            assert counts.tolist() == [int((local == e).sum()) for e in range(4)]
            scaled = rows * (row_probs * (local >= 0)).sum(1, keepdim=True)
            out, _ = fused_a2a.fused_combine(
                scaled, group, handle, async_finish=True, allocate_on_comm_stream=True
            )
            grad = torch.randn(out.shape, generator=generator)
            kept.append((x, probs, out, grad, fused_a2a._buffer))
        assert kept[0][4] is not kept[1][4] and kept[1][4] is kept[2][4]
        for x, probs, out, grad, _ in (kept[1], kept[0], kept[2]):
            out.backward(grad)
            total = probs.detach().sum(1, keepdim=True)
            torch.testing.assert_close(out.detach(), x.detach() * total)
            torch.testing.assert_close(x.grad, grad * total)
            per_slot = (x.detach() * grad).sum(1, keepdim=True).expand(-1, 3)
            torch.testing.assert_close(probs.grad, per_slot)


def test_fused_functions_forward_and_backward(ranks: RankServer) -> None:
    ranks.run(_check_interleaved, 2, limit_s=LIMIT_S)


def _check_too_late(rank: int) -> str:
    from megatron.core.transformer.moe import fused_a2a

    assert not fused_a2a.HAVE_DEEP_EP
    with pytest.raises(RuntimeError, match="before the first import of megatron") as caught:
        moe_ep.deep_ep.install()
    assert "deep_ep" not in sys.modules
    return str(caught.value)


def test_install_after_megatron_is_an_error(megatron_ranks: RankServer) -> None:
    (message,) = megatron_ranks.run(_check_too_late, 1, limit_s=LIMIT_S)
    assert "fused_a2a was imported before" in message
