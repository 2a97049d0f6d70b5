"""A model whose MoE layers run on moe_ep, and what belongs to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from moe_ep.dispatcher import ExpertParallel
from moe_ep.errors import BrokenError, LayoutError
from moe_ep.handle import DispatchHandle
from moe_ep.integrations.deepspeed import routes
from moe_ep.integrations.deepspeed.config import MoEEPConfig
from moe_ep.integrations.deepspeed.layout import LayerShape, layout_for
from moe_ep.integrations.deepspeed.native import MAX_COPIES, CoreMOELayer, adds_biases
from moe_ep.pool import ExpertParallelPool

logger = logging.getLogger("moe_ep")


class LayerExchange:
    """What one converted layer knows beside its own module; not part of its state_dict."""

    def __init__(
        self,
        conversion: Conversion,
        shape: LayerShape,
        gate_names_routes: bool = True,
        strided_rows: bool = False,
    ) -> None:
        self.conversion = conversion
        self.shape = shape
        self.gate_names_routes = gate_names_routes
        self.strided_rows = strided_rows
        self._by_dtype: dict[torch.dtype, ExpertParallel] = {}

    def expert_parallel(
        self, group: dist.ProcessGroup | None, dtype: torch.dtype
    ) -> ExpertParallel:
        """The model's object for this layer's sizes and rows of `dtype`.

        Collective over `group` when it is first asked for, which all ranks do in one order.
        """
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self.conversion.expert_parallel(self.shape, group, dtype)
        return self._by_dtype[dtype]

    def count(self, handle: DispatchHandle) -> None:
        """Adds a dispatch to the conversion's figures."""
        self.conversion.rows_received += int(handle.valid_tokens_per_expert.sum())


class Conversion:
    """The converted MoE layers of one model, and their communication.

    Layers of one process group and one set of sizes share one ExpertParallel.

    Args:
        model: its layers are converted in place. Where DeepSpeed has made their process groups
            already, the communication is set up at once: collective over each group.
        options: the "moe_ep" section.
        autoep: whether AutoEP layers are converted too.

    Attributes:
        layers: a list of pairs: the path of a converted layer, and the layer.
        pool: owns the ExpertParallel objects.
        rows_received: token rows that this rank's experts got, in all forwards so far. Summed
            over the ranks it is the number of rows that were sent.

    Raises:
        LayoutError: the layout named in the options is invalid or does not fit a layer.
        ValueError: a layer can't be converted; the message says why.
    """

    def __init__(self, model: nn.Module, options: MoEEPConfig, autoep: bool = True) -> None:
        self.options = options
        self.pool = ExpertParallelPool()
        self.rows_received = 0
        self._named = options.named_layout()
        self._closed = False
        native = list(_native_layers(model))
        converted = list(_autoep_layers(model)) if autoep else []
        self.layers: list[tuple[str, Any]] = native + converted
        shapes = [_native_shape(name, layer, len(self.layers)) for name, layer in native]
        shapes += [_autoep_shape(name, layer, len(self.layers)) for name, layer in converted]
        dtypes = [_rows_dtype(layer) for _, layer in self.layers]
        for shape, dtype in zip(shapes, dtypes, strict=True):
            layout_for(shape, dtype, options, self._named)  # all complaints before any change
        try:
            for (_, layer), shape, dtype in zip(self.layers, shapes, dtypes, strict=True):
                self._attach(layer, shape)
                if layer.ep_group is not None:
                    layer.moe_ep.expert_parallel(layer.ep_group, dtype)
        except Exception:
            self.restore()  # not half a conversion
            raise
        if not self.layers:
            logger.warning("moe_ep is enabled, but this model has no DeepSpeed MoE layer for it")

    def _attach(self, layer: Any, shape: LayerShape) -> None:
        if isinstance(layer, MOELayer):
            layer.__class__ = CoreMOELayer
            several = layer.ep_size > 1 and layer.num_local_experts > 1
            layer.moe_ep = LayerExchange(
                self,
                shape,
                gate_names_routes=routes.names_routes(layer.gate),
                strided_rows=several and adds_biases(layer.experts),
            )
            return
        from moe_ep.integrations.deepspeed import autoep

        layer.__class__ = autoep.CoreAutoEPLayer
        layer.moe_ep = LayerExchange(self, shape)
        layer.moe_ep_stock_backend = layer.__dict__.get("moe_ep_stock_backend", layer.comm_backend)
        layer.comm_backend = autoep.DEEPEP_BACKEND

    def expert_parallel(
        self, shape: LayerShape, group: dist.ProcessGroup | None, dtype: torch.dtype
    ) -> ExpertParallel:
        """The shared object for a layer of this `shape` over `group`, for rows of `dtype`; built
        when it is first asked for. Collective then.

        Raises:
            BrokenError: after `destroy` or `restore`.
            RuntimeError: DeepSpeed has not made the layer's process group yet.
        """
        if self._closed:
            raise BrokenError(f"{shape.name}: forward of a converted model after destroy()")
        if group is None:
            raise RuntimeError(
                f"{shape.name}: DeepSpeed has made no expert-parallel group yet; call "
                "deepspeed.initialize, or set_deepspeed_parallelism() of each MoE layer"
            )
        return self.pool.get(layout_for(shape, dtype, self.options, self._named), group)

    def destroy(self) -> None:
        """Frees the communication; the layers can't run any more. Idempotent."""
        self._closed = True
        for _, layer in self.layers:
            if self._owns(layer):
                layer.moe_ep._by_dtype.clear()
        self.pool.destroy()

    def restore(self) -> None:
        """Gives every layer back to DeepSpeed's own exchange, and frees the communication."""
        self.destroy()
        for _, layer in self.layers:
            if not self._owns(layer):
                continue
            if not isinstance(layer, CoreMOELayer):
                layer.comm_backend = layer.__dict__.pop("moe_ep_stock_backend")
            layer.__class__ = type(layer).__bases__[0]
            del layer.moe_ep

    def _owns(self, layer: Any) -> bool:
        exchange = layer.__dict__.get("moe_ep")
        return exchange is not None and exchange.conversion is self


def _native_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer]]:
    for name, module in model.named_modules():
        if not isinstance(module, MOELayer):
            continue
        if type(module) not in (MOELayer, CoreMOELayer):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise ValueError(
                f"{name}: a {kind} can't be converted, only deepspeed.moe.sharded_moe.MOELayer "
                "itself: a subclass may exchange its tokens in another way"
            )
        yield name, module


def _autoep_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    try:
        from moe_ep.integrations.deepspeed import autoep
    except ImportError:  # a DeepSpeed from before AutoEP
        return
    for name, module in model.named_modules():
        if isinstance(module, autoep.AutoEPMoELayer):
            problem = autoep.refusal(module)
            if problem:
                raise ValueError(f"{name}: {problem}")
            yield name, module


def _native_shape(name: str, layer: MOELayer, num_layers: int) -> LayerShape:
    gate = layer.gate
    if not hasattr(gate, "k") or not hasattr(gate, "wg"):
        raise LayoutError(
            f"{name}.gate: a {type(gate).__name__} without `k` and `wg` does not say how many "
            "experts a token goes to, and which hidden size it has"
        )
    return LayerShape(
        name=name,
        hidden=gate.wg.in_features,
        num_experts=layer.ep_size * layer.num_local_experts,
        top_k=gate.k,
        ep_size=layer.ep_size,
        num_moe_layers=num_layers,
        copies=gate.k if gate.k <= MAX_COPIES else 1,
    )


def _autoep_shape(name: str, layer: Any, num_layers: int) -> LayerShape:
    return LayerShape(
        name=name,
        hidden=layer.hidden_size,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        ep_size=layer.ep_size,
        num_moe_layers=num_layers,
        tokens_per_rank=layer.comm_max_tokens_per_rank or None,
    )


def _rows_dtype(layer: Any) -> torch.dtype:
    """The dtype token rows will most likely have: that of the experts."""
    first = next(layer.experts.parameters(), None)
    return torch.get_default_dtype() if first is None else first.dtype
