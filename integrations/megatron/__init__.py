"""Megatron-core on moe_ep: `moe_token_dispatcher_type="deepep"` for every MoE layer.

    from moe_ep.integrations import megatron

    megatron.install("configs/mixtral_8x7b_ep8.yaml")   # before the model is built
    config.moe_token_dispatcher_type = "deepep"
    ...
    megatron.uninstall()

Any Megatron script, unchanged: `python -m moe_ep.integrations.megatron SCRIPT ARGS...`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.layout import EPLayout

if TYPE_CHECKING:
    from moe_ep.integrations.megatron.integration import MegatronIntegration

DISPATCHER_TYPE = "deepep"


def install(
    layout: EPLayout | str | Path | None = None, backend: str | None = None
) -> MegatronIntegration:
    """Makes Megatron build our dispatcher for configs whose type is "deepep"; others are untouched.

    Idempotent. Also lets such configs use what Megatron allows its "alltoall" type only
    (`moe_shared_expert_overlap`, `overlap_moe_expert_parallel_comm`).

    Args:
        layout: an EPLayout or the path of one; it must agree with the model. None: the file named
            by MOE_EP_LAYOUT, or else a layout made from each model's own config.
        backend: replaces the layout's backend.

    Returns:
        The installed integration, which owns all communication objects.

    Raises:
        ImportError: megatron-core is not installed.
        LayoutError: the layout file is invalid, or there is no such backend.
        RuntimeError: already installed with other options.
    """
    from moe_ep.integrations.megatron.integration import MegatronIntegration

    return MegatronIntegration(layout, backend).patch()


def log_statistics(
    writer: Any, iteration: int, wandb_writer: Any = None, *, prefix: str = "moe_ep"
) -> dict[str, float]:
    """Writes what dispatch and combine did since the last call, as scalars, and begins anew.

    Collective over every expert-parallel group: all ranks call it at the same iteration, with
    writer None on those that have none (Megatron's `get_tensorboard_writer()` gives that). What is
    written is of the writing rank's own group. The first call switches statistics on, unless
    MOE_EP_STATISTICS=1 has: it writes nothing then.

    Args:
        writer: anything with TensorBoard's `add_scalar(name, value, step)`, or None.
        iteration: the step they belong to.
        wandb_writer: anything with `log(values, step)`, or None.
        prefix: of every name; docs/operating.md lists the names.

    Returns:
        The scalars, on every rank; empty where nothing has been counted yet.

    Raises:
        RuntimeError: moe_ep is not installed in Megatron.
        PeerTimeoutError: a rank of the group did not come in time.
    """
    from moe_ep.integrations.megatron.integration import MegatronIntegration

    installed = MegatronIntegration.installed()
    if installed is None:
        raise RuntimeError("log_statistics() needs install() before the model is built")
    return installed.log_statistics(writer, iteration, wandb_writer, prefix=prefix)


def uninstall() -> None:
    """Undoes `install`, and destroys the communication objects of models built meanwhile."""
    from moe_ep.integrations.megatron.integration import MegatronIntegration

    installed = MegatronIntegration.installed()
    if installed is not None:
        installed.unpatch()
