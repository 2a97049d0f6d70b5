"""The low-latency methods have the arguments of deep_ep.Buffer (v1.2.1), in its order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from moe_ep import Buffer

_NONE = inspect.Parameter.empty

INTERFACE: dict[str, dict[str, Any]] = {
    "low_latency_dispatch": {
        "x": _NONE,
        "topk_idx": _NONE,
        "num_max_dispatch_tokens_per_rank": _NONE,
        "num_experts": _NONE,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "low_latency_combine": {
        "x": _NONE,
        "topk_idx": _NONE,
        "topk_weights": _NONE,
        "handle": _NONE,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
        # Not DeepEP's:
        "block_signals": None,
        "block_signal_value": 1,
    },
    "clean_low_latency_buffer": {
        "num_max_dispatch_tokens_per_rank": _NONE,
        "hidden": _NONE,
        "num_experts": _NONE,
    },
    "get_next_low_latency_combine_buffer": {"handle": _NONE},
    "get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": _NONE,
        "hidden": _NONE,
        "num_ranks": _NONE,
        "num_experts": _NONE,
    },
}


@pytest.mark.parametrize("name", INTERFACE)
def test_arguments(name: str) -> None:
    parameters = dict(inspect.signature(getattr(Buffer, name)).parameters)
    parameters.pop("self", None)
    assert list(parameters) == list(INTERFACE[name])
    for argument, default in INTERFACE[name].items():
        assert parameters[argument].default is default, argument


def test_the_size_hint_needs_no_object() -> None:
    assert Buffer.get_low_latency_rdma_size_hint(1, 128, 1, 1) > 2 * 128 * 2


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((8.5, 128, 2, 4), TypeError, "num_max_dispatch_tokens_per_rank is a float"),
        ((-8, 128, 2, 4), ValueError, "num_max_dispatch_tokens_per_rank=-8"),
        ((8, 0, 2, 4), ValueError, "hidden=0"),
        ((8, 128, 0, 4), ValueError, "num_ranks=0"),
        ((8, 128, 2, 4.0), TypeError, "num_experts is a float"),
        ((8, 128, 3, 4), ValueError, "num_experts=4"),
    ],
)
def test_sizes_that_are_none(sizes: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Buffer.get_low_latency_rdma_size_hint(*sizes)
