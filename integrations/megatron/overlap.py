"""Megatron's schedule of overlapped micro-batches (`overlap_moe_expert_parallel_comm`)."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from moe_ep.integrations.megatron import DISPATCHER_TYPE

_FREES_INPUTS = "should_free_input"
_OWNERS = (
    "megatron.core.models.common.utils",  # 0.19
    "megatron.core.models.gpt.fine_grained_callables",  # 0.16
)
_NEEDED_IN_BACKWARD = ("moe_dispatch", "mlp")


class InputsKept:
    """While in place, the schedule keeps what the backward of our layers reads.

    The schedule frees the input of a layer's steps as soon as their forward is done, unless its
    dispatcher is known to need it. Ours hands the layer's own tokens to the dispatch, and the
    dispatched rows to the experts as they are, without a copy: freed, the router's and the
    experts' weight gradients would have nothing to read.
    """

    def __init__(self) -> None:
        self._owner = _owner()
        self._original = getattr(self._owner, _FREES_INPUTS)

    def patch(self) -> None:
        original = self._original

        @functools.wraps(original)
        def should_free_input(
            name: str, is_moe: bool, config: TransformerConfig, *args: Any, **kwargs: Any
        ) -> bool:
            ours = config.moe_token_dispatcher_type == DISPATCHER_TYPE
            if ours and is_moe and name in _NEEDED_IN_BACKWARD:
                return False
            return bool(original(name, is_moe, config, *args, **kwargs))

        setattr(self._owner, _FREES_INPUTS, should_free_input)

    def unpatch(self) -> None:
        setattr(self._owner, _FREES_INPUTS, self._original)


def _owner() -> ModuleType:
    """The module in which the schedule looks for the function."""
    for name in _OWNERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, _FREES_INPUTS):
            return module
    raise RuntimeError(
        "overlap_moe_expert_parallel_comm with moe_ep is known for megatron-core 0.16 and 0.19; "
        "this version has its schedule elsewhere: set it to False"
    )
