"""What the ranks of a test of low-latency mode between simulated hosts do; between the hosts only
NVSHMEM calls are used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import low_latency_cases
import low_latency_scenarios
import torch
import torch.distributed as dist
from low_latency_cases import Case, expected_rows, make_buffer, receive, send, send_back
from torch import Tensor

_ROUTE_BYTES, _VECTOR_BYTES = 8, 16
_START_S = 60.0  # NVSHMEM takes seconds to start


@dataclass(frozen=True)
class HostSettings:
    """form: of MOE_EP_LOW_LATENCY_FORM."""

    num_hosts: int
    ranks_per_host: int
    form: str = "layered"

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def name(self) -> str:
        return f"{self.num_hosts}x{self.ranks_per_host}-{self.form}"


def between_hosts(rank: int, hosts: HostSettings, function: Callable[..., Any], *args: Any) -> Any:
    """Runs function(rank, *args) with backend nvshmem, which has started and goes on meanwhile."""
    os.environ["MOE_EP_BACKEND"] = "nvshmem"
    os.environ["MOE_EP_RANKS_PER_HOST"] = str(hosts.ranks_per_host)
    os.environ["MOE_EP_LOW_LATENCY_FORM"] = hosts.form
    low_latency_scenarios.prepare(_START_S)
    keeper = make_buffer([Case(tokens=(1,), hidden=8, max_tokens=1)])
    result = function(rank, *args)
    keeper.destroy()
    return result


def check_all(rank: int, hosts: HostSettings, rounds: int) -> list[str]:
    """Everything that ends well; returns what `low_latency_order.check_hooks` does."""
    for scales in (None, "fp32"):
        check_border(rank, hosts, Case((12, 0, 16, 7), 256, top_k=4, scales=scales))
    low_latency_scenarios.check_rounds(rank, rounds)
    low_latency_scenarios.check_uneven_sms(rank)
    return low_latency_scenarios.check_all(rank, low_latency_cases.common_cases())


def check_border(rank: int, hosts: HostSettings, case: Case) -> None:
    """What crosses the border is what the form says, and nothing else."""
    buffer = make_buffer([case])
    backend: Any = buffer._low_latency._backend  # type: ignore[union-attr]
    host = rank // hosts.ranks_per_host
    row_bytes = case.hidden * 2
    if case.scales:
        row_bytes = case.hidden + case.hidden // 128 * 4
        row_bytes += -row_bytes % _VECTOR_BYTES
    for seed in range(3):
        before = _seen(backend)
        flight = send(buffer, case, seed, "cuda")
        receive(flight)
        low_latency_cases.check_received(buffer, flight)
        mine = flight.inputs[rank].idx
        wanted = _hosts_of(mine, case, hosts)
        away = (wanted >= 0) & (wanted != host)
        if hosts.form == "layered":
            rows = sum(len(set(w[a].tolist())) for w, a in zip(wanted, away, strict=True))
            readers = hosts.num_hosts - 1
        else:
            rows, readers = int(away.sum()), hosts.num_ranks - hosts.ranks_per_host
        routes = readers * mine.numel() * _ROUTE_BYTES
        moved = _moved(before, _seen(backend))
        assert moved == (rows, rows * row_bytes, routes), (moved, rows, row_bytes, routes)
        before = _seen(backend)
        out, _, hook = send_back(buffer, flight)
        receive(replace(flight, hook=hook))
        low_latency_cases.check_sum(buffer, flight, out)
        sources = [
            source
            for local in range(case.local)
            for source, _ in expected_rows(case, flight.inputs, rank * case.local + local)
        ]
        rows = sum(source // hosts.ranks_per_host != host for source in sources)
        assert _moved(before, _seen(backend)) == (rows, rows * case.hidden * 2, 0)
    buffer.destroy()


def _hosts_of(idx: Tensor, case: Case, hosts: HostSettings) -> Tensor:
    """[T, K]: the host of each expert, -1 for unused slots."""
    found = torch.div(idx, case.local * hosts.ranks_per_host, rounding_mode="floor")
    return torch.where(idx < 0, -1, found)


def _seen(backend: Any) -> tuple[int, int, int]:
    border = backend.border()
    return border.rows, border.bytes, border.other_bytes


def _moved(before: tuple[int, int, int], after: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def check_other_form(rank: int) -> str:
    """Rank 0 asks for the other form; what each is told."""
    os.environ["MOE_EP_LOW_LATENCY_FORM"] = "slots" if rank == 0 else "layered"
    try:
        make_buffer([Case()])
    except ValueError as error:
        return str(error)
    return ""


def check_automatic(rank: int) -> str:
    """Backend auto takes NVSHMEM where there are several hosts, and can be made anew."""
    os.environ["MOE_EP_BACKEND"] = "auto"
    names = []
    for _ in range(4):
        buffer = make_buffer([Case()])
        assert buffer._low_latency is not None
        names.append(buffer._low_latency.backend_name)
        low_latency_cases.check_case(buffer, Case(), 0, "cuda")
        dist.barrier()
        buffer.destroy()
    assert len(set(names)) == 1
    return names[0]
