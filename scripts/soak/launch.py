"""Starts the ranks of a stretch and waits for them, a bounded time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from soak import rank as rank_program
from soak.options import ROOT

_STOPPED = 124  # the exit status of a rank that had to be stopped
# A rank that is killed keeps the semaphores of its progress bar: nothing to warn of at the end.
_QUIET = "ignore:resource_tracker:UserWarning"


def forked(num_ranks: int, plan: Path, output: Path, deadline: float) -> list[int]:
    """Ranks on the CPU, from a server that has imported the frameworks once for all stretches."""
    warnings = os.environ.get("PYTHONWARNINGS", "")
    if _QUIET not in warnings:
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [warnings, _QUIET]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soak.worker"])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        context.Process(
            target=rank_program.start, args=(plan, output, shared | {"RANK": r, "LOCAL_RANK": r})
        )
        for r in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        return [_STOPPED if p.exitcode is None else p.exitcode for p in processes]
    finally:
        for process in processes:
            _end(process)


def _end(process: Any) -> None:
    """Ends a rank, and what it has started itself: it leads a group of processes."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(30)


def with_mps(num_ranks: int, plan: Path, output: Path, deadline: float) -> int:
    """Ranks that share one GPU, under an MPS server of their own. The first bad exit status."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = ["bash", str(ROOT / "scripts" / "with_mps.sh"), str(num_ranks)]
    command += [sys.executable, "-m", "soak.rank", str(plan)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        return process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return _STOPPED
    finally:
        if process.poll() is None:
            process.terminate()  # it then ends its ranks and its MPS server
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
