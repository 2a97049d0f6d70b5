"""Sharing: all layers of a model that exchange the same shapes over one group share one object."""

from __future__ import annotations

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

    def __len__(self) -> int:
        return len(self._members)

    def destroy(self) -> None:
        """Destroys every object handed out. Idempotent."""
        while self._members:
            self._members.popitem()[1].destroy()
