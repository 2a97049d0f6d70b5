"""Checks of what a Buffer is called with. They raise; the Buffer tells the peers first."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ep.rank_rows import (
    ROW_DTYPES,
    ROW_MULTIPLE_BYTES,
    WORD_BYTES,
    RowFormat,
    scales_as_rows,
)

_SUM_DTYPES = ROW_DTYPES[:3]
INDEX_DTYPES = (torch.int64, torch.int32)
_STRIDED = torch.strided


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}, not an int") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}={number}; it must be at least {minimum}")
    return number


def num_sms(config: Any, default: int) -> int:
    """Of a Config; `default` for None."""
    if config is None:
        return default
    if not hasattr(config, "num_sms"):
        raise TypeError(f"config is a {type(config).__name__}; it must be a Config or None")
    return integer("config.num_sms", config.num_sms, 1)


def split_x(x: Any) -> tuple[Any, Any]:
    """(rows, scales), scales None where x is one tensor."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)}; it must be a tensor or (data, scales)")
    return x


def check_payload(x: Any, scales: Any, device: torch.device | None) -> None:
    """device: where the tensors must be; None: all of them where x is."""
    check_tensor("x", x, ROW_DTYPES, 2, device)
    if (scales is not None) != (x.dtype == torch.float8_e4m3fn):
        raise TypeError(
            f"x is {x.dtype} {'without' if scales is None else 'with'} scales; FP8 data "
            "come as a tuple (data, scales), other dtypes as one tensor"
        )
    row_bytes = x.shape[1] * x.element_size()
    if row_bytes == 0 or row_bytes % ROW_MULTIPLE_BYTES:
        raise ValueError(
            f"hidden={x.shape[1]} makes rows of {row_bytes} bytes; they must be a multiple of "
            f"{ROW_MULTIPLE_BYTES}"
        )
    if scales is None:
        return
    check_tensor("the scales", scales, (torch.float32, torch.int32), None, device or x.device)
    if scales.dim() not in (1, 2) or scales.shape[0] != x.shape[0]:
        raise ValueError(
            f"the scales are {_shape(scales)}; for x {_shape(x)} they must be [{x.shape[0]}, "
            f"scales of a row] or [{x.shape[0]}]"
        )


def check_routing(
    x: Tensor,
    scales: Tensor | None,
    routing: dict[str, Any],
    num_worst_tokens: int,
    num_ranks: int,
    device: torch.device | None,
) -> RowFormat:
    """What a dispatch with a new routing sends.

    Args:
        routing: num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx and
            topk_weights, as given to `Buffer.dispatch`.
        device: as for `check_payload`.
    """
    num_tokens, device = x.shape[0], device or x.device
    missing = [name for name in _LAYOUT if routing[name] is None]
    if missing:
        raise ValueError(
            f"dispatch without a handle needs {', '.join(missing)}: see get_dispatch_layout"
        )
    integers = (torch.int32, torch.int64)
    per_rank, in_rank, per_expert = (routing[name] for name in _LAYOUT)
    check_tensor(_LAYOUT[0], per_rank, integers, 1, device)
    check_tensor(_LAYOUT[1], in_rank, (torch.bool,), 2, device)
    check_tensor(_LAYOUT[2], per_expert, integers, 1, device)
    check_shape(_LAYOUT[0], per_rank, (num_ranks,))
    check_shape(_LAYOUT[1], in_rank, (num_tokens, num_ranks))
    num_experts = per_expert.shape[0]
    check_num_experts(num_experts, num_ranks)
    topk_idx, topk_weights = routing["topk_idx"], routing["topk_weights"]
    if (topk_idx is None) != (topk_weights is None):
        raise ValueError("topk_idx and topk_weights go together: give both or neither")
    num_topk = 0
    if topk_idx is not None:
        check_topk_idx(topk_idx, device)
        num_topk = topk_idx.shape[1]
        check_shape("topk_idx", topk_idx, (num_tokens, num_topk))
        check_topk_weights(topk_weights, num_tokens, device, num_topk)
    if num_worst_tokens < 0 or (num_worst_tokens and not num_topk):
        raise ValueError(
            f"num_worst_tokens={num_worst_tokens}: it must not be negative, and needs topk_idx"
        )
    num_scales = 0 if scales is None else scales_as_rows(scales).shape[1]
    return RowFormat(x.shape[1], x.dtype, num_topk, num_scales, num_experts, num_worst_tokens)


_LAYOUT = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")


def check_num_experts(num_experts: int, num_ranks: int) -> None:
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts={num_experts} is no multiple of the {num_ranks} ranks")


def check_topk_idx(topk_idx: Any, device: torch.device | None) -> None:
    check_tensor("topk_idx", topk_idx, INDEX_DTYPES, 2, device)
    if topk_idx.shape[1] == 0:
        raise ValueError(f"topk_idx is {_shape(topk_idx)}: no slot")


def check_topk_weights(
    weights: Any, num_rows: int, device: torch.device | None, num_topk: int
) -> None:
    """num_topk: K; 0: any."""
    check_tensor("topk_weights", weights, (torch.float32,), 2, device)
    check_shape("topk_weights", weights, (num_rows, num_topk or weights.shape[1]))


def check_again(x: Tensor, scales: Tensor | None, form: RowFormat, num_tokens: int) -> RowFormat:
    """What a dispatch with a handle sends: the handle's rows without experts, or sums' gradients.

    Ranks compared what they send when the handle was made; only what follows from the handle is
    still equal on all of them.

    Args:
        form: of the handle's dispatch.
    """
    check_shape("x", x, (num_tokens, form.hidden))
    if x.dtype not in (form.dtype, sum_dtype(form)):
        raise TypeError(_other_dtype(x, form, form.dtype))
    num_scales = 0 if scales is None else scales_as_rows(scales).shape[1]
    if scales is not None and num_scales != form.num_scales:
        raise ValueError(
            f"{num_scales} scales a row; the handle's dispatch had {form.num_scales}, and so must "
            "this one"
        )
    return replace(form, dtype=x.dtype, num_topk=0, num_scales=num_scales)


def check_sums(x: Any, form: RowFormat, num_rows: int, device: torch.device | None) -> None:
    check_tensor("x", x, _SUM_DTYPES, 2, device)
    check_shape("x", x, (num_rows, form.hidden))
    if x.dtype != sum_dtype(form):
        raise TypeError(_other_dtype(x, form, sum_dtype(form)))


def sum_dtype(form: RowFormat) -> torch.dtype:
    """Of the rows that go back to their tokens: that of the dispatch, bf16 for FP8."""
    return torch.bfloat16 if form.dtype == torch.float8_e4m3fn else form.dtype


def _other_dtype(x: Tensor, form: RowFormat, wanted: torch.dtype) -> str:
    return f"x is {x.dtype}; with a handle of a dispatch of {form.dtype} it must be {wanted}"


def check_words(num_words: int, row_bytes: int) -> None:
    if num_words * WORD_BYTES > row_bytes:
        raise ValueError(
            f"{num_words} weights a row; the handle's dispatch made room for "
            f"{row_bytes // WORD_BYTES}"
        )


def check_bias(bias: Any, num_tokens: int, x: Tensor, device: torch.device | None) -> list[Tensor]:
    """The bias tensors: none, one or two."""
    given = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
    if len(given) > 2:
        raise ValueError(f"bias is a tuple of {len(given)}; give one tensor or two")
    for tensor in given:
        if tensor is not None:
            check_tensor("bias", tensor, (x.dtype,), 2, device)
            check_shape("bias", tensor, (num_tokens, x.shape[1]))
    return [tensor for tensor in given if tensor is not None]


def check_tensor(
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    dimensions: int | None,
    device: torch.device | None,
) -> None:
    """device: as for `check_place`."""
    check_dimensions(name, value, dimensions)
    check_kind(name, value, dtypes, device)


def check_dimensions(name: str, value: Any, dimensions: int | None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    if value.layout is not _STRIDED or value.is_nested:  # it may have no shape
        raise ValueError(f"{name} is sparse or nested; it must be dense")
    if dimensions is not None and value.dim() != dimensions:
        raise ValueError(f"{name} is {_shape(value)}; it must have {dimensions} dimensions")


def check_kind(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device | None
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    check_place(name, tensor, device)


def check_place(name: str, tensor: Tensor, device: torch.device | None) -> None:
    """device: None: any that has data."""
    place = tensor.device
    if device is None:
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta, without values")
    elif place != device:
        hint = "; MOE_EP_BACKEND=reference takes CPU tensors" if place.type == "cpu" else ""
        raise ValueError(f"{name} is on {place}; it must be on {device}{hint}")


def check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} is {_shape(value)}; it must be {list(shape)}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
