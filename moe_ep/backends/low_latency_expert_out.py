"""Expert rows in symmetric memory, where peers read them: two buffers that are lent in turn."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class ExpertOut:
    """Which of the two buffers is free, and whether a peer may still read it.

    Args:
        comm: `_C.LowLatency`.
    """

    def __init__(self, comm: Any, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._lent: dict[int, weakref.ref[_DeviceArray]] = {}
        self._addresses: dict[int, int] = {}
        self._last_use = {1: -3, 2: -3}  # the operation that sent it last
        self._captured = False  # a replayed graph sends it without being counted
        self._next = 1

    def lend(self, shape: Any, size: tuple[int, ...], dispatch: int) -> tuple[Tensor | None, int]:
        """A bf16 buffer for the rows of that dispatch, or None where none is free.

        Returns:
            The buffer, and its number if the stream must wait until peers have read it (else 0).
        """
        which = next((i for i in (self._next, 3 - self._next) if self._is_free(i)), 0)
        address = self._comm.expert_out(shape, which) if which else 0
        if not address:
            return None, 0
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        memory = _DeviceArray(address, size)  # which lives as long as any tensor on it
        buffer = torch.as_tensor(memory, device=self._device).view(torch.bfloat16)
        self._lent[which], self._addresses[which] = weakref.ref(memory), address
        self._next = 3 - which
        # The second operation after that combine was not sent before the peers had received it.
        must_wait = self._captured or dispatch < self._last_use[which] + 2
        return buffer, which if must_wait else 0

    def sent(self, rows: Tensor, operation: int) -> int:
        """The number of the buffer that holds the rows, 0 if none; it may be lent again."""
        for which, address in self._addresses.items():
            if address == rows.data_ptr():
                self._captured = self._captured or torch.cuda.is_current_stream_capturing()
                self._lent.pop(which, None)
                self._last_use[which] = operation
                return which
        return 0

    def _is_free(self, which: int) -> bool:
        lent = self._lent.get(which)
        return lent is None or lent() is None


class _DeviceArray:
    """Device memory as torch takes it over without a copy, and keeps. It knows no bf16."""

    def __init__(self, address: int, size: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": size,
            "typestr": "<i2",
            "version": 3,
        }
