"""What a time-out on the device says of the peer, no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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


def test_another_shape() -> None:
    assert isinstance(told(ROWS, WORD, WORD | 1 << 24), OrderError)
