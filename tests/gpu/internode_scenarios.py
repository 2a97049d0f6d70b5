"""What the ranks of a test between simulated hosts do; the hosts are parts of one machine, between
which only NVSHMEM calls are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import buffer_scenarios
import fault_scenarios
import scenarios
import torch
import torch.distributed as dist
from buffer_cases import common_cases
from expected import gather
from scenarios import Case, call, make_backend, make_inputs
from torch import Tensor

from moe_ep import EPLayout
from moe_ep.backends.cuda import CudaBackend
from moe_ep.errors import BackendUnavailableError, PeerError

_VECTOR_BYTES = 16


@dataclass(frozen=True)
class HostSettings:
    """inbox_tokens: rows an inbox has room for; half of them move at once."""

    num_hosts: int
    ranks_per_host: int
    inbox_tokens: int = 32

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host


def between_hosts(rank: int, hosts: HostSettings, function: Callable[..., Any], *args: Any) -> Any:
    """Runs function(rank, *args) with the NVSHMEM backend in place of the CUDA backend."""
    os.environ[scenarios.TESTED_BACKEND] = "nvshmem"
    os.environ["MOE_EP_RANKS_PER_HOST"] = str(hosts.ranks_per_host)
    os.environ["DEEP_EP_NUM_MAX_RDMA_TOKENS"] = str(hosts.inbox_tokens)
    return function(rank, *args)


def check_all(rank: int, steps: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Several scenarios in one group of processes: NVSHMEM takes seconds to start."""
    for function, args in steps:
        try:
            function(rank, *args)
        except Exception as error:
            raise AssertionError(f"{function.__name__}: {type(error).__name__}: {error}") from error
        torch.cuda.synchronize()
        dist.barrier()


def exchange_cases() -> list[Case]:
    """Every option of an exchange; several chunks where a rank has more than 16 tokens."""
    routings = ("random", "skewed", "unused", "one_expert", "first_rank", "duplicates")
    cases = [Case(routing=routing, top_k=4, alignment=8) for routing in routings]
    cases += [Case(dtype=dtype) for dtype in scenarios.DTYPES]
    cases += [Case(tokens=(0, 5, 3, 0)), Case(tokens=(0,)), Case(tokens=(1,)), Case(tokens=(7, 4))]
    cases += [Case(tokens=tokens) for tokens in ((15, 16, 17), (128, 1, 129, 0))]
    cases += [Case(fp8_scale=scale, hidden=384, alignment=16) for scale in ("fp32", "power_of_two")]
    cases += [Case(fp8_scale="fp32", dtype="fp32", hidden=2048 + 128)]
    cases += [Case(hidden=7168, top_k=8, local=8, tokens=(40, 33), repeats=3)]
    cases += [Case(idx_dtype="int32"), Case(num_sms=1), Case(num_sms=16, tokens=(300, 129))]
    cases += [Case(top_k=9, local=24), Case(top_k=32, local=24, tokens=(20,))]
    return cases


def check_repeats(rank: int) -> None:
    """Case 28 between hosts, with chunks in flight."""
    case = Case(tokens=(200, 121), hidden=1024, local=8, top_k=8, repeats=20, num_sms=16)
    scenarios.check_cases(rank, [case])


def check_border(rank: int, hosts: HostSettings) -> None:
    """One row for each token and remote host, forward and backward, and nothing else but ids and
    carried values."""
    case = Case(tokens=(40, 0, 33, 17), top_k=4, hidden=256)
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)
    wanted = [_wanted_hosts(other, case, hosts) for other in gather(idx.cpu())]
    host, place = divmod(rank, hosts.ranks_per_host)
    away = wanted[rank].clone()
    away[:, host] = False
    leaving = int(away.sum())
    returning = sum(
        int(wanted[other * hosts.ranks_per_host + place][:, host].sum())
        for other in range(hosts.num_hosts)
        if other != host
    )
    row_bytes, probs_bytes = 256 * 2, -(-case.top_k * 4 // _VECTOR_BYTES) * _VECTOR_BYTES
    chunk = hosts.inbox_tokens // 2
    num_chunks = -(-40 // chunk)
    values_bytes = (hosts.num_hosts - 1) * num_chunks * chunk * case.top_k * 4
    ids_bytes = (hosts.num_hosts - 1) * len(idx) * case.top_k * 4
    meter = _Meter(backend)
    plan = backend.prepare(idx, call())
    plan.resolve()
    assert meter.moved() == (0, 0, ids_bytes)
    arrived = backend.dispatch(plan, x, probs, call())
    assert meter.moved() == (leaving, leaving * (row_bytes + probs_bytes), 0)
    backend.combine(plan, arrived.rows, call(), weights=arrived.probs)
    assert meter.moved() == (returning, returning * row_bytes, 0)
    backend.dispatch(plan, x, None, call())  # the backward of combine
    assert meter.moved() == (leaving, leaving * row_bytes, 0)
    backend.combine(plan, arrived.rows, call(), values=arrived.probs)  # and of dispatch
    assert meter.moved() == (returning, returning * row_bytes, values_bytes)
    backend.destroy()
    fp8 = replace(case, fp8_scale="fp32")
    backend = make_backend(fp8)
    plan = backend.prepare(idx, call())
    plan.resolve()
    meter = _Meter(backend)
    backend.dispatch(plan, x, probs, call(), "fp32", dequantize=True)
    scales_bytes = _VECTOR_BYTES  # two scales of four bytes, rounded up
    assert meter.moved() == (leaving, leaving * (256 + scales_bytes + probs_bytes), 0)
    backend.destroy()


def _wanted_hosts(idx: Tensor, case: Case, hosts: HostSettings) -> Tensor:
    """[T, n]: which hosts a token goes to."""
    wanted = torch.zeros(len(idx), hosts.num_hosts, dtype=torch.bool)
    for token, row in enumerate(idx.tolist()):
        for expert in row:
            if expert >= 0:
                wanted[token, expert // (case.local * hosts.ranks_per_host)] = True
    return wanted


class _Meter:
    """What this rank puts to other hosts from one look to the next."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend: Any = backend
        self._seen = self._look()

    def _look(self) -> tuple[int, int, int]:
        border = self._backend.border()
        return border.rows, border.bytes, border.other_bytes

    def moved(self) -> tuple[int, int, int]:
        before, self._seen = self._seen, self._look()
        rows, num_bytes, other = (b - a for a, b in zip(before, self._seen, strict=True))
        return rows, num_bytes, other


def check_refused(rank: int) -> str:
    """What cannot run between hosts says so."""
    layout: EPLayout = scenarios.make_layout(Case(exact=True))
    try:
        scenarios.backend_class()(layout, dist.group.WORLD, scenarios.Channel(dist.group.WORLD, 99))
    except BackendUnavailableError as error:
        return str(error)
    return ""


def check_buffer(rank: int, ranks_per_host: int) -> None:
    """The DeepEP interface over hosts."""
    os.environ["MOE_EP_BACKEND"] = "nvshmem"  # of everything that Buffer builds
    try:
        cases = [replace(case, ranks_per_host=ranks_per_host) for case in common_cases()[::2]]
        buffer_scenarios.check_cases(rank, cases)
    finally:
        del os.environ["MOE_EP_BACKEND"]


def check_capacity(rank: int) -> None:
    told = scenarios.check_capacity(rank)
    assert "dispatch.capacity is 30" in told and "rank 0 would receive" in told, told


def check_culprit(rank: int, verb: str) -> str:
    """The last rank sends rows that mean nothing, of a routing all know. What each is told."""
    case = Case(tokens=(64,), top_k=4)
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)
    plan = backend.prepare(idx, call())
    rows = backend.dispatch(plan, x, probs, call()).rows
    bad = replace(call(), error=ValueError("of no use"))
    given = bad if rank == dist.get_world_size() - 1 else call()
    told = ""
    try:
        if verb == "dispatch":
            backend.dispatch(plan, x, probs, given)
        else:
            backend.combine(plan, rows, given)
        torch.cuda.synchronize()
        backend.check(call())
    except (ValueError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    backend.destroy()
    return told


def check_bad_input(rank: int) -> None:
    """A bad index on the last rank, on the last host, raises on all ranks of all hosts."""
    told = fault_scenarios.check_bad_input(rank)
    last = rank == dist.get_world_size() - 1
    assert told == ("ValueError" if last else "PeerError"), told
