"""How hypothesis makes programs: a state machine whose rules add one step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
from fuzz_steps import (
    BAD_AGAIN,
    BAD_COMBINE,
    BAD_DISPATCH,
    Again,
    Backward,
    Combine,
    Dispatch,
    Drop,
    Layout,
    Program,
    Rebuild,
    Refuse,
    Step,
)
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

STEPS = 40
_SEEDS = st.integers(0, 2**31 - 1)
_WHICH = st.integers(0, 7)


@st.composite
def layouts(draw: Any, ranks: int, backend: str) -> Layout:
    cuda = backend == "cuda"
    # More experts than one need not be spread over all ranks: some hold parts of the same ones.
    expert_tensor = draw(st.sampled_from([n for n in (1, 1, 2, 4) if ranks % n == 0]))
    local = draw(st.sampled_from([1, 1, 2, 3, 5]))
    experts = ranks // expert_tensor * local
    top_k = min(experts, draw(st.sampled_from([1, 2, 2, 3, 4, 7, 16])))
    dtypes = ["bf16", "bf16", "fp16", "fp32", "fp32", "fp8_e4m3"] + ([] if cuda else ["fp64"])
    dtype = draw(st.sampled_from(dtypes))
    sizes = [8, 8, 64, 1536] if cuda else [1, 3, 8, 8, 64, 4096]
    hidden = draw(st.sampled_from([128, 128, 384] if dtype == "fp8_e4m3" else sizes))
    capacity = draw(st.sampled_from([None, None, None, 24, 64]))
    tokens_per_rank = draw(st.sampled_from([None, 9, 33]))
    if cuda:  # an overflow breaks the object there, and tokens_per_rank must bound the shapes
        capacity = None if capacity is None else 33 * 16 * ranks * 2
        tokens_per_rank = 33 if capacity else tokens_per_rank
    return Layout(
        ranks=ranks,
        local_experts=local,
        top_k=top_k,
        hidden=hidden,
        expert_tensor=expert_tensor,
        dtype=dtype,
        scale=draw(st.sampled_from(["fp32", "power_of_two"])),
        alignment=draw(st.sampled_from([1, 1, 1, 4, 16])),
        capacity=capacity,
        mode="throughput" if cuda else draw(st.sampled_from(["throughput"] * 3 + ["low_latency"])),
        exact=draw(st.booleans()),
        tokens_per_rank=tokens_per_rank,
    )


@st.composite
def dispatches(draw: Any, layout: Layout) -> Dispatch:
    limit = layout.tokens_per_rank or 40
    counts = st.sampled_from([n for n in (0, 0, 1, 2, 3, 4, 5, 7, 9, 33) if n <= limit])
    kind = draw(st.sampled_from(["any", "any", "any", "none", "many"]))
    tokens = tuple(0 if kind == "none" else draw(counts) for _ in range(layout.ranks))
    if kind == "many" and layout.tokens_per_rank is None and layout.hidden <= 8:
        tokens = (520, *tokens[1:])
    variant = draw(st.integers(0, 3 * 5 * 3 * 2**4 - 1))  # one draw: each costs 20 us

    def choose(*options: Any) -> Any:
        nonlocal variant
        variant, index = divmod(variant, len(options))
        return options[index]

    return Dispatch(
        seed=draw(_SEEDS),
        tokens=tokens,
        slots=draw(st.integers(1, layout.top_k)),
        routing=draw(st.sampled_from(["random", "skewed", "repeated", "one rank", "one expert"])),
        unused=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        weighted=choose(True, False),
        grad=choose("yes", "yes", "yes", "no", "no_grad"),
        idx_dtype=choose("int64", "int32"),
        x_dtype=choose("fp32", "bf16", "fp16"),
        strided=choose(False, True),
        asynchronous=choose(False, True),
        dequantize=choose(True, True, False),
    )


def machine(backend: str, ranks: tuple[int, ...], run: Callable[[Program], object]) -> Any:
    """A state machine class; every program it makes is given to `run`, which raises on failure."""
    # On backend cuda bad input beside a handle breaks the object (docs/troubleshooting.md).
    beside_a_handle = () if backend == "cuda" else (*BAD_AGAIN, *BAD_COMBINE)

    class Programs(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[Step] = []
            self.layout: Layout | None = None
            self.alive = 0  # dispatches to refer to, at most: some are refused

        @initialize(data=st.data(), ranks=st.sampled_from(ranks))
        def build(self, data: Any, ranks: int) -> None:
            self.first = self.layout = data.draw(layouts(ranks, backend))

        def any_alive(self) -> bool:
            return self.alive > 0

        @rule(data=st.data())
        def dispatch(self, data: Any) -> None:
            self.steps.append(data.draw(dispatches(self.layout)))
            self.alive += 1

        @precondition(any_alive)
        @rule(which=_WHICH, seed=_SEEDS, weighted=st.booleans(), grad=st.sampled_from(["yes", "no"]))
        def again(self, which: int, seed: int, weighted: bool, grad: str) -> None:
            self.steps.append(Again(which, seed, weighted, grad))
            self.alive += 1

        @precondition(any_alive)
        @rule(
            which=_WHICH,
            weights=st.sampled_from(["combine", "experts", "no"]),
            poison=st.booleans(),
            asynchronous=st.booleans(),
        )
        def combine(self, which: int, weights: str, poison: bool, asynchronous: bool) -> None:
            self.steps.append(Combine(which, weights, poison, asynchronous))

        @precondition(any_alive)
        @rule(which=_WHICH, seed=_SEEDS)
        def backward(self, which: int, seed: int) -> None:
            self.steps.append(Backward(which, seed))
            self.alive -= 1

        @precondition(any_alive)
        @rule(which=_WHICH)
        def drop(self, which: int) -> None:
            self.steps.append(Drop(which))
            self.alive -= 1

        @rule(
            which=_WHICH,
            rank=st.integers(0, max(ranks) - 1),
            what=st.sampled_from((*BAD_DISPATCH, *beside_a_handle)),
            seed=_SEEDS,
        )
        def refuse(self, which: int, rank: int, what: str, seed: int) -> None:
            self.steps.append(Refuse(which, rank, what, seed))

        @precondition(lambda self: len(self.steps) > 5)
        @rule(data=st.data())
        def rebuild(self, data: Any) -> None:
            self.layout = data.draw(layouts(self.first.ranks, backend))
            self.steps.append(Rebuild(self.layout))
            self.alive = 0

        def teardown(self) -> None:
            if self.steps:
                program = Program(self.first, tuple(self.steps))
                hypothesis.note(f"the program: {program.to_json()}")
                run(program)

    return Programs


def run_programs(
    backend: str,
    ranks: tuple[int, ...],
    programs: int,
    run: Callable[[Program], object],
    fresh: bool = False,
) -> None:
    """Gives `programs` programs to `run`, and where it raises shrinks the program and raises.

    fresh: other programs on every call; else always the same.
    """
    settings = hypothesis.settings(
        max_examples=programs,
        stateful_step_count=STEPS,
        derandomize=not fresh,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine(backend, ranks, run), settings=settings)
