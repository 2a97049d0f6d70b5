"""Where moe_ep enters Megatron: the construction of MoE layers and of configs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size

from moe_ep import env
from moe_ep.errors import LayoutError
from moe_ep.integrations.megatron import DISPATCHER_TYPE
from moe_ep.integrations.megatron.dispatcher import MoEEPTokenDispatcher
from moe_ep.integrations.megatron.layout import layout_for
from moe_ep.integrations.megatron.overlap import InputsKept
from moe_ep.layout import BACKENDS, EPLayout
from moe_ep.pool import ExpertParallelPool, pool_scalars

_MARK = "moe_ep_integration"


class MegatronIntegration:
    """Builds our dispatcher into MoE layers, and owns the objects they share.

    `patch()` does it for all layers of the process; `layer_class()` gives a MoELayer subclass for
    a layer spec, for those who refuse patching.

    Args:
        layout: an EPLayout or the path of one; None: the file named by MOE_EP_LAYOUT, or else a
            layout made from each model's own config.
        backend: replaces the layout's backend.

    Raises:
        LayoutError: the layout file is invalid, or there is no such backend.
    """

    def __init__(
        self, layout: EPLayout | str | Path | None = None, backend: str | None = None
    ) -> None:
        named = layout if layout is not None else env.layout_path()
        if isinstance(named, str | Path):
            named = EPLayout.from_yaml(named)
        if backend is not None and backend not in BACKENDS:
            raise LayoutError(f"backend: {backend!r}: one of {', '.join(BACKENDS)}")
        self.layout: EPLayout | None = named
        self.backend = backend
        self.pool = ExpertParallelPool()
        self._layer_init: Callable[..., None] = MoELayer.__init__
        self._config_check: Callable[..., None] = TransformerConfig.__post_init__
        self._inputs_kept: InputsKept | None = None

    # -- the patch --------------------------------------------------------------------------------

    @staticmethod
    def installed() -> MegatronIntegration | None:
        """The integration whose patch is in place: the patch itself remembers it."""
        return getattr(MoELayer.__init__, _MARK, None)

    def patch(self) -> MegatronIntegration:
        """What `install` does. Idempotent.

        Returns:
            The integration that is in place.

        Raises:
            RuntimeError: another one is, with another layout or backend.
        """
        present = self.installed()
        if present is not None:
            if (present.layout, present.backend) != (self.layout, self.backend):
                raise RuntimeError(
                    "moe_ep is installed in Megatron with another layout or backend; "
                    "call uninstall() first"
                )
            return present
        original, check = self._layer_init, self._config_check

        @functools.wraps(original)
        def init(layer: MoELayer, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            if config.moe_token_dispatcher_type == DISPATCHER_TYPE:
                self.init_layer(layer, config, *args, **kwargs)
            else:
                original(layer, config, *args, **kwargs)

        @functools.wraps(check)
        def post_init(config: TransformerConfig) -> None:
            if config.moe_token_dispatcher_type != DISPATCHER_TYPE:
                check(config)
                return
            with _dispatcher_type(config, "alltoall"):
                check(config)

        setattr(init, _MARK, self)
        MoELayer.__init__ = init
        TransformerConfig.__post_init__ = post_init
        return self

    def unpatch(self) -> None:
        """Takes the patch away, if it is this object's, and destroys the communication objects."""
        if self.installed() is self:
            MoELayer.__init__ = self._layer_init
            TransformerConfig.__post_init__ = self._config_check
        if self._inputs_kept is not None:
            self._inputs_kept.unpatch()
            self._inputs_kept = None
        self.destroy()

    def destroy(self) -> None:
        """Destroys the communication objects of all layers built here. Idempotent."""
        self.pool.destroy()

    def log_statistics(
        self, writer: Any, iteration: int, wandb_writer: Any = None, *, prefix: str = "moe_ep"
    ) -> dict[str, float]:
        """Logs what `collect_stats()` has counted since the last call, as scalars of all layers.

        Args:
            writer: TensorBoard's, as Megatron's `get_tensorboard_writer()` gives it; None: none.
            iteration: the step they belong to.
            wandb_writer: wandb's module or run, likewise.
            prefix: of their names.

        Returns:
            The scalars by name; docs/operating.md lists them.
        """
        scalars = pool_scalars(self.pool, prefix)
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer is not None and scalars:
            wandb_writer.log(scalars, iteration)
        return scalars

    # -- building a layer -------------------------------------------------------------------------

    def layer_class(self) -> type[MoELayer]:
        """A MoELayer subclass that uses our dispatcher whatever the config's type says."""
        integration = self

        class MoEEPLayer(MoELayer):
            def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
                integration.init_layer(self, config, *args, **kwargs)

        return MoEEPLayer

    def init_layer(
        self, layer: MoELayer, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Initialises `layer` as Megatron would from the same `args` and `kwargs`, with our
        dispatcher in it. Collective over the layer's expert-parallel group.

        Raises:
            LayoutError: the model does not fit the layout.
            ValueError: the config has an option that cannot be honoured.
        """
        if config.overlap_moe_expert_parallel_comm:
            self._prepare_overlap(config)
        # Megatron refuses types it does not know; "allgather" can be built on any device.
        with _dispatcher_type(config, "allgather"):
            self._layer_init(layer, config, *args, **kwargs)
        call = inspect.signature(self._layer_init).bind(layer, config, *args, **kwargs)
        groups = call.arguments.get("pg_collection") or get_default_pg_collection()
        layout = layout_for(
            config, get_pg_size(groups.ep), get_pg_size(groups.expt_tp), self.layout
        )
        if self.backend is not None:
            layout = layout.replace(backend=self.backend)
        layer.token_dispatcher = MoEEPTokenDispatcher(
            layer.num_local_experts,
            layer.local_expert_indices,
            config,
            groups,
            self.pool.get(layout, groups.tp_ep),
        )
        layer.token_dispatcher.layer = layer
        if layer.shared_expert_overlap and layer.shared_experts is not None:
            layer.token_dispatcher.set_shared_experts(layer.shared_experts)

    def _prepare_overlap(self, config: TransformerConfig) -> None:
        if self.installed() is not self or config.moe_token_dispatcher_type != DISPATCHER_TYPE:
            raise ValueError(
                "overlap_moe_expert_parallel_comm needs install() and "
                f"moe_token_dispatcher_type={DISPATCHER_TYPE}: by the type its schedule knows what "
                "the dispatcher's backward needs"
            )
        if self._inputs_kept is None:
            self._inputs_kept = InputsKept()
            self._inputs_kept.patch()


@contextlib.contextmanager
def _dispatcher_type(config: TransformerConfig, name: str) -> Iterator[None]:
    before = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = name
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = before
