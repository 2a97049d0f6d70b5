"""What a time-out on the device says of the peer, no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep.backends.base import Call
from moe_ep.backends.low_latency_base import Shape
from moe_ep.backends.low_latency_cuda import CudaLowLatencyBackend
from moe_ep.errors import OrderError, PeerTimeoutError

ROWS, COMBINE = "low_latency_dispatch (rows)", "low_latency_combine (expert rows)"
FREE = "a low-latency send (its buffer free)"
WORD = 7 << 32  # a ready word of operation 7


def told(phase: str, expected: int, seen: int) -> Exception:
    backend = object.__new__(CudaLowLatencyBackend)
    backend._timeout_s = 2.0
    fault = SimpleNamespace(rank=0, peer=3, phase=phase, operation=7, expected=expected, seen=seen)
    error = backend._of_fault(fault)
    assert backend._broken is not None
    return error


@pytest.mark.parametrize("phase", [ROWS, COMBINE])
def test_rows_that_have_not_all_come(phase: str) -> None:
    """A count of messages, or the operation of a block: the peer has said what would come."""
    error = told(phase, 12, 11)
    assert isinstance(error, PeerTimeoutError)
    assert f"rank 0 waited 2 s for rank 3 in {phase}, operation 7" in str(error)
    assert "rank 3 had begun this operation, and not all of its rows have come" in str(error)


@pytest.mark.parametrize(
    ("phase", "expected", "seen"), [(ROWS, WORD, 5 << 32), (COMBINE, WORD, 0), (FREE, 5, 3)]
)
def test_a_peer_that_did_not_come(phase: str, expected: int, seen: int) -> None:
    error = told(phase, expected, seen)
    assert isinstance(error, PeerTimeoutError)
    assert "rank 3 did not reach this operation" in str(error)


def test_calls_that_the_peers_are_told_of() -> None:
    """Of a handle that is none, in place of rows; not of a call out of turn."""
    backend: Any = object.__new__(CudaLowLatencyBackend)
    backend._device, backend.combine = torch.device("cpu"), mock.Mock()
    shape, out_of_turn, no_handle = Shape(8, 128, 4, 2, False), OrderError("hook"), TypeError("h")
    with pytest.raises(OrderError):
        backend.refuse(shape, 3, Call(7, "low_latency_combine", 2.0, out_of_turn))
    backend.combine.assert_not_called()
    call = Call(8, "low_latency_combine", 2.0, no_handle)
    with pytest.raises(TypeError):
        backend.refuse(shape, 3, call)
    backend.combine.assert_called_once_with(shape, 3, mock.ANY, None, call, at_once=False)
    assert backend.combine.call_args[0][2].layout_range.tolist() == [0, 0, 0, 0]


def test_another_shape() -> None:
    assert isinstance(told(ROWS, WORD, WORD | 1 << 24), OrderError)
