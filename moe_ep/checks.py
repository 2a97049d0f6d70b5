"""Checks of a call's arguments. Each returns the error to raise: peers are told first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep.handle import DispatchHandle
from moe_ep.layout import EPLayout

DTYPES = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp32": (torch.float32,),
    "fp64": (torch.float64,),
    "fp8_e4m3": (torch.bfloat16, torch.float16, torch.float32),
}
"""The dtypes of x that each `dispatch.dtype` takes."""

_INDEX_DTYPES = (torch.int32, torch.int64)
_STRIDED = torch.strided


def _check_place(what: str, tensor: Tensor, device: torch.device | None) -> Exception | None:
    """Before a shape or a value is read, which torch refuses with errors of its own.

    what: with its verb. device: where it must be; None: anywhere, the backend moves it.
    """
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return ValueError(f"{what} sparse or nested; only dense tensors are taken")
    if device is None:
        return ValueError(f"{what} on meta, without values") if tensor.is_meta else None
    if tensor.device == device:
        return None
    return ValueError(
        f"{what} on {tensor.device}; it must be on {device}, as the dispatched x or this object's "
        "backend: move it there, or set backend: reference and leave all on the CPU"
    )


def check_tokens(
    layout: EPLayout, device: torch.device | None, x: Any, dequantize: bool
) -> Exception | None:
    """What is wrong with the tokens, where they are, or what they are to come back as."""
    allowed = DTYPES[layout.dispatch.dtype]
    if not isinstance(x, Tensor):
        return _no_tensor("x", x)
    if x.dtype not in allowed:
        names = ", ".join(map(str, allowed))
        return TypeError(f"x is {x.dtype}; dispatch.dtype {layout.dispatch.dtype} takes {names}")
    problem = _check_place("x is", x, device)
    if problem is not None:
        return problem
    shape = x.shape
    if len(shape) != 2 or shape[1] != layout.model.hidden:
        return ValueError(f"x is {_shape(x)}; it must be [T, {layout.model.hidden}]")
    limit = layout.tokens_per_rank
    if limit is not None and shape[0] > limit:
        return ValueError(f"x has {shape[0]} tokens; tokens_per_rank={limit}")
    if dequantize:
        return None
    if layout.dispatch.dtype != "fp8_e4m3" or x.requires_grad:
        return ValueError("dequantize=False needs dispatch.dtype fp8_e4m3 and no gradient of x")
    return None


def check_routing(
    layout: EPLayout,
    device: torch.device | None,
    num_tokens: int,
    topk_idx: Any,
    topk_weights: Any,
    values: bool,
) -> Exception | None:
    """`values`: look at the indices too, not only at their dtype, place and shape."""
    if not isinstance(topk_idx, Tensor):
        return _no_tensor("topk_idx", topk_idx)
    if topk_idx.dtype not in _INDEX_DTYPES:
        return TypeError(f"topk_idx is {topk_idx.dtype}; it must be int32 or int64")
    problem = _check_place("topk_idx is", topk_idx, device)
    if problem is not None:
        return problem
    shape = topk_idx.shape
    if len(shape) != 2 or shape[0] != num_tokens:
        return ValueError(
            f"topk_idx {list(shape)} does not fit x [{num_tokens}, {layout.model.hidden}]"
        )
    if not 1 <= shape[1] <= layout.model.top_k:
        return ValueError(
            f"topk_idx has {shape[1]} slots a token; model.top_k={layout.model.top_k}"
        )
    if values and topk_idx.numel():
        low, high = (int(value) for value in torch.aminmax(topk_idx))
        if low < -1 or high >= layout.model.num_experts:
            return ValueError(
                f"topk_idx holds {low if low < -1 else high}; valid are -1 (unused) and "
                f"0 to {layout.model.num_experts - 1}"
            )
    return check_weights(device, topk_weights, shape)


def check_rows(layout: EPLayout, rows: Any, handle: DispatchHandle) -> Exception | None:
    expected = (handle.num_rows, layout.model.hidden)
    if not isinstance(rows, Tensor):
        return _no_tensor("rows", rows)
    problem = _check_place("rows are", rows, handle.device)
    if problem is not None:
        return problem
    if rows.shape != expected:
        return ValueError(f"rows are {_shape(rows)}; this dispatch returned {list(expected)}")
    if rows.dtype != handle.dtype:
        return TypeError(f"rows are {rows.dtype}; the dispatched tokens were {handle.dtype}")
    return None


def check_weights(
    device: torch.device | None, weights: Any, shape: tuple[int, ...]
) -> Exception | None:
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        return _no_tensor("weights", weights)
    if not weights.is_floating_point():
        return TypeError(f"weights are {weights.dtype}; they must be floating point")
    problem = _check_place("weights are", weights, device)
    if problem is not None:
        return problem
    if weights.shape != shape:
        return ValueError(f"weights are {_shape(weights)}; they must be {list(shape)}")
    return None


def check_event(event: Any) -> Exception | None:
    if hasattr(event, "current_stream_wait") and hasattr(event, "event"):  # or one of DeepEP's
        return None
    return TypeError(f"previous_event is a {type(event).__name__}, not an EventOverlap")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _no_tensor(name: str, value: Any) -> TypeError:
    return TypeError(f"{name} is a {type(value).__name__}, not a tensor")
