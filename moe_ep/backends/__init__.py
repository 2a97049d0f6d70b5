"""Backends, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from moe_ep.backends import cuda, cuda_limits, nvshmem_runtime
from moe_ep.backends.base import Backend
from moe_ep.backends.channel import Channel
from moe_ep.backends.nvshmem import NvshmemBackend
from moe_ep.backends.reference import ReferenceBackend
from moe_ep.errors import BackendUnavailableError
from moe_ep.layout import EPLayout

logger = logging.getLogger("moe_ep")


@dataclass(frozen=True)
class _Candidate:
    unavailable: Callable[[EPLayout], str | None]
    """Why it cannot run this layout here; None where it can."""
    build: Callable[[EPLayout, dist.ProcessGroup, Channel], Backend]


# Fastest first: the order in which "auto" tries them.
_CANDIDATES = {
    "nvshmem": _Candidate(nvshmem_runtime.unavailable_reason, NvshmemBackend),
    "cuda": _Candidate(cuda_limits.unavailable_reason, cuda.CudaBackend),
    "reference": _Candidate(lambda layout: None, ReferenceBackend),
}


def reasons(layout: EPLayout) -> dict[str, str | None]:
    """Why each backend cannot run `layout` in this process; None where it can."""
    return {name: candidate.unavailable(layout) for name, candidate in _CANDIDATES.items()}


def create(
    layout: EPLayout,
    group: dist.ProcessGroup,
    channel: Channel,
    unavailable: dict[str, str | None],
) -> Backend:
    """Builds the layout's backend: the same on every rank.

    Args:
        unavailable: as from `reasons`, for the group as a whole.

    Raises:
        BackendUnavailableError: a backend asked for by name cannot run on some rank.
    """
    if layout.backend != "auto":
        return _build(layout.backend, layout, group, channel, unavailable)
    skipped: list[str] = []
    for name in _CANDIDATES:
        try:
            backend = _build(name, layout, group, channel, unavailable)
        except BackendUnavailableError as error:  # raised on all ranks or on none
            skipped.append(str(error))
            continue
        if channel.rank == 0:
            logger.info("backend auto: using %r (%s)", name, "; ".join(skipped) or "the fastest")
        return backend
    raise AssertionError("the reference backend always runs")


def _build(
    name: str,
    layout: EPLayout,
    group: dist.ProcessGroup,
    channel: Channel,
    unavailable: dict[str, str | None],
) -> Backend:
    reason, build = unavailable[name], _CANDIDATES[name].build
    if reason is not None:
        raise BackendUnavailableError(
            f"backend {name!r} cannot run: {reason}; backend: reference runs everywhere, "
            "backend: auto takes the fastest that runs"
        )
    return build(layout, group, channel)
