"""What a run reports: one JSON object a step, a progress bar, and the load of every expert."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class ExpertCounter:
    """Counts the tokens each router sends to each expert, on this rank, between two `take` calls.

    A forward hook on the routers: it works with any dispatcher, because it looks at the decision
    and not at its delivery. Only training passes count.

    Args:
        routers: (layer index, router) of this rank; a router returns (probs, routing_map [T, E]).
        num_layers: layers of the whole model, those on other ranks included.
    """

    def __init__(
        self, routers: list[tuple[int, nn.Module]], num_layers: int, num_experts: int
    ) -> None:
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._hooks = [
            router.register_forward_hook(self._hook_of(layer)) for layer, router in routers
        ]

    def _hook_of(self, layer: int) -> Any:
        def hook(router: nn.Module, inputs: Any, output: tuple) -> None:
            if router.training:
                counts = output[1].detach().sum(dim=0, dtype=torch.int64)
                if self._counts.device != counts.device:
                    self._counts = self._counts.to(counts.device)
                self._counts[layer] += counts

        return hook

    def take(self) -> torch.Tensor:
        """[num_layers, num_experts] int64 counts of this rank since the last call."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class MetricsLog:
    """``metrics.jsonl`` of one run, written by the rank that owns it.

    A resumed run goes on in the same file: what the earlier run wrote after the checkpoint is
    dropped, so that each step is there once.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = []
        if first_step > 1 and self.path.exists():
            kept = [record for record in read_metrics(self.path) if record["step"] < first_step]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Appends one step; it is on disk when the call returns, so a killed run keeps it."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line cut short by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def expert_metrics(counts: torch.Tensor) -> dict[str, Any]:
    """The load of the experts, from [num_layers, num_experts] counts summed over all ranks."""
    return {
        "tokens_per_expert_max": int(counts.max()),
        "tokens_per_expert_mean": float(counts.double().mean()),
        "tokens_per_expert": counts.tolist(),
    }


def tensorboard_writer(folder: Path) -> Any:
    """TensorBoard's writer for a run's folder; None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


class Progress:
    """A tqdm bar with loss, speed, and balance (fullest expert over the mean; 1 is even)."""

    def __init__(self, first_step: int, steps: int, shown: bool) -> None:
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps,
            initial=first_step - 1,
            desc="train",
            unit="step",
            disable=not shown,
            # A log file gets a few lines, not hundreds.
            mininterval=0.2 if terminal else 5.0,
            ncols=None if terminal else 110,
        )

    def update(self, record: dict[str, Any]) -> None:
        balance = record["tokens_per_expert_max"] / max(record["tokens_per_expert_mean"], 1e-9)
        self._bar.set_postfix_str(
            f"loss {record['lm_loss']:.3f}, {record['tokens_per_s']:.0f} tok/s, "
            f"balance {balance:.2f}",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


def summary(folder: Path, description: str) -> str:
    """The few lines a run ends with: first and last losses, speed, and where the files are."""
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        return "no step was run"
    first, last = records[0], records[-1]
    steady = sorted(record["step_ms"] for record in records[len(records) // 5 :])
    lines = [
        f"text              {description}",
        f"lm loss           {first['lm_loss']:.3f} (step {first['step']}) -> "
        f"{last['lm_loss']:.3f} (step {last['step']})",
    ]
    validated = [record for record in records if "validation_loss" in record]
    if validated:
        record = validated[-1]
        lines.append(f"validation loss   {record['validation_loss']:.3f} (step {record['step']})")
    median = steady[len(steady) // 2]
    tokens = last["tokens_per_s"] * last["step_ms"] / 1000
    balance = last["tokens_per_expert_max"] / last["tokens_per_expert_mean"]
    lines += [
        f"speed             {median:.0f} ms a step (median), {tokens / median * 1000:.0f} tokens/s",
        f"expert balance    fullest / mean = {balance:.2f}",
        *(f"{label:<18}{folder / name}" for label, name in _FILES if (folder / name).exists()),
    ]
    return "\n".join(lines)


_FILES = (("metrics", "metrics.jsonl"), ("loss curve", "loss.png"), ("expert load", "experts.png"))
