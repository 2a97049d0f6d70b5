"""Which buffer for expert rows is lent, and when its peers may still read it, no GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from moe_ep.backends import low_latency_expert_out
from moe_ep.backends.low_latency_expert_out import ExpertOut

SIZE = (2, 4, 8)


class Memory:
    """As `_C.LowLatency`: two places."""

    def __init__(self) -> None:
        self.places = [torch.zeros(SIZE, dtype=torch.int16) for _ in range(2)]

    def expert_out(self, shape: Any, which: int) -> int:
        return self.places[which - 1].data_ptr()

    @staticmethod
    def as_tensor(array: Any, device: Any) -> Tensor:
        """As torch takes over memory of the GPU: the tensor keeps the object that lent it."""
        array.__array_interface__ = array.__cuda_array_interface__
        return torch.from_numpy(numpy.asarray(array))


@pytest.fixture
def lender() -> Any:
    memory = Memory()
    with (
        mock.patch.object(low_latency_expert_out.torch, "as_tensor", memory.as_tensor),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        yield ExpertOut(memory, torch.device("cpu"))


def test_two_are_lent_in_turn(lender: ExpertOut) -> None:
    first, _ = lender.lend(None, SIZE, 1)
    second, _ = lender.lend(None, SIZE, 1)
    assert first is not None and second is not None
    assert first.dtype == torch.bfloat16 and first.data_ptr() != second.data_ptr()
    assert lender.lend(None, SIZE, 1) == (None, 0)
    assert lender.sent(first, 2) == 1 and lender.sent(torch.zeros(3), 2) == 0
    again, _ = lender.lend(None, SIZE, 3)
    assert again is not None and again.data_ptr() == first.data_ptr()
    address, same = second.data_ptr(), second.data  # which does not keep `second`
    del second
    assert lender.lend(None, SIZE, 3) == (None, 0), "its memory is in use"
    del same
    third, _ = lender.lend(None, SIZE, 3)
    assert third is not None and third.data_ptr() == address


@pytest.mark.parametrize(("dispatch", "which"), [(4, 1), (6, 1), (7, 0), (8, 0)])
def test_waits_for_the_readers_of_the_last_combine(
    lender: ExpertOut, dispatch: int, which: int
) -> None:
    """Operation 5 read it; operation 7 was sent once the peers had received that."""
    rows, wait = lender.lend(None, SIZE, 4)
    assert rows is not None and wait == 0
    assert lender.sent(rows, 5) == 1
    other, wait = lender.lend(None, SIZE, dispatch)
    assert other is not None and wait == 0
    again, wait = lender.lend(None, SIZE, dispatch)
    assert again is not None and again.data_ptr() == rows.data_ptr() and wait == which


def test_always_waits_once_a_graph_sends(lender: ExpertOut) -> None:
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        rows, wait = lender.lend(None, SIZE, 4)
        assert rows is not None and wait == 1
        lender.sent(rows, 5)
    assert lender.lend(None, SIZE, 100)[1] == 2
