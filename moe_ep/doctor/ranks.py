"""Under torchrun: every rank examines its machine, and the ranks compare what they saw."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # where they are typed

from moe_ep.doctor.finding import Finding, Level
from moe_ep.doctor.names import LAUNCHER

NOT_JOINED = ("ranks.rendezvous", "ranks.gloo")

_PREFIX = "moe_ep_doctor"
_POLL_S = 0.1
# Findings whose text must be the same on all ranks, and how bad it is if it isn't.
_COMPARED: dict[str, Level] = {
    "python.version": "warning",
    "python.torch": "failure",
    "python.core": "failure",
    "python.megatron-core": "failure",
    "python.deepspeed": "failure",
    "cuda.driver": "warning",
    "cuda.runtime": "failure",
    "gpu.devices": "failure",
    "nvshmem.package": "failure",
    "nvshmem.module": "failure",
    "ibgda.driver_options": "warning",
}
_PER_RANK = (*LAUNCHER, "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class RankReport:
    """What one rank tells the others."""

    rank: int
    host: str
    values: dict[str, str]
    problems: list[Finding]


def report_of(
    rank: int, version: str, findings: Sequence[Finding], environment: Mapping[str, str]
) -> RankReport:
    """Args: version: of moe_ep. findings: of this rank's machine."""
    values = {"moe_ep": version}
    values |= {finding.id: finding.seen for finding in findings if finding.id in _COMPARED}
    values |= {f"env.{name}": v for name, v in environment.items() if name not in _PER_RANK}
    problems = [finding for finding in findings if finding.level in ("warning", "failure")]
    return RankReport(rank, socket.gethostname(), values, problems)


def compare(reports: Sequence[RankReport]) -> list[Finding]:
    """Findings about differences between ranks, and the problems that rank 0 does not have."""
    findings = []
    for key in sorted({key for report in reports for key in report.values}):
        by_rank = {report.rank: report.values.get(key, "not set") for report in reports}
        counts = Counter(by_rank.values())
        usual = max(counts, key=lambda value: (counts[value], value == by_rank[0]))
        odd = [rank for rank, value in by_rank.items() if value != usual]
        if odd:
            hosts = {report.rank: report.host for report in reports}
            names = "; ".join(f"rank {rank} ({hosts[rank]}) has {by_rank[rank]!r}" for rank in odd)
            many = f"{counts[usual]} of {len(reports)} ranks have {usual!r}"
            findings.append(
                Finding(
                    f"ranks.{key}",
                    _COMPARED.get(key, "failure" if key == "moe_ep" else "warning"),
                    f"{names}; {many}",
                    "ranks of one job should run the same software with the same settings",
                    "start the odd ones from the same image with the same environment",
                )
            )
    if not findings:
        findings.append(Finding("ranks.equal", "ok", f"{len(reports)} ranks agree"))
    return findings + _of_others(reports)


def _of_others(reports: Sequence[RankReport]) -> list[Finding]:
    """Problems of other ranks that rank 0 does not have, one finding for all that see the same."""
    mine = {problem.id for report in reports if report.rank == 0 for problem in report.problems}
    seen_by: dict[Finding, list[int]] = {}
    for report in reports:
        for problem in report.problems:
            if problem.id not in mine:
                seen_by.setdefault(problem, []).append(report.rank)
    return [
        Finding(p.id, p.level, f"rank {', '.join(map(str, ranks))}: {p.seen}", p.why, p.fix)
        for p, ranks in seen_by.items()
    ]


def gather(report: RankReport, group: dist.ProcessGroup) -> list[RankReport]:
    """Every rank's report, by rank, over a gloo group."""
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, asdict(report), group=group)
    return [
        RankReport(**{**each, "problems": [Finding(**problem) for problem in each["problems"]]})
        for each in gathered
    ]


def meet(report: RankReport, environment: Mapping[str, str], limit_s: float) -> list[Finding]:
    """Joins the ranks that torchrun has started, and compares them.

    Args:
        environment: with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        limit_s: longest wait for the others, in seconds; about twice that in all.

    Returns:
        As `compare`; or one finding that names the ranks that did not come, or says that gloo does
        not connect.
    """
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    limit = timedelta(seconds=limit_s)
    address = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
    try:
        store: Store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            size,
            rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=limit,
            wait_for_workers=False,
        )
        store = PrefixStore(_PREFIX, store)
        store.set(str(rank), report.host)
        missing = _absent(store, size, limit_s)
    except (RuntimeError, KeyError, ValueError) as error:
        seen = f"no connection to rank 0 at {address}: {_first_line(error)}"
        return [_not_joined("ranks.rendezvous", seen)]
    if missing:
        seen = f"rank {', '.join(map(str, missing))} did not come within {limit_s:g} s"
        return [_not_joined("ranks.rendezvous", seen)]
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        group = dist.group.WORLD
        assert group is not None
        reports = gather(report, group)
        dist.destroy_process_group()
    except RuntimeError as error:
        return [_not_joined("ranks.gloo", f"gloo does not connect: {_first_line(error)}")]
    return compare(reports)


def _absent(store: Store, size: int, limit_s: float) -> list[int]:
    """Ranks that have not come when the time is over."""
    deadline = time.monotonic() + limit_s
    missing = list(range(size))
    while True:
        missing = [rank for rank in missing if not store.check([str(rank)])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_S)


def _not_joined(name: str, seen: str) -> Finding:
    return Finding(
        name,
        "failure",
        seen,
        "the job would wait there as well",
        "look at those ranks' logs; from every host: nc -vz $MASTER_ADDR $MASTER_PORT; set "
        "GLOO_SOCKET_IFNAME to the interface that joins the hosts",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
