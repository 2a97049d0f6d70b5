"""`deepspeed.initialize` with a "moe_ep" section, by our own name or by patching DeepSpeed's."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

import deepspeed

from moe_ep.integrations.deepspeed import clipping, statistics
from moe_ep.integrations.deepspeed.config import SECTION, MoEEPConfig, read_config
from moe_ep.integrations.deepspeed.conversion import Conversion

_INSTALLED = "moe_ep_integration"  # attribute of the patched function


def initialize(**arguments: Any) -> tuple[Any, Any, Any, Any]:
    """See `moe_ep.integrations.deepspeed.initialize`."""
    if DeepSpeedIntegration.installed() is not None:
        return deepspeed.initialize(**arguments)
    return _initialize(deepspeed.initialize, arguments)[0]


def _initialize(original: Any, arguments: dict[str, Any]) -> tuple[tuple, Any | None]:
    """Calls `original`; returns its result, and its engine if that was converted."""
    content = read_config(
        arguments.get("config"), arguments.get("config_params"), arguments.get("args")
    )
    options = MoEEPConfig.parse(content.get(SECTION, {}))
    if not options.enabled:
        return original(**arguments), None
    options.named_layout()  # a bad file is reported before any process group is made
    result = original(**arguments)
    engine = result[0]
    chosen = (content.get("expert_parallel") or {}).get("comm_backend")
    convert_engine(engine, options, autoep=chosen != "comm")
    return result, engine


def convert_engine(engine: Any, options: MoEEPConfig, autoep: bool = True) -> Conversion:
    """Converts a DeepSpeed engine's model; the Conversion becomes `engine.moe_ep`.

    `engine.destroy()` then frees the communication too. Collective.
    """
    conversion = Conversion(engine.module, options, autoep)
    engine.moe_ep = conversion
    if options.exact_clipping:
        engine.clip_fp32_gradients = types.MethodType(clipping.clip_fp32_gradients, engine)
    if options.statistics_every:
        statistics.collect(engine)
        engine.step = types.MethodType(statistics.step, engine)
    engine.destroy = types.MethodType(_destroy_engine, engine)
    return conversion


def _destroy_engine(engine: Any) -> None:
    engine.moe_ep.destroy()
    type(engine).destroy(engine)


def restore_engine(engine: Any) -> None:
    """Undoes `convert_engine`."""
    engine.moe_ep.restore()
    for name in ("moe_ep", "clip_fp32_gradients", "destroy", "step"):
        engine.__dict__.pop(name, None)


class DeepSpeedIntegration:
    """The patch of `deepspeed.initialize`, and the engines it has converted.

    Args:
        original: the function that is patched.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def install(cls) -> DeepSpeedIntegration:
        """Patches `deepspeed.initialize`, unless it is patched already."""
        present = cls.installed()
        if present is not None:
            return present
        integration = cls(deepspeed.initialize)
        signature = inspect.signature(integration.original)

        @functools.wraps(integration.original)
        def patched(*args: Any, **kwargs: Any) -> tuple:
            bound = signature.bind(*args, **kwargs)
            result, engine = _initialize(integration.original, dict(bound.arguments))
            if engine is not None:
                integration.engines.add(engine)
            return result

        setattr(patched, _INSTALLED, integration)
        deepspeed.initialize = patched
        return integration

    @classmethod
    def installed(cls) -> DeepSpeedIntegration | None:
        """The integration that is in force, if any."""
        return getattr(deepspeed.initialize, _INSTALLED, None)

    def uninstall(self) -> None:
        """Gives `deepspeed.initialize` and all converted engines back to DeepSpeed."""
        if self.installed() is self:
            deepspeed.initialize = self.original
        for engine in list(self.engines):
            if hasattr(engine, "moe_ep"):
                restore_engine(engine)
        self.engines.clear()
