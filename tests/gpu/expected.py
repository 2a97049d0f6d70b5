"""What dispatch and combine must return, computed plainly from the inputs of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class World:
    """Inputs of every rank, on the CPU: x [T, H], topk_idx [T, K], probs [T, K]."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    probs: list[Tensor]


def gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_world(x: Tensor, topk_idx: Tensor, probs: Tensor) -> World:
    ranks = gather((x.cpu(), topk_idx.cpu().long(), probs.cpu()))
    return World([r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks])


def rows_of(
    world: World, rank: int, local: int, alignment: int
) -> list[tuple[int, int, int] | None]:
    """(source rank, token, k) of every row of `rank`'s result, None for padding."""
    rows: list[tuple[int, int, int] | None] = []
    for expert in range(rank * local, (rank + 1) * local):
        for source, idx in enumerate(world.topk_idx):
            rows += [(source, int(t), int(k)) for t, k in (idx == expert).nonzero()]
        while len(rows) % alignment:
            rows.append(None)
    return rows


def expected_dispatch(
    world: World, rank: int, local: int, alignment: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Rows, probs and block sizes of `rank`'s result. Blocks start at multiples of alignment."""
    rows = rows_of(world, rank, local, alignment)
    hidden = world.x[0].shape[1]
    out = torch.zeros(len(rows), hidden, dtype=world.x[0].dtype)
    probs = torch.zeros(len(rows))
    for place, row in enumerate(rows):
        if row is not None:
            source, token, k = row
            out[place] = world.x[source][token]
            probs[place] = world.probs[source][token, k]
    blocks = []
    for expert in range(rank * local, (rank + 1) * local):
        count = sum(int((idx == expert).sum()) for idx in world.topk_idx)
        blocks.append(-(-count // alignment) * alignment)
    return out, probs, blocks


def expected_combine(
    world: World,
    rank: int,
    local: int,
    alignment: int,
    all_rows: list[Tensor],
    all_weights: list[Tensor] | None = None,
) -> Tensor:
    """The sum over the used slots of each token of `rank`, in fp64. all_rows: [N, H] per rank."""
    num_tokens, hidden = world.x[rank].shape
    out = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for owner, rows in enumerate(all_rows):
        for place, row in enumerate(rows_of(world, owner, local, alignment)):
            if row is not None and row[0] == rank:
                weight = 1.0 if all_weights is None else all_weights[owner][place].double()
                out[row[1]] += rows[place].double() * weight
    return out


def expected_values(
    world: World, rank: int, local: int, alignment: int, all_values: list[Tensor]
) -> Tensor:
    """Values of the expert rows brought back to their slots, zero in unused ones."""
    out = torch.zeros(world.topk_idx[rank].shape)
    for owner, values in enumerate(all_values):
        for place, row in enumerate(rows_of(world, owner, local, alignment)):
            if row is not None and row[0] == rank:
                out[row[1], row[2]] = values[place]
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if not torch.isfinite(actual).all():
        return float("nan")
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > 0 else 1.0)
