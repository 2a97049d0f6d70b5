"""Statistics of a converted engine's layers, among the events of DeepSpeed's own monitors."""

from __future__ import annotations

from typing import Any

from moe_ep.pool import pool_scalars

_PREFIX = "Train/moe_ep"  # DeepSpeed's own events begin with Train/ too


def collect(engine: Any) -> None:
    """Switches statistics on for all exchanges that the engine has so far."""
    for ep in engine.moe_ep.pool:
        ep.collect_stats()


def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """`engine.step`, and after every `statistics_every`-th optimizer step a record."""
    ends = engine.is_gradient_accumulation_boundary()
    result = type(engine).step(engine, *args, **kwargs)
    if ends and engine.global_steps % engine.moe_ep.options.statistics_every == 0:
        log_statistics(engine)
    return result


def log_statistics(engine: Any) -> dict[str, float]:
    """See `moe_ep.integrations.deepspeed.log_statistics`."""
    scalars = pool_scalars(engine.moe_ep.pool, _PREFIX)
    if scalars and engine.monitor.enabled:
        engine.monitor.write_events([(*item, engine.global_samples) for item in scalars.items()])
    return scalars
