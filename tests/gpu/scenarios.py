"""What the ranks of a GPU test do. Every function runs on all ranks of one group."""

from __future__ import annotations

import importlib
import os
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from expected import (
    World,
    expected_combine,
    expected_dispatch,
    expected_values,
    gather,
    gather_world,
    relative_error,
)
from torch import Tensor

from moe_ep import EPLayout, ExpertParallel
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel
from moe_ep.backends.cuda import CudaBackend
from moe_ep.backends.cuda_plan import CudaPlan
from moe_ep.errors import CapacityError, OrderError
from moe_ep.quant import dequantize_fp8, quantize_fp8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {"bf16": 8e-3, "fp16": 1e-3, "fp32": 1e-6}
_CHANNELS = [1]
TESTED_BACKEND = "GPU_TESTED_BACKEND"  # set in the processes of the ranks


@dataclass(frozen=True)
class Case:
    """One exchange. tokens: of each rank, cyclically. routing: see `route`."""

    tokens: tuple[int, ...] = (64, 33)
    hidden: int = 128
    local: int = 4
    top_k: int = 2
    dtype: str = "bf16"
    routing: str = "random"
    alignment: int = 1
    num_sms: int = 8
    fp8_scale: str | None = None
    exact: bool = False
    idx_dtype: str = "int64"
    repeats: int = 2
    tokens_per_rank: int | None = None
    capacity: int | None = None
    timeout_s: float = 30.0

    def call(self) -> Call:
        """A call that waits for peers as long as the case allows."""
        return call(timeout_s=self.timeout_s)


def make_layout(case: Case) -> EPLayout:
    size = dist.get_world_size()
    return EPLayout(
        model={"hidden": case.hidden, "num_experts": case.local * size, "top_k": case.top_k},
        parallel={"expert": size},
        tokens_per_rank=case.tokens_per_rank,
        dispatch={
            "dtype": "fp8_e4m3" if case.fp8_scale else case.dtype,
            "row_alignment": case.alignment,
            "num_sms": case.num_sms,
            "capacity": case.capacity,
            "exact_combine": case.exact,
        },
        timeouts={"first_s": case.timeout_s, "steady_s": case.timeout_s},
    )


def make_backend(case: Case) -> CudaBackend:
    layout = make_layout(case)
    _CHANNELS[0] += 1
    group = dist.group.WORLD
    backend: CudaBackend = backend_class()(layout, group, Channel(group, _CHANNELS[0]))
    return backend


def backend_name() -> str:
    """Of the backend under test: "cuda" unless internode_scenarios.py has chosen the other."""
    return os.environ.get(TESTED_BACKEND, "cuda")


def backend_class() -> Any:
    if backend_name() == "cuda":
        return CudaBackend
    return importlib.import_module("moe_ep.backends.nvshmem").NvshmemBackend


def route(case: Case, num_tokens: int, generator: torch.Generator) -> Tensor:
    """[T, K] expert ids over the whole group."""
    experts = case.local * dist.get_world_size()
    shape = (num_tokens, case.top_k)
    if case.routing == "one_expert":
        return torch.zeros(shape, dtype=torch.int64)
    if case.routing == "first_rank":
        return torch.randint(0, case.local, shape, generator=generator)
    if case.routing == "duplicates":
        return torch.randint(0, experts, (num_tokens, 1), generator=generator).expand(shape)
    scores = torch.rand(num_tokens, experts, generator=generator)
    if case.routing == "skewed":
        scores += torch.linspace(0, 1.5, experts)
    idx = scores.argsort(1)[:, : case.top_k]
    if idx.shape[1] < case.top_k:  # more slots than experts
        idx = torch.cat([idx, torch.randint(0, experts, shape, generator=generator)], 1)
        idx = idx[:, : case.top_k]
    if case.routing == "unused":
        idx = torch.where(torch.rand(shape, generator=generator) < 0.4, -1, idx)
    return idx.contiguous()


def make_inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens = case.tokens[rank % len(case.tokens)]
    x = torch.randn(num_tokens, case.hidden, generator=generator).to(DTYPES[case.dtype])
    idx = route(case, num_tokens, generator).to(getattr(torch, case.idx_dtype))
    probs = torch.rand(num_tokens, case.top_k, generator=generator)
    return x.cuda(), idx.cuda(), probs.cuda()


def call(number: int = 1, phase: str = "test", timeout_s: float = 30.0, **more: Any) -> Call:
    return Call(number, phase, timeout_s, **more)


def poison() -> None:
    """Leaves NaN in the memory that the next results will be given."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 22, 1 << 20, 1 << 16)]
    del blocks


def check_case(backend: CudaBackend, case: Case, seed: int = 0) -> None:
    """One exchange against the plain computation, with every option the case asks for."""
    rank = dist.get_rank()
    x, idx, probs = make_inputs(case, seed)
    world = gather_world(x, idx, probs)
    rows, row_probs, blocks = expected_dispatch(world, rank, case.local, case.alignment)
    scale = case.fp8_scale
    if scale is not None:
        q, scales = quantize_fp8(rows, scale)
        travelled = dequantize_fp8(q, scales, rows.dtype)
    else:
        travelled = rows
    poison()
    plan = backend.prepare(idx, case.call(), x=x, probs=probs, fp8_scale=scale)
    extra = plan.num_rows - len(rows)  # what a static capacity leaves
    assert extra == 0 if case.capacity is None else extra >= 0
    assert plan.tokens_per_expert.tolist() == blocks, (plan.tokens_per_expert.tolist(), blocks)
    used = len(rows)
    for _ in range(max(case.repeats, 2)):  # staged by `prepare`, then for a known routing
        poison()
        arrived = backend.dispatch(plan, x, probs, case.call(), scale, dequantize=scale is not None)
        assert torch.equal(arrived.rows[:used].cpu(), travelled), _where(arrived.rows, travelled)
        assert torch.equal(arrived.probs[:used].cpu(), row_probs)
        assert not arrived.rows[used:].any() and not arrived.probs[used:].any()
    if scale is not None:
        poison()
        raw = backend.dispatch(plan, x, None, case.call(), scale)
        filled = rows.abs().amax(1) > 0  # padding rows have scale 0, not 1
        assert torch.equal(
            raw.rows[:used].cpu().view(torch.uint8)[filled], q.view(torch.uint8)[filled]
        )
        assert torch.equal(raw.scales[:used].cpu()[filled], scales[filled])
    _check_combine(backend, plan, case, world, rank, seed)


def _check_combine(
    backend: CudaBackend, plan: CudaPlan, case: Case, world: Any, rank: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(77 + 1000 * seed + rank)
    shape = (plan.num_rows, case.hidden)
    rows = torch.randn(shape, generator=generator).to(DTYPES[case.dtype])
    weights = torch.rand(plan.num_rows, generator=generator)
    values = torch.rand(plan.num_rows, generator=generator)
    all_rows, all_weights, all_values = gather(rows), gather(weights), gather(values)
    plain = expected_combine(world, rank, case.local, case.alignment, all_rows)
    weighted = expected_combine(world, rank, case.local, case.alignment, all_rows, all_weights)
    carried = expected_values(world, rank, case.local, case.alignment, all_values)
    limit = ROUNDING[case.dtype]
    first = None
    for _ in range(case.repeats):
        poison()
        out, slot_values = backend.combine(plan, rows.cuda(), case.call(), values=values.cuda())
        error = relative_error(out, plain)
        assert error <= limit, f"combine: relative error {error}, limit {limit}"
        assert torch.equal(slot_values.cpu(), carried)
        assert first is None or torch.equal(first, out), "combine does not repeat bit for bit"
        first = out.clone()
    poison()
    out, _ = backend.combine(plan, rows.cuda(), case.call(), weights=weights.cuda())
    error = relative_error(out, weighted)
    assert error <= limit, f"weighted combine: relative error {error}, limit {limit}"


def _where(actual: Tensor, expected: Tensor) -> str:
    actual = actual[: len(expected)].cpu()
    wrong = (actual != expected).any(1).nonzero().flatten().tolist()
    return f"{len(wrong)} of {len(expected)} rows differ, first {wrong[:8]}"


def check_cases(rank: int, cases: list[Case]) -> None:
    """Cases one after the other, each on a backend of its own."""
    for number, case in enumerate(cases):
        backend = make_backend(case)
        try:
            check_case(backend, case, seed=number)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        torch.cuda.synchronize()
        backend.check(case.call())
        backend.destroy()


def check_interleaved(rank: int) -> None:
    """Case 21 and 42: plans held together, combined in another order; equal to one by one."""
    case = Case(tokens=(40, 0, 17), hidden=256, repeats=1)
    backend = make_backend(case)
    inputs = [make_inputs(case, seed) for seed in range(4)]
    alone = []
    for x, idx, probs in inputs:
        plan = backend.prepare(idx, call())
        arrived = backend.dispatch(plan, x, probs, call())
        alone.append(backend.combine(plan, arrived.rows, call())[0])
    for repeat in range(50):
        if (rank + repeat) % 7 == 0:
            time.sleep(1e-3)
        plans = [backend.prepare(idx, call()) for _, idx, _ in inputs]
        rows = [
            backend.dispatch(plan, x, None, call()).rows
            for plan, (x, _, _) in zip(plans, inputs, strict=True)
        ]
        for i in (2, 0, 3, 1):
            out = backend.combine(plans[i], rows[i], call())[0]
            assert torch.equal(out, alone[i]), (repeat, i)
    backend.destroy()


def check_growth(rank: int) -> None:
    """Symmetric memory grows when some rank has more tokens than it is for."""
    case = Case()
    backend = make_backend(case)
    for seed, tokens in enumerate([(8, 8), (8, 400), (1500, 3), (2, 0)]):
        check_case(backend, replace(case, tokens=tokens), seed)
    backend.destroy()


def check_different_num_sms(rank: int) -> None:
    for scale in (None, "fp32"):
        case = Case(tokens=(300, 129), hidden=512, fp8_scale=scale)
        backend = make_backend(case)
        backend.num_sms = (1, 2, 5, 40)[rank]
        check_case(backend, case)
        backend.destroy()


def check_capacity(rank: int) -> str:
    """Static shapes, the same numbers; an overflow raises on all ranks at the next check."""
    case = Case(tokens=(20, 31), tokens_per_rank=64, capacity=400, alignment=4)
    backend = make_backend(case)
    check_case(backend, case)
    backend.destroy()
    backend = make_backend(replace(case, capacity=30, routing="one_expert"))
    x, idx, probs = make_inputs(replace(case, routing="one_expert"))
    try:
        plan = backend.prepare(idx, call(), x=x, probs=probs)
        arrived = backend.dispatch(plan, x, probs, call())  # may know already
        torch.cuda.synchronize()
        assert not arrived.rows.any()
        backend.prepare(idx, call())
    except CapacityError as error:
        return str(error)
    finally:
        backend.destroy()
    return ""


def check_graph(rank: int) -> None:
    """Case 23: a captured exchange replayed with new inputs equals an eager one."""
    case = Case(tokens=(24, 9), tokens_per_rank=32, capacity=256, repeats=1)
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)

    def exchange() -> tuple[Tensor, Tensor, Tensor]:
        plan = backend.prepare(idx, call(), x=x, probs=probs)
        arrived = backend.dispatch(plan, x, probs, call())
        out, _ = backend.combine(plan, arrived.rows * 2, call(), weights=arrived.probs)
        return arrived.rows, arrived.probs, out

    exchange()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = exchange()
    for seed in range(1, 11):
        new_x, new_idx, new_probs = make_inputs(case, seed)
        x.copy_(new_x), idx.copy_(new_idx), probs.copy_(new_probs)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in captured]
        for got, wanted in zip(replayed, exchange(), strict=True):
            assert torch.equal(got, wanted), seed
    del graph, captured
    backend.destroy()


def check_capture_without_capacity(rank: int) -> None:
    """The host would wait for counts that only a replay sends; it is told, and all goes on."""
    case = Case()
    backend = make_backend(case)
    x, idx, _probs = make_inputs(case)
    refused = ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.mul_(1)
        try:
            backend.prepare(idx, call(), x=x)
        except OrderError as error:
            refused = str(error)
    assert "set dispatch.capacity" in refused
    check_case(backend, case)
    backend.destroy()


def check_sizes(rank: int) -> None:
    """Objects of many experts and of few, alive together: none changes what the others may use."""
    many, few = Case(local=256, top_k=8), Case(local=1)
    backends = [(case, make_backend(case)) for case in (many, few, many, few)]
    for case, backend in backends:
        check_case(backend, case)
    for _, backend in backends:
        backend.destroy()


def check_autograd(rank: int) -> None:
    """Outputs and all gradients through ExpertParallel equal the reference backend's, fp32."""
    case = Case(tokens=(21, 0, 13), hidden=64, top_k=3, dtype="fp32", alignment=4)
    x, idx, probs = make_inputs(case)
    results = []
    for name, device in (("reference", "cpu"), (backend_name(), "cuda")):
        ep = ExpertParallel(make_layout(case).replace(backend=name))
        inputs = [t.detach().to(device).requires_grad_() for t in (x, probs)]
        d = ep.dispatch(inputs[0], idx.to(device), inputs[1])
        out = ep.combine(torch.tanh(d.tokens) * d.probs[:, None], d.handle)
        weighted = ep.combine(d.tokens * 3, d.handle, weights=d.probs)
        again = ep.dispatch(inputs[0] * 2, handle=d.handle)
        third = ep.combine(again.tokens, d.handle)
        (out.square().sum() + (weighted * third).sum()).backward()
        results.append([t.detach().cpu() for t in (d.tokens, out, weighted, third)])
        results[-1] += [t.grad.cpu() for t in inputs]
        ep.destroy()
    for number, (wanted, got) in enumerate(zip(*results, strict=True)):
        error = relative_error(got, wanted)
        assert error < 2e-6, (number, error)


def check_fresh_objects(rank: int, times: int) -> None:
    """The first exchange of one object after the other, ranks out of step, nothing between set-up
    and use: memory that an earlier object has left full is read only once it is written anew."""
    size, generator = dist.get_world_size(), torch.Generator()
    shapes = (
        Case(tokens=(3, 2, 4, 1), local=2, dtype="fp32"),
        Case(tokens=(3,), local=1, top_k=size),
        Case(tokens=(40, 1, 0, 17), local=4, top_k=3, hidden=640),
    )
    delays = random.Random(rank)
    for number in range(times):
        case = shapes[number % len(shapes)]
        generator.manual_seed(number)
        world = World([], [], [])
        for r in range(size):
            num_tokens = case.tokens[r % len(case.tokens)]
            x = torch.randn(num_tokens, case.hidden, generator=generator)
            world.x.append(x.to(DTYPES[case.dtype]))
            world.topk_idx.append(route(case, num_tokens, generator))
            world.probs.append(torch.rand(num_tokens, case.top_k, generator=generator))
        rows, probs, blocks = expected_dispatch(world, rank, case.local, 1)
        x, idx, weights = (t[rank].cuda() for t in (world.x, world.topk_idx, world.probs))
        backend = make_backend(case)
        time.sleep(delays.choice([0.0, 0.0, 1e-4, 2e-3]))
        plan = backend.prepare(idx, call())
        arrived = backend.dispatch(plan, x, weights, call())
        out, _ = backend.combine(plan, arrived.rows, call(), weights=arrived.probs)
        assert plan.tokens_per_expert.tolist() == blocks, number
        assert torch.equal(arrived.rows.cpu(), rows), (number, _where(arrived.rows, rows))
        assert torch.equal(arrived.probs.cpu(), probs), number
        scale = (world.probs[rank] * (world.topk_idx[rank] >= 0)).sum(1, keepdim=True)
        error = relative_error(out, world.x[rank].double() * scale)
        assert error <= ROUNDING[case.dtype], (number, error)
        backend.destroy()
