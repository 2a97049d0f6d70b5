"""Run Megatron-core on a CPU: shims that are applied when asked for and undone on exit.

Megatron-core assumes a CUDA device: it asks for ``torch.cuda.current_device()``, allocates with
``device="cuda"``, keeps its random number states in the CUDA generator and moves tensors on side
streams. None of that is needed for its arithmetic, so within

    with cpu_shims():
        model = GPTModel(...)
        ...

those requests are answered by the CPU. ``torch.cuda.is_available()`` keeps telling the truth, so
code that checks it takes its CPU path. Works with megatron-core 0.16 and 0.19: models, DDP,
optimizers, pipeline schedules, activation recompute, and distributed checkpoints.

The shims hold for the whole process, except the tensor factory rewrite, which torch keeps per
thread. Blocks may be nested.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_MISSING = object()


class CpuEvent:
    """What CUDA code expects of an event. CPU work is done when its call returns: nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuStream:
    """What CUDA code expects of a stream. All of them are the one order of the program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        return event or CpuEvent()


class _CudaToCpu(TorchFunctionMode):
    """Answers ``device="cuda"``, ``.cuda()`` and CUDA type names with CPU tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers look for 'torch.cuda.FloatTensor' and refuse anything else.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_cpu_device(a) for a in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_device(kwargs["device"])
        kwargs.pop("pin_memory", None)  # pinning is for copies to a GPU, and fails without one
        return func(*args, **kwargs)


def _cpu_device(value: Any) -> Any:
    """The CPU device where ``value`` names a CUDA device, else ``value`` itself."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return _CPU
    return value


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's all-to-all splits: it turns them into arrays only where it copies from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """``CudaRNGStatesTracker.fork`` on the CPU generator.

    Megatron's own warns whenever the CPU generator moves inside the block, which is the point here.
    Forks may be nested: the outer state is put aside under its name, as in the original.
    """
    if name not in tracker.states_:
        raise KeyError(f"random number state {name!r} was never added to the tracker")
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name != "default-rng":
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        if outer_name != "default-rng":
            outer_state = tracker.states_[outer_name]
        torch.set_rng_state(outer_state)
        tracker._current_state_name = outer_name


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets ``owner.name`` for the block; afterwards it is as before, or absent again."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _torch_shims() -> list[tuple[Any, str, Any]]:
    def nothing() -> Any:
        # A function of its own each time: torch.compile has rules by name, one for an object.
        return lambda *args, **kwargs: None

    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", nothing()),
        (cuda, "synchronize", nothing()),
        (cuda, "empty_cache", nothing()),
        (cuda, "Stream", CpuStream),
        (cuda, "Event", CpuEvent),
        (cuda, "current_stream", lambda *args: CpuStream()),
        (cuda, "default_stream", lambda *args: CpuStream()),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "is_current_stream_capturing", lambda: False),
        (cuda, "get_rng_state", _get_rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        # Set on the class: its argument parser would refuse our stream before any mode is asked.
        (torch.Tensor, "record_stream", nothing()),
        (cuda.nvtx, "range_push", nothing()),
        (cuda.nvtx, "range_pop", nothing()),
        (cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
    ]


def _megatron_shims() -> list[tuple[Any, str, Any]]:
    def module(name: str) -> Any:
        return importlib.import_module(f"megatron.core.{name}")

    rng = module("tensor_parallel.random")
    return [
        (rng, "_get_cuda_rng_state", _get_rng_state),
        (rng, "_set_cuda_rng_state", _set_rng_state),
        (rng.CudaRNGStatesTracker, "fork", _fork),
        # 0.16 never defines this name without Transformer Engine, then reads it; and with it, the
        # kernel behind it would want a GPU.
        (module("transformer.moe.moe_utils"), "te_general_gemm", None),
        # Kept per class once made: a CPU stream must not outlive the block.
        (module("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher,
         "cuda_dtoh_stream", None),
        (module("transformer.moe.token_dispatcher"), "maybe_move_tensor_to_cpu", _as_on_the_host),
        (module("transformer.moe.shared_experts").SharedExpertMLP, "stream", None),
    ]  # fmt: skip


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Within the block Megatron-core runs on the CPU; on exit everything is as it was.

    Import Megatron's models and specs first, enter it before the first Megatron object is built
    (`parallel_state` included) and leave it after the last was used. Configure the model with
    `use_cpu_initialization=False` (with True, all expert-parallel ranks would start from the same
    experts), the local layer specs, and `bias_activation_fusion`, `bias_dropout_fusion` and
    `gradient_accumulation_fusion` off.

    Raises:
        ModuleNotFoundError: megatron-core isn't installed.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in (*_torch_shims(), *_megatron_shims()):
            stack.enter_context(_attribute(owner, name, value))
        # Megatron compiles small functions; on a CPU that would need a C++ compiler, for nothing.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaToCpu())
        yield
