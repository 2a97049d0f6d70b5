"""Draws a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(file: Path, data: dict[str, Any], curve: list[tuple[int, float, float]]) -> None:
    """Left: microseconds of dispatch and combine together over tokens per rank, and those of an
    all-to-all. Right: what each of them is made of; with a sweep, its choices instead.

    Args:
        data: see `moe_ep.cli.plan.describe`. curve: (tokens, ours, all-to-all).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever matplotlib's settings say
    left, right = figure.subplots(1, 2)
    tokens = [point[0] for point in curve]
    left.plot(tokens, [point[1] for point in curve], marker="o", markersize=3, label="moe_ep")
    left.plot(tokens, [point[2] for point in curve], marker="o", markersize=3, label="all-to-all")
    left.set(xlabel="tokens per rank", ylabel="µs, dispatch + combine, predicted")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    found = bars(data)
    longest = max(width for _, _, width, _ in found)
    colours = {part: f"C{i % 10}" for i, part in enumerate(dict.fromkeys(b[3] for b in found))}
    for name, start, width, part in found:
        right.barh(name, width, left=start, edgecolor="white", color=colours[part])
        if width > longest / 12:  # there is room for its name
            right.text(start + width / 2, name, part, ha="center", va="center", fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="µs, predicted")
    model = data["layout"]["model"]
    figure.suptitle(
        f"{data['layout_name']} on {data['cluster']['name']}: {data['ranks']} ranks, "
        f"H {model['hidden']}, top-{model['top_k']} of {model['num_experts']}",
        fontsize=10,
    )
    figure.savefig(file, dpi=120)


def bars(data: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """(line, start, width, what it is); of a sweep, one a choice."""
    if "sweep" in data:
        return [(c["name"], 0.0, c["us"], f"{c['us']:.0f}") for c in data["sweep"]["choices"]]
    found = []
    for name, cost in data["costs"].items():
        end = 0.0
        parts = [(p["name"], p["us"]) for p in cost["phases"]]
        if cost["fixed_us"]:
            parts.insert(0, ("fixed", cost["fixed_us"]))
        for part, width in parts:
            found.append((name, end, width, part))
            end += width
    return found
