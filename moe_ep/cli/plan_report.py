"""The text of a plan."""

from __future__ import annotations

import textwrap
from typing import Any

_WIDTH = 96
_COLUMNS = (("NVLink", "nvlink_bytes"), ("NIC", "nic_bytes"), ("HBM", "hbm_bytes"))


def table(data: dict[str, Any]) -> str:
    """At most 96 columns. `data`: see `moe_ep.cli.plan.describe`."""
    lines = [*_head(data), "#", *_costs(data), "#", *_step(data), "#", *_sensitivity(data)]
    if "sweep" in data:
        lines += ["#", *_sweep(data["sweep"])]
    for note in data["notes"]:
        lines += _wrapped(f"note: {note}")
    return "\n".join(lines)


def _head(data: dict[str, Any]) -> list[str]:
    model, dispatch = data["layout"]["model"], data["layout"]["dispatch"]
    exact = ", exact combine" if dispatch["exact_combine"] else ""
    mode = ", low latency" if dispatch["mode"] == "low_latency" else ""
    limit = "" if data["host_limit"] is None else f", at most {data['host_limit']} hosts a token"
    memory = "no kernels of backend cuda for this layout"
    if data["buffer_bytes"] is not None:
        memory = f"{data['buffer_bytes'] / 1e6:.1f} MB a GPU, for all layers together"
    return [
        f"# moe-ep plan: {data['layout_name']} on {data['cluster']['name']}; a model, not a "
        "measurement",
        f"# {data['tokens']} tokens x {model['hidden']}, top-{model['top_k']} of "
        f"{model['num_experts']} experts, {dispatch['dtype']}{exact}{mode}",
        f"# {_count(data['ranks'], 'rank')} on {_count(data['hosts'], 'host')}, "
        f"{data['num_sms']} SMs a rank; uniform routing{limit}, fullest rank "
        f"{data['imbalance']:.2f} x the mean",
        f"# a token goes to {data['destinations_per_token']:.2f} ranks on "
        f"{data['hosts_per_token']:.2f} hosts; a rank gets {data['expert_rows']:.0f} expert rows "
        f"+ {data['padding_rows']:.0f} of padding",
        f"# symmetric memory: {memory}",
    ]


def _costs(data: dict[str, Any]) -> list[str]:
    lines = [
        "# " + f"{'one call':<22}{'time':>10}  {'bound by':<9}" + _cells([n for n, _ in _COLUMNS]),
        "# " + f"{'':<22}{'(us)':>10}  {'':<9}" + _cells(["(MB)"] * len(_COLUMNS)),
    ]
    costs = data["costs"]
    for names, title in (
        (("dispatch", "combine"), "dispatch + combine"),
        (("all-to-all there", "all-to-all back"), "all-to-all both ways"),
    ):
        for name in names:
            lines.append(_row(name, costs[name], costs[name]["bound"]))
            if costs[name]["fixed_us"]:
                lines.append(f"    {'fixed':<20}{costs[name]['fixed_us']:>10.1f}  latency")
            if len(costs[name]["phases"]) > 1 or costs[name]["fixed_us"]:
                lines += [_row(p["name"], p, p["bound"], "    ") for p in costs[name]["phases"]]
        keys = ("us", *(key for _, key in _COLUMNS))
        total = {key: sum(costs[name][key] for name in names) for key in keys}
        lines.append(_row(title, total, ""))
    ratio = data["us"] / data["all_to_all_us"]
    return [*lines, f"# dispatch + combine take {ratio:.2f} of the all-to-all's time"]


def _step(data: dict[str, Any]) -> list[str]:
    step = data["step"]
    what = "forward and backward" if step["backward"] else "forward"
    lines = [
        "# " + f"{'a step':<22}{'time':>10}  {'':<9}" + _cells([name for name, _ in _COLUMNS]),
        "# " + f"{'':<22}{'(ms)':>10}  {'':<9}" + _cells(["(GB)"] * len(_COLUMNS)),
    ]
    for name in ("moe_ep", "all-to-all"):
        values = [f"{step[name][key] / 1e9:.2f}" for _, key in _COLUMNS]
        lines.append(f"  {name:<22}{step[name]['us'] / 1e3:>10.2f}  {'':<9}" + _cells(values))
    lines.append(f"# {_count(step['layers'], 'MoE layer')}, {what}, one micro-batch")
    return lines


def _sensitivity(data: dict[str, Any]) -> list[str]:
    aligned, uneven = data["row_alignment"], data["imbalances"]
    padded = [
        _series("row_alignment", aligned, "value", ".0f"),
        _series("  rows of padding", aligned, "padding_rows", ".0f"),
        _series("  time", aligned, "us", ".0f"),
    ]
    fixed_slots = data["layout"]["dispatch"]["mode"] == "low_latency"
    return [
        "# dispatch + combine (us), if only this changes",
        *([] if fixed_slots else padded),
        _series("fullest / mean", uneven, "value", ".2f"),
        _series("  time", uneven, "us", ".0f"),
        _series("  all-to-all", uneven, "all_to_all_us", ".0f"),
    ]


def _sweep(sweep: dict[str, Any]) -> list[str]:
    start = f"{_count(sweep['gpus'], 'GPU')}"
    lines = [
        f"# {start:<20}{'replicas':>9}{'time':>10}{'NVLink':>10}{'NIC':>10}{'buffers':>10}"
        f"{'experts':>10}",
        f"# {'':<20}{'':>9}{'(us)':>10}{'(MB)':>10}{'(MB)':>10}{'(GB)':>10}{'(GB)':>10}",
    ]
    for choice in sweep["choices"]:
        mark = "*" if choice["name"] == sweep["recommended"] else " "
        lines.append(
            f"{mark} {choice['name']:<20}{choice['replicas']:>9}{choice['us']:>10.0f}"
            f"{choice['nvlink_bytes'] / 1e6:>10.1f}{choice['nic_bytes'] / 1e6:>10.1f}"
            f"{_giga(choice['buffer_bytes']):>10}{_giga(choice['weight_bytes']):>10}"
            + ("  too much" if choice["refusal"] else "")
        )
    start = "" if sweep["recommended"] is None else f"take {sweep['recommended']}: "
    return [*lines, *_wrapped(start + sweep["reason"])]


def _row(name: str, values: dict[str, Any], bound: str, indent: str = "  ") -> str:
    width = 24 - len(indent)
    cells = _cells([f"{values[key] / 1e6:.1f}" for _, key in _COLUMNS])
    return f"{indent}{name:<{width}}{values['us']:>10.1f}  {bound:<9}{cells}"


def _cells(values: list[str]) -> str:
    return "".join(f"{value:>12}" for value in values)


def _series(name: str, points: list[dict[str, Any]], key: str, form: str) -> str:
    return f"  {name:<22}" + "".join(f"{format(point[key], form):>10}" for point in points)


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
