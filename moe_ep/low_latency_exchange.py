"""The low-latency exchange of one process group, over either backend. `moe_ep.low_latency` has its
public methods and the legend of shapes.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import backends, env
from moe_ep import low_latency_checks as checks
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round
from moe_ep.backends.low_latency_base import (
    CombineInputs,
    LowLatencyBackend,
    Receive,
    Result,
    Shape,
    num_bytes_needed,
)
from moe_ep.backends.low_latency_cuda import CudaLowLatencyBackend
from moe_ep.backends.low_latency_nvshmem import NvshmemLowLatencyBackend
from moe_ep.backends.low_latency_reference import ReferenceLowLatencyBackend
from moe_ep.errors import BackendUnavailableError, BrokenError, LayoutMismatchError, OrderError
from moe_ep.handshake import handshake
from moe_ep.layout import EPLayout, Timeouts

logger = logging.getLogger("moe_ep")

_NUM_BUFFERS = 2
_NUM_TAGS = 256
_FIRST_OPERATIONS = 3  # may take as long as a set-up


class LowLatencyHandle(tuple[Any, ...]):
    """The routing of one dispatch: a tuple (src_info [L, N] int32, layout_range [L, R] int64, Tmax,
    H, E), as in DeepEP, that `low_latency_combine` needs itself and not a copy of."""

    shape: Shape
    plan: Any
    owner: object
    num_tokens: int
    received: bool
    combine_buffer: Tensor | None  # for the next combine with zero_copy

    @classmethod
    def of(
        cls, result: Result, shape: Shape, plan: Any, owner: object, num_tokens: int
    ) -> LowLatencyHandle:
        facts = (shape.max_tokens, shape.hidden, shape.num_experts)
        handle = cls((result.src_info, result.layout_range, *facts))
        handle.shape, handle.plan, handle.owner = shape, plan, owner
        handle.num_tokens, handle.received = num_tokens, False
        handle.combine_buffer = None
        return handle


class LowLatency:
    """The low-latency exchange of one process group. Construction is collective.

    Args:
        group: all ranks on one host with the cuda backend; equally many on each host, those of a
            host in a row, with the nvshmem backend.
        num_bytes: of symmetric memory, the same on all ranks.

    Raises:
        LayoutMismatchError (a ValueError): ranks give different `num_bytes`.
        BackendUnavailableError, PeerTimeoutError: as for ExpertParallel.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = num_bytes
        seconds = env.timeout_s()
        self._timeouts = (
            Timeouts() if seconds is None else Timeouts(first_s=seconds, steady_s=seconds)
        )
        self._operations = 0
        self._num_sent = 0
        self._in_flight: dict[int, Call] = {}
        self._agreed: list[Shape] = []
        self._last: Shape | None = None  # of those, the one that was used last
        self._backend = self._build(group)
        self._destroyed = False

    @property
    def device(self) -> torch.device | None:
        """Where tensors must be; None: anywhere."""
        return self._backend.device

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def dispatch(
        self, arguments: dict[str, Any], num_sms: int, at_once: bool
    ) -> tuple[Result, LowLatencyHandle, Receive]:
        """Sends. See `moe_ep.low_latency` for the arguments.

        at_once: the receiving half is called immediately.
        """
        call = self._call("low_latency_dispatch")
        shape = outgoing = None
        try:
            shape = checks.dispatch_shape(self.size, self.num_bytes, **arguments)
            outgoing = checks.outgoing(shape, self.size, self.device, **arguments)
        except (TypeError, ValueError, RuntimeError) as error:  # of torch, the last
            call.error = error
            if shape is None:
                shape = self._closest_shape(arguments)
        shape, tag = self._agree(shape, call)
        self._backend.num_sms = num_sms
        result, plan, receive = self._backend.dispatch(shape, tag, outgoing, call, at_once)
        assert outgoing is not None
        handle = LowLatencyHandle.of(result, shape, plan, self, len(outgoing.x))

        def finish() -> None:
            receive()
            handle.received = True

        return result, handle, self._track(call, finish)

    def combine(
        self, handle: Any, arguments: dict[str, Any], num_sms: int, at_once: bool
    ) -> tuple[Tensor, Receive]:
        """Sends. See `moe_ep.low_latency` for the arguments, `dispatch` for at_once.

        Returns:
            The tensor that receiving fills, and the receiving half.
        """
        call = self._call("low_latency_combine")
        try:
            checks.check_handle(handle, LowLatencyHandle, self)
        except (TypeError, ValueError, OrderError) as error:
            call.error = error
            self._refuse(call)
        inputs: CombineInputs | None = None
        try:
            inputs = checks.combine_inputs(handle, self.size, self.device, **arguments)
        except (TypeError, ValueError, RuntimeError) as error:  # of torch, the last
            call.error = error
        tag = self._agreed.index(handle.shape) % _NUM_TAGS
        self._backend.num_sms = num_sms
        receive = self._backend.combine(handle.shape, tag, handle.plan, inputs, call, at_once)
        assert inputs is not None
        handle.combine_buffer = None
        return inputs.out, self._track(call, receive)

    def combine_buffer(self, handle: Any) -> Tensor:
        """[L, N, H] bf16 for the rows of the handle's next combine with zero_copy."""
        checks.check_handle(handle, LowLatencyHandle, self, received=False)
        if self._destroyed:
            raise BrokenError(f"rank {self.rank}: a combine buffer after destroy()")
        buffer = self._backend.combine_buffer(handle.shape, handle.plan, handle[0].device)
        handle.combine_buffer = buffer
        return buffer

    def round_trip_us(self, rounds: int = 1000) -> float | None:
        """How long a signal between ranks 0 and 1 takes there and back, by these two; waits for it.

        None on all other ranks, and where signals are messages of the host.
        """
        if self.size == 1 or self.rank > 1:
            return None
        call = Call(self._operations, "the exchange of a signal", self._timeouts.steady_s)
        return self._backend.round_trip_us(1 - self.rank, rounds, call)

    def destroy(self) -> None:
        """Frees everything. Idempotent; does not wait for a dead peer."""
        self._destroyed = True
        self._backend.destroy()

    def destroy_when_dropped(self) -> None:
        """Calls `destroy` when nobody holds this object any more; not at the end of the process."""
        weakref.finalize(self, self._backend.destroy).atexit = False

    # -- internals --------------------------------------------------------------------------------

    def _call(self, phase: str) -> Call:
        """The next operation. Its buffer is that of the operation two before it."""
        if self._destroyed:
            raise BrokenError(f"rank {self.rank}: {phase} after destroy()")
        self._operations = number = self._operations + 1
        first = number <= _FIRST_OPERATIONS
        seconds = self._timeouts.first_s if first else self._timeouts.steady_s
        call = Call(number, phase, seconds)
        waiting = [n for n in self._in_flight if n <= self._num_sent + 1 - _NUM_BUFFERS]
        if waiting:
            other = self._in_flight[waiting[0]]
            call.error = OrderError(
                f"rank {self.rank}: {phase}, operation {number}: {other.phase}, operation "
                f"{other.operation}, has not been received yet and there are {_NUM_BUFFERS} "
                "buffers; call its hook first"
            )
            self._refuse(call)
        return call

    def _refuse(self, call: Call) -> NoReturn:
        """Where this rank cannot take part in what its peers do."""
        tag = self._agreed.index(self._last) % _NUM_TAGS if self._last is not None else 0
        self._backend.refuse(self._last, tag, call)

    def _track(self, call: Call, receive: Receive) -> Receive:
        """The operation is in flight until the result is called; calling it again does nothing."""
        self._num_sent += 1
        number = self._num_sent
        self._in_flight[number] = call

        def once() -> None:
            if self._in_flight.pop(number, None) is None:
                return
            if self._destroyed:
                raise BrokenError(
                    f"rank {self.rank}: {call.phase}, operation {call.operation}: its hook was "
                    "called after destroy()"
                )
            receive()

        return once

    def _build(self, group: dist.ProcessGroup) -> LowLatencyBackend:
        name = env.backend() or "auto"
        layout = EPLayout(
            model={"hidden": 8, "num_experts": self.size, "top_k": 1},
            parallel={"expert": self.size},
            backend=name,
            timeouts=self._timeouts.model_dump(),
        )
        reasons = backends.reasons(layout)
        self._channel, unavailable = handshake(layout, group, self._timeouts.first_s, reasons)
        call = Call(0, "low_latency setup", self._timeouts.first_s)
        if self.num_bytes <= num_bytes_needed(0, 0, 1, 1):
            call.error = ValueError(
                f"num_rdma_bytes={self.num_bytes} is too small for low-latency mode; use "
                "Buffer.get_low_latency_rdma_size_hint(...)"
            )
        _compare(self._channel, {"num_rdma_bytes": self.num_bytes}, call)
        for candidate, build in _BUILDERS.items():
            if name not in ("auto", candidate) or unavailable[candidate] is not None:
                continue
            try:
                core = importlib.import_module("moe_ep._C")
                return build(core, layout, self._channel, self.num_bytes, call)
            except BackendUnavailableError as error:  # on all ranks or on none
                if name == candidate:
                    raise
                if self.rank == 0:
                    logger.info("low-latency mode: not using %r (%s)", candidate, error)
        if name not in ("auto", "reference"):
            raise BackendUnavailableError(
                f"backend {name!r} cannot run low-latency mode: {unavailable[name]}; backend: "
                "reference runs everywhere"
            )
        return ReferenceLowLatencyBackend(self._channel)

    def _agree(self, shape: Shape | None, call: Call) -> tuple[Shape, int]:
        """The shape and its tag. Before its first use ranks compare it, which waits for them."""
        if shape is None or shape not in self._agreed:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise OrderError(
                    f"rank {self.rank}: {call.phase}: the ranks have not compared this shape yet, "
                    "which a CUDA graph cannot capture; run it once before the capture"
                )
            # With an error and no shape, anything: comparing raises the error.
            values = vars(shape or Shape(0, 0, 0, 0, False))
            _compare(self._channel, {_PUBLIC_NAMES.get(k, k): int(values[k]) for k in values}, call)
            assert shape is not None
            self._agreed.append(shape)
        self._last = shape
        return shape, self._agreed.index(shape) % _NUM_TAGS

    def _closest_shape(self, arguments: dict[str, Any]) -> Shape | None:
        """What the peers probably use where this rank's arguments make no shape: the known one that
        most of them fit, the last used of equals."""
        known = [] if self._last is None else [self._last, *self._agreed]
        return max(known, key=lambda s: checks.num_equal(s, **arguments), default=None)


# Fastest first: the order in which "auto" tries them; the reference backend runs everywhere.
_BUILDERS: dict[str, Callable[[Any, EPLayout, Channel, int, Call], LowLatencyBackend]] = {
    "nvshmem": NvshmemLowLatencyBackend,
    "cuda": lambda core, layout, channel, num_bytes, call: CudaLowLatencyBackend(
        core, channel, num_bytes, call
    ),
}

_PUBLIC_NAMES = {
    "max_tokens": "num_max_dispatch_tokens_per_rank",
    "num_slots": "top-k",
    "fp8": "use_fp8",
}


def _compare(channel: Channel, values: dict[str, int], call: Call) -> None:
    """Raises on all ranks where any value differs between two of them.

    Raises:
        LayoutMismatchError: names both ranks and values. As `Round.finish` else.
    """
    mine = torch.tensor(list(values.values()), dtype=torch.int64, device=channel.device())
    frames = {peer: torch.empty_like(mine) for peer in range(channel.size) if peer != channel.rank}
    with Round(channel, call, f"{call.phase}: comparison") as exchange:
        for peer in exchange.peers():
            exchange.recv(peer, frames[peer])
            exchange.send(peer, mine)
    exchange.finish()
    frames[channel.rank] = mine
    first = frames[0].tolist()
    for peer in range(channel.size):
        for name, here, there in zip(values, first, frames[peer].tolist(), strict=True):
            if here != there:
                raise LayoutMismatchError(
                    f"{call.phase}: {name} is {here} on rank 0 and {there} on rank {peer}; give "
                    "all ranks the same"
                )
