"""The picture of a soak: losses of both trainings, and the memory of every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLORS = {"disturbed": "tab:red", "alone": "tab:blue"}


def draw(path: Path, stretches: list[Any]) -> str | None:
    """Returns why nothing was drawn, or None."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture: matplotlib isn't installed (draw it elsewhere with --report-only)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, memory) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for phase, color in _COLORS.items():
        points = [
            (event["step"], event["loss"])
            for stretch in stretches
            if stretch.phase == phase
            for rank, event in stretch.of("step")
            if rank == 0
        ]
        style = "-" if phase == "disturbed" else ":"
        loss.plot(*zip(*points, strict=True) if points else ((), ()), style, color=color,
                  label=phase)  # fmt: skip
    for stretch in stretches:
        for _, event in stretch.of("kill"):
            for axes in (loss, memory):
                axes.axvline(event["step"], color="black", linewidth=0.8, linestyle="--")
        for kind, style in (("rss", "-"), ("cuda", "--")):
            for rank in range(len(stretch.ranks)):
                held = [
                    (event["step"], event[kind] / 2**20)
                    for other, event in stretch.of("step")
                    if other == rank and kind in event
                ]
                if held:
                    memory.plot(*zip(*held, strict=True), style, color=_COLORS[stretch.phase],
                                linewidth=0.8)  # fmt: skip
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title("dashed: a rank was killed, and all restarted from the last checkpoint")
    loss.legend()
    memory.set_ylabel("MiB of each process (dashed: torch's on the GPU)")
    memory.set_xlabel("step")
    for axes in (loss, memory):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return None
