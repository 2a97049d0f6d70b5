"""The Slurm script: what it would start, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train_mixtral.sbatch"


@pytest.fixture
def submit_dir(tmp_path: Path) -> Path:
    """A checkout with an environment, and commands that say how they were called."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    stand_ins = {
        "scontrol": "echo node7; echo node8",
        "srun": 'echo "srun $* | IBGDA=$NVSHMEM_IB_ENABLE_IBGDA IF=${GLOO_SOCKET_IFNAME:-}"',
    }
    for name, text in stand_ins.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{folder / 'commands'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        **variables,
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_one_torchrun_a_node_meets_on_the_first(submit_dir: Path) -> None:
    done = run(submit_dir)
    assert done.returncode == 0, done.stderr
    doctor, training = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    for line in (doctor, training):
        for part in (
            "--ntasks-per-node=1 torchrun",
            "--nnodes 2 --nproc-per-node 8",
            "--rdzv-endpoint node7:23456 --rdzv-id 123456",
            "IBGDA=1 IF=",
        ):
            assert part in line, line
    assert "-m moe_ep doctor" in doctor
    assert "-- scripts/train_mixtral.py --device cuda --backend nvshmem --model small" in training


def test_settings_of_the_user_reach_the_ranks(submit_dir: Path) -> None:
    done = run(
        submit_dir,
        "--ep",
        "4",
        DOCTOR="0",
        GPUS_PER_NODE="4",
        SOCKET_IFNAME="eth1",
        NVSHMEM_IB_ENABLE_IBGDA="0",
    )
    (training,) = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    assert "--nproc-per-node 4" in training and "IBGDA=0 IF=eth1" in training
    assert training.split(" | ")[0].endswith("--backend nvshmem --ep 4")


def test_without_an_environment_it_says_what_to_do(submit_dir: Path) -> None:
    (submit_dir / ".venv" / "bin" / "activate").unlink()
    done = run(submit_dir)
    assert done.returncode == 2 and "scripts/setup.sh" in done.stderr


def test_flags_of_the_script_are_known() -> None:
    """The defaults that the script passes on parse."""
    done = subprocess.run(
        ["python3", str(ROOT / "scripts" / "train_mixtral.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    for flag in ("--device", "--backend", "--model", "--dtype"):
        assert flag in done.stdout
