"""Launching ranks for tests: several processes on this machine, joined by gloo.

outcomes = run_ranks(function, 4, argument)     # function(rank, argument) on every rank
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        exitcode: of its process; None where it had to be killed at the time limit.
        result: what its call returned.
        error: its traceback, or how else it failed; None if it did not.
        seconds: from the start to the end of its process.
    """

    rank: int
    exitcode: int | None
    result: Any = None
    error: str | None = None
    seconds: float = 0.0


def launch_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float = 60.0
) -> list[Outcome]:
    """Runs `function(rank, *args)` in `num_ranks` processes that form the default gloo group.

    Args:
        function: importable by name; what it returns must be picklable.
        limit_s: ranks that still run after so many seconds are killed.

    Returns:
        One Outcome per rank, whatever happened to it. No process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "moe_ep"])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        outcomes = [Outcome(rank, None) for rank in range(num_ranks)]
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, num_ranks, store, limit_s, pipes[rank][1], args),
            )
            for rank in range(num_ranks)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            _collect(processes, [receiver for receiver, _ in pipes], outcomes, started + limit_s)
        finally:
            for process, outcome in zip(processes, outcomes, strict=True):
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join()
                    outcome.error = f"killed: still running after {limit_s:g} s"
    return outcomes


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float = 60.0
) -> list[Any]:
    """As `launch_ranks`, for ranks that must succeed; same arguments.

    Returns:
        What each rank's call returned, by rank.

    Raises:
        AssertionError: a rank raised, was killed or exited non-zero; gives every traceback.
    """
    outcomes = launch_ranks(function, num_ranks, *args, limit_s=limit_s)
    failures = [o for o in outcomes if o.error is not None or o.exitcode != 0]
    if failures:
        details = "\n".join(f"rank {o.rank}, exit code {o.exitcode}: {o.error}" for o in failures)
        raise AssertionError(f"{len(failures)} of {num_ranks} ranks failed\n{details}")
    return [outcome.result for outcome in outcomes]


def _collect(
    processes: list[Any], receivers: list[Connection], outcomes: list[Outcome], deadline: float
) -> None:
    """Waits until every process has ended, at most until `deadline` (monotonic seconds)."""
    started = time.monotonic()
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    open_pipes = {receiver: rank for rank, receiver in enumerate(receivers)}
    while (running or open_pipes) and time.monotonic() < deadline:
        for ready in wait([*running, *open_pipes], timeout=max(deadline - time.monotonic(), 0.0)):
            if isinstance(ready, Connection):
                outcome = outcomes[open_pipes.pop(ready)]
                try:
                    outcome.result, outcome.error = ready.recv()
                except EOFError:
                    outcome.error = "ended without a result"
            else:
                assert isinstance(ready, int)
                rank = running.pop(ready)
                processes[rank].join()
                outcomes[rank].exitcode = processes[rank].exitcode
                outcomes[rank].seconds = time.monotonic() - started


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: str,
    limit_s: float,
    sender: Connection,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=limit_s),
        )
        sender.send((function(rank, *args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        sender.close()
        os._exit(1)
    sender.close()
