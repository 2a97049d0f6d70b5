"""Other implementations that are timed in the same run. PEERS is the table to extend.

A peer takes the workload of this rank and returns its version and its cases. It is built on every
rank, and may communicate over a group of its own. What it needs is imported by
name when it is asked for: nothing of moe_ep depends on a framework.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.cli.bench.cases import Case, Workload
from moe_ep.cli.bench.traffic import RowBytes, Traffic

Built = tuple[str, list[Case]]


def whole_way(peer: str) -> str:
    """Name of the peer's case that does what dispatch and combine do together."""
    return f"{peer} whole way"


def all_to_all(work: Workload) -> Built:
    """The same rows through all_to_all_single: to the experts' ranks, and back."""
    ranks, local, group = work.ranks, work.layout.num_local_experts, work.ranks.new_group()
    sent = torch.bincount(work.expert_slots.flatten() // local, minlength=ranks.size).tolist()
    arriving = [row[ranks.rank] for row in ranks.gather(sent)]
    outgoing = work.x.new_zeros(sum(sent), work.x.shape[1])
    incoming = work.x.new_zeros(sum(arriving), work.x.shape[1])
    moved = Traffic(outgoing.numel() * outgoing.element_size(), None, _remote(sent, work))

    def there() -> object:
        return dist.all_to_all_single(incoming, outgoing, arriving, sent, group=group)

    def back() -> object:
        return dist.all_to_all_single(outgoing, incoming, sent, arriving, group=group)

    return str(torch.__version__), [
        Case("all_to_all there", "all_to_all", there, moved),
        Case("all_to_all back", "all_to_all", back, moved),
    ]


def megatron(work: Workload) -> Built:
    """Megatron-core's unfused permute and unpermute of this rank's tokens, all experts."""
    utils, version = _megatron_core()
    x, experts = work.x, work.layout.model.num_experts
    routing_map, probs = multi_hot(work.topk_idx, work.weights, experts)
    num_rows = int(routing_map.sum())
    permuted, _, order = permute(utils, x, routing_map, probs, num_rows)
    rows = torch.randn_like(permuted)

    def permute_and_back(tokens: Tensor) -> Tensor:
        mapped = multi_hot(work.topk_idx, work.weights, experts)
        arrived, _, new_order = permute(utils, tokens, *mapped, num_rows)
        result: Tensor = utils.unpermute(arrived, new_order, tokens.shape)
        return result

    def forward_backward() -> None:
        permute_and_back(x.detach().requires_grad_()).backward(x)

    row = RowBytes.of(work.layout).x
    one_way = Traffic(num_rows * row, (len(x) + num_rows) * row, 0)
    both_ways = one_way + one_way

    def case(name: str, action: Callable[[], object], moved: Traffic | None = one_way) -> Case:
        return Case(f"megatron {name}", "megatron", action, moved)

    return version, [
        case("multi-hot", lambda: multi_hot(work.topk_idx, work.weights, experts), None),
        case("permute", lambda: permute(utils, x, routing_map, None, num_rows)),
        case("permute, probs", lambda: permute(utils, x, routing_map, probs, num_rows)),
        case("unpermute", lambda: utils.unpermute(rows, order, x.shape)),
        case(
            "unpermute, probs",
            lambda: utils.unpermute(rows, order, x.shape, probs=probs, routing_map=routing_map),
        ),
        case("whole way", lambda: permute_and_back(x), both_ways),
        case("forward + backward", forward_backward, both_ways + both_ways),
    ]


def deep_ep(work: Workload) -> Built:
    """DeepEP's V1 interface within one host, bf16 rows; with Megatron's permute where it is."""
    module = load("deep_ep", "install DeepEP, or leave --peer deep_ep out")
    utils: Any = None
    with contextlib.suppress(ImportError):  # then there is no case for the whole way
        utils, _ = _megatron_core()
    ranks, layout, x = work.ranks, work.layout, work.x
    if x.dtype != torch.bfloat16:
        raise TypeError(f"DeepEP moves bf16 rows, this layout has {x.dtype}; use --dtype bf16")
    buffer_type = module.Buffer
    buffer_type.set_num_sms(max(layout.dispatch.num_sms // 2 * 2, 2))  # it wants an even number
    size = x.shape[1] * x.element_size()
    configs = (buffer_type.get_dispatch_config, buffer_type.get_combine_config)
    num_bytes = max(get(ranks.size).get_nvl_buffer_size_hint(size, ranks.size) for get in configs)
    buffer = buffer_type(ranks.new_group(), num_bytes, 0)

    def dispatch() -> Any:
        plan = buffer.get_dispatch_layout(work.topk_idx, layout.model.num_experts)
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = plan
        return buffer.dispatch(
            x,
            topk_idx=work.topk_idx,
            topk_weights=work.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )

    def permute_and_back() -> None:
        arrived, idx, weights, per_expert, handle, _ = dispatch()
        mapped = multi_hot(idx, weights, layout.num_local_experts)
        rows, _, order = permute(utils, arrived, *mapped, sum(per_expert))
        buffer.combine(utils.unpermute(rows, order, arrived.shape), handle)

    arrived, _, _, _, handle, _ = dispatch()
    cases = [
        Case("deep_ep dispatch", "deep_ep", dispatch),
        Case("deep_ep dispatch, cached", "deep_ep", lambda: buffer.dispatch(x, handle=handle)),
        Case("deep_ep combine", "deep_ep", lambda: buffer.combine(arrived, handle)),
    ]
    if utils is not None:
        cases.append(Case(whole_way("deep_ep"), "deep_ep", permute_and_back))
    return str(getattr(module, "__version__", "of unknown version")), cases


PEERS: dict[str, Callable[[Workload], Built]] = {
    "all_to_all": all_to_all,
    "megatron": megatron,
    "deep_ep": deep_ep,
}


def load(module: str, advice: str) -> Any:
    """Imports a peer's module.

    Raises:
        ImportError: it is not there; says what to do.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"cannot import {module} ({error}): {advice}") from None


def multi_hot(idx: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """[T, K] expert ids and weights as the [T, E] map and probabilities that Megatron works on.

    Slots of -1 go to a column that is cut off.
    """
    column = torch.where(idx < 0, num_experts, idx)
    shape = (len(idx), num_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=idx.device)
    probs = torch.zeros(shape, dtype=weights.dtype, device=idx.device)
    routing_map.scatter_(1, column, True)
    probs.scatter_(1, column, weights)
    return routing_map[:, :num_experts], probs[:, :num_experts]


def permute(
    utils: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows, their probabilities and their source tokens, from any release of Megatron-core."""
    rows, row_probs, order, *_ = utils.permute(
        tokens, routing_map, probs=probs, num_out_tokens=num_rows
    )
    return rows, row_probs, order


def _megatron_core() -> tuple[Any, str]:
    advice = "pip install 'moe-ep[megatron]', or put Megatron-LM on PYTHONPATH"
    utils = load("megatron.core.transformer.moe.moe_utils", advice)
    core = load("megatron.core", advice)
    return utils, str(getattr(core, "__version__", "of unknown version"))


def _remote(sent: list[int], work: Workload) -> int:
    own = sent[work.ranks.rank]
    return (sum(sent) - own) * work.x.shape[1] * work.x.element_size()
