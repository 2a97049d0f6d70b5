"""Sharing: all layers of a model that exchange the same shapes over one group share one object."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from moe_ep.dispatcher import ExpertParallel
from moe_ep.layout import EPLayout


class ExpertParallelPool:
    """Owns one ExpertParallel per (group, layout)."""

    def __init__(self) -> None:
        self._members: dict[tuple[dist.ProcessGroup, EPLayout], ExpertParallel] = {}

    def get(self, layout: EPLayout, group: dist.ProcessGroup) -> ExpertParallel:
        """The pool's object for this `layout` and `group`; built (collectively) when first asked
        for, and again where somebody destroyed it.

        Raises:
            LayoutError, BackendUnavailableError, PeerTimeoutError: as ExpertParallel.
        """
        key = (group, layout)
        member = self._members.get(key)
        if member is None or member.destroyed:
            member = self._members[key] = ExpertParallel(layout, group)
        return member

    def __iter__(self) -> Iterator[ExpertParallel]:
        """The objects in use, in the order in which they were first asked for."""
        return (member for member in list(self._members.values()) if not member.destroyed)

    def __len__(self) -> int:
        return len(self._members)

    def destroy(self) -> None:
        """Destroys every object handed out. Idempotent."""
        while self._members:
            self._members.popitem()[1].destroy()


def pool_scalars(pool: ExpertParallelPool, prefix: str) -> dict[str, float]:
    """Statistics of all objects of a pool since the last call, by name; see docs/operating.md.

    Collective over the group of each. Objects that did not collect begin to, and give nothing. With
    several objects the names of each but the first have its number behind the prefix.
    """
    scalars: dict[str, float] = {}
    for number, ep in enumerate(pool):
        if ep.collects_stats:
            group = ep.gather_stats(reset=True)
            if group.layers:
                scalars |= group.scalars(f"{prefix}/{number}" if number else prefix)
        ep.collect_stats()
    return scalars
