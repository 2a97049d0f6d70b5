"""What the device reports to the CUDA backend, as errors."""

from __future__ import annotations

from collections import deque
from typing import Any

from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, left_halfway
from moe_ep.errors import BrokenError, CapacityError, PeerError, PeerTimeoutError

OK, BAD_INPUT, NEEDS_ROOM, OVERFLOW = range(4)  # NotifyStatus of csrc/shared/control.h


class CudaErrors:
    """Raises what kernels have found, in terms of the calls that launched them."""

    channel: Channel
    rank: int
    size: int
    num_local_experts: int
    _comm: Any  # `_C.Communicator`
    _broken: str | None  # why nothing more can be done
    _calls: deque[tuple[int, Call]]  # the last operations by number

    def check(self, call: Call) -> None:
        """Raises what the device has reported so far; does not synchronise."""
        if self._broken is not None:
            raise BrokenError(
                f"rank {self.rank}: {call.phase}, operation {call.operation}: this object stopped "
                f"earlier ({self._broken}); build a new one"
            )
        if self._comm.is_quiet():
            return
        fault = self._comm.fault()
        if fault is not None:
            raise self._peer_timeout(fault)
        bad_peer = self._comm.take_bad_peer()
        if bad_peer >= 0:
            self._broken = f"rank {bad_peer} gave bad input while rows were on their way"
            raise PeerError(
                f"rank {self.rank}: rank {bad_peer} gave bad input to an operation before "
                f"{call.phase}, operation {call.operation}; see its log"
            )
        self._broken = "a static capacity was exceeded or an index was bad"
        self._raise_status(self._comm.sticky(), call)

    def _raise_own_error(self, call: Call) -> None:
        """Peers learn of it from the device, at some later call: nobody can go on after that."""
        if call.error is not None:
            self._broken = f"bad input to {call.phase}, operation {call.operation}"
            raise call.error

    def _left_halfway(self, call: Call, error: BaseException) -> None:
        """Out of memory, say, after the peers have got counts or rows: they go on without us."""
        self._broken = self._broken or left_halfway(call, error)

    def _peer_timeout(self, fault: Any) -> PeerTimeoutError:
        calls = [known for number, known in self._calls if number == fault.operation]
        operation = calls[0].operation if calls else fault.operation
        seconds = f"{calls[0].timeout_s:g} s " if calls else ""
        whom = self._name_of(fault.peer)
        message = (
            f"rank {fault.rank} waited {seconds}for {whom} in {fault.phase}, operation "
            f"{operation} (expected {fault.expected:#x}, seen {fault.seen:#x}; {whom} did not "
            "reach this operation: see its log; raise the layout's time-outs if it was only slow)"
        )
        self._broken = message
        return PeerTimeoutError(message)

    def _name_of(self, rank: int) -> str:
        return self.channel.name(rank)

    def _raise_status(self, counts: Any, call: Call) -> None:
        if call.error is not None:
            raise call.error
        if counts.status == OK:
            return
        where = f"rank {self.rank}: {call.phase}, operation {call.operation}"
        if counts.status == BAD_INPUT and counts.culprit == self.rank:
            raise ValueError(
                f"{where}: topk_idx holds an index that is neither -1 nor below "
                f"{self.size * self.num_local_experts}, the expert slots of the group"
            )
        if counts.status == BAD_INPUT:
            raise PeerError(f"{where}: rank {counts.culprit} gave bad input")
        if counts.status == OVERFLOW:
            raise CapacityError(
                f"{where}: rank {counts.culprit} would receive {counts.worst_rows} rows, "
                f"dispatch.capacity is {counts.capacity}; raise it, or drop tokens in the router"
            )
