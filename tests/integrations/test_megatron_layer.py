"""Megatron's MoE layer on our dispatcher equals the one on Megatron's own, option by option."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_layer import compare, make_config, make_layer, megatron, run_layer

from moe_ep.testing import RankServer

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 180.0


def _pair(stock: str, **options: object) -> tuple[object, object]:
    from moe_ep.integrations import megatron as integration

    integration.install(backend="reference")
    theirs = make_layer(make_config(stock, **options))
    return make_layer(make_config("deepep", **options)), theirs


def _check_options(rank: int) -> None:
    variants = {
        "top-1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        "top-2": {},
        "top-4": {"moe_router_topk": 4},
        "bf16": {"params_dtype": torch.bfloat16},
        "drop by probability": {
            "moe_expert_capacity_factor": 0.7,
            "moe_token_drop_policy": "probs",
        },
        "drop by position": {
            "moe_expert_capacity_factor": 0.7,
            "moe_token_drop_policy": "position",
        },
        "pad to capacity": {
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
        },
        "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "shared experts": {"moe_shared_expert_intermediate_size": 24},
        "overlapped shared experts": {
            "moe_shared_expert_intermediate_size": 24,
            "moe_shared_expert_overlap": True,
        },
        "sigmoid router": {"moe_router_score_function": "sigmoid"},
    }
    with megatron():
        for number, (name, options) in enumerate(variants.items()):
            ours, stock = _pair("alltoall", **options)
            try:
                tolerance = 2e-2 if options.get("params_dtype") == torch.bfloat16 else 2e-6
                compare(ours, stock, seed=100 * number + rank, tolerance=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_options_equal_alltoall(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_options, 2, limit_s=LIMIT_S)


def _check_rows(rank: int) -> None:
    with megatron():
        ours, stock = _pair("alltoall", params_dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(9, 2, 32, generator=generator).bfloat16()
        ours.load_state_dict(stock.state_dict())
        probs, routing_map = stock.router(x)
        results = []
        for layer in (ours, stock):
            dispatcher = layer.token_dispatcher
            tokens, weights = dispatcher.dispatch_preprocess(x, routing_map, probs)
            tokens, weights = dispatcher.token_dispatch(tokens, weights)
            results.append(dispatcher.dispatch_postprocess(tokens, weights))
        (rows, counts, row_probs), (stock_rows, stock_counts, stock_probs) = results
        assert torch.equal(rows, stock_rows)
        assert torch.equal(row_probs, stock_probs)
        assert counts.dtype == torch.int64 and counts.device.type == "cpu"
        assert torch.equal(counts, stock_counts.cpu())


def test_dispatched_rows_equal_alltoall_bit_for_bit(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_rows, 2, limit_s=LIMIT_S)


def _check_tensor_parallel(rank: int, etp: int) -> None:
    with megatron(tp=2, ep=2, etp=etp):
        from megatron.core import parallel_state

        options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        options["expert_model_parallel_size"] = 2
        options["expert_tensor_parallel_size"] = etp
        # gloo can't gather the uneven rows that Megatron's alltoall gathers over expert-tensor
        # ranks.
        ours, stock = _pair("alltoall" if etp == 1 else "allgather", **options)
        assert parallel_state.get_expert_tensor_and_model_parallel_group().size() == 2 * etp
        compare(ours, stock, seed=rank, tolerance=2e-6)
        parallel = ours.token_dispatcher.ep.layout.parallel
        assert (parallel.expert, parallel.expert_tensor) == (2, etp)


@pytest.mark.parametrize("etp", [1, 2])
def test_tensor_and_sequence_parallel(megatron_ranks: RankServer, etp: int) -> None:
    megatron_ranks.run(_check_tensor_parallel, 4, etp, limit_s=LIMIT_S)


def _check_padding(rank: int) -> None:
    """Padding for quantisation: blocks of 16 rows, results as without padding."""
    with megatron():
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

        from moe_ep.integrations import megatron as integration
        from moe_ep.integrations.megatron.layout import layout_for

        integration.install(backend="reference")
        padded = make_config("deepep")
        padded.moe_router_padding_for_quantization = True
        ours, plain = make_layer(padded), make_layer(make_config("deepep"))
        compare(ours, plain, seed=rank, tolerance=1e-6)
        align = get_align_size_for_quantization(padded) or 1  # 0.19 pads quantised models only
        for recipe, rows in (("delayed", 16), ("mxfp8", 32)):
            quantised = make_config("deepep")
            quantised.moe_router_padding_for_quantization = True
            quantised.fp8, quantised.fp8_recipe = "e4m3", recipe
            assert layout_for(quantised, 2, 1, None).dispatch.row_alignment == rows
        x = torch.randn(5, 1, 32)
        probs, routing_map = ours.router(x)
        dispatcher = ours.token_dispatcher
        rows, counts, row_probs = dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
        )
        assert (counts % align == 0).all() and rows.shape[0] == counts.sum()
        used = dispatcher.handle.valid_tokens_per_expert
        for block, block_probs, n in zip(
            rows.split(counts.tolist()), row_probs.split(counts.tolist()), used, strict=True
        ):
            assert not block[n:].any() and not block_probs[n:].any()


def test_padding_for_quantization(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_padding, 2, limit_s=LIMIT_S)


def _check_unbalanced(rank: int) -> None:
    """All tokens to rank 0's experts: both ranks finish, and idle experts get zero gradients."""
    with megatron():
        ours, stock = _pair("alltoall")
        with torch.no_grad():
            bias = torch.zeros_like(stock.router.weight)
            bias[:2] = 0.0
            bias[2:] = -5.0
            stock.router.weight.copy_(bias)
        for layer in (ours, stock):
            layer.router.weight.requires_grad_(False)
        ours.load_state_dict(stock.state_dict())
        generator = torch.Generator().manual_seed(rank)
        x = torch.rand(6, 2, 32, generator=generator) + 0.1  # positive: experts 0 and 1 always win
        outputs = []
        for layer in (ours, stock):
            leaf = x.clone().requires_grad_()
            output, _ = layer(leaf)
            output.sum().backward()
            outputs.append((output.detach(), leaf.grad))
        # Outputs are below 1e-3: an absolute tolerance of the default size would see nothing.
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-8)
        received = torch.tensor([ours.token_dispatcher.ep.operations])
        dist.all_reduce(received)
        assert int(received) == 2 * 4  # dispatch, combine and their backwards on both ranks


def test_case_02_all_tokens_to_one_rank(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_unbalanced, 2, limit_s=LIMIT_S)


def _check_subclass(rank: int) -> None:
    """The subclass route patches nothing."""
    with megatron():
        from megatron.core.transformer.moe.moe_layer import MoELayer

        from moe_ep.integrations.megatron.dispatcher import MoEEPTokenDispatcher
        from moe_ep.integrations.megatron.integration import MegatronIntegration

        before = MoELayer.__init__
        integration = MegatronIntegration(backend="reference")
        ours = make_layer(make_config("allgather"), integration.layer_class())
        stock = make_layer(make_config("allgather"))
        assert isinstance(ours.token_dispatcher, MoEEPTokenDispatcher)
        assert not isinstance(stock.token_dispatcher, MoEEPTokenDispatcher)
        assert MoELayer.__init__ is before
        compare(ours, stock, seed=rank, tolerance=2e-6)
        assert len(integration.pool) == 1
        integration.destroy()
        with pytest.raises(Exception, match="after destroy"):
            run_layer(ours, seed=0)


def test_layer_class_without_patching(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_subclass, 2, limit_s=LIMIT_S)
