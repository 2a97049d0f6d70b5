"""Ranks that stay alive and run one program after the other."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from multiprocessing.connection import Connection, wait

import torch.distributed as dist
from fuzz_ranks import TIMEOUT_S, Rank
from fuzz_steps import Program

from moe_ep.testing import launch_ranks


class RankPool:
    """Ranks that stay alive from program to program; started anew after a failure.

    A program of n ranks runs on the first n. All must be there when the pool is used.
    """

    def __init__(self, size: int, backend: str, limit_s: float) -> None:
        self.size, self.backend, self.limit_s = size, backend, limit_s
        self._pipes: list[Connection] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, program: Program) -> int:
        """The number of operations that every rank has checked.

        Raises:
            AssertionError: a check failed, with the traceback of every rank that failed.
        """
        if self._thread is None:
            self._start()
        pipes = self._pipes[: program.layout.ranks]
        for pipe in pipes:
            pipe.send(program)
        counts, errors, waiting = set(), [], list(pipes)
        while waiting:
            ready = wait(waiting, timeout=2 * TIMEOUT_S)
            if not ready:
                errors.append(f"{len(waiting)} ranks do not answer")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                try:
                    count, error = pipe.recv()
                except (EOFError, ConnectionError):
                    count, error = 0, "a rank died"
                counts.add(count)
                if error is not None:
                    errors.append(error)
            if errors and waiting and not wait(waiting, timeout=0.5):
                break  # they wait for the one that failed
        if errors:
            if waiting:
                self.stop()
            raise AssertionError("\n".join(errors))
        assert len(counts) == 1, f"ranks checked {counts} operations"
        return int(counts.pop())

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the ranks end
        if self._thread is not None:
            self._thread.join()
        self._pipes, self._thread = [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(self.size)]
        self._pipes = [mine for mine, _ in pairs]
        theirs = [pipe for _, pipe in pairs]
        arguments = (_serve, self.size, theirs, self.backend)

        def launch() -> None:
            launch_ranks(*arguments, limit_s=self.limit_s)

        self._thread = threading.Thread(target=launch, daemon=True)
        self._thread.start()
        for pipe in self._pipes:
            assert pipe.recv() == "ready"
        for pipe in theirs:
            pipe.close()


def _serve(rank: int, pipes: list[Connection], backend: str) -> None:
    """Runs programs until the pool closes its end of the pipe."""
    mine = pipes[rank]
    for pipe in pipes:
        if pipe is not mine:
            pipe.close()
    groups = [dist.new_group(range(n + 1)) for n in range(len(pipes))]
    mine.send("ready")
    while True:
        try:
            program: Program = mine.recv()
        except (EOFError, ConnectionError):
            return
        try:
            ranks = program.layout.ranks
            mine.send((Rank(rank, groups[ranks - 1], backend, program.layout).run(program), None))
        except BaseException:
            mine.send((0, traceback.format_exc()))
