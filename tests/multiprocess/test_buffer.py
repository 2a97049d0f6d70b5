"""Buffer against a plain computation on gloo and the CPU, and how it is made."""

from __future__ import annotations

import gc

import buffer_cases
import pytest
import torch
import torch.distributed as dist
from buffer_cases import Case, check_case, check_cases, common_cases, in_environment

from moe_ep import Buffer
from moe_ep.testing import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equals_plain_computation(num_ranks: int) -> None:
    run_ranks(in_environment, num_ranks, check_cases, common_cases(), limit_s=120)


def _order(rank: int) -> None:
    """Handles held together and used in another order, also of a Buffer that was replaced."""
    narrow, wide = Case(hidden=64), Case(hidden=256, tokens=(3, 8))
    world = dist.group.WORLD
    buffer = Buffer(world)
    held = []
    for number, case in enumerate((narrow, wide, narrow, wide)):
        inputs = [buffer_cases.make_inputs(case, number, r, 2) for r in range(2)]
        mine = inputs[rank]
        layout = buffer.get_dispatch_layout(mine.idx, 8)
        out = buffer.dispatch(
            mine.x,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        held.append((mine.x, layout[3], out[0], out[4]))
        if number == 1:
            del buffer
            gc.collect()
            buffer = Buffer(world)
    for number in (2, 0, 3, 1):
        x, in_rank, recv_x, handle = held[number]
        total = buffer.combine(recv_x, handle)[0]
        assert torch.equal(total.float(), (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    backends = [handle.plan.owner._backends for _, _, _, handle in held]
    assert backends[0] is not backends[2] and all(backends)
    del held, handle
    gc.collect()
    assert not backends[0] and backends[2]  # the first Buffer's memory went with its last handle


def test_handles_in_any_order() -> None:
    run_ranks(in_environment, 2, _order)


def _compiled(rank: int) -> None:
    """torch.compile ends a graph before a verb and goes on after it."""
    hint = Buffer.get_low_latency_rdma_size_hint(8, 128, 1, 4)
    buffer = Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True)

    def throughput(x: torch.Tensor) -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        rows, _, _, _, handle, _ = buffer.dispatch(
            2 * x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return buffer.combine(rows + 1, handle)[0] - 1

    def low_latency(x: torch.Tensor) -> torch.Tensor:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(2 * x, idx, 8, 4, use_fp8=False)
        return buffer.low_latency_combine(rows + 1, idx, torch.ones(5, 1), handle)[0] - 1

    x, idx = torch.arange(5.0).bfloat16().unsqueeze(1).repeat(1, 128), torch.zeros(5, 1).long()
    for step in (throughput, low_latency):
        compiled = torch.compile(step, backend="eager")
        assert torch.equal(compiled(x), 2 * x)
        assert torch.equal(compiled(x + 1), 2 * x + 2)


def test_verbs_in_compiled_code() -> None:
    run_ranks(in_environment, 1, _compiled)


def _construction(rank: int) -> None:
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="group"):
        Buffer(None)
    buffer = Buffer(
        world,
        1 << 12,
        64,
        False,
        num_qps_per_rank=4,
        allow_nvlink_for_low_latency_mode=False,
        allow_mnnvl=True,
        use_fabric=True,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, 2, world)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 12, 64)
    local = buffer.get_local_buffer_tensor(torch.bfloat16)
    assert local.shape == (2048,) and local.dtype == torch.bfloat16
    local.fill_(1)
    part = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), offset=16)
    assert part.shape == (4, 8) and part.data_ptr() == local.data_ptr() + 32 and (part == 1).all()
    assert buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True).shape == (8,)
    assert buffer.get_local_buffer_tensor(torch.float32, (3, 2)).shape == (3, 2)
    for size, offset, words in (
        ((1025,), 0, "4096 bytes"),
        ((), -3, "offset=-3"),
        ((-1,), 0, "-1"),
    ):
        with pytest.raises(ValueError, match=words):
            buffer.get_local_buffer_tensor(torch.float32, size, offset)
    with pytest.raises(TypeError, match="float"):
        buffer.get_local_buffer_tensor(torch.float32, (2.5,))
    check_case(buffer, Case(), 0)
    backends = buffer._exchange._backends
    del buffer
    gc.collect()
    assert len(backends) == 2  # explicitly_destroy


def test_construction() -> None:
    run_ranks(in_environment, 2, _construction)
