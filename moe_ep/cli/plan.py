"""moe-ep plan: what a layout costs on a cluster, before there is one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_ep.cli import plan_report
from moe_ep.cli.outputs import check_plot
from moe_ep.cost import (
    Choice,
    Cluster,
    Cost,
    ExpertWeights,
    Prediction,
    choices,
    predict,
    recommend,
    step,
)
from moe_ep.cost.cluster import DEFAULT_CLUSTER
from moe_ep.cost.memory import MAX_CORE_RANKS
from moe_ep.layout import EPLayout

DEFAULT_TOKENS = 4096
ALIGNMENTS = (1, 16, 32, 64, 128)
IMBALANCES = (1.0, 1.1, 1.25, 1.5, 2.0)
PUBLISHED_RANKS = 256
LARGEST = 1e12  # of a flag's number: products of several must stay finite

_DESCRIPTION = """Predicts memory, bytes per link and times of dispatch and combine, beside a plain
all-to-all. A model: it needs no GPU, and docs/plan.md says how far off it has been."""

_EPILOG = """examples:
  moe-ep plan configs/mixtral_8x7b_ep8.yaml
      on the default cluster, H100 hosts with a 400 Gb/s card per GPU
  moe-ep plan configs/deepseek_v3_ep64.yaml --cluster gb200_nvl72 --tokens 8192
      the same layout on another cluster, with other micro-batches
  moe-ep plan configs/deepseek_v3_ep64.yaml --host-limit 4 --imbalance 1.3
      group-limited gating (at most 4 hosts a token), and a fullest rank with 1.3 times the mean
  moe-ep plan configs/mixtral_8x22b_two_hosts.yaml --sweep --ffn-hidden 16384 --memory-gb 60
      which EP x expert-TP sizes fit 16 GPUs and 60 GB of experts each, and which to take
  moe-ep plan my_layout.yaml --cluster my_cluster.yaml --json > plan.json

what is printed
  time       of one call on the fullest rank. Each phase takes as long as its slowest resource does,
             named under "bound by": HBM, SMs (of dispatch.num_sms), NVLink, NIC, or latency.
  HBM        bytes that a rank reads and writes in device memory, network cards included.
  NVLink     bytes that a rank receives over it in dispatch, sends in combine.
  NIC        bytes that a rank sends to other hosts, one way.
  all-to-all permute, all-to-all of one row per (token, expert), sort by expert; and back. In the
             layout's row format, at the same link efficiency, with the same exchange of counts.
  a step     all MoE layers, forward and backward (in low-latency mode forward) of one micro-batch.

a cluster is a YAML file; configs/clusters has several, docs/plan.md explains the keys. Its
gpus_per_host says which ranks share a host, not the layout's parallel.ranks_per_host.

--sweep compares parallel.expert x parallel.expert_tensor with a product of --gpus. --ffn-hidden
adds the memory of expert weights (gate, up and down projection). With --memory-gb smaller groups
with replicas count too: without a limit, keeping every expert on every GPU would always win. What
the experts' GEMMs take is not part of the model."""


def add_parser(commands: Any, name: str) -> None:
    parser = commands.add_parser(
        name,
        help="predict memory, bytes and times of a layout on a cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("layout", type=Path, metavar="LAYOUT", help="EP layout (YAML)")
    add("--cluster", default=DEFAULT_CLUSTER, metavar="FILE|NAME", help="(default: %(default)s)")
    add("--tokens", type=int, metavar="N", help="per rank (default: the layout's, else 4096)")
    add(
        "--imbalance", type=float, default=1.0, metavar="F", help="fullest rank / mean (default: 1)"
    )
    add("--host-limit", type=int, metavar="M", help="hosts a token may go to (default: any)")
    add("--sweep", action="store_true", help="compare EP x expert-TP sizes")
    add("--gpus", type=int, metavar="N", help="for --sweep (default: as many as the layout has)")
    add("--ffn-hidden", type=int, metavar="F", help="for --sweep: an expert's inner columns")
    add("--bytes-per-parameter", type=float, metavar="B", help="of expert weights (default: 2)")
    add(
        "--memory-gb", type=float, metavar="G", help="a GPU's, for experts and buffers (10^9 bytes)"
    )
    add("--json", action="store_true", help="print JSON in place of the table")
    add("--plot", type=Path, metavar="FILE.png", help="draw time against tokens, and the phases")


def run(options: argparse.Namespace) -> int:
    weights = _check(options)
    layout = EPLayout.from_yaml(options.layout)
    if options.tokens is not None:
        if options.tokens < 1:
            raise ValueError(f"--tokens: {options.tokens}; give at least 1 per rank")
        layout = layout.replace(tokens_per_rank=options.tokens)
    tokens = layout.tokens_per_rank or DEFAULT_TOKENS
    cluster = Cluster.named(options.cluster)
    prediction = predict(layout, cluster, tokens, options.imbalance, options.host_limit)
    data = describe(prediction, options.layout.name, options.imbalance, options.host_limit)
    if options.sweep:
        gpus = options.gpus or -(-layout.parallel.group_size // cluster.ranks_per_gpu)
        found = choices(layout, cluster, tokens, gpus, weights, imbalance=options.imbalance)
        data["sweep"] = describe_sweep(found, gpus)
    print(json.dumps(data, indent=2) if options.json else plan_report.table(data))
    if options.plot is not None:
        from moe_ep.cli import plan_plot

        curve = _curve(prediction, options.imbalance, options.host_limit)
        plan_plot.draw(options.plot, data, curve)
    return 0


def describe(
    prediction: Prediction, name: str, imbalance: float, host_limit: int | None
) -> dict[str, Any]:
    """Everything that is printed, as plain values: bytes, rows and microseconds."""
    layout, cluster, routing = prediction.layout, prediction.cluster, prediction.routing
    total = step(prediction)
    alignments = sorted({*ALIGNMENTS, layout.dispatch.row_alignment})
    imbalances = sorted({*IMBALANCES, imbalance})

    def other(alignment: int, fullest: float) -> Prediction:
        changed = layout.replace(**{"dispatch.row_alignment": alignment})
        return predict(changed, cluster, prediction.tokens, fullest, host_limit)

    aligned = [other(alignment, imbalance) for alignment in alignments]
    uneven = [other(layout.dispatch.row_alignment, fullest) for fullest in imbalances]
    return {
        "layout_name": name,
        "layout": layout.model_dump(),
        "cluster": cluster.model_dump(),
        "tokens": prediction.tokens,
        "imbalance": imbalance,
        "host_limit": host_limit,
        "ranks": routing.ranks,
        "hosts": routing.hosts,
        "destinations_per_token": routing.destinations,
        "hosts_per_token": routing.host_destinations,
        "remote_hosts_per_token": routing.remote_hosts,
        "expert_rows": prediction.rows.arriving,
        "padding_rows": routing.padding_rows,
        "buffer_bytes": prediction.buffer_bytes,
        "num_sms": min(layout.dispatch.num_sms, cluster.sms),
        "sms_that_suffice": prediction.sms_that_suffice,
        "costs": {
            "dispatch": _cost(prediction.dispatch),
            "combine": _cost(prediction.combine),
            "all-to-all there": _cost(prediction.peer_dispatch),
            "all-to-all back": _cost(prediction.peer_combine),
        },
        "us": prediction.us,
        "all_to_all_us": prediction.peer_us,
        "step": {
            "layers": layout.model.num_moe_layers,
            "backward": total.backward,
            "moe_ep": {
                "us": total.us,
                "hbm_bytes": total.hbm_bytes,
                "nvlink_bytes": total.nvlink_bytes,
                "nic_bytes": total.nic_bytes,
            },
            "all-to-all": {
                "us": total.peer_us,
                "hbm_bytes": total.peer_hbm_bytes,
                "nvlink_bytes": total.peer_nvlink_bytes,
                "nic_bytes": total.peer_nic_bytes,
            },
        },
        "row_alignment": [
            {"value": value, "us": p.us, "padding_rows": p.routing.padding_rows}
            for value, p in zip(alignments, aligned, strict=True)
        ],
        "imbalances": [
            {"value": value, "us": p.us, "all_to_all_us": p.peer_us}
            for value, p in zip(imbalances, uneven, strict=True)
        ],
        "notes": _notes(prediction, host_limit),
    }


def describe_sweep(found: list[Choice], gpus: int) -> dict[str, Any]:
    best, reason = recommend(found)
    return {
        "gpus": gpus,
        "choices": [
            {
                "name": choice.name,
                "expert": choice.layout.parallel.expert,
                "expert_tensor": choice.layout.parallel.expert_tensor,
                "replicas": choice.replicas,
                "us": choice.prediction.us,
                "nvlink_bytes": _both(choice.prediction, "nvlink_bytes"),
                "nic_bytes": _both(choice.prediction, "nic_bytes"),
                "buffer_bytes": choice.prediction.buffer_bytes,
                "weight_bytes": choice.weight_bytes,
                "refusal": choice.refusal,
            }
            for choice in found
        ],
        "recommended": None if best is None else best.name,
        "reason": reason,
    }


def _check(options: argparse.Namespace) -> ExpertWeights | None:
    """Raises ValueError for flags that don't go together."""
    check_plot(options.plot)
    if options.sweep and options.host_limit is not None:
        raise ValueError("--sweep compares numbers of hosts: leave --host-limit out")
    numbers = ("gpus", "ffn_hidden", "bytes_per_parameter", "memory_gb")
    given = {name: getattr(options, name) for name in numbers if getattr(options, name) is not None}
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if not options.sweep:
            raise ValueError(f"{flag} is for --sweep; add it")
        if not 0 < value <= LARGEST:
            raise ValueError(f"{flag}: {value}; give a positive number, at most {LARGEST:g}")
        if name in ("bytes_per_parameter", "memory_gb") and options.ffn_hidden is None:
            raise ValueError(f"{flag} needs --ffn-hidden, the inner columns of an expert")
    if options.ffn_hidden is None:
        return None
    limit = None if options.memory_gb is None else options.memory_gb * 1e9
    return ExpertWeights(options.ffn_hidden, options.bytes_per_parameter or 2.0, limit)


def _cost(cost: Cost) -> dict[str, Any]:
    fixed = cost.fixed_us
    phases = [
        {
            "name": phase.name,
            "us": time,
            "bound": bound,
            "hbm_bytes": phase.hbm,
            "nvlink_bytes": phase.nvlink,
            "nic_bytes": phase.nic,
        }
        for phase, time, bound in cost.parts
    ]
    return {
        "us": cost.us,
        "bound": cost.bound,
        "hbm_bytes": cost.hbm_bytes,
        "nvlink_bytes": cost.nvlink_bytes,
        "nic_bytes": cost.nic_bytes,
        "fixed_us": fixed,
        "phases": phases,
    }


def _both(prediction: Prediction, what: str) -> float:
    return float(getattr(prediction.dispatch, what) + getattr(prediction.combine, what))


def _curve(
    prediction: Prediction, imbalance: float, host_limit: int | None
) -> list[tuple[int, float, float]]:
    """(tokens, microseconds, those of an all-to-all), a factor of 16 both ways."""
    sizes = sorted({max(1, int(prediction.tokens * 2.0**power)) for power in range(-4, 5)})
    found = [
        predict(prediction.layout, prediction.cluster, tokens, imbalance, host_limit)
        for tokens in sizes
    ]
    return [(p.tokens, p.us, p.peer_us) for p in found]


def _notes(prediction: Prediction, host_limit: int | None) -> list[str]:
    """What a reader of the figures must know."""
    layout, cluster, routing = prediction.layout, prediction.cluster, prediction.routing
    notes = []
    if routing.hosts > 1:
        notes.append(
            "between hosts the figures are of one row per (token, host) through the rank of the "
            "same local index; backend cuda works within one host"
        )
        notes.append("symmetric memory is without the inboxes that rows from other hosts need")
    elif routing.ranks > MAX_CORE_RANKS:
        notes.append(f"backend cuda takes at most {MAX_CORE_RANKS} ranks")
    if routing.ranks > PUBLISHED_RANKS:
        notes.append(
            f"the figures it was compared with end at {PUBLISHED_RANKS} ranks: an extrapolation"
        )
    if layout.backend == "reference":
        notes.append("the layout names backend reference; figures are of GPUs all the same")
    if (
        routing.ranks > 1
        and layout.parallel.ranks_per_host != cluster.ranks_per_host < routing.ranks
    ):
        notes.append(
            f"{cluster.ranks_per_host} ranks a host, as the cluster has; the layout says "
            f"{layout.parallel.ranks_per_host}"
        )
    capacity = layout.dispatch.capacity
    if capacity is not None and capacity < prediction.rows.arriving:
        notes.append(
            f"dispatch.capacity {capacity} is less than the {prediction.rows.arriving:.0f} rows of "
            "the fullest rank: dispatch would raise CapacityError"
        )
    wanted = prediction.sms_that_suffice
    if wanted > min(layout.dispatch.num_sms, cluster.sms):
        faster = predict(
            layout.replace(**{"dispatch.num_sms": wanted}),
            cluster,
            prediction.tokens,
            prediction.rows.imbalance,
            host_limit,
        ).us
        if faster < 0.98 * prediction.us:
            notes.append(
                f"with {wanted} SMs a rank in place of {layout.dispatch.num_sms} "
                f"(dispatch.num_sms) dispatch + combine would take {faster:.0f} us"
            )
    return notes
