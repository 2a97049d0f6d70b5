"""The cases of the field on the GPU, each a check that all ranks of a group run together."""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_layer import Target, check_layer, run_layer
from reference_model import DTYPES, Problem, padding_rows
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ep import BackendUnavailableError, EPLayout, ExpertParallel, PeerError
from moe_ep.pool import ExpertParallelPool
from moe_ep.quant import dequantize_fp8, quantize_fp8


def run_checks(rank: int, names: list[str], target: Target) -> dict[str, str | None]:
    """The checks in turn; of each, None or the traceback of its failure on this rank."""
    failures: dict[str, str | None] = {}
    for name in names:
        try:
            CHECKS[name](target)
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc()
        dist.barrier()
    return failures


def case_01_uneven_tokens(target: Target) -> None:
    tokens = [0, 5, 3, 0]
    variants: list[dict[str, Any]] = [
        {},
        {"dispatch__exact_combine": True},
        {"dispatch__row_alignment": 8},
        {"tokens_per_rank": 8, "dispatch__capacity": 64},
        {"dispatch__dtype": "bf16"},
        {"dispatch__dtype": "fp16"},
        {"dispatch__dtype": "fp8_e4m3"},
        {"dispatch__dtype": "fp8_e4m3", "dispatch__scale": "power_of_two"},
    ]
    for changes in variants:
        ep = ExpertParallel(target.layout(**changes))
        problem = Problem(ep.layout, 1, tokens, unused=0.1)
        dtype = ep.layout.dispatch.dtype
        if dtype == "fp32":
            check_layer(target, ep, problem)
        else:
            answer = run_layer(target, ep, problem)
            assert all(v.isfinite().all() for v in vars(answer).values()), changes
        x = problem.x[ep.rank].to(target.device, DTYPES[dtype])
        d = ep.dispatch(x, problem.idx[ep.rank].to(target.device))
        out = ep.combine(d.tokens, d.handle)
        assert out.shape == (tokens[ep.rank], 128) and out.dtype == x.dtype
        ep.destroy()


def case_02_all_tokens_to_one_rank(target: Target) -> None:
    """And case 3: an expert that got no token has a zero gradient, not None."""
    ep = ExpertParallel(target.layout())
    for tokens in ([7, 4], [0, 6], [1, 0]):
        problem = Problem(ep.layout, 2, tokens, only_experts=[0, 1])
        answer = check_layer(target, ep, problem)
        received = ep.dispatch(
            problem.x[ep.rank].float().to(target.device), problem.idx[ep.rank].to(target.device)
        )
        assert received.tokens.shape == ((0 if ep.rank else 2 * sum(tokens)), 128)
        assert ep.rank == 0 or not (answer.up.any() or answer.down.any())
    ep.destroy()


def case_18_index_types(target: Target) -> None:
    ep = ExpertParallel(target.layout())
    problem = Problem(ep.layout, 18, [33, 20], unused=0.2)
    x = problem.x[ep.rank].float().to(target.device)
    w = problem.weights[ep.rank].float().to(target.device)
    idx = problem.idx[ep.rank].to(target.device)
    results = []
    for dtype in (torch.int64, torch.int32):
        d = ep.dispatch(x, idx.to(dtype), w)
        results.append((d.tokens, d.probs, ep.combine(d.tokens, d.handle, d.probs)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    for dtype in (torch.int16, torch.uint8, torch.float32):
        for bad in (0, 1):
            try:
                ep.dispatch(x, idx.to(dtype) if ep.rank == bad else idx, w)
            except TypeError as error:
                assert ep.rank == bad and str(dtype) in str(error), error
            except PeerError as error:
                assert ep.rank != bad and f"rank {bad}" in str(error), error
            else:
                raise AssertionError(f"{dtype} indices on rank {bad} went unnoticed")
    check_layer(target, ep, problem)
    ep.destroy()


def case_22_poisoned_memory(target: Target) -> None:
    """NaN in all memory that is handed out, in padding rows, and in the slots ranks write to."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN from here on
    try:
        assert torch.empty(4, device=target.device).isnan().all()
        for changes in ({}, {"dispatch__row_alignment": 8}, {"dispatch__exact_combine": True}):
            ep = ExpertParallel(target.layout(**changes))
            nan = torch.full((64, 128), torch.nan, device=target.device)
            routes = (
                torch.arange(128, device=target.device).view(64, 2) % ep.layout.model.num_experts
            )
            d = ep.dispatch(nan, routes)
            assert ep.combine(d.tokens, d.handle).isnan().all()
            for tokens, experts in (([7, 4], None), ([3, 0], [1, 2]), ([30, 33], None)):
                problem = Problem(ep.layout, 22, tokens, unused=0.2, only_experts=experts)
                for poison_padding in (False, True):
                    target.poison()
                    check_layer(target, ep, problem, poison_padding=poison_padding)
                _check_padding_gradients(target, ep, problem)
            ep.destroy()
    finally:
        torch.use_deterministic_algorithms(False)


def _check_padding_gradients(target: Target, ep: ExpertParallel, problem: Problem) -> None:
    x = problem.x[ep.rank].float().to(target.device)
    w = problem.weights[ep.rank].float().to(target.device)
    d = ep.dispatch(x, problem.idx[ep.rank].to(target.device), w)
    assert d.probs is not None
    padding = padding_rows(d.handle).to(target.device)
    assert not d.tokens[padding].any() and not d.probs[padding].any()
    rows = torch.where(padding.unsqueeze(1), torch.nan, d.tokens).requires_grad_()
    weights = torch.where(padding, torch.nan, d.probs).requires_grad_()
    ep.combine(rows, d.handle, weights).sum().backward()
    for grad in (rows.grad, weights.grad):
        assert grad is not None and grad.isfinite().all()
        assert not grad[padding].any()


def case_26_sum_in_fp32(target: Target) -> None:
    """256 + 1 + 1 + 1 is 260 in bf16; one addition after the other would stay at 256."""
    experts = dist.get_world_size()
    for exact in (False, True):
        ep = ExpertParallel(
            target.layout(
                model__num_experts=experts,
                model__top_k=experts,
                dispatch__dtype="bf16",
                dispatch__exact_combine=exact,
            )
        )
        for shift in range(experts):  # whichever rank gives the large share
            x = torch.ones(3, 128, device=target.device, dtype=torch.bfloat16)
            idx = torch.arange(experts, device=target.device).expand(3, -1).roll(shift, 1)
            d = ep.dispatch(x, idx.contiguous())
            share = 256.0 if ep.rank == shift else 1.0
            out = ep.combine(torch.full_like(d.tokens, share), d.handle)
            assert (out == 260).all(), (exact, shift, out.unique().tolist())
        ep.destroy()


def case_30_fp8(target: Target) -> None:
    for scale in ("fp32", "power_of_two"):
        ep = ExpertParallel(
            target.layout(
                model__hidden=256,
                dispatch__dtype="fp8_e4m3",
                dispatch__scale=scale,
                dispatch__row_alignment=4,
            )
        )
        problem = Problem(ep.layout, 30, [16, 9])
        problem.x[0][2] = 0
        problem.x[1][4] *= 1e-30
        problem.x[1][5] *= 1e30
        _check_fp8(target, ep, problem)
        ep.destroy()


def _check_fp8(target: Target, ep: ExpertParallel, problem: Problem) -> None:
    x, idx = problem.x[ep.rank], problem.idx[ep.rank].to(target.device)
    scale = ep.layout.dispatch.scale
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        d = ep.dispatch(given.to(target.device), idx, dequantize=False)
        rows = d.handle.num_rows
        assert d.tokens.dtype == torch.float8_e4m3fn and d.tokens.shape == (rows, 256)
        assert d.scales is not None and d.scales.dtype == torch.float32
        assert d.scales.shape == (rows, 2)
        if rows:
            assert d.tokens.stride() == (256, 1) and d.scales.stride() == (2, 1)
        used = d.scales[~padding_rows(d.handle).to(target.device)]
        assert (used > 0).all()
        if scale == "power_of_two":
            assert (torch.frexp(used).mantissa == 0.5).all()
        wide = ep.dispatch(given.to(target.device), handle=d.handle)
        decoded = dequantize_fp8(d.tokens, d.scales, dtype)
        assert torch.equal(decoded, wide.tokens)
        assert not wide.tokens[padding_rows(d.handle).to(target.device)].any()
        # Each token sent home again: what its row became, within the bound of the quantisation.
        one = torch.where(torch.arange(2, device=target.device) == 0, idx, -1)
        alone = ep.dispatch(given.float().to(target.device), one)
        home = ep.combine(alone.tokens, alone.handle).cpu().double()
        scales = quantize_fp8(given.float(), scale)[1].double().repeat_interleave(128, 1)
        bound = given.double().abs() / 16 + scales * 2.0**-10
        assert ((home - given.double()).abs() <= bound).all()
        assert home.any()
        assert ep.rank != 0 or not home[2].any()


def case_42_layers_share_buffers(target: Target) -> None:
    """48 layers, two models in turn; the device holds the buffers of two objects, then of none."""
    layouts = [target.layout(model__hidden=h, tokens_per_rank=16384) for h in (128, 256)]
    warm = ExpertParallel(layouts[1])
    check_layer(target, warm, Problem(layouts[1], 1, [5, 3]))
    warm.destroy()
    before = target.used_bytes()
    pool = ExpertParallelPool()
    group = dist.group.WORLD
    assert group is not None
    layers = [pool.get(layout, group) for _ in range(24) for layout in layouts]
    assert len(pool) == 2 and len({id(layer) for layer in layers}) == 2
    held = target.used_bytes() - before
    if target.device != "cpu":
        rank_bytes = [_symmetric_bytes(layout) for layout in layouts]
        assert held >= dist.get_world_size() * min(rank_bytes), "the measure sees no buffer at all"
        assert held < 2 * dist.get_world_size() * sum(rank_bytes), (held, rank_bytes)
    for number in range(24):
        for model, layer in enumerate((layers[2 * number], layers[2 * number + 1])):
            check_layer(target, layer, Problem(layouts[model], 100 + number, [6, 9], unused=0.1))
    del layer, layers
    pool.destroy()
    gc.collect()
    left = target.used_bytes() - before
    assert left < 4 << 20, f"{left} bytes are left after destroy"


def _symmetric_bytes(layout: EPLayout) -> int:
    """Two staging slots and K combine slots of one rank; signals and lists are small beside."""
    assert layout.tokens_per_rank is not None
    return layout.tokens_per_rank * layout.model.hidden * 4 * (2 + layout.model.top_k)


def case_43_memory_stays_flat(target: Target) -> None:
    """200 forwards without gradient and 50 recomputed steps: no live handle, the same memory."""
    ep = ExpertParallel(target.layout(model__hidden=512))
    problem = Problem(ep.layout, 43, [300, 211])
    x = problem.x[ep.rank].float().to(target.device)
    idx = problem.idx[ep.rank].to(target.device)
    w = problem.weights[ep.rank].float().to(target.device)

    def layer(rows: Tensor) -> Tensor:
        d = ep.dispatch(rows, idx, w)
        assert d.probs is not None
        return ep.combine(torch.tanh(d.tokens) * d.probs[:, None], d.handle)

    def run(forwards: int, steps: int) -> tuple[int, int]:
        with torch.no_grad():
            for _ in range(forwards):
                layer(x)
        for step in range(steps):
            leaf = x.clone().requires_grad_()
            checkpoint(layer, leaf, use_reentrant=step % 2 == 0).sum().backward()
        gc.collect()
        allocated = torch.cuda.memory_allocated() if target.device != "cpu" else 0
        return allocated, target.used_bytes()

    first = run(10, 4)
    second = run(200, 50)
    assert ep.live_handles == 0
    assert second[0] == first[0], f"torch holds {second[0] - first[0]} bytes more"
    assert second[1] - first[1] < 4 << 20, f"the device holds {second[1] - first[1]} bytes more"
    ep.destroy()


def case_49_no_kernel_for_the_gpu(target: Target) -> None:
    """Kernels for later GPUs only: named, it says what it has and what is needed; auto goes on."""
    core: Any = importlib.import_module("moe_ep._C")
    compiled, core.ARCHITECTURES = core.ARCHITECTURES, ["99.0"]
    major, minor = torch.cuda.get_device_capability()
    try:
        with pytest.raises(BackendUnavailableError) as told:
            ExpertParallel(target.layout())
        for part in ("99.0", f"{major}.{minor}", f"MOE_EP_CUDA_ARCHS={major}.{minor}"):
            assert part in str(told.value), told.value
        ep = ExpertParallel(target.layout(backend="auto"))
        assert ep.backend.name == "reference"
        check_layer(target, ep, Problem(ep.layout, 49, [3, 2]))
        ep.destroy()
    finally:
        core.ARCHITECTURES = compiled


def case_53_no_nccl(target: Target) -> None:
    """Set-up and use on one GPU with gloo's send and receive only."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a collective of torch.distributed was called")

    names = "all_reduce all_gather all_gather_object all_gather_into_tensor barrier broadcast "
    names += "broadcast_object_list all_to_all all_to_all_single new_group gather scatter "
    names += "reduce_scatter monitored_barrier init_process_group ProcessGroupNCCL"
    modules = (dist, dist.distributed_c10d)
    saved = [(m, n, getattr(m, n)) for m in modules for n in names.split() if hasattr(m, n)]
    for module, name, _ in saved:
        setattr(module, name, refuse)
    try:
        ep = ExpertParallel(target.layout())
        check_layer(target, ep, Problem(ep.layout, 53, [3, 2, 4, 1][: dist.get_world_size()]))
        backend = ep.group._get_backend(torch.device(target.device))
        assert backend.name() == "gloo" and ep.backend.name == target.backend
        ep.destroy()
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


CHECKS: dict[str, Callable[[Target], None]] = {
    check.__name__: check
    for check in (
        case_01_uneven_tokens,
        case_02_all_tokens_to_one_rank,
        case_18_index_types,
        case_22_poisoned_memory,
        case_26_sum_in_fp32,
        case_30_fp8,
        case_42_layers_share_buffers,
        case_43_memory_stays_flat,
        case_49_no_kernel_for_the_gpu,
        case_53_no_nccl,
    )
}
