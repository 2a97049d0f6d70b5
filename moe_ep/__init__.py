"""moe_ep: expert-parallel dispatch and combine for Mixture-of-Experts training.

layout = EPLayout.from_yaml("configs/mixtral_8x7b_ep8.yaml")
ep = ExpertParallel(layout, group)
d = ep.dispatch(x, topk_idx, topk_weights)
out = ep.combine(experts(d.tokens, d.probs, d.tokens_per_expert), d.handle)
"""

from moe_ep.buffer import Buffer, Config
from moe_ep.dispatcher import ExpertParallel
from moe_ep.errors import (
    BackendUnavailableError,
    BrokenError,
    CapacityError,
    LayoutError,
    LayoutMismatchError,
    MoEEPError,
    OrderError,
    PeerError,
    PeerTimeoutError,
)
from moe_ep.events import EventHandle, EventOverlap
from moe_ep.handle import DispatchHandle, DispatchResult
from moe_ep.layout import EPLayout
from moe_ep.pool import ExpertParallelPool

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BrokenError",
    "Buffer",
    "CapacityError",
    "Config",
    "DispatchHandle",
    "DispatchResult",
    "EPLayout",
    "EventHandle",
    "EventOverlap",
    "ExpertParallel",
    "ExpertParallelPool",
    "LayoutError",
    "LayoutMismatchError",
    "MoEEPError",
    "OrderError",
    "PeerError",
    "PeerTimeoutError",
]
