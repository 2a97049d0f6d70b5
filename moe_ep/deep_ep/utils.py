"""What `deep_ep.utils` is asked for."""

from __future__ import annotations

from moe_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
