"""Starts Mixtral trainings on one GPU: groups of processes, each a world of ranks of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NEEDS_MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 150  # of groups that run at once
FP32_LIMIT = 1e-5
# One bf16 rounding. With two experts a token all backends add two numbers and round once, so runs
# of some hundred steps stay together. Sums that round differently do not stay within it: such runs
# are 3e-2 apart before step 50 (seen on a CPU, Megatron's dispatcher against ours with four experts
# a token).
BF16_LIMIT = 2.0**-8
# Blocks that wait hold an SM each: those of 16 ranks that train at once, half of a GPU.
LAYOUT = """
model: {hidden: 64, num_experts: 8, top_k: 2}
parallel: {expert: 1}
dispatch: {num_sms: 4}
timeouts: {first_s: 60.0, steady_s: 30.0}
"""
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Ranks of one world, what they train one after the other, and their environment."""

    num_ranks: int
    trainings: Mapping[str, list[str]]  # name -> flags of train_mixtral
    environment: Mapping[str, str] = field(default_factory=dict)


def tiny(ranks: int, dtype: str, backend: str, steps: int) -> list[str]:
    """Eight sequences a step, whatever the number of ranks."""
    flags = f"--steps {steps} --micro-batch {8 // ranks} --global-batch 8 --ep {ranks}"
    return f"{flags} --dtype {dtype} --backend {backend}".split()


def train(groups: Mapping[str, Group], base: Path) -> dict[tuple[str, str], Records]:
    """Runs all groups at once; of each group and training what every step reported."""
    folders = {name: base / name.replace(" ", "_") for name in groups}
    _finish([(_start(group, folders[name]), folders[name]) for name, group in groups.items()])
    found = {}
    for name, group in groups.items():
        for training in group.trainings:
            path = folders[name] / training / "metrics.jsonl"
            found[name, training] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def largest_difference(mine: Records, theirs: Records, steps: int) -> float:
    """Of the losses of two trainings of so many steps, relative; also printed."""
    assert len(mine) == len(theirs) == steps
    worst = max(
        abs(a["lm_loss"] - b["lm_loss"]) / b["lm_loss"] for a, b in zip(mine, theirs, strict=True)
    )
    print(f"largest relative difference: {worst:.2e}")
    return worst


def call_script(*flags: str, **environment: str) -> str:
    """What scripts/train_mixtral.py prints when a user calls it: it becomes torchrun."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train_mixtral.py"), *flags],
        env=os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _progress(groups: list[tuple[list[subprocess.Popen], Path]]) -> dict[str, int]:
    """Steps that each group has done."""
    return {
        folder.name: sum(len(f.read_text().splitlines()) for f in folder.glob("*/metrics.jsonl"))
        for _, folder in groups
    }


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to outgoing connections, which come and go meanwhile."""
    ports: list[int] = []
    for port in random.sample(range(10_000, 30_000), 1_000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"no {count} free ports from 10000 to 30000")


def _start(group: Group, folder: Path) -> list[subprocess.Popen]:
    folder.mkdir()
    (folder / "layout.yaml").write_text(LAYOUT)
    common = f"--device cuda --eval-every 0 --timeout-s 60 --layout {folder / 'layout.yaml'}"
    plan = []
    ports = _free_ports(len(group.trainings))
    for port, (name, flags) in zip(ports, group.trainings.items(), strict=True):
        out = ["--out", str(folder / name)]
        plan.append({"port": port, "flags": [*common.split(), *flags, *out]})
    (folder / "runs.json").write_text(json.dumps(plan))
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as train_mixtral sets it
        "WORLD_SIZE": str(group.num_ranks),
        "LOCAL_WORLD_SIZE": str(group.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        **group.environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "training_runs.py"), str(folder / "runs.json")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"errors_{rank}.txt").open("w"),
        )
        for rank in range(group.num_ranks)
    ]


def _finish(groups: list[tuple[list[subprocess.Popen], Path]]) -> None:
    """Waits for all ranks of all groups; none outlives the call."""
    deadline = time.monotonic() + LIMIT_S
    try:
        for processes, folder in groups:
            for rank, process in enumerate(processes):
                try:
                    code = process.wait(timeout=max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"not done in {LIMIT_S} s: {_progress(groups)}") from None
                errors = (folder / f"errors_{rank}.txt").read_text()
                assert code == 0, f"{folder.name}, rank {rank}: {errors[-4000:]}"
    finally:
        for processes, _ in groups:
            for process in processes:
                process.kill()
                process.wait()
