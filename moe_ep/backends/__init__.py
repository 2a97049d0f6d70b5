"""Backends, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

from moe_ep.backends.base import Backend
from moe_ep.backends.channel import Channel
from moe_ep.backends.reference import ReferenceBackend
from moe_ep.errors import BackendUnavailableError
from moe_ep.layout import EPLayout

logger = logging.getLogger("moe_ep")

_NOT_BUILT = (
    "this version of moe_ep has no {} backend; set backend: reference (any device) or backend: auto"
)


def _reference_reason(layout: EPLayout) -> str | None:
    return None


def _reason(name: str) -> Callable[[EPLayout], str | None]:
    return lambda layout: _NOT_BUILT.format(name)


# Fastest first: the order in which "auto" tries them. Each entry says why it can't run, or None.
_UNAVAILABLE: dict[str, Callable[[EPLayout], str | None]] = {
    "nvshmem": _reason("nvshmem"),
    "cuda": _reason("cuda"),
    "reference": _reference_reason,
}
_CLASSES = {"reference": ReferenceBackend}


def create(layout: EPLayout, group: dist.ProcessGroup, channel: Channel) -> Backend:
    """Builds the layout's backend.

    Raises:
        BackendUnavailableError: a backend asked for by name cannot run here.
    """
    if layout.backend != "auto":
        reason = _UNAVAILABLE[layout.backend](layout)
        if reason:
            raise BackendUnavailableError(f"backend {layout.backend!r} cannot run: {reason}")
        return _CLASSES[layout.backend](layout, group, channel)
    skipped: list[str] = []
    for name, unavailable in _UNAVAILABLE.items():
        reason = unavailable(layout)
        if reason is None:
            if channel.rank == 0:
                why = "; ".join(skipped) or "the first choice"
                logger.info("backend auto: using %r (%s)", name, why)
            return _CLASSES[name](layout, group, channel)
        skipped.append(f"not {name}: {reason.split(';')[0]}")
    raise AssertionError("the reference backend always runs")
