"""What every call must give, worked out densely in fp64 from the inputs of all ranks.

The experts of the programs are linear: expert e, part p (of its expert-tensor ranks) multiplies a
row by `factor(e, p)`, a power of two, so that it adds no rounding in any dtype. Every expectation
comes with the largest error that the documented arithmetic allows: rows travel unchanged, sums are
accumulated in fp32 (fp64 for fp64) and rounded once. Nothing of moe_ep is used here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from fuzz_steps import Dispatch, Layout
from torch import Tensor

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Largest relative error of rounding to nearest, and the largest absolute one among subnormals.
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
_TINY = {"bf16": 2.0**-133, "fp16": 2.0**-25, "fp32": 2.0**-149, "fp64": 0.0}
_FACTORS = (1.0, -2.0, 0.5, -1.0, 2.0, -0.5, 4.0)


def factor(expert: int, part: int) -> float:
    return _FACTORS[(3 * expert + part) % len(_FACTORS)]


@dataclass
class Expected:
    """A value, and how far off it may be; both [...] fp64."""

    value: Tensor
    error: Tensor

    def check(self, mine: Tensor | None, what: str) -> None:
        assert mine is not None, f"{what} is None"
        assert mine.shape == self.value.shape, f"{what}: {mine.shape}, not {self.value.shape}"
        off = (mine.detach().cpu().double() - self.value).abs()
        bad = ~(off <= self.error)  # NaN is bad too
        if bad.any():
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise AssertionError(
                f"{what}{list(first)} is {float(mine[first])}, expected {float(self.value[first])} "
                f"within {float(self.error[first]):.3g}; {int(bad.sum())} of {bad.numel()} differ"
            )


@dataclass
class World:
    """Inputs of one dispatch on all ranks, by rank; fp64, representable in the dtype that travels.

    x: [T, H]. idx: [T, K], -1 unused. weights: [T, K], representable in fp32.
    """

    layout: Layout
    x_dtype: str
    x: list[Tensor]
    idx: list[Tensor]
    weights: list[Tensor]
    _rows: dict[int, list[list[tuple[int, int, int]]]] = field(default_factory=dict)

    # -- dispatch ---------------------------------------------------------------------------------

    def rows_of(self, rank: int) -> list[list[tuple[int, int, int]]]:
        """Per local expert of a rank, its rows as (source rank, token, slot), in order."""
        if rank not in self._rows:
            self._rows[rank] = self._find_rows(rank)
        return self._rows[rank]

    def _find_rows(self, rank: int) -> list[list[tuple[int, int, int]]]:
        first = rank // self.layout.expert_tensor * self.layout.local_experts
        blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(self.layout.local_experts)]
        for source, idx in enumerate(self.idx):
            for token, slots in enumerate(idx.tolist()):
                for slot, expert in enumerate(slots):
                    if first <= expert < first + self.layout.local_experts:
                        blocks[expert - first].append((source, token, slot))
        return blocks

    def block_sizes(self, rank: int) -> list[int]:
        multiple = self.layout.alignment
        return [-(-len(block) // multiple) * multiple for block in self.rows_of(rank)]

    def overflows(self) -> bool:
        capacity = self.layout.capacity
        if capacity is None:
            return False
        return any(sum(self.block_sizes(r)) > capacity for r in range(self.layout.ranks))

    def places(self, rank: int) -> list[tuple[int, int, int] | None]:
        """[N] what each row of a rank's result holds; None: padding."""
        rows: list[tuple[int, int, int] | None] = []
        for block, size in zip(self.rows_of(rank), self.block_sizes(rank), strict=True):
            rows += [*block, *[None] * (size - len(block))]
        return rows + [None] * ((self.layout.capacity or 0) - len(rows))

    def tokens(self, rank: int) -> Expected:
        """[N, H] what dispatch returns: exact, unless rows travel in FP8."""
        rows = torch.zeros(len(self.places(rank)), self.layout.hidden, dtype=torch.float64)
        error = torch.zeros_like(rows)
        everything = torch.cat(self.x)
        worst = torch.cat([self.travel_error(r) for r in range(len(self.x))])
        starts = [sum(len(x) for x in self.x[:r]) for r in range(len(self.x))]
        used = [(n, starts[p[0]] + p[1]) for n, p in enumerate(self.places(rank)) if p is not None]
        if used:
            to, source = (torch.tensor(column) for column in zip(*used, strict=True))
            rows[to], error[to] = everything[source], worst[source]
        return Expected(rows, error)

    def travel_error(self, rank: int) -> Tensor:
        """[T, H] how far a dequantised row may be from x: e4m3 keeps three bits of mantissa."""
        x = self.x[rank]
        if self.layout.dtype != "fp8_e4m3":
            return torch.zeros_like(x)
        largest = x.view(len(x), x.shape[1] // 128, 128).abs().amax(2)
        scale = largest / 448 * (2 if self.layout.scale == "power_of_two" else 1)
        fine = x.abs() / 16 + scale.repeat_interleave(128, 1) * 2.0**-10
        return fine * (1 + 2.0**-20) + x.abs() * 1.1 * _ROUNDING[self.x_dtype]

    def probs(self, rank: int) -> Tensor:
        """[N] fp64, zero in padding rows."""
        weights = [w.tolist() for w in self.weights]
        return torch.tensor(
            [0.0 if p is None else weights[p[0]][p[1]][p[2]] for p in self.places(rank)],
            dtype=torch.float64,
        )

    # -- combine and gradients --------------------------------------------------------------------

    def factors(self, rank: int) -> Tensor:
        """[T, K] sum over an expert's parts of their factors; zero in unused slots."""
        return self._over_parts(rank, absolute=False)

    def _over_parts(self, rank: int, absolute: bool) -> Tensor:
        parts = range(self.layout.expert_tensor)

        def total(expert: int) -> float:
            values = (factor(expert, part) for part in parts)
            return sum(abs(v) if absolute else v for v in values)

        table = torch.tensor([*map(total, range(self.layout.num_experts)), 0.0])
        return table.double()[self.idx[rank]]

    def out(self, rank: int, weights: str, rounds_shares: bool) -> Expected:
        """[T, H] of combine. rounds_shares: each rank's share of a token is rounded first."""
        w = torch.ones_like(self.weights[rank]) if weights == "no" else self.weights[rank]
        x = self.x[rank]
        value = x * (w * self.factors(rank)).sum(1, keepdim=True)
        scale = (w * self._over_parts(rank, absolute=True)).sum(1, keepdim=True)
        early = 2 * (weights == "experts") + rounds_shares
        return self._rounded(value, x.abs() * scale, early, scale * self.travel_error(rank))

    def grad_x(self, rank: int, grad_out: Tensor, weights: str, rounds_shares: bool) -> Expected:
        """[T, H] of sum(out * grad_out)."""
        w = torch.ones_like(self.weights[rank]) if weights == "no" else self.weights[rank]
        value = grad_out * (w * self.factors(rank)).sum(1, keepdim=True)
        scale = (w * self._over_parts(rank, absolute=True)).sum(1, keepdim=True)
        early = 2 * (weights != "no") + rounds_shares
        return self._rounded(value, grad_out.abs() * scale, early)

    def grad_weights(self, rank: int, grad_out: Tensor, weights: str) -> Expected:
        """[T, K] of sum(out * grad_out); zero where the weights were not used."""
        if weights == "no":
            none = torch.zeros_like(self.weights[rank])
            return Expected(none, none)
        x = self.x[rank]
        value = self.factors(rank) * (x * grad_out).sum(1, keepdim=True)
        scale = self._over_parts(rank, absolute=True)
        size = scale * (x * grad_out).abs().sum(1, keepdim=True)
        wide = _ROUNDING["fp64" if self.x_dtype == "fp64" else "fp32"]
        narrow = 2.02 * _ROUNDING[self.x_dtype] * (weights == "experts")
        error = size * (narrow + wide * (self.layout.hidden + 8))
        error += self.layout.hidden * 8 * _TINY[self.x_dtype]
        error += scale * (grad_out.abs() * self.travel_error(rank)).sum(1, keepdim=True)
        return Expected(value, error)

    def grad_x_of_rows(self, rank: int, grad: Tensor, rounds_shares: bool) -> Expected:
        """[T, H] of sum over rows (of all ranks) of 2^slot * row * grad[its token]."""
        copies, slots = self.layout.expert_tensor, self.idx[rank].shape[1]
        factors = (self.idx[rank] >= 0) * 2.0 ** torch.arange(slots, dtype=torch.float64)
        scale = copies * factors.sum(1, keepdim=True)
        return self._rounded(grad * scale, grad.abs() * scale, int(rounds_shares))

    def _rounded(
        self, value: Tensor, size: Tensor, early: int, more: Tensor | float = 0.0
    ) -> Expected:
        """A sum of products of magnitude `size` in all, with `early` roundings of its terms."""
        unit = _ROUNDING[self.x_dtype]
        wide = _ROUNDING["fp64" if self.x_dtype == "fp64" else "fp32"]
        terms = self.idx[0].shape[1] * self.layout.expert_tensor
        error = unit * value.abs() + size * (1.01 * early * unit + (terms + 3) * wide)
        return Expected(value, error * 1.01 + more + 40 * _TINY[self.x_dtype])


def make_world(layout: Layout, step: Dispatch) -> World:
    """The inputs of a dispatch, the same on every rank that asks."""
    g = torch.Generator().manual_seed(step.seed)
    x_dtype = step.x_dtype if layout.dtype == "fp8_e4m3" else layout.dtype
    idx = [_route(layout, step, count, g) for count in step.tokens]
    x, weights = _values(layout, x_dtype, [tuple(i.shape) for i in idx], g)
    return World(layout, x_dtype, x, idx, weights)


def same_routing(world: World, seed: int) -> World:
    """Other rows and weights on the routing of `world`."""
    g = torch.Generator().manual_seed(seed)
    shapes = [tuple(i.shape) for i in world.idx]
    x, weights = _values(world.layout, world.x_dtype, shapes, g)
    return World(world.layout, world.x_dtype, x, world.idx, weights)


def gradients(world: World, seed: int) -> list[Tensor]:
    """By rank [T, H] fp64, representable in the dtype of x."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g).to(DTYPES[world.x_dtype]).double() for x in world.x]


def _values(
    layout: Layout, x_dtype: str, shapes: list[tuple[int, ...]], g: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    xs, weights = [], []
    for tokens, slots in shapes:
        x = torch.randn(tokens, layout.hidden, generator=g)
        x[torch.rand(tokens, generator=g) < 0.1] = 0
        xs.append(x.to(DTYPES[x_dtype]).double())
        weights.append(torch.rand(tokens, slots, generator=g).double())
    return xs, weights


def _route(layout: Layout, step: Dispatch, tokens: int, g: torch.Generator) -> Tensor:
    """[T, K] expert ids."""
    experts, shape = layout.num_experts, (tokens, step.slots)
    if step.routing == "one expert":
        idx = torch.full(shape, int(torch.randint(experts, (), generator=g)))
    elif step.routing == "one rank":
        idx = torch.randint(layout.local_experts, shape, generator=g)
    elif step.routing == "repeated":
        idx = torch.randint(experts, shape, generator=g)
    else:
        scores = torch.rand(tokens, experts, generator=g)
        if step.routing == "skewed":
            scores -= torch.linspace(0, 0.8, experts)
        idx = scores.argsort(1, descending=True)[:, : step.slots]
    return torch.where(torch.rand(shape, generator=g) < step.unused, -1, idx)
