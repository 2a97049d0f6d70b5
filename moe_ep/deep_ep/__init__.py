"""The module `deep_ep` (DeepEP v1.2.1) on moe_ep.

import moe_ep.deep_ep as deep_ep      # in code of one's own
moe_ep.deep_ep.install()              # for code that says `import deep_ep`: before it is imported
"""

from __future__ import annotations

import importlib.util
import sys

import torch

from moe_ep.buffer import Buffer, Config
from moe_ep.deep_ep import utils
from moe_ep.events import EventHandle, EventOverlap

__version__ = "1.2.1"

topk_idx_t = torch.int64
"""The dtype of expert ids in DeepEP's default build."""

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "install",
    "topk_idx_t",
    "uninstall",
    "utils",
]

# Modules that look for deep_ep once, when they are imported, and remember what they found.
_EARLY_IMPORTERS = ("megatron.core.transformer.moe.fused_a2a",)


def install(replace: bool = False) -> None:
    """Makes `import deep_ep` and `from deep_ep.utils import ...` find this package. Idempotent.

    Args:
        replace: also where a package named deep_ep is installed.

    Raises:
        RuntimeError: a package deep_ep is installed and `replace` is false, or Megatron-core's
            fused_a2a was imported before and has another deep_ep, or none.
    """
    here = sys.modules[__name__]
    found = sys.modules.get("deep_ep")
    if found is not here and not replace:
        spec = None if found is not None else importlib.util.find_spec("deep_ep")
        if found is not None or spec is not None:
            place = getattr(found, "__file__", None) or getattr(spec, "origin", None)
            raise RuntimeError(
                f"a package deep_ep is installed ({place}); moe_ep.deep_ep.install(replace=True) "
                "puts moe_ep in its place for this process"
            )
    for name in _EARLY_IMPORTERS:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "Buffer", None) is not Buffer:
            raise RuntimeError(
                f"{name} was imported before and goes on with what it found as deep_ep then; call "
                "moe_ep.deep_ep.install() before the first import of megatron.core"
            )
    for name in [name for name in sys.modules if name.startswith("deep_ep.")]:
        del sys.modules[name]
    sys.modules["deep_ep"] = here
    sys.modules["deep_ep.utils"] = utils


def uninstall() -> None:
    """Undoes `install`: `import deep_ep` finds what is installed, or nothing. Idempotent.

    Modules that imported deep_ep in between keep what they have.
    """
    if sys.modules.get("deep_ep") is sys.modules[__name__]:
        del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]
