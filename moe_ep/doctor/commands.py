"""The commands whose output the probes read, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moe_ep.doctor import facts

_KILLED_S = 1.0


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Output:
    """What a command printed (standard error too, if it failed) and its exit code."""

    text: str
    exit_code: int


def _facts(topic: str, limit_s: float) -> Command:
    """`facts.py` as a script: it does not import torch unless the topic is torch."""
    return Command((sys.executable, str(Path(facts.__file__)), topic), limit_s)


GPU_FIELDS = "index,name,memory.total,compute_cap,mig.mode.current,compute_mode,driver_version"

# Names are also file names in a recorded tree.
COMMANDS = {
    "nvidia-smi": Command(
        ("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"), 30.0
    ),
    "nvidia-smi-topo": Command(("nvidia-smi", "topo", "-m"), 30.0),
    "nvidia-smi-p2p": Command(("nvidia-smi", "topo", "-p2p", "w"), 30.0),
    "nvcc": Command(("nvcc", "--version"), 10.0),
    "df": Command(("df", "-Pk", "/dev/shm"), 10.0),
    "packages": _facts("packages", 30.0),
    "core": _facts("core", 30.0),
    "torch": _facts("torch", 60.0),
    "nvshmem": _facts("nvshmem", 30.0),
    "ipc": Command((sys.executable, "-m", "moe_ep.doctor.live", "ipc"), 90.0),
}


def run_command(command: Command) -> Output | None:
    """Runs a command in a session of its own.

    Returns:
        Its output; None if there is no such program.

    Raises:
        TimeoutError: it still ran at its limit. It and its children were killed; a process that the
            kernel does not let die is left behind.
    """
    try:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError):
        return None
    try:
        out, err = process.communicate(timeout=command.limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        name = " ".join([Path(command.argv[0]).name, *command.argv[1:]])
        raise TimeoutError(f"`{name}` gave no answer in {command.limit_s:g} s") from None
    return Output(out if process.returncode == 0 else out + err, process.returncode)


def _kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
    try:
        process.communicate(timeout=_KILLED_S)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
