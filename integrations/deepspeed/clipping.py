"""Gradient clipping in fp32 without ZeRO, where DeepSpeed averages the ranks' norms.

There each rank takes the norm of the dense gradients and of its own experts, and the ranks then
use the mean of these norms. The norm of all gradients is the root of the sum of squares, with
every expert counted once, which is what ZeRO 1 and 2 compute. `"exact_clipping": true` in the
"moe_ep" section asks for it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import Tensor, nn


def global_grad_norm(parameters: list[nn.Parameter], mpu: Any = None) -> Tensor:
    """L2 norm of all gradients, each expert's counted once. Collective.

    Args:
        parameters: of this rank's model; those without a gradient count as zero.
        mpu: DeepSpeed's model-parallel unit, or None.

    Returns:
        A scalar, the same on every rank that holds the same dense parameters.
    """
    device = parameters[0].device
    first_of_model = mpu is None or mpu.get_model_parallel_rank() == 0
    sharded = groups._get_expert_model_parallel_world_size() > 1
    partial, complete = torch.zeros((), device=device), torch.zeros((), device=device)
    by_group: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
    for parameter in parameters:
        # Every rank must take part in every group's sum, with or without gradients.
        square = torch.zeros((), device=device)
        if parameter.grad is not None:
            square = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32) ** 2
        counts_here = first_of_model or is_model_parallel_parameter(parameter)
        if not is_moe_param(parameter):
            partial += square * counts_here
        else:
            # Whole experts on tensor-parallel ranks are different experts of one EP group.
            name = str(getattr(parameter, "group_name", ""))
            by_group[name] += square * (counts_here or not sharded)
    for name in sorted(by_group):
        dist.all_reduce(by_group[name], group=groups._get_expert_parallel_group(name))
        if sharded:
            partial += by_group[name]
        else:
            complete += by_group[name]
    if mpu is not None:
        dist.all_reduce(partial, group=mpu.get_model_parallel_group())
    return (partial + complete).sqrt()


def clip_fp32_gradients(engine: Any) -> None:
    """Takes the place of the engine's method of this name."""
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    norm = global_grad_norm(parameters, engine.mpu)
    factor = torch.clamp(engine.gradient_clipping() / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    engine._global_grad_norm = float(norm)
