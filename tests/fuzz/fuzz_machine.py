"""How hypothesis makes programs: a state machine whose rules add one step each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


# What is drawn does not depend on what was drawn before, which would cost hypothesis more than the
# ranks spend on the step: raw numbers are fitted to the layout afterwards.
_LAYOUT = st.fixed_dictionaries(
    {
        "expert_tensor": st.sampled_from([1, 1, 2, 4]),
        "local_experts": st.sampled_from([1, 1, 2, 3, 5]),
        "top_k": st.sampled_from([1, 2, 2, 3, 4, 7, 16]),
        "dtype": st.sampled_from(["bf16", "bf16", "fp16", "fp32", "fp32", "fp8_e4m3", "fp64"]),
        "scale": st.sampled_from(["fp32", "power_of_two"]),
        "hidden": st.integers(0, 5),
        "alignment": st.sampled_from([1, 1, 1, 4, 16]),
        "capacity": st.sampled_from([None, None, None, 24, 64]),
        "mode": st.sampled_from(["throughput", "throughput", "throughput", "low_latency"]),
        "exact": st.booleans(),
        "tokens_per_rank": st.sampled_from([None, 9, 33]),
    }
)
_COUNTS = (0, 0, 1, 2, 3, 4, 5, 7, 9, 33)
_DISPATCH = st.fixed_dictionaries(
    {
        "seed": _SEEDS,
        "tokens": st.tuples(*[st.sampled_from(_COUNTS)] * 4),
        "many": st.sampled_from([1, 1, 1, 0, 16]),
        "slots": st.integers(0, 15),
        "routing": st.sampled_from(["random", "skewed", "repeated", "one rank", "one expert"]),
        "unused": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        "variant": st.integers(0, 2 * 5 * 2 * 3 * 2 * 2 * 3 - 1),
    }
)


_LATEST = -1  # of those that fit, whatever their number


def _fitted_layout(raw: dict[str, Any], ranks: int, backend: str) -> Layout:
    values = dict(raw)
    if ranks % values["expert_tensor"]:
        values["expert_tensor"] = 1
    experts = ranks // values["expert_tensor"] * values["local_experts"]
    values["top_k"] = min(values["top_k"], experts, 32 // values["expert_tensor"])
    cuda = backend == "cuda"
    if cuda:
        # It has no fp64 and no low_latency mode, wants rows of 16 bytes and tokens_per_rank beside
        # a capacity, and an overflow breaks the object.
        values["dtype"] = values["dtype"].replace("fp64", "bf16")
        values["mode"] = "throughput"
        if values["capacity"] is not None:
            values["tokens_per_rank"] = 33
            values["capacity"] = 33 * ranks * values["top_k"] + 16 * values["local_experts"]
    sizes = (8, 8, 64, 64, 8, 1536) if cuda else (8, 1, 3, 64, 8, 4096)
    if values["dtype"] == "fp8_e4m3":
        sizes = (128, 128, 128, 128, 128, 384)
    values["hidden"] = sizes[values["hidden"]]
    return Layout(ranks=ranks, **values)


def _fitted_dispatch(raw: dict[str, Any], layout: Layout) -> Dispatch:
    limit = layout.tokens_per_rank
    # All ranks empty, a few tokens each, or more than one block of the sum in combine.
    factor = raw["many"] if limit is None and layout.hidden <= 8 else min(raw["many"], 1)
    tokens = [min(n, limit or n) for n in raw["tokens"][: layout.ranks]]
    tokens[0] *= factor
    if factor == 0:
        tokens = [0] * layout.ranks
    variant = raw["variant"]  # one number for many small choices

    def choose(*options: Any) -> Any:
        nonlocal variant
        variant, index = divmod(variant, len(options))
        return options[index]

    return Dispatch(
        seed=raw["seed"],
        tokens=tuple(tokens),
        slots=1 + raw["slots"] % layout.top_k,
        routing=raw["routing"],
        unused=raw["unused"],
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
            self.first = self.layout = Layout(ranks=1, local_experts=1, top_k=1, hidden=8)
            self.alive = 0  # dispatches to refer to, at most: some are refused

        @initialize(raw=_LAYOUT, ranks=st.sampled_from(ranks))
        def build(self, raw: dict[str, Any], ranks: int) -> None:
            self.first = self.layout = _fitted_layout(raw, ranks, backend)

        def any_alive(self) -> bool:
            return self.alive > 0

        @rule(raw=_DISPATCH)
        def dispatch(self, raw: dict[str, Any]) -> None:
            self.steps.append(_fitted_dispatch(raw, self.layout))
            self.alive += 1

        @rule(
            raw=_DISPATCH,
            weights=st.sampled_from(["combine", "combine", "experts", "no"]),
            poison=st.booleans(),
            seed=_SEEDS,
        )
        def there_and_back(
            self, raw: dict[str, Any], weights: str, poison: bool, seed: int
        ) -> None:
            """What training does, which single steps would seldom put together."""
            raw = {**raw, "tokens": [n or 5 for n in raw["tokens"]], "many": 1}
            step = _fitted_dispatch(raw, self.layout)
            self.steps.append(replace(step, weighted=True, grad="yes", dequantize=True))
            self.steps += [Combine(_LATEST, weights, poison), Backward(_LATEST, seed)]

        @precondition(any_alive)
        @rule(
            which=_WHICH, seed=_SEEDS, weighted=st.booleans(), grad=st.sampled_from(["yes", "no"])
        )
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

        @precondition(lambda self: not (self.steps and isinstance(self.steps[-1], Refuse)))
        @rule(
            which=_WHICH,
            rank=st.integers(0, max(ranks) - 1),
            what=st.sampled_from((*BAD_DISPATCH, *beside_a_handle)),
            seed=_SEEDS,
        )
        def refuse(self, which: int, rank: int, what: str, seed: int) -> None:
            self.steps.append(Refuse(which, rank, what, seed))

        @precondition(lambda self: not any(isinstance(s, Rebuild) for s in self.steps[-9:]))
        @rule(raw=_LAYOUT)
        def rebuild(self, raw: dict[str, Any]) -> None:
            self.layout = _fitted_layout(raw, self.first.ranks, backend)
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
    seed: int,
    shrink: bool = False,
) -> None:
    """Gives about `programs` programs to `run`, the same for the same seed.

    Where it raises, raises, with the program in the exception's notes. shrink: looks for a smaller
    one that fails first, for up to five minutes.
    """
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    settings = hypothesis.settings(
        max_examples=programs,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    seeded = hypothesis.seed(seed)(machine(backend, ranks, run))
    run_state_machine_as_test(seeded, settings=settings)
