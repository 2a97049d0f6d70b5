"""Rounds of point-to-point messages between the ranks of one process group, with bounded waits.

A round is posted message by message and finished once: `finish` returns when everything has
arrived, or raises an error that names the peer. In every round each rank first tells every other
what it is doing (its status), so that ranks that disagree, or one with bad input, become an error
on all of them.

Several messages between the same two ranks are matched in the order they were posted. The tag of
a message holds the channel, the round and a checksum of the status: messages of another channel,
round or kind of operation never meet, whose sizes would differ. (Where the bits for the channel
repeat, the status tells.)
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.errors import BrokenError, MoEEPError, OrderError, PeerError, PeerTimeoutError

_TAG_MARK = 1 << 30  # keeps our tags away from the small ones that frameworks use
_CHANNEL_BITS, _ROUND_BITS, _STATUS_BITS = 7, 8, 15
_STATUS_BYTES = 512
_FRAME_BYTES = 4096
_SEPARATOR = "\0"


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
        self._global_ranks = dist.get_process_group_ranks(group)
        self._broken: str | None = None
        self._lost: list[Any] = []

    def group_rank(self, peer: int) -> int:
        """A rank of this channel as a rank of its group."""
        return peer

    def name(self, peer: int) -> str:
        """A rank of this channel, for messages: whose log to open, where groups count anew."""
        rank = self.group_rank(peer)
        global_rank = self._global_ranks[rank]
        return f"rank {rank}" if global_rank == rank else f"rank {rank} (global rank {global_rank})"

    def device(self) -> torch.device:
        """A device whose tensors this channel sends without a detour."""
        if _backend_name(self.group, torch.device("cpu")) is not None:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def begin(self, call: Call) -> int:
        """Counts a new round and returns its message tag, status bits zero."""
        if self._broken:
            raise BrokenError(
                f"{self.name(self.rank)}: {call.phase}, operation {call.operation}: this object "
                f"stopped after an earlier fault ({self._broken}); build a new one on a new "
                "process group"
            )
        self.rounds += 1
        channel = self.number % (1 << _CHANNEL_BITS)
        number = self.rounds % (1 << _ROUND_BITS)
        return _TAG_MARK | channel << (_ROUND_BITS + _STATUS_BITS) | number << _STATUS_BITS

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def fail(self, message: str, keep: list[Any]) -> None:
        """Marks the channel broken; `keep` holds buffers that messages in flight still point to."""
        self._broken = message
        self._lost.append(keep)

    @contextlib.contextmanager
    def whole(self, call: Call) -> Iterator[None]:
        """Breaks the channel on an error that peers don't learn of, such as too little memory."""
        try:
            yield
        except (ValueError, TypeError, MoEEPError):  # bad input, which they do learn of
            raise
        except BaseException as error:
            if not self.broken:
                self.fail(left_halfway(call, error), [])
            raise


@dataclass
class _Message:
    peer: int
    receives: bool
    tensor: Tensor
    wire: Tensor  # what travels: the tensor itself, or its copy on the host
    work: dist.Work | None = None


class Round:
    """One exchange: post every `send` and `recv` in a `with` block, then `finish`.

    An exception in between (out of memory, say) leaves peers without their messages and messages
    without their buffers: the channel is broken.

    Args:
        kind: what is exchanged (the phase, and whatever decides the sizes of messages). All ranks
            must give the same.
    """

    def __init__(self, channel: Channel, call: Call, kind: str) -> None:
        if channel.number >= 1 << _CHANNEL_BITS:  # tags repeat: another channel's message may come
            kind = f"{kind} on channel {channel.number}"
        self.channel = channel
        self.call = call
        self.kind = kind
        self.deadline = time.monotonic() + call.timeout_s
        self.waited: tuple[int, int] | None = None
        """After `finish`: nanoseconds until all peers had come, and the one that took longest."""
        self._statuses: list[_Message] = []
        self._payload: list[_Message] = []
        self._batch: list[dist.P2POp] = []
        self._tag = channel.begin(call)
        error = "" if call.error is None else f"{type(call.error).__name__}: {call.error}"
        mine = _pack(kind + _SEPARATOR + error).to(channel.device())
        with self:
            for peer in self.peers():
                self._post(self._statuses, peer, torch.empty_like(mine), receives=True)
            for peer in self.peers():
                self._post(self._statuses, peer, mine, receives=False)
        self._tag |= 1 + zlib.crc32(kind.encode()) % ((1 << _STATUS_BITS) - 1)

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.channel.broken:
            self._fail(left_halfway(self.call, error))

    def peers(self) -> list[int]:
        """The other ranks, each rank starting with its own successor: no rank is hit by all."""
        channel = self.channel
        return [(channel.rank + 1 + i) % channel.size for i in range(channel.size - 1)]

    def send(self, peer: int, tensor: Tensor) -> None:
        self._post(self._payload, peer, tensor.contiguous(), receives=False)

    def recv(self, peer: int, tensor: Tensor) -> None:
        """Posts the receipt of a contiguous tensor, complete after `finish`."""
        self._post(self._payload, peer, tensor, receives=True)

    def finish(self) -> None:
        """Waits for all messages of the round.

        Raises:
            PeerTimeoutError: names the first peer that did not deliver; the channel is broken.
            OrderError: a peer is in another operation; the channel is broken.
            PeerError: a peer reported bad input.
            `call.error`: this rank's own, in place of any of these.
        """
        with self:
            self._start_batch()
            self.waited = self._wait(self._statuses)
            theirs = {m.peer: _unpack(m.wire) for m in self._statuses if m.receives}
            self._check_kinds(theirs)
            self._wait(self._payload)
        for message in self._payload:
            if message.receives and message.tensor is not message.wire:
                message.tensor.copy_(message.wire)
        self._raise_errors(theirs)

    def _check_kinds(self, theirs: dict[int, tuple[str, str]]) -> None:
        """Ranks that disagree about the round cannot go on: their messages don't match."""
        different = {peer: kind for peer, (kind, _) in theirs.items() if kind != self.kind}
        if not different:
            return
        channel, call, peer = self.channel, self.call, min(different)
        message = (
            f"{channel.name(channel.rank)} is in operation {call.operation}, {self.kind}, "
            f"{channel.name(peer)} in {different[peer]}: all ranks must make the same calls in "
            "the same order"
        )
        self._fail(message)
        self._raise_errors(theirs)
        raise OrderError(message)

    def _raise_errors(self, theirs: dict[int, tuple[str, str]]) -> None:
        if self.call.error is not None:
            raise self.call.error
        channel = self.channel
        for peer in sorted(theirs):
            if theirs[peer][1]:
                raise PeerError(
                    f"{channel.name(channel.rank)}: {channel.name(peer)} gave bad input to "
                    f"{self.call.phase}, operation {self.call.operation}: {theirs[peer][1]}"
                )

    def _post(self, messages: list[_Message], peer: int, tensor: Tensor, receives: bool) -> None:
        if tensor.numel() == 0:
            return
        group, address = self.channel.group, self.channel.group_rank(peer)
        backend = _backend_name(group, tensor.device)
        wire = tensor
        if tensor.device.type != "cpu" and backend in (None, "gloo"):
            # gloo's send and recv read host memory only
            wire = torch.empty_like(tensor, device="cpu") if receives else tensor.cpu()
        message = _Message(peer, receives, tensor, wire)
        messages.append(message)
        flat = wire.view(-1).view(torch.uint8)  # gloo knows no float8
        if backend == "nccl":  # has no tags: one batch, started by `finish`
            operation = dist.irecv if receives else dist.isend
            self._batch.append(dist.P2POp(operation, flat, group=group, group_peer=address))
            return
        try:
            if receives:
                message.work = dist.irecv(flat, group=group, group_src=address, tag=self._tag)
            else:
                message.work = dist.isend(flat, group=group, group_dst=address, tag=self._tag)
        except RuntimeError as error:
            raise self._failure(peer, error) from None

    def _wait(self, messages: list[_Message]) -> tuple[int, int] | None:
        """Returns the nanoseconds it took, and the peer with the largest share in them."""
        begun = last = time.perf_counter_ns()
        longest, slowest = -1, None
        # Receipts first: what a peer has not sent says more than what it has not taken.
        for message in sorted(messages, key=lambda message: not message.receives):
            if message.work is None:
                continue
            left = max(self.deadline - time.monotonic(), 1e-3)
            try:
                message.work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self._failure(message.peer, error) from None
            now = time.perf_counter_ns()
            if now - last > longest:
                longest, slowest = now - last, message.peer
            last = now
        return None if slowest is None else (last - begun, slowest)

    def _start_batch(self) -> None:
        for work in dist.batch_isend_irecv(self._batch) if self._batch else []:
            while not work.is_completed():
                if time.monotonic() > self.deadline:
                    raise self._failure(None, RuntimeError("Timed out"))
                time.sleep(50e-6)
            work.wait()

    def _failure(self, peer: int | None, error: RuntimeError) -> Exception:
        """What to raise: this rank's own error, if it has one, is what its log must tell."""
        who, call = self.channel.name(self.channel.rank), self.call
        whom = "a peer" if peer is None else self.channel.name(peer)
        if time.monotonic() >= self.deadline or "Timed out" in str(error):
            what = f"waited {call.timeout_s:g} s for {whom}"
            advice = (
                f"{whom} did not reach this operation: see its log; raise the "
                "time-outs of the layout if it was only slow"
            )
        else:
            what = f"lost its connection to {whom}"
            advice = f"the process of {whom} has probably ended: see its log"
        message = f"{who} {what} in {call.phase}, operation {call.operation} ({advice})"
        self._fail(message)
        return call.error or PeerTimeoutError(message)

    def _fail(self, message: str) -> None:
        self.channel.fail(message, [self._statuses, self._payload, self._batch])


def left_halfway(call: Call, error: BaseException) -> str:
    """Why a channel is broken after an error that the peers don't learn of."""
    return (
        f"{call.phase}, operation {call.operation}, was left halfway: "
        f"{type(error).__name__}: {error}"
    )


def exchange_json(
    channel: Channel, value: dict[str, str], call: Call, kind: str = "symmetric memory"
) -> list[dict[str, str]]:
    """Every rank's value, by rank. A barrier, too.

    Raises:
        As `Round.finish`.
    """
    data = json.dumps(value).encode()
    assert len(data) <= _FRAME_BYTES, f"{len(data)} bytes, a frame has {_FRAME_BYTES}"
    mine = torch.frombuffer(bytearray(data.ljust(_FRAME_BYTES)), dtype=torch.uint8)
    mine = mine.to(channel.device())
    peers = [peer for peer in range(channel.size) if peer != channel.rank]
    frames = {peer: torch.empty_like(mine) for peer in peers}
    with Round(channel, call, kind) as exchange:
        for peer, frame in frames.items():
            exchange.recv(peer, frame)
        for peer in exchange.peers():
            exchange.send(peer, mine)
    exchange.finish()
    frames[channel.rank] = mine
    return [json.loads(bytes(frames[rank].cpu().tolist())) for rank in range(channel.size)]


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Name of the group's backend for tensors on `device`; None where it has none."""
    try:
        return str(group._get_backend(device).name()).lower()
    except (RuntimeError, ValueError):
        return None


def _pack(text: str) -> Tensor:
    data = text.encode()[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(status: Tensor) -> tuple[str, str]:
    """The sender's kind of round, and its error or an empty string."""
    text = status.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    kind, _, error = text.partition(_SEPARATOR)
    return kind, error
