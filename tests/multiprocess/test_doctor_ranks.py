"""`moe-ep doctor` under torchrun: ranks are compared, and the odd one out is named."""

import json
import os
import subprocess
import sys
import time

import torch.distributed as dist

from moe_ep.doctor.finding import Finding
from moe_ep.doctor.ranks import RankReport, compare, gather, meet, report_of
from moe_ep.testing import run_ranks


def fake_report(rank: int, torch_version: str, variables: dict[str, str]) -> RankReport:
    findings = [
        Finding("python.torch", "ok", f"torch {torch_version}"),
        Finding("host.shm", "ok", f"/dev/shm has {rank} MiB"),  # not compared
    ]
    if rank == 1:
        findings.append(Finding("rdma.ports", "warning", "mlx5_0:1 1: DOWN", "why", "fix"))
    return report_of(rank, "0.1.0", findings, variables)


def gathered(rank: int, versions: list[str]) -> list[dict]:
    variables = {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank), "NCCL_IB_SL": "3"}
    group = dist.group.WORLD
    assert group is not None
    found = compare(gather(fake_report(rank, versions[rank], variables), group))
    return [(f.id, f.level, f.seen) for f in found]


def test_two_ranks_that_differ() -> None:
    results = run_ranks(gathered, 2, ["2.6.0", "2.7.1"])
    assert results[0] == results[1]
    (odd_id, odd_level, seen), (other_id, other_level, other) = results[0]
    assert (odd_id, odd_level) == ("ranks.python.torch", "failure")
    assert seen.startswith("rank 1 (") and "torch 2.7.1" in seen and "torch 2.6.0" in seen
    assert (other_id, other_level) == ("rdma.ports", "warning")
    assert other == "rank 1: mlx5_0:1 1: DOWN"


def test_ranks_that_agree() -> None:
    for found in run_ranks(gathered, 2, ["2.6.0", "2.6.0"]):
        assert [(f[0], f[1]) for f in found] == [("ranks.equal", "ok"), ("rdma.ports", "warning")]


def test_the_minority_is_the_odd_one() -> None:
    reports = [fake_report(0, "2.7.1", {})]
    reports += [fake_report(rank, "2.6.0", {}) for rank in (2, 3)]
    found = compare(reports)
    assert [f.id for f in found] == ["ranks.python.torch"]
    assert (
        found[0].seen.startswith("rank 0 (") and "2 of 3 ranks have 'torch 2.6.0'" in found[0].seen
    )


def test_a_variable_set_on_one_rank_only() -> None:
    reports = [
        fake_report(rank, "2.6.0", {"MOE_EP_TIMEOUT_S": "5"} if rank else {}) for rank in (0, 2, 3)
    ]
    (found,) = compare(reports)
    assert (found.id, found.level) == ("ranks.env.MOE_EP_TIMEOUT_S", "warning")
    assert "rank 0" in found.seen and "has 'not set'" in found.seen


def free_port(rank: int) -> int:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    return store.port


def rendezvous(rank: int, size: int) -> dict[str, str]:
    """A launcher's variables, for a port at which nobody is."""
    (port,) = run_ranks(free_port, 1)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    variables = rendezvous(0, 3)
    started = time.monotonic()
    (found,) = meet(fake_report(0, "2.6.0", {}), variables, 2.0)
    assert 2.0 <= time.monotonic() - started < 20
    assert (found.id, found.level) == ("ranks.rendezvous", "failure")
    assert "rank 1, 2 did not come within 2 s" in found.seen


def test_rank_0_that_is_not_there() -> None:
    variables = rendezvous(1, 2)
    started = time.monotonic()
    (found,) = meet(fake_report(1, "2.6.0", {}), variables, 2.0)
    assert time.monotonic() - started < 30
    assert found.id == "ranks.rendezvous" and f"127.0.0.1:{variables['MASTER_PORT']}" in found.seen


def test_torchrun() -> None:
    """The whole command on two ranks, one with another setting."""
    command = 'NCCL_IB_SL=$RANK exec "$0" -m moe_ep doctor --json --wait 100'
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--no-python",
            "bash",
            "-c",
            command,
            sys.executable,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode != 0  # torchrun's own code: a rank ended with a warning
    report = json.loads(done.stdout)  # one report, of rank 0
    odd = [f for f in report["findings"] if f["id"].startswith("ranks.")]
    assert [f["id"] for f in odd] == ["ranks.env.NCCL_IB_SL"], done.stderr
    assert odd[0]["area"] == "job" and odd[0]["seen"].startswith("rank 1 (")
    assert report["exit_code"] == 1
