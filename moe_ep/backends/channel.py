"""Rounds of point-to-point messages between the ranks of one process group, with bounded waits.

A round is posted message by message and finished once: `finish` returns when everything has
arrived, or raises an error that names the peer. Several messages between the same two ranks are
matched in the order they were posted. Rounds of different channels never mix (message tags).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.errors import BrokenError, PeerTimeoutError

_TAG_MARK = 1 << 30  # keeps our tags away from the small ones that frameworks use
_CHANNEL_BITS, _ROUND_BITS = 10, 20


class Channel:
    """This rank's end of a channel over `group`.

    Args:
        group: any process group whose backend has send and recv (gloo, nccl, mpi).
        number: the same on all ranks; channels of one group with different numbers don't mix.
    """

    next_number = 1
    """What this process proposes for its next channel; 0 is for set-up. Ranks take the largest
    proposal, so a number is never used twice between the same two processes."""

    def __init__(self, group: dist.ProcessGroup, number: int = 0) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.number = number
        self.rounds = 0
        self._broken: str | None = None
        self._lost: list[Any] = []

    def device(self) -> torch.device:
        """A device whose tensors this channel sends without a detour."""
        if _backend_name(self.group, torch.device("cpu")) is not None:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def begin(self, call: Call) -> int:
        """Counts a new round and returns its message tag."""
        if self._broken:
            raise BrokenError(
                f"rank {self.rank}: {call.phase}, operation {call.operation}: this object stopped "
                f"after an earlier fault ({self._broken}); build a new one on a new process group"
            )
        self.rounds += 1
        channel = self.number % (1 << _CHANNEL_BITS)
        return _TAG_MARK | channel << _ROUND_BITS | self.rounds % (1 << _ROUND_BITS)

    def fail(self, message: str, keep: list[Any]) -> None:
        """Marks the channel broken; `keep` holds buffers that messages in flight still point to."""
        self._broken = message
        self._lost.append(keep)


class Round:
    """One exchange: post every `send` and `recv`, then `finish`."""

    def __init__(self, channel: Channel, call: Call) -> None:
        self.channel = channel
        self.call = call
        self.deadline = time.monotonic() + call.timeout_s
        self.tag = channel.begin(call)
        self._works: list[tuple[int, bool, dist.Work, Tensor]] = []
        self._batch: list[dist.P2POp] = []
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []

    def peers(self) -> list[int]:
        """The other ranks, each rank starting with its own successor: no rank is hit by all."""
        channel = self.channel
        return [(channel.rank + 1 + i) % channel.size for i in range(channel.size - 1)]

    def send(self, peer: int, tensor: Tensor) -> None:
        self._post(peer, tensor.contiguous(), receives=False)

    def recv(self, peer: int, tensor: Tensor) -> None:
        """Posts the receipt of a contiguous tensor, complete after `finish`."""
        self._post(peer, tensor, receives=True)

    def _post(self, peer: int, tensor: Tensor, receives: bool) -> None:
        if tensor.numel() == 0:
            return
        group = self.channel.group
        backend = _backend_name(group, tensor.device)
        wire = tensor
        if tensor.device.type != "cpu" and backend in (None, "gloo"):
            # gloo's send and recv read host memory only
            wire = torch.empty_like(tensor, device="cpu") if receives else tensor.cpu()
            if receives:
                self._staged.append((tensor, wire))
        flat = wire.view(-1).view(torch.uint8)  # gloo knows no float8
        if backend == "nccl":
            operation = dist.irecv if receives else dist.isend
            self._batch.append(dist.P2POp(operation, flat, group=group, group_peer=peer))
            self._kept.append(wire)
            return
        try:
            if receives:
                work = dist.irecv(flat, group=group, group_src=peer, tag=self.tag)
            else:
                work = dist.isend(flat, group=group, group_dst=peer, tag=self.tag)
        except RuntimeError as error:
            raise self._failure(peer, error) from None
        assert work is not None
        self._works.append((peer, receives, work, wire))

    def finish(self) -> None:
        """Waits for all messages of the round.

        Raises:
            PeerTimeoutError: names the first peer that did not deliver; the channel is broken.
        """
        if self._batch:
            self._finish_batch()
        # Receipts first: what a peer has not sent says more than what it has not taken.
        for peer, _, work, _ in sorted(self._works, key=lambda item: not item[1]):
            try:
                work.wait(timedelta(seconds=max(self.deadline - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                raise self._failure(peer, error) from None
        for tensor, wire in self._staged:
            tensor.copy_(wire)
        self._works.clear()

    def _finish_batch(self) -> None:
        works = dist.batch_isend_irecv(self._batch)
        for work in works:
            while not work.is_completed():
                if time.monotonic() > self.deadline:
                    peers = ", ".join(map(str, self.peers()))
                    raise self._failure(None, RuntimeError(f"Timed out waiting for {peers}"))
                time.sleep(50e-6)
            work.wait()

    def _failure(self, peer: int | None, error: RuntimeError) -> PeerTimeoutError:
        rank, call = self.channel.rank, self.call
        whom = "a peer" if peer is None else f"rank {peer}"
        if time.monotonic() >= self.deadline or "Timed out" in str(error):
            what = f"waited {call.timeout_s:g} s for {whom}"
            advice = (
                f"{whom} did not reach this operation: see its log; raise timeouts.steady_s "
                "if it was only slow"
            )
        else:
            what = f"lost its connection to {whom}"
            advice = f"the process of {whom} has probably ended: see its log"
        message = f"rank {rank} {what} in {call.phase}, operation {call.operation} ({advice})"
        self.channel.fail(message, [self._works, self._batch, self._kept])
        return PeerTimeoutError(message)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Name of the group's backend for tensors on `device`; None where it has none."""
    try:
        return str(group._get_backend(device).name()).lower()
    except (RuntimeError, ValueError):
        return None
