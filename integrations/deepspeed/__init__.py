"""DeepSpeed on moe_ep: `"moe_ep": {"enabled": true}` in a DeepSpeed JSON, for every MoE layer.

    from moe_ep.integrations.deepspeed import initialize

    engine, optimizer, _, _ = initialize(model=model, config="ds_config.json", ...)

or, for code that calls `deepspeed.initialize` itself:

    from moe_ep.integrations import deepspeed as moe_ep_deepspeed

    moe_ep_deepspeed.install()
    ...
    moe_ep_deepspeed.uninstall()

Any script, unchanged: `deepspeed --module moe_ep.integrations.deepspeed SCRIPT ARGS...`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ep.integrations.deepspeed.conversion import Conversion
    from moe_ep.integrations.deepspeed.integration import DeepSpeedIntegration

_DEFAULT_PORT = 29500  # deepspeed's TORCH_DISTRIBUTED_DEFAULT_PORT


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = _DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, and then what the config's "moe_ep" section asks for.

    Without that section, or with `"enabled": false`, it is `deepspeed.initialize` and no more.
    Otherwise the engine's MoE layers exchange their tokens through moe_ep, and `engine.moe_ep` is
    the `Conversion` that owns the communication.

    All arguments are DeepSpeed's own, with their meaning there.

    Returns:
        engine, optimizer, training dataloader and learning rate scheduler, as from DeepSpeed.

    Raises:
        ConfigError: an unknown key or a wrong value under "moe_ep"; the message has its path.
            Raised before DeepSpeed is called.
        LayoutError: the layout named there is invalid, or is for another model.
        BackendUnavailableError: the backend named there cannot run here.
    """
    from moe_ep.integrations.deepspeed import integration

    return integration.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
    )


def install() -> DeepSpeedIntegration:
    """Makes `deepspeed.initialize` read the "moe_ep" section. Idempotent.

    Returns:
        The installed integration.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    from moe_ep.integrations.deepspeed.integration import DeepSpeedIntegration

    return DeepSpeedIntegration.install()


def uninstall() -> None:
    """Undoes `install`: engines made meanwhile go back to DeepSpeed's own exchange."""
    from moe_ep.integrations.deepspeed.integration import DeepSpeedIntegration

    installed = DeepSpeedIntegration.installed()
    if installed is not None:
        installed.uninstall()


def log_statistics(engine: Any) -> dict[str, float]:
    """Writes what dispatch and combine did since the last call to DeepSpeed's monitors.

    `"statistics_every": N` in the "moe_ep" section calls it after every N-th step; this is for
    other times. Collective over every expert-parallel group: all ranks call it together. Global
    rank 0 writes, of its own group. The first call only switches statistics on, unless
    `statistics_every` or MOE_EP_STATISTICS=1 has.

    Args:
        engine: that `initialize` has converted.

    Returns:
        The scalars, on every rank; docs/operating.md lists the names.

    Raises:
        PeerTimeoutError: a rank of the group did not come in time.
    """
    from moe_ep.integrations.deepspeed import statistics

    return statistics.log_statistics(engine)


def convert(model: Any, section: dict[str, Any] | None = None) -> Conversion:
    """Converts the MoE layers of a model that no engine made, or not yet.

    Parameters, their names and their order stay as they are, so an optimizer or a checkpoint made
    before stays valid. DeepSpeed must have made the layers' process groups before the first
    forward (`deepspeed.initialize`, or `MoE.set_deepspeed_parallelism`).

    Args:
        model: a module with `deepspeed.moe.layer.MoE` or AutoEP layers.
        section: what a JSON would have under "moe_ep"; "enabled" is implied.

    Returns:
        The Conversion: its `restore()` undoes it, its `destroy()` frees the communication.

    Raises:
        ConfigError, LayoutError: as for `initialize`.
    """
    from moe_ep.integrations.deepspeed.config import MoEEPConfig
    from moe_ep.integrations.deepspeed.conversion import Conversion

    return Conversion(model, MoEEPConfig.parse({"enabled": True, **(section or {})}))
