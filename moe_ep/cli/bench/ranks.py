"""The processes of one benchmark: their groups, their devices, and agreement on what failed."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.errors import BrokenError, LayoutError, PeerError, PeerTimeoutError


@dataclass(frozen=True)
class Ranks:
    """This process among the benchmark's.

    Attributes:
        control: gloo group of all ranks, for barriers and results; never timed.
        device_ids: by rank, equal for ranks that share a GPU (on a CPU: a host).
    """

    control: dist.ProcessGroup
    device: torch.device
    device_ids: list[str]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.control)

    @property
    def size(self) -> int:
        return len(self.device_ids)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_own_gpu(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.on_gpu and len(set(self.device_ids)) == self.size

    @property
    def transport(self) -> str:
        """Backends of the groups that `new_group` makes."""
        return "cpu:gloo,cuda:nccl" if self.has_own_gpu and self.size > 1 else "gloo"

    @property
    def is_native(self) -> bool:
        """Whether torch's collectives move this device's tensors without a copy on the host."""
        return not self.on_gpu or "nccl" in self.transport

    def new_group(self) -> dist.ProcessGroup:
        """A group of all ranks; collective. What is timed gets one of its own, since a time-out
        makes a gloo group unusable."""
        group = dist.new_group(backend=self.transport)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def barrier(self) -> None:
        dist.barrier(self.control)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def first_error(self, error: str | None) -> str | None:
        """The first rank's error, the same on all ranks; None where no rank has one.

        An error that only tells of another rank's comes last.
        """
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text]
        symptoms = (PeerTimeoutError.__name__, PeerError.__name__, BrokenError.__name__)
        return min(found, key=lambda text: text.split(": ")[1] in symptoms, default=None)

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """What the action returned, and the first error of any rank.

        Raises:
            LayoutError: from the action: the user's mistake, the same on every rank.
        """
        value, error = None, None
        try:
            value = action()
        except LayoutError:
            raise
        except Exception as caught:
            error = describe(caught)
        return value, self.first_error(error)


class Guard:
    """A call that keeps its first error and does nothing after it, so that a rank on which it
    failed still takes part in every barrier."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self.error: str | None = None

    def __call__(self) -> None:
        self.run(self._action)

    def run(self, action: Callable[[], Any]) -> None:
        """Something else that belongs to the call, such as waiting for its end."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = self.error or describe(error)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def open_ranks(wants_gpu: bool) -> Iterator[Ranks]:
    """The ranks that torchrun or scripts/with_mps.sh started, or this process alone."""
    gpus = torch.cuda.device_count() if wants_gpu else 0
    device = torch.device("cuda", env.local_rank() % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        if env.under_torchrun():
            dist.init_process_group("gloo")
        else:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
        try:
            yield _ranks(device)
        finally:
            dist.destroy_process_group()


def _ranks(device: torch.device) -> Ranks:
    control = dist.distributed_c10d._get_default_group()
    size = dist.get_world_size(control)
    ids: list[Any] = [None] * size
    dist.all_gather_object(ids, _device_id(device), group=control)
    return Ranks(control, device, ids)


def _device_id(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()
