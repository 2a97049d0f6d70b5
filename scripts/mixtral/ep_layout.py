"""The EP layout of a run, and whether its backend can run here."""

from __future__ import annotations

import argparse

from mixtral.cli import ROOT
from moe_ep import EPLayout, backends, env


def layout_of(options: argparse.Namespace, on_gpu: bool) -> EPLayout:
    """That of `--layout`, or the tiny run's, with this run's sizes, dtype, backend and time-outs.

    Raises:
        LayoutError: the file can't be read, or does not go with these sizes.
    """
    layout = EPLayout.from_yaml(options.layout or ROOT / "configs" / "mixtral_tiny_cpu.yaml")
    backend = options.backend
    if backend == "auto" and not on_gpu:
        backend = "reference"  # also where there is a GPU that this run does not use
    elif backend == "auto" and options.layout is not None:
        backend = layout.backend
    fp8 = layout.dispatch.dtype == "fp8_e4m3"
    return layout.replace(
        **{
            "model.hidden": options.size.hidden,
            "model.num_experts": options.size.num_experts,
            "model.top_k": options.top_k,
            "model.num_moe_layers": options.size.num_layers,
            "parallel.expert": options.ep,
            "parallel.expert_tensor": options.expert_tp,
            "dispatch.dtype": "fp8_e4m3" if fp8 else options.dtype,
            "backend": backend,
            **{f"timeouts.{key}": seconds for key, seconds in timeouts(options).items()},
        }
    )


def timeouts(options: argparse.Namespace) -> dict[str, float]:
    """What `--timeout-s` replaces in a layout; nothing where it was not given."""
    if not options.timeout_given:
        return {}
    return {"first_s": float(options.timeout_s), "steady_s": float(options.timeout_s)}


def refusal(options: argparse.Namespace, on_gpu: bool) -> str | None:
    """Why the backend that was named can't run here, or None.

    Raises:
        LayoutError: as for `layout_of`.
    """
    layout = layout_of(options, on_gpu)
    layout = layout.replace(backend=env.backend() or layout.backend)
    name = layout.backend
    if name in ("auto", "reference"):
        return None
    reason = backends.reasons(layout)[name]
    if reason is None and not on_gpu:
        reason = "this run is on the CPU"
    if reason is None:
        return None
    return (
        f"backend {name} cannot run: {reason}; --backend reference runs everywhere, auto takes the "
        "fastest that runs"
    )
