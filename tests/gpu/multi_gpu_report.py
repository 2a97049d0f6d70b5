"""What scripts/bench_multi_gpu.sh says of its figures: tables, and goals that are met or missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = list[Any]
_VERBS = ("dispatch", "dispatch, cached", "combine", "whole way", "forward + backward")
_NCCL_WAY = (
    "megatron multi-hot",
    "megatron permute",
    "all_to_all there",
    "all_to_all back",
    "megatron unpermute",
)


def tables(report: dict[str, Any]) -> str:
    """All that was measured, as text."""
    steps = report["steps"]
    parts = [
        f"{report['ranks']} ranks on {report['gpus']} x {report['gpu']}, driver "
        f"{report['driver']}, CUDA {report['cuda']}, torch {report['torch']}"
    ]
    for name, rates in steps.get("bandwidth", {}).items():
        title = f"bandwidth, rows of {rates['row_bytes']} bytes ({name}), {rates['unit']}"
        parts.append(_table(title, _bandwidth(rates)))
    runs = list(_runs(report))
    if runs:
        parts.append(_table("dispatch and combine, us, the slowest rank's median", _bench(runs)))
    low_latency = [
        [timing["name"], timing["median_us"], (timing["graph_us"] or {}).get("median")]
        for run in steps.get("low_latency", {}).get("runs", [])
        for timing in run["timings"]
        if timing["error"] is None
    ]
    if low_latency:
        head: Row = ["verb", "call", "in a graph"]
        parts.append(_table("low latency, us", [head, *low_latency]))
    if steps.get("training"):
        times = [["dispatcher", "ms a step"], *map(list, steps["training"].items())]
        parts.append(_table("Mixtral training", times))
    if steps.get("tests"):
        found = [[name, text or "FAILED"] for name, text in steps["tests"].items()]
        parts.append(_table("tests", found))
    return "\n\n".join(parts) + "\n"


def _runs(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(model, run) of every benchmark."""
    for step in ("bench", "other_sms"):
        for entry in report["steps"].get(step, []):
            for run in entry["report"]["runs"]:
                yield entry["model"], run


def _bandwidth(rates: dict[str, Any]) -> list[Row]:
    blocks = list(rates["pull"])
    rows: list[Row] = [["", "copy engine", *(f"{count} blocks" for count in blocks)]]
    rows.append(["copies", rates["copy_engine"]])
    rows += [
        [name, None, *(rates[way][count] for count in blocks)]
        for name, way in (("SMs read", "pull"), ("SMs write", "push"))
    ]
    return rows


def _bench(runs: list[tuple[str, Any]]) -> list[Row]:
    head = ["model", "dtype", "tokens", "SMs", *_VERBS, "there GB/s", "back GB/s"]
    rows: list[Row] = [[*head, "NCCL + permute", "ours of it"]]
    for model, run in runs:
        timings = {t["name"]: t for t in run["timings"] if t["error"] is None}
        dispatch = run["layout"]["dispatch"]
        row: Row = [model, dispatch["dtype"], run["tokens"], dispatch["num_sms"]]
        row += [timings.get(verb, {}).get("median_us") for verb in _VERBS]
        row += [link_rate(timings.get(verb)) for verb in ("dispatch, cached", "combine")]
        theirs = None
        if all(name in timings for name in _NCCL_WAY):
            theirs = sum(timings[name]["median_us"] for name in _NCCL_WAY)
        ours = timings.get("whole way", {}).get("median_us")
        rows.append([*row, theirs, ours / theirs if ours and theirs else None])
    return rows


def link_rate(timing: dict[str, Any] | None) -> float | None:
    """GB/s that a call has sent over its rank's links."""
    if timing is None or not timing["link_bytes"]:
        return None
    return float(timing["link_bytes"] / timing["median_us"] / 1e3)


def _table(title: str, rows: list[Row]) -> str:
    texts = [[_cell(value) for value in row] for row in rows]
    columns = max(map(len, texts))
    texts = [[*row, *[""] * (columns - len(row))] for row in texts]
    widths = [max(len(row[column]) for row in texts) for column in range(columns)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]
    return "\n".join([title, *lines])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def goals(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, allowed): lower is better in all of them. Only what was measured."""
    steps, found = report["steps"], []
    push = steps.get("bandwidth", {}).get("deepseek", {}).get("push", {})
    for model, run in _runs(report):
        found += _goals_of_run(model, run, push)
    for run in steps.get("low_latency", {}).get("runs", []):
        limits = {"dispatch": 40.0, "combine": 65.0} if report.get("ranks") == 8 else {}
        for timing in run["timings"]:
            if timing["name"] in limits and timing["graph_us"] is not None:
                what = f"low latency, {timing['name']}, us"
                found.append((what, timing["graph_us"]["median"], limits[timing["name"]]))
    times = steps.get("training", {})
    if len(times) == 2:
        found.append(
            ("training step, deepep over alltoall", times["deepep"] / times["alltoall"], 1.0)
        )
    return found


def _goals_of_run(model: str, run: Any, push: Any) -> list[tuple[str, float, float]]:
    timings = {t["name"]: t for t in run["timings"] if t["error"] is None}
    dispatch = run["layout"]["dispatch"]
    sms, dtype = str(dispatch["num_sms"]), dispatch["dtype"]
    what = f"{model} {dtype}, {run['tokens']} tokens, {sms} SMs"
    found = []
    for verb in ("dispatch, cached", "combine"):
        rate = link_rate(timings.get(verb))
        if rate is not None and sms in push and sms in ("16", "24"):
            found.append((f"{what}: peer-write rate over {verb}'s", push[sms] / rate, 1 / 0.75))
    if model == "deepseek" and run["tokens"] == 4096 and int(sms) >= 16:
        verb, limit_us = ("dispatch", 450.0) if dtype != "bf16" else ("combine", 900.0)
        if verb in timings:
            found.append((f"{what}: {verb}, us", timings[verb]["median_us"], limit_us))
    return found
