"""What backend cuda can run: its module, its GPUs, its limits."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from moe_ep.layout import EPLayout

MAX_RANKS = 64
MAX_EXPERT_SLOTS = 2048
ROW_MULTIPLE_BYTES = 16
# Of an element, in the widest type that rows of this dtype take on the way.
WIDEST_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 4}


def load_core() -> Any:
    return importlib.import_module("moe_ep._C")


def unavailable_reason(layout: EPLayout) -> str | None:
    """Why this backend cannot run `layout` here, with the fix; None where it can."""
    try:
        load_core()
    except ImportError as error:
        return f"moe_ep/_C is not there ({error}); install with nvcc on the PATH to build it"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES"
    lacking = _lacking_architecture()
    if lacking is not None:
        return lacking
    dtype, hidden = layout.dispatch.dtype, layout.model.hidden
    if dtype not in WIDEST_BYTES:
        return f"dispatch.dtype {dtype} is not supported; use {', '.join(WIDEST_BYTES)}"
    narrowest = 4 if dtype == "fp32" else 2
    if hidden * narrowest % ROW_MULTIPLE_BYTES:
        return (
            f"model.hidden={hidden} makes rows of {hidden * narrowest} bytes; they must be a "
            f"multiple of {ROW_MULTIPLE_BYTES} bytes"
        )
    size = layout.parallel.group_size
    if size > MAX_RANKS:
        return f"the group has {size} ranks; one host can have {MAX_RANKS}"
    slots = size * layout.num_local_experts
    if slots > MAX_EXPERT_SLOTS:
        return f"{slots} expert slots in the group; at most {MAX_EXPERT_SLOTS} are supported"
    if layout.dispatch.mode != "throughput":
        return f"dispatch.mode {layout.dispatch.mode} is not supported by it yet"
    if layout.dispatch.capacity is not None and layout.tokens_per_rank is None:
        return "dispatch.capacity makes shapes static and needs tokens_per_rank to be set too"
    return None


def _lacking_architecture() -> str | None:
    """Kernels run on GPUs of their architecture and, compiled anew by the driver, on later ones."""
    architectures = load_core().ARCHITECTURES
    major, minor = torch.cuda.get_device_capability()
    if any(tuple(map(int, name.split("."))) <= (major, minor) for name in architectures):
        return None
    return (
        f"{torch.cuda.get_device_name()} has architecture {major}.{minor}, moe_ep/_C "
        f"has kernels for {', '.join(architectures)}; install with "
        f"MOE_EP_CUDA_ARCHS={major}.{minor}"
    )
