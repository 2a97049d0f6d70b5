"""Disturbances of one rank: stalls at random, and its own death at a chosen step."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch

from soak.events import EventLog

_STALL_SHARE = 0.01  # of the calls
_LONG_STALL_SHARE = 0.1  # of the stalls
_STALL_S = (0.005, 0.1)
_LONG_STALL_S = (0.5, 1.5)
_CALLS_OF_A_STEP = 20  # at least: 2 layers x 2 micro-batches x 5 verbs, backward included
_VERBS = ("prepare", "dispatch", "combine")


class Disturbance:
    """Stalls of this rank, and its death, at the entrance of a backend's verbs.

    Args:
        kill: {"rank", "at_step", "at_time", "every"}: the rank to die, from which step and from
            which time (seconds since the epoch) on, and of how many steps it does so in the middle.
            None kills nobody.
    """

    def __init__(self, rank: int, seed: str, kill: dict[str, Any] | None, log: EventLog) -> None:
        self.step = 0
        self._rank, self._log = rank, log
        self._choice = random.Random(seed)
        self._kill = kill if kill is not None and kill["rank"] == rank else None
        self._calls_to_live: int | None = None

    def watch(self, backend: Any) -> None:
        """From now on the backend's verbs pass through here first."""
        for verb in _VERBS:
            setattr(backend, verb, self._disturbed(verb, getattr(backend, verb)))

    def begin_step(self, step: int) -> None:
        self.step = step
        kill = self._kill
        if kill is None or step < kill["at_step"] or time.time() < kill["at_time"]:
            return
        if step % kill["every"] == kill["every"] // 2:  # there is something to do again
            self._calls_to_live = self._choice.randrange(_CALLS_OF_A_STEP)

    def _disturbed(self, verb: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._stall(verb)
            if self._calls_to_live is not None:
                if self._calls_to_live == 0:
                    self._die(verb)
                self._calls_to_live -= 1
            return original(*args, **kwargs)

        return call

    def _stall(self, verb: str) -> None:
        if self._choice.random() >= _STALL_SHARE:
            return
        long = self._choice.random() < _LONG_STALL_SHARE
        seconds = self._choice.uniform(*(_LONG_STALL_S if long else _STALL_S))
        self._log.write(event="stall", step=self.step, verb=verb, seconds=seconds)
        time.sleep(seconds)

    def _die(self, verb: str) -> None:
        if torch.cuda.is_initialized():
            # The GPU is shared with innocent processes: leave no kernel of ours running.
            torch.cuda.synchronize()
        self._log.write(event="kill", step=self.step, verb=verb, time=time.time())
        os.killpg(0, signal.SIGKILL)  # the children of this rank, too
