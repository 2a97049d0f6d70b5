"""Cases from the field through a converted DeepSpeed layer, against a dense reference."""

import gc

import pytest
import torch
import torch.distributed as dist
from deepspeed_support import (
    EXPERTS,
    HIDDEN,
    Dense,
    Model,
    batch,
    check_against_dense,
    config,
    engine_for,
    moe_layer,
    start,
    tokens_of,
)
from torch import nn

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(150)


def _only_experts(layer: nn.Module, favoured: list[int]) -> None:
    """Makes the gate choose these experts for every token whose first value is positive."""
    weight = layer.deepspeed_moe.gate.wg.weight
    with torch.no_grad():
        weight.mul_(0.01)
        weight[:, 0] = -5.0
        for place, number in enumerate(favoured):
            weight[number, 0] = 5.0 - place


def _one_sided(rank: int) -> None:
    start()
    layer = moe_layer(2, rank, drop_tokens=False)
    _only_experts(layer, [0, 1])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    x = tokens_of(rank, 6).requires_grad_()
    with torch.no_grad():
        x[:, 0] = 1.0
    before = [p.detach().clone() for p in layer.deepspeed_moe.experts.parameters()]
    output, aux_loss, exp_counts = layer(x)
    assert exp_counts.tolist() == [6, 6, 0, 0]
    (output.square().sum() + aux_loss).backward()
    reference = Dense(layer)
    mirror = x.detach().clone().requires_grad_()
    expected, _ = reference(mirror)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    expected.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    optimizer.step()
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {1} and len(optimizer.state) == len(list(layer.parameters()))
    for old, new in zip(before, layer.deepspeed_moe.experts.parameters(), strict=True):
        assert new.grad is not None
        assert bool(new.grad.any()) == (rank == 0), "rank 1's experts got no token"
        assert not torch.equal(old, new) or rank == 1


def test_cases_02_and_03_all_tokens_to_one_rank(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_one_sided, 2)


def _uneven(rank: int) -> None:
    start()
    for drop in (False, True):
        for top_k in (1, 2):
            layer = moe_layer(
                2, rank, k=top_k, drop_tokens=drop, capacity_factor=0.5,
                eval_capacity_factor=0.3, min_capacity=1,
            )  # fmt: skip
            for counts in ([7, 4], [0, 5], [3, 0], [0, 0], [64, 1]):
                check_against_dense(layer.train(), counts)
                check_against_dense(layer.eval(), counts)
    # Fewer tokens than the smallest capacity, which stock DeepSpeed refuses for top-1.
    check_against_dense(moe_layer(2, rank, k=1, min_capacity=4), [2, 9])


def test_cases_04_and_31_uneven_tokens(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_uneven, 2)


def _four_ranks(rank: int) -> None:
    start()
    layer = moe_layer(4, rank, drop_tokens=False)
    check_against_dense(layer, [0, 5, 3, 0])
    layer = moe_layer(2, rank, experts=6, drop_tokens=False)  # two groups of two ranks
    check_two_groups = [4, 1, 0, 3]
    half = check_two_groups[rank // 2 * 2 : rank // 2 * 2 + 2]
    x = tokens_of(rank, half[rank % 2])
    expected, _ = Dense(layer, 6)(x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-6, atol=2e-6)


def test_case_01_four_ranks_and_two_groups(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_four_ranks, 4)


def _nan_filled(rank: int) -> None:
    start()
    torch.use_deterministic_algorithms(True)  # and with it, torch.empty gives NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    check_against_dense(moe_layer(2, rank, drop_tokens=True, capacity_factor=0.5), [9, 4])


def test_case_22_buffers_of_nan(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_nan_filled, 2)


def _bf16(rank: int) -> None:
    start()
    engine = engine_for(Model(2, rank), config(zero=2, bf16=True))
    gate = engine.module.moe.deepspeed_moe.gate
    seen = []
    decided = gate.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x, labels = batch(rank, 0, 16, torch.bfloat16)
    loss = engine(x, labels)
    engine.backward(loss)
    engine.step()
    decided.remove()
    floats = [part for part in seen[0] if torch.is_tensor(part) and part.is_floating_point()]
    assert floats and all(part.dtype == torch.float32 for part in floats)
    # A router that the user keeps in fp32 by hand.
    layer = moe_layer(2, rank).bfloat16()
    layer.deepspeed_moe.gate.float()
    output, _, _ = layer(tokens_of(rank, 8).bfloat16())
    assert output.dtype == torch.bfloat16
    assert layer.deepspeed_moe.gate.wg.weight.dtype == torch.float32
    # Autocast: rows in fp32, experts in bf16, the result in what the experts give.
    layer = moe_layer(2, rank)
    with torch.autocast("cpu", torch.bfloat16):
        output, _, _ = layer(tokens_of(rank, 8))
    assert output.dtype == torch.bfloat16


def test_case_33_router_in_fp32(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_bf16, 2)


def _rows_moved(rank: int) -> tuple[int, int, int]:
    start()
    layer = moe_layer(2, rank, capacity_factor=2.0, drop_tokens=True)
    _only_experts(layer, [0, 3])
    x = tokens_of(rank, 256)
    capacity = 256 * 2 * 2 // EXPERTS  # of stock DeepSpeed: top-k * factor * T / E
    layer(x)
    chosen = (Dense(layer).decide(x)[0] > 0).sum()
    dist.all_reduce(chosen)
    moved = torch.tensor(layer.deepspeed_moe.moe_ep.conversion.rows_received)
    dist.all_reduce(moved)
    return int(moved), int(chosen), 2 * EXPERTS * capacity


def test_only_routed_rows_are_moved(deepspeed_ranks: RankServer) -> None:
    moved, routed, stock = deepspeed_ranks.run(_rows_moved, 2)[0]
    print(f"rows moved {moved}, routed {routed}; stock DeepSpeed moves {stock}")
    assert moved == routed <= stock // 2


def _no_leak(rank: int) -> None:
    start()
    from torch.utils.checkpoint import checkpoint

    layer = moe_layer(2, rank, drop_tokens=False)
    conversion = layer.deepspeed_moe.moe_ep.conversion
    x = tokens_of(rank, 16)

    def living() -> int:
        gc.collect()
        return sum(torch.is_tensor(thing) for thing in gc.get_objects())

    def forwards(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                layer(x)

    def recomputed(count: int) -> None:
        for number in range(count):
            leaf = x.clone().requires_grad_()
            out = checkpoint(lambda t: layer(t)[0], leaf, use_reentrant=bool(number % 2))
            out.sum().backward()
        layer.zero_grad()

    forwards(2)
    recomputed(2)
    before = living()
    forwards(200)
    recomputed(50)
    assert living() == before
    (ep,) = conversion.pool._members.values()
    assert ep.live_handles == 0
    conversion.destroy()
    conversion.destroy()
    assert len(conversion.pool) == 0
    with pytest.raises(RuntimeError, match="after destroy"):
        layer(x)


def test_case_43_nothing_is_kept(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_no_leak, 2, limit_s=100)


def _shared(rank: int) -> None:
    start()
    from deepspeed.moe.layer import MoE
    from deepspeed_support import expert, quiet

    from moe_ep.integrations.deepspeed import convert

    with quiet():
        layers = [MoE(HIDDEN, expert(), num_experts=4, ep_size=2, k=1) for _ in range(6)]
        layers += [MoE(HIDDEN, expert(), num_experts=6, ep_size=2, k=1)]
        model = nn.ModuleList(layers)
        for layer in layers:
            layer.set_deepspeed_parallelism()
    conversion = convert(model)
    assert len(conversion.layers) == 7 and len(conversion.pool) == 2
    conversion.restore()
    assert all(type(layer.deepspeed_moe).__name__ == "MOELayer" for layer in layers)


def test_case_42_layers_of_one_shape_share(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_shared, 2)
