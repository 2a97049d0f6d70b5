"""Tensor-parallel ranks hold the same tokens: each exchanges a share of them.

As in DeepSpeed's `drop_tokens` and `gather_tokens` (whose buffers gloo refuses), what is dropped
forward is gathered backward, so every tensor-parallel rank ends with whole outputs and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor
from torch.nn.functional import pad


def world_size() -> int:
    """Ranks that hold the same tokens; 1 without tensor parallelism."""
    return int(bwc_tensor_model_parallel_world_size(groups.mpu))


def experts_are_sharded() -> bool:
    """Whether each expert spans the tensor-parallel ranks, which must then see the same rows."""
    return bool(groups._get_expert_model_parallel_world_size() > 1)


class _Drop(torch.autograd.Function):
    """Keeps this rank's part of dimension 0."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _own_part(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_parts(grad)


class _Gather(torch.autograd.Function):
    """Joins the parts of all tensor-parallel ranks along dimension 0."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _all_parts(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _own_part(grad)


def _own_part(tensor: Tensor) -> Tensor:
    size = tensor.shape[0] // world_size()
    part = tensor.narrow(0, bwc_tensor_model_parallel_rank(groups.mpu) * size, size)
    return part.clone()  # not a view of what autograd gave


def _all_parts(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor, group=bwc_tensor_model_parallel_group(groups.mpu))
    return torch.cat(parts)


def own_share(tensor: Tensor, filler: float = 0) -> Tensor:
    """This rank's rows of a tensor that all tensor-parallel ranks hold.

    Args:
        tensor: [T, ...]. filler: fills the rows that make T a multiple of the ranks.

    Returns:
        [ceil(T / ranks), ...], differentiable.
    """
    missing = -tensor.shape[0] % world_size()
    if missing:
        tensor = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=filler)
    return _Drop.apply(tensor)


def whole(share: Tensor, num_tokens: int) -> Tensor:
    """The inverse of `own_share`: [num_tokens, ...] on every tensor-parallel rank."""
    return _Gather.apply(share)[:num_tokens]


@dataclass
class SharedRows:
    """The rows of all tensor-parallel ranks for this rank's part of each expert.

    Attributes:
        blocks: per local expert [n, H], the same on every tensor-parallel rank.
    """

    blocks: list[Tensor]
    _index: Tensor
    _length: int
    _num_own: int

    def own(self, outputs: list[Tensor]) -> Tensor:
        """Whole outputs of the blocks to the rows this rank brought, [N, H]."""
        flat = torch.cat(outputs)
        everything = flat.new_zeros(self._length, flat.shape[1]).index_copy(0, self._index, flat)
        return _Drop.apply(everything)[: self._num_own]


def share_rows(rows: Tensor, tokens_per_expert: Tensor) -> SharedRows:
    """Gathers rows for experts that are sharded over the tensor-parallel ranks. Collective.

    Args:
        rows: [N, H] expert-major; N may differ between ranks.
        tokens_per_expert: [L] rows of each local expert.
    """
    ranks, counts = world_size(), tokens_per_expert.to(rows.device)
    sizes = torch.cat([counts, counts.new_tensor([rows.shape[0]])])
    table = _all_parts(sizes).view(ranks, -1).tolist()
    longest = max(row[-1] for row in table)
    everything = _Gather.apply(pad(rows, (0, 0, 0, longest - rows.shape[0])))
    places: list[list[Tensor]] = [[] for _ in range(counts.numel())]
    for rank, row in enumerate(table):
        first = rank * longest
        for expert, count in enumerate(row[:-1]):
            places[expert].append(torch.arange(first, first + count, device=rows.device))
            first += count
    indices = [torch.cat(place) for place in places]
    return SharedRows(
        blocks=[everything.index_select(0, index) for index in indices],
        _index=torch.cat(indices),
        _length=ranks * longest,
        _num_own=rows.shape[0],
    )
