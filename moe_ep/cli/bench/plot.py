"""Draws time and ratio against the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_OWN_CASES = ("dispatch", "dispatch, cached", "combine", "whole way")
Series = dict[str, list[tuple[int, float]]]


def draw(file: Path, shared: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Left: microseconds of our cases and of each peer's whole way. Right: the ratios of dispatch
    and combine together, to the floor and to each peer. Both over tokens per rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever matplotlib's settings say
    left, right = figure.subplots(1, 2)
    panels = (
        (left, "µs, slowest rank's median", collect(runs, _times)),
        (right, "dispatch + combine, as a multiple of", collect(runs, _ratios)),
    )
    for axes, label, series in panels:
        for name, points in series.items():
            tokens, values = zip(*points, strict=True)
            axes.plot(tokens, values, marker="o", markersize=3, linewidth=1, label=name)
        axes.set(xlabel="tokens per rank", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        if series:
            axes.legend(fontsize=7)
    left.set_yscale("log")
    model = runs[0]["layout"]["model"]
    figure.suptitle(
        f"{shared['ranks']} ranks on {shared['devices']} x {shared['device']}, "
        f"H {model['hidden']}, top-{model['top_k']} of {model['num_experts']}",
        fontsize=10,
    )
    figure.savefig(file, dpi=120)


def collect(
    runs: list[dict[str, Any]], values_of: Callable[[dict[str, Any]], dict[str, float]]
) -> Series:
    """Points (tokens, value) by series; one for each backend, dtype, number of SMs and case."""
    series: Series = {}
    several = len({run["layout"]["dispatch"].get("num_sms") for run in runs}) > 1
    for run in runs:
        dispatch = run["layout"]["dispatch"]
        who = f"{run['backend']} {dispatch['dtype']}"
        if several:
            who += f" {dispatch['num_sms']} SMs"
        for name, value in values_of(run).items():
            series.setdefault(f"{who}: {name}", []).append((run["tokens"], value))
    return {name: sorted(points) for name, points in series.items()}


def _times(run: dict[str, Any]) -> dict[str, float]:
    return {
        timing["name"]: timing["median_us"]
        for timing in run["timings"]
        if timing["median_us"] is not None
        and (timing["name"] in _OWN_CASES or timing["name"].endswith(" whole way"))
    }


def _ratios(run: dict[str, Any]) -> dict[str, float]:
    return dict(run["ratios"])
