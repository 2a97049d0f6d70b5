"""Jobs of one machine start and leave NVSHMEM in turn.

For ranks that share a GPU under MPS, NVSHMEM makes shared memory whose name is the same in all jobs
of a machine. A job that leaves takes the name away from one that is just starting, and the ranks of
that one end without a word.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = Path("/dev/shm") / f"moe_ep-nvshmem-{os.getuid()}.lock"  # where those names are


@contextmanager
def to_start(seconds: float) -> Iterator[str]:
    """For one rank, while all start; gives a problem: it is not this job's turn in `seconds`."""
    with _lock(fcntl.LOCK_EX, seconds) as has_turn:
        yield "" if has_turn else f"another job has kept {FILE} for {seconds:g} s to start NVSHMEM"


@contextmanager
def to_leave(seconds: float) -> Iterator[None]:
    """For each rank while it leaves, together with ranks of any job."""
    with _lock(fcntl.LOCK_SH, seconds):
        yield


@contextmanager
def _lock(kind: int, seconds: float) -> Iterator[bool]:
    """True with the lock, or where there can be none; false where it took too long to get it."""
    try:
        file = FILE.open("a")
    except OSError:  # no such folder, or a read-only one
        yield True
        return
    with file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.01)
        yield True
