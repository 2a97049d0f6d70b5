"""Symmetric memory of the CUDA backend: set-up, growth and release, all ranks together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round
from moe_ep.errors import BackendUnavailableError

_FRAME_BYTES = 4096
_GOODBYE_S = 2.0
_REPORTED_PEERS = 4


class SharedMemory:
    """The symmetric memory of a communicator (`_C.Communicator`) and its mappings.

    Args:
        core: the module `moe_ep._C`. communicator: made by it.
        channel: carries handles and verdicts; not used once memory is set up.
        device: of this rank.
    """

    def __init__(
        self, core: Any, communicator: Any, channel: Channel, device: torch.device
    ) -> None:
        self._core, self._communicator = core, communicator
        self._channel, self._device = channel, device
        self._rank, self._size = channel.rank, channel.size
        self.max_tokens = 0  # of any rank, that there is room for

    def connect(self, max_tokens: int, call: Call) -> None:
        """Allocates memory, maps the peers' and checks every pair in both directions.

        Raises:
            BackendUnavailableError: on all ranks, if any pair can't share; names the pair.
        """
        handle, problem = "", ""
        try:
            handle = self._communicator.allocate(max_tokens).handle().hex()
        except RuntimeError as error:
            problem = str(error)
        mine = {"host": _host_id(), "handle": handle, "problem": problem[:1000]}
        answers = self._exchange(mine, call)
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                raise BackendUnavailableError(f"rank {rank}: {answer['problem']}")
            if answer["host"] != answers[0]["host"]:
                raise BackendUnavailableError(
                    f"ranks 0 and {rank} are on different hosts; backend cuda works within one"
                )
        memory = self._communicator.memory()
        handles = [bytes.fromhex(answer["handle"]) for answer in answers]
        hello = self._core.Signal.HELLO
        self._agree("map the memory of", memory.open(handles), call)
        self._agree("write to", memory.mark(hello), call)
        self._agree("be written to by", memory.missing_marks(hello), call)
        self.max_tokens = max_tokens

    def grow(self, needed_tokens: int, call: Call) -> None:
        """Replaces the memory by a larger one; all ranks come here in the same operation."""
        torch.cuda.synchronize(self._device)
        self._exchange({}, call)  # nobody uses any of it any more
        self._communicator.memory().close()
        self._exchange({}, call)  # nobody has any of it mapped any more
        self.connect(needed_tokens + needed_tokens // 4, call)

    def release(self) -> None:
        """Frees everything once no peer uses it.

        Where a peer does not say so within two seconds, the memory stays until the process ends.
        """
        communicator, self._communicator = self._communicator, None
        try:
            torch.cuda.synchronize(self._device)
            if self._say_goodbye(communicator.memory()):
                communicator.release_memory()
        except RuntimeError:  # the CUDA context is gone, and the memory with it
            return

    def _say_goodbye(self, memory: Any) -> bool:
        """Tells the peers that their memory is no longer used; true when all have told us so."""
        goodbye = self._core.Signal.GOODBYE
        memory.mark(goodbye)
        deadline = time.monotonic() + _GOODBYE_S
        while any(memory.missing_marks(goodbye)):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True

    def _agree(self, what: str, problems: list[str], call: Call) -> None:
        """A barrier; raises on all ranks if any rank has a problem with any peer."""
        found = [(str(peer), text[:200]) for peer, text in enumerate(problems) if text]
        for rank, answer in enumerate(self._exchange(dict(found[:_REPORTED_PEERS]), call)):
            for peer, text in answer.items():
                raise BackendUnavailableError(
                    f"rank {rank} cannot {what} rank {peer}: {text}; peer access between their "
                    "GPUs and a shared IPC namespace are needed"
                )

    def _exchange(self, value: dict[str, str], call: Call) -> list[dict[str, str]]:
        """Every rank's value, by rank."""
        data = json.dumps(value).encode()
        assert len(data) <= _FRAME_BYTES, f"{len(data)} bytes, a frame has {_FRAME_BYTES}"
        mine = torch.frombuffer(bytearray(data.ljust(_FRAME_BYTES)), dtype=torch.uint8)
        mine = mine.to(self._channel.device())
        frames = {peer: torch.empty_like(mine) for peer in range(self._size) if peer != self._rank}
        exchange = Round(self._channel, call, "symmetric memory")
        for peer, frame in frames.items():
            exchange.recv(peer, frame)
        for peer in exchange.peers():
            exchange.send(peer, mine)
        exchange.finish()
        frames[self._rank] = mine
        return [json.loads(bytes(frames[rank].cpu().tolist())) for rank in range(self._size)]


def _host_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
