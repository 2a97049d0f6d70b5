"""What is printed and written of a benchmark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Timing:
    """One line of the table; microseconds of the slowest rank, bytes of the busiest rank.

    None: not measured this way, or not counted. With `error` nothing was measured.
    """

    name: str
    by: str
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    alone_us: dict[str, float] | None = None
    graph_us: dict[str, float] | None = None
    host_us: float | None = None
    payload_bytes: int | None = None
    hbm_bytes: int | None = None
    link_bytes: int | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    error: str | None = None


_COLUMNS = (
    # heading, unit, width, digits, value of a timing
    ("median", "(us)", 10, 1, lambda t: t["median_us"]),
    ("min", "(us)", 10, 1, lambda t: t["min_us"]),
    ("max", "(us)", 10, 1, lambda t: t["max_us"]),
    ("alone", "(us)", 10, 1, lambda t: (t["alone_us"] or {}).get("median")),
    ("graph", "(us)", 10, 1, lambda t: (t["graph_us"] or {}).get("median")),
    ("host", "(us)", 8, 1, lambda t: t["host_us"]),
    ("payload", "(MB)", 9, 2, lambda t: _scaled(t["payload_bytes"], 1e6)),
    ("HBM", "(MB)", 9, 2, lambda t: _scaled(t["hbm_bytes"], 1e6)),
    ("link", "(MB)", 9, 2, lambda t: _scaled(t["link_bytes"], 1e6)),
    ("rate", "(GB/s)", 9, 2, lambda t: _rate(t)),
    ("floor", "(us)", 9, 1, lambda t: t["floor_us"]),
    ("ratio", "(floor)", 9, 2, lambda t: t["ratio_to_floor"]),
)
_RATIO_NAMES = {"floor": "the floor", "all_to_all": "all_to_all there and back"}
_ON_A_CPU = ("median", "min", "max", "payload", "link", "rate")


def table(shared: dict[str, Any], run: dict[str, Any]) -> str:
    """One measurement as text. Columns without any figure on a CPU are left out there; the rate
    is of the HBM bytes where they are counted, else of the payload."""
    columns = [c for c in _COLUMNS if shared["copy_GBps"] is not None or c[0] in _ON_A_CPU]
    names = [timing["name"] for timing in run["timings"]]
    width = max(map(len, names), default=0)
    lines = _head(shared, run)
    lines.append("# " + " " * width + "".join(f"{c[0]:>{c[2]}}" for c in columns))
    lines.append("# " + " " * width + "".join(f"{c[1]:>{c[2]}}" for c in columns))
    for timing in run["timings"]:
        start = f"  {timing['name']:<{width}}"
        if timing["error"] is not None:
            lines.append(f"{start}  failed: {timing['error']}")
            continue
        cells = (_cell(value(timing), size, digits) for _, _, size, digits, value in columns)
        lines.append(start + "".join(cells))
    failed = {timing["name"] for timing in run["timings"] if timing["error"] is not None}
    lines += [
        f"# {what} failed: {error}" for what, error in run["errors"].items() if what not in failed
    ]
    if run.get("signal_round_trip_us") is not None:
        lines.append(
            f"# a signal from rank 0 to rank 1 and back: {run['signal_round_trip_us']:.2f} us"
        )
    if run["whole_way_us"] is not None:
        ratios = "".join(
            f", {value:.2f} x {_RATIO_NAMES.get(name, f'{name} whole way')}"
            for name, value in run["ratios"].items()
        )
        lines.append(f"# dispatch + combine: {run['whole_way_us']:.0f} us{ratios}")
    return "\n".join(lines)


def write(
    file: Path, shared: dict[str, Any], runs: list[dict[str, Any]], *, complete: bool
) -> None:
    """Everything measured. The first measurement's keys are at the top too."""
    data = {**shared, **runs[0], "complete": complete, "runs": runs}
    file.write_text(json.dumps(data, indent=2) + "\n")


def _head(shared: dict[str, Any], run: dict[str, Any]) -> list[str]:
    model, dispatch = run["layout"]["model"], run["layout"]["dispatch"]
    sms, combine = "", ""
    machine = f"{shared['threads_per_rank']} threads a rank"
    if shared["copy_GBps"] is not None:
        sms = f", {dispatch['num_sms']} SMs a rank"
        machine = (
            f"CUDA {shared['cuda']}, driver {shared['driver']}, "
            f"a copy moves {shared['copy_GBps']:.0f} GB/s"
        )
    if dispatch["exact_combine"]:
        combine = ", exact combine"
    versions = {name: v for name, v in run["peers"].items() if name != "all_to_all"}
    peers = "".join(f", {name} {version}" for name, version in versions.items())
    return [
        f"# moe-ep bench: backend {run['backend']}, {shared['ranks']} ranks on "
        f"{shared['devices']} x {shared['device']}{sms}",
        f"# {run['tokens']} tokens x {model['hidden']}, top-{model['top_k']} of "
        f"{model['num_experts']} experts, {dispatch['dtype']}{combine}",
        f"# torch {shared['torch']}, {machine}, {shared['iterations']} iterations, torch's "
        f"collectives over {shared['all_to_all_backend']}{peers}",
    ]


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _rate(timing: dict[str, Any]) -> float | None:
    num_bytes = timing["hbm_bytes"] or timing["payload_bytes"]
    return num_bytes / timing["median_us"] / 1e3 if num_bytes and timing["median_us"] else None
