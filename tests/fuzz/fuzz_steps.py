"""What a fuzzed program is: a layout, and the calls all ranks make, as plain data.

Nothing here knows what a call returns: ranks work that out themselves (`fuzz_model`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

BAD_DISPATCH = ("hidden", "dtype", "ids", "id dtype", "slots", "tokens", "weights", "nothing")
BAD_AGAIN = ("again tokens", "again weights", "again both")
BAD_COMBINE = ("rows", "rows dtype", "row weights", "no tensor")


@dataclass(frozen=True)
class Layout:
    """The keys of an EP layout that are varied."""

    ranks: int
    local_experts: int
    top_k: int
    hidden: int
    expert_tensor: int = 1
    dtype: str = "fp32"
    scale: str = "fp32"
    alignment: int = 1
    capacity: int | None = None
    mode: str = "throughput"
    exact: bool = False
    tokens_per_rank: int | None = None

    @property
    def num_experts(self) -> int:
        return self.ranks // self.expert_tensor * self.local_experts


@dataclass(frozen=True)
class Dispatch:
    """A dispatch with a routing of its own.

    tokens: of each rank. grad: "yes", "no", or "no_grad" (inputs want one, torch.no_grad forbids).
    unused: the part of the slots that are -1. x_dtype: of FP8 layouts.
    """

    seed: int
    tokens: tuple[int, ...]
    slots: int
    routing: str = "random"
    unused: float = 0.0
    weighted: bool = True
    grad: str = "yes"
    idx_dtype: str = "int64"
    x_dtype: str = "fp32"
    strided: bool = False
    asynchronous: bool = False
    dequantize: bool = True


@dataclass(frozen=True)
class Again:
    """A dispatch with the handle of dispatch number `which` (of those alive, modulo)."""

    which: int
    seed: int
    weighted: bool = True
    grad: str = "yes"


@dataclass(frozen=True)
class Combine:
    """weights: "combine", "experts" (they multiply their rows), or "no"."""

    which: int
    weights: str = "combine"
    poison: bool = False
    asynchronous: bool = False


@dataclass(frozen=True)
class Backward:
    """Of the combine of a dispatch, or of the dispatch alone where none was made."""

    which: int
    seed: int


@dataclass(frozen=True)
class Drop:
    """Forgets a dispatch without another word."""

    which: int


@dataclass(frozen=True)
class Refuse:
    """Rank `rank` (modulo) gives bad input; the others make a good call."""

    which: int
    rank: int
    what: str
    seed: int


@dataclass(frozen=True)
class Rebuild:
    """destroy(), a call on what was destroyed, and a new object, perhaps with another layout."""

    layout: Layout


Step = Dispatch | Again | Combine | Backward | Drop | Refuse | Rebuild
_KINDS = {kind.__name__: kind for kind in (Dispatch, Again, Combine, Backward, Drop, Refuse)}


@dataclass(frozen=True)
class Program:
    layout: Layout
    steps: tuple[Step, ...]

    def to_json(self) -> str:
        steps = [{"do": type(s).__name__, **dataclasses.asdict(s)} for s in self.steps]
        return json.dumps({"layout": dataclasses.asdict(self.layout), "steps": steps})

    @classmethod
    def from_json(cls, text: str) -> Program:
        data = json.loads(text)
        return cls(Layout(**data["layout"]), tuple(_step(**step) for step in data["steps"]))


def _step(do: str, **values: Any) -> Step:
    if do == "Rebuild":
        return Rebuild(Layout(**values["layout"]))
    if "tokens" in values:
        values["tokens"] = tuple(values["tokens"])
    step: Step = _KINDS[do](**values)
    return step
