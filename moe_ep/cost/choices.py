"""EP times expert-tensor sizes that fit a number of GPUs, and which of them to take."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep.cost.cluster import Cluster
from moe_ep.cost.times import Prediction, predict
from moe_ep.errors import LayoutError
from moe_ep.layout import EPLayout


@dataclass(frozen=True)
class ExpertWeights:
    """What experts take of a GPU's memory.

    Attributes:
        ffn_hidden: columns between the projections of an expert (gate, up and down: SwiGLU).
        bytes_per_parameter: 2 for bf16 weights; 16 or so with gradients and Adam's states.
        limit_bytes: of one GPU, for experts and symmetric memory together; None: no limit.
    """

    ffn_hidden: int
    bytes_per_parameter: float = 2.0
    limit_bytes: float | None = None

    def per_gpu(self, layout: EPLayout) -> float:
        """Bytes of all MoE layers' experts on one GPU."""
        model, parallel = layout.model, layout.parallel
        parameters = 3 * model.hidden * self.ffn_hidden * model.num_moe_layers
        share = layout.num_local_experts / parallel.expert_tensor
        return parameters * share * self.bytes_per_parameter


@dataclass(frozen=True)
class Choice:
    """One way to spread the experts.

    Attributes:
        replicas: groups of this size that the GPUs hold. weight_bytes: of one GPU, if known.
        refusal: why it cannot be taken; empty if it can.
    """

    layout: EPLayout
    replicas: int
    prediction: Prediction
    weight_bytes: float | None
    refusal: str

    @property
    def name(self) -> str:
        parallel = self.layout.parallel
        return f"EP {parallel.expert} x ETP {parallel.expert_tensor}"


def choices(
    layout: EPLayout,
    cluster: Cluster,
    tokens: int,
    gpus: int,
    weights: ExpertWeights | None = None,
    *,
    imbalance: float = 1.0,
) -> list[Choice]:
    """Every expert and expert-tensor size whose product is `gpus`; with a limit on memory also
    those that divide it, replicated: without one, no exchange at all would always win.

    Raises:
        ValueError: none is possible.
    """
    limited = weights is not None and weights.limit_bytes is not None
    ranks = gpus * cluster.ranks_per_gpu
    found: list[Choice] = []
    for size in _divisors(ranks) if limited else [ranks]:
        for expert in _divisors(size):
            changes = {"parallel.expert": expert, "parallel.expert_tensor": size // expert}
            try:
                candidate = layout.replace(**changes)
            except LayoutError:
                continue
            prediction = predict(candidate, cluster, tokens, imbalance)
            weight_bytes = weights.per_gpu(candidate) if weights is not None else None
            refusal = _refusal(prediction, weight_bytes, weights)
            found.append(Choice(candidate, ranks // size, prediction, weight_bytes, refusal))
    if not found:
        raise ValueError(
            f"no expert x expert_tensor of {ranks} ranks: expert must divide num_experts="
            f"{layout.model.num_experts}, and top_k * expert_tensor be at most 32"
        )
    return sorted(found, key=lambda choice: (bool(choice.refusal), choice.prediction.us))


def recommend(found: list[Choice]) -> tuple[Choice | None, str]:
    """The fastest of those that fit, and why; None where none fits."""
    fitting = [choice for choice in found if not choice.refusal]
    if not fitting:
        least = min(found, key=lambda choice: _needed(choice.prediction, choice.weight_bytes))
        return None, (
            f"none fits: the smallest, {least.name}, needs {_needed_text(least)}; use more GPUs, a "
            "higher limit, or fewer bytes per parameter"
        )
    best = min(fitting, key=lambda choice: choice.prediction.us)
    others = [choice for choice in fitting if choice is not best]
    reasons = [_why(best, min(others, key=lambda choice: choice.prediction.us))] if others else []
    faster = [c for c in found if c.refusal and c.prediction.us < best.prediction.us]
    if faster:
        reasons.append(f"{faster[0].name} would be faster but needs {_needed_text(faster[0])}")
    return best, "; ".join(reasons or ["the only choice"])


def _why(best: Choice, other: Choice) -> str:
    """What the next best one moves more of."""
    mine, theirs = best.prediction, other.prediction
    ratio = theirs.us / mine.us
    links = (
        ("network", mine.dispatch.nic_bytes + mine.combine.nic_bytes,
         theirs.dispatch.nic_bytes + theirs.combine.nic_bytes),
        ("NVLink", mine.dispatch.nvlink_bytes + mine.combine.nvlink_bytes,
         theirs.dispatch.nvlink_bytes + theirs.combine.nvlink_bytes),
        ("memory", mine.dispatch.hbm_bytes + mine.combine.hbm_bytes,
         theirs.dispatch.hbm_bytes + theirs.combine.hbm_bytes),
    )  # fmt: skip
    start = f"{other.name}, the next, takes {ratio:.2f} times as long"
    for what, least, most in links:
        if most > least * 1.01:
            times = f"{most / least:.2f} times the" if least else f"{most / 1e6:.0f} MB of"
            return f"{start} and moves {times} {what} bytes"
    return start


def _refusal(
    prediction: Prediction, weight_bytes: float | None, weights: ExpertWeights | None
) -> str:
    if weights is None or weights.limit_bytes is None:
        return ""
    needed = _needed(prediction, weight_bytes)
    if needed <= weights.limit_bytes:
        return ""
    return f"{needed / 1e9:.1f} GB, limit {weights.limit_bytes / 1e9:.1f} GB"


def _needed(prediction: Prediction, weight_bytes: float | None) -> float:
    return (weight_bytes or 0.0) + (prediction.buffer_bytes or 0)


def _needed_text(choice: Choice) -> str:
    return f"{_needed(choice.prediction, choice.weight_bytes) / 1e9:.1f} GB a GPU"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
