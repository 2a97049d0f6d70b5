"""Launching ranks for tests: several processes on this machine, joined by gloo.

results = run_ranks(function, 4, argument)      # function(rank, argument) on every rank

with RankServer(prepare) as server:             # where ranks would spend seconds on imports
    results = server.run(function, 4, argument)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
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
    return _launch(context, function, num_ranks, args, limit_s)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float = 60.0
) -> list[Any]:
    """As `launch_ranks`, for ranks that must succeed; same arguments.

    Returns:
        What each rank's call returned, by rank.

    Raises:
        AssertionError: a rank raised, was killed or exited non-zero; gives every traceback.
    """
    return _results(launch_ranks(function, num_ranks, *args, limit_s=limit_s))


class RankServer:
    """A process that imports what the ranks need once, and forks the ranks of every call.

    Each call has fresh processes, as with `launch_ranks`: what one does to a module is not seen by
    the next. The process is started by the first call, and again after a call that was interrupted.

    Args:
        prepare: called once in the process with `args`; importable by name. It must start no
            thread, since a fork copies only the thread that calls it.
    """

    def __init__(self, prepare: Callable[..., None], *args: Any) -> None:
        self._prepare, self._args = prepare, args
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def launch(
        self, function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float = 60.0
    ) -> list[Outcome]:
        """As `launch_ranks`, with the same arguments.

        Raises:
            RuntimeError: the process ended: `prepare` failed, or left a thread running.
        """
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((function, num_ranks, args, limit_s))
            outcomes: list[Outcome] = self._connection.recv()
        except (EOFError, ConnectionError):
            self.close()
            raise RuntimeError(
                f"the process that {self._prepare.__qualname__} prepares has ended; "
                "its standard error says why"
            ) from None
        except BaseException:
            self.close()  # a late answer would be taken for that of the next call
            raise
        return outcomes

    def run(
        self, function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float = 60.0
    ) -> list[Any]:
        """As `run_ranks`, with the same arguments."""
        return _results(self.launch(function, num_ranks, *args, limit_s=limit_s))

    def close(self) -> None:
        """Ends the process and whatever ranks it still has. May be called again."""
        if self._connection is None or self._process is None:
            return
        self._connection.close()
        self._connection = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from moe_ep import testing; testing._serve({descriptor})"],
            pass_fds=[descriptor],
            start_new_session=True,  # a process group of its own, with the ranks to come
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OMP_NUM_THREADS": "1",  # numpy would start threads when it is imported
            },
        )
        theirs.close()
        self._connection.send((self._prepare, self._args))


def _serve(descriptor: int) -> None:
    connection = Connection(descriptor)
    prepare, args = connection.recv()
    prepare(*args)
    context = multiprocessing.get_context("fork")
    while True:
        try:
            function, num_ranks, call_args, limit_s = connection.recv()
        except EOFError:
            return
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"{prepare.__qualname__} left {threads - 1} threads: can't fork")
        connection.send(_launch(context, function, num_ranks, call_args, limit_s))


def _launch(
    context: Any,
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    limit_s: float,
) -> list[Outcome]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        outcomes = [Outcome(rank, None) for rank in range(num_ranks)]
        processes: list[Any] = []
        receivers: list[Connection] = []
        try:
            for rank in range(num_ranks):
                # One after the other: a forked rank holds no end on which a later one writes.
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(function, rank, num_ranks, store, limit_s, sender, args),
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            _collect(processes, receivers, outcomes, started + limit_s)
        finally:
            for process, outcome in zip(processes, outcomes, strict=False):
                if process.is_alive():
                    process.kill()
                    process.join()
                    outcome.error = f"killed: still running after {limit_s:g} s"
    return outcomes


def _results(outcomes: list[Outcome]) -> list[Any]:
    failures = [o for o in outcomes if o.error is not None or o.exitcode != 0]
    if failures:
        details = "\n".join(f"rank {o.rank}, exit code {o.exitcode}: {o.error}" for o in failures)
        raise AssertionError(f"{len(failures)} of {len(outcomes)} ranks failed\n{details}")
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
        if torch.cuda.device_count() > 1:  # ranks take the GPUs in turn
            torch.cuda.set_device(rank % torch.cuda.device_count())
        limit = timedelta(seconds=limit_s)
        meeting = dist.FileStore(store, num_ranks)
        dist.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=limit
        )
        # A rank that ends while another still connects would fail that one too.
        meeting.set(f"connected/{rank}", "")
        meeting.wait([f"connected/{peer}" for peer in range(num_ranks)], limit)
        sender.send((function(rank, *args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        sender.close()
        os._exit(1)
    sender.close()
