"""What a rank does and checks in a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fuzz_mistakes import OF_A_HANDLE, beside_handle_with, dispatch_with, is_dispatch
from fuzz_model import DTYPES, World, factor, gradients, make_world, same_routing
from fuzz_steps import (
    Again,
    Backward,
    Combine,
    Dispatch,
    Drop,
    Layout,
    Program,
    Rebuild,
    Refuse,
)
from torch import Tensor

from moe_ep import (
    BrokenError,
    CapacityError,
    DispatchHandle,
    DispatchResult,
    EPLayout,
    ExpertParallel,
    OrderError,
    PeerError,
)

TIMEOUT_S = 30.0
_LOW_LATENCY_IN_FLIGHT = 2


@dataclass(eq=False)
class Flight:
    """One dispatch that the program may still refer to."""

    world: World
    result: DispatchResult
    x: Tensor
    weights: Tensor | None
    wants_grad: bool
    out: Tensor | None = None
    weighted: str = "no"  # how `out` was


class Rank:
    """One rank's part in one program."""

    def __init__(self, rank: int, group: dist.ProcessGroup, backend: str, layout: Layout) -> None:
        self.rank, self.group, self.backend = rank, group, backend
        self.device = "cuda" if backend == "cuda" else "cpu"
        self.operations = 0
        self.flights: list[Flight] = []
        self.in_flight: dict[DispatchHandle, int] = {}
        self.build(layout)

    def build(self, layout: Layout) -> None:
        self.layout = layout
        self.ep = ExpertParallel(_ep_layout(layout, self.backend), self.group)
        # The reference backend, one rank and exact_combine add a token's rows in one place.
        self.rounds_shares = self.backend == "cuda" and not layout.exact and layout.ranks > 1

    def run(self, program: Program) -> int:
        """The number of operations that were checked."""
        try:
            for number, step in enumerate(program.steps):
                try:
                    getattr(self, type(step).__name__.lower())(step)
                except Exception as error:
                    raise AssertionError(f"rank {self.rank}, step {number}, {step}") from error
                live = {flight.result.handle for flight in self.flights}
                assert self.ep.live_handles == len(live), (
                    f"rank {self.rank}, step {number}: {self.ep.live_handles} live handles, "
                    f"{len(live)} held"
                )
        finally:
            self.ep.destroy()
        return self.operations

    # -- steps ------------------------------------------------------------------------------------

    def dispatch(self, step: Dispatch) -> None:
        world = make_world(self.layout, step)
        x, weights = self._inputs(world, step.weighted, step.grad)
        if step.strided:
            x = x.detach().T.contiguous().T.requires_grad_(x.requires_grad)
        idx = world.idx[self.rank].to(getattr(torch, step.idx_dtype)).to(self.device)
        dequantize = step.dequantize or self.layout.dtype != "fp8_e4m3" or x.requires_grad

        def action() -> DispatchResult:
            return self.ep.dispatch(
                x, idx, weights, dequantize=dequantize, async_finish=step.asynchronous
            )

        if self._full():
            return self._expect(action, OrderError, "in flight")
        if world.overflows():
            return self._expect(action, CapacityError, str(self.layout.capacity))
        with _maybe_no_grad(step.grad):
            result = action()
        self._arrived(Flight(world, result, x, weights, step.grad == "yes"), step.weighted)

    def again(self, step: Again) -> None:
        flight = self._pick(step.which)
        if flight is None:
            return
        world = same_routing(flight.world, step.seed)
        x, weights = self._inputs(world, step.weighted, step.grad)
        handle = flight.result.handle

        def action() -> DispatchResult:
            return self.ep.dispatch(x, handle=handle, topk_weights=weights)

        if self._full():
            return self._expect(action, OrderError, "in flight")
        with _maybe_no_grad(step.grad):
            result = action()
        assert result.handle is handle
        self._arrived(Flight(world, result, x, weights, step.grad == "yes"), step.weighted)

    def combine(self, step: Combine) -> None:
        flight = self._pick(step.which, lambda f: f.out is None and f.result.scales is None)
        if flight is None:
            return
        result, world = flight.result, flight.world
        weights = step.weights if result.probs is not None else "no"
        rows = self._experts(flight, weights, step.poison)
        probs = result.probs if weights == "combine" else None
        got: Any = self.ep.combine(rows, result.handle, probs, async_finish=step.asynchronous)
        if step.asynchronous:
            got, event = got
            event.current_stream_wait()
        flight.out, flight.weighted = got, weights
        self.in_flight[result.handle] = max(self.in_flight[result.handle] - 1, 0)
        assert got.dtype == flight.x.dtype and got.requires_grad == flight.wants_grad
        world.out(self.rank, weights, self.rounds_shares).check(got, "out")
        self.operations += 1

    def backward(self, step: Backward) -> None:
        flight = self._pick(step.which, lambda f: f.wants_grad)
        if flight is None:
            return
        grad = gradients(flight.world, step.seed)
        if flight.out is None:
            self._backward_of_dispatch(flight, grad)
        else:
            mine = grad[self.rank]
            flight.out.backward(mine.to(flight.out.dtype).to(self.device))
            world, weighted = flight.world, flight.weighted
            expected = world.grad_x(self.rank, mine, weighted, self.rounds_shares)
            expected.check(flight.x.grad, "gradient of x")
            if flight.weights is not None:
                expected = world.grad_weights(self.rank, mine, weighted)
                expected.check(flight.weights.grad, "gradient of the weights")
            self.operations += 1
        self.operations += 1
        self._forget(flight)

    def drop(self, step: Drop) -> None:
        flight = self._pick(step.which)
        if flight is not None:
            self._forget(flight)

    def rebuild(self, step: Rebuild) -> None:
        flight = self._pick(0)
        self.ep.destroy()
        if flight is not None:
            result = flight.result
            self._expect(lambda: self.ep.combine(result.tokens, result.handle), BrokenError, "dest")
            del result
        del flight
        self.flights.clear()
        self.in_flight.clear()
        self.build(step.layout)
        self.operations += 1

    def refuse(self, step: Refuse) -> None:
        culprit = step.rank % self.layout.ranks
        bad = self.rank == culprit
        flight = self._pick(step.which)
        fresh = step.what not in OF_A_HANDLE
        if self._full() or (flight is None and not fresh):
            return
        if self.backend == "cuda" and self.layout.capacity is not None:
            return  # peers learn of it at a later call, and the object is broken
        if fresh or flight is None:
            tokens = tuple(1 + (step.seed + rank) % 3 for rank in range(self.layout.ranks))
            world = make_world(self.layout, Dispatch(step.seed, tokens, 1, x_dtype="fp32"))
            x, weights = self._inputs(world, True, "no")
            assert weights is not None
            idx = world.idx[self.rank].to(self.device)
            action = dispatch_with(step.what if bad else "", self.ep, x, idx, weights)
        else:
            if flight.result.scales is not None and not is_dispatch(step.what):
                return
            weights = None if flight.weights is None else flight.weights.detach()
            idx = flight.world.idx[self.rank].to(self.device)
            x, result = flight.x.detach(), flight.result
            action = beside_handle_with(step.what, self.ep, result, x, idx, weights, bad)
        kinds = (ValueError, TypeError) if bad else (PeerError,)
        self._expect(action, kinds, "" if bad else f"rank {culprit}")

    # -- parts of steps ---------------------------------------------------------------------------

    def _inputs(self, world: World, weighted: bool, grad: str) -> tuple[Tensor, Tensor | None]:
        wide = torch.float64 if world.x_dtype == "fp64" else torch.float32
        x = world.x[self.rank].to(DTYPES[world.x_dtype], copy=True).to(self.device)
        weights = world.weights[self.rank].to(wide, copy=True).to(self.device) if weighted else None
        wants = grad != "no"
        return x.requires_grad_(wants), None if weights is None else weights.requires_grad_(wants)

    def _arrived(self, flight: Flight, weighted: bool) -> None:
        """Checks what a dispatch returned, and remembers it."""
        result, world = flight.result, flight.world
        result.event.current_stream_wait()
        blocks = world.block_sizes(self.rank)
        valid = [len(block) for block in world.rows_of(self.rank)]
        assert result.tokens_per_expert.tolist() == blocks
        assert result.handle.valid_tokens_per_expert.tolist() == valid
        expected = world.tokens(self.rank)
        if result.scales is None:
            assert result.tokens.dtype == flight.x.dtype
            assert result.tokens.requires_grad == flight.wants_grad
            expected.check(result.tokens, "tokens")
        else:
            assert result.tokens.dtype == torch.float8_e4m3fn
            wide = result.tokens.cpu().double().unflatten(1, (self.layout.hidden // 128, 128))
            rows = (wide * result.scales.cpu().double().unsqueeze(2)).flatten(1)
            padding = [n for n, p in enumerate(world.places(self.rank)) if p is None]
            rows[padding] = torch.where(rows[padding].isnan(), 0, rows[padding])
            expected.check(rows, "tokens times scales")
            if self.layout.scale == "power_of_two":
                used = [n for n, p in enumerate(world.places(self.rank)) if p is not None]
                mantissa, _ = torch.frexp(result.scales.cpu()[used])
                assert (mantissa == 0.5).all(), "scales are no powers of two"
        if weighted:
            assert result.probs is not None
            assert torch.equal(result.probs.detach().cpu().double(), world.probs(self.rank))
        else:
            assert result.probs is None
        self.flights.append(flight)
        self.in_flight[result.handle] = self.in_flight.get(result.handle, 0) + 1
        self.operations += 1

    def _experts(self, flight: Flight, weights: str, poison: bool) -> Tensor:
        """[N, H]: every row times its expert's factor; NaN in padding rows, if wanted."""
        result, places = flight.result, flight.world.places(self.rank)
        first = self.rank // self.layout.expert_tensor * self.layout.local_experts
        part = self.rank % self.layout.expert_tensor
        table = [factor(first + e, part) for e in range(self.layout.local_experts)]
        per_row = [
            f
            for f, n in zip(table, result.tokens_per_expert.tolist(), strict=True)
            for _ in range(n)
        ]
        per_row += [1.0] * (len(places) - len(per_row))
        factors = torch.tensor(per_row, dtype=result.tokens.dtype, device=self.device)
        rows = result.tokens * factors.unsqueeze(1)
        if weights == "experts":
            assert result.probs is not None
            rows = rows * result.probs.to(rows.dtype).unsqueeze(1)
        if poison:
            padding = torch.tensor([p is None for p in places], dtype=torch.bool)
            rows = torch.where(padding.to(self.device).unsqueeze(1), torch.nan, rows)
        return rows

    def _backward_of_dispatch(self, flight: Flight, grad: list[Tensor]) -> None:
        """Rows and probs want the gradients 2^slot * grad[token] and 2^slot."""
        result, world = flight.result, flight.world
        places = world.places(self.rank)
        grad_tokens = torch.zeros(len(places), self.layout.hidden, dtype=torch.float64)
        grad_probs = torch.zeros(len(places), dtype=torch.float64)
        for row, place in enumerate(places):
            if place is not None:
                source, token, slot = place
                grad_tokens[row] = grad[source][token] * 2.0**slot
                grad_probs[row] = 2.0**slot
        outputs = [(result.tokens, grad_tokens)]
        if result.probs is not None:
            outputs.append((result.probs, grad_probs))
        torch.autograd.backward(
            [tensor for tensor, _ in outputs],
            [g.to(tensor.dtype).to(self.device) for tensor, g in outputs],
        )
        expected = world.grad_x_of_rows(self.rank, grad[self.rank], self.rounds_shares)
        expected.check(flight.x.grad, "gradient of x")
        if flight.weights is not None:
            idx = world.idx[self.rank]
            slots = 2.0 ** torch.arange(idx.shape[1], dtype=torch.float64)
            value = (idx >= 0) * slots * self.layout.expert_tensor
            assert flight.weights.grad is not None
            assert torch.equal(flight.weights.grad.cpu().double(), value)

    def _expect(
        self,
        action: Callable[[], object],
        kinds: type[Exception] | tuple[type[Exception], ...],
        words: str,
    ) -> None:
        try:
            action()
        except kinds as error:
            assert words in str(error), f"{words!r} is not in {error!r}"
            self.operations += 1
            return
        raise AssertionError(f"no error; expected {kinds}")

    def _pick(
        self, which: int, fits: Callable[[Flight], bool] = lambda flight: True
    ) -> Flight | None:
        flights = [flight for flight in self.flights if fits(flight)]
        return flights[which % len(flights)] if flights else None

    def _forget(self, flight: Flight) -> None:
        self.flights.remove(flight)
        handle = flight.result.handle
        if all(other.result.handle is not handle for other in self.flights):
            del self.in_flight[handle]

    def _full(self) -> bool:
        if self.layout.mode != "low_latency":
            return False
        return sum(self.in_flight.values()) >= _LOW_LATENCY_IN_FLIGHT


def _maybe_no_grad(grad: str) -> contextlib.AbstractContextManager[Any]:
    return torch.no_grad() if grad == "no_grad" else contextlib.nullcontext()


def _ep_layout(layout: Layout, backend: str) -> EPLayout:
    return EPLayout(
        model={"hidden": layout.hidden, "num_experts": layout.num_experts, "top_k": layout.top_k},
        parallel={
            "expert": layout.ranks // layout.expert_tensor,
            "expert_tensor": layout.expert_tensor,
        },
        tokens_per_rank=layout.tokens_per_rank,
        dispatch={
            "dtype": layout.dtype,
            "scale": layout.scale,
            "row_alignment": layout.alignment,
            "capacity": layout.capacity,
            "mode": layout.mode,
            "exact_combine": layout.exact,
        },
        backend=backend,
        timeouts={"first_s": TIMEOUT_S, "steady_s": TIMEOUT_S},
    )
