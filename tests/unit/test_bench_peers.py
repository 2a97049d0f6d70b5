"""The peers of the benchmark do the work that they are timed for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.cli.bench import peers
from moe_ep.cli.bench.cases import Workload
from moe_ep.cli.bench.ranks import Ranks
from moe_ep.layout import EPLayout


class OneRank(Ranks):
    """A rank alone, without a process group."""

    rank = 0

    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"), ["here"])  # type: ignore[arg-type]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def new_group(self) -> Any:
        return "a group"


def work(dtype: str = "fp32", tokens: int = 20) -> Workload:
    layout = EPLayout(
        model={"hidden": 8, "num_experts": 6, "top_k": 3},
        parallel={"expert": 1},
        tokens_per_rank=tokens,
        dispatch={"dtype": dtype},
    )
    return Workload.random(layout, OneRank(), seed=3)


def test_multi_hot() -> None:
    idx = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    weights = torch.tensor([[0.1, 0.2], [9.0, 0.3], [9.0, 9.0]])
    routing_map, probs = peers.multi_hot(idx, weights, 3)
    assert routing_map.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    expected = torch.tensor([[0.2, 0.0, 0.1], [0.0, 0.3, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(probs, expected)


def test_megatron() -> None:
    """Its permute gives the rows of our dispatch; the whole way back sums K copies of a row."""
    load = work()
    version, cases = peers.megatron(load)
    assert version[0].isdigit()
    results = {case.name: case.action for case in cases}
    rows, probs, _ = results["megatron permute, probs"]()  # type: ignore[misc]
    pairs = sorted(
        (expert, token) for token, row in enumerate(load.topk_idx.tolist()) for expert in row
    )
    assert torch.equal(rows, load.x[[token for _, token in pairs]])
    dense = torch.zeros(20, 6).scatter(1, load.topk_idx, load.weights)
    assert torch.equal(probs, torch.stack([dense[token, expert] for expert, token in pairs]))
    assert results["megatron permute"]()[1] is None  # type: ignore[index]
    torch.testing.assert_close(results["megatron whole way"](), 3 * load.x)
    assert results["megatron unpermute"]().shape == load.x.shape  # type: ignore[attr-defined]
    assert results["megatron unpermute, probs"]().shape == load.x.shape  # type: ignore[attr-defined]
    results["megatron forward + backward"]()
    moved = {case.name: case.traffic for case in cases}
    one_way = moved["megatron permute"]
    assert one_way is not None and one_way.hbm == (20 + 60) * 8 * 4 and one_way.link == 0


class StubBuffer:
    """DeepEP's V1 interface on one rank: every token arrives once, combine returns the rows."""

    num_sms = 0

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert (group, num_nvl_bytes, num_rdma_bytes) == ("a group", 16, 0)
        self.combined: list[Tensor] = []

    @classmethod
    def set_num_sms(cls, number: int) -> None:
        cls.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda size, ranks: size * ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, idx: Tensor, num_experts: int) -> Any:
        per_expert = torch.bincount(idx.flatten(), minlength=num_experts)
        return torch.tensor([len(idx)]), None, per_expert, torch.ones(len(idx), 1).bool(), None

    def dispatch(self, x: Tensor, handle: object = None, **given: Any) -> Any:
        if handle is not None:
            return x, None, None, None, handle, None
        assert given["num_tokens_per_rank"].tolist() == [len(x)]
        counts = given["num_tokens_per_expert"].tolist()
        return x, given["topk_idx"], given["topk_weights"], counts, "handle", None

    def combine(self, rows: Tensor, handle: object) -> Any:
        assert handle == "handle"
        self.combined.append(rows)
        return rows, None, None


def test_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StubBuffer] = []

    class Buffer(StubBuffer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer, __version__="1.2.1"))
    load = work("bf16")
    version, cases = peers.deep_ep(load)
    assert version == "1.2.1" and Buffer.num_sms == 24
    actions = {case.name: case.action for case in cases}
    assert list(actions) == [
        "deep_ep dispatch",
        "deep_ep dispatch, cached",
        "deep_ep combine",
        "deep_ep whole way",
    ]
    for action in actions.values():
        action()
    torch.testing.assert_close(
        made[0].combined[-1], (3 * load.x.float()).bfloat16(), atol=0.1, rtol=0
    )
    with pytest.raises(TypeError, match="bf16"):
        peers.deep_ep(work("fp32"))


def test_a_missing_peer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ImportError, match=r"cannot import deep_ep .*install DeepEP"):
        peers.deep_ep(work("bf16"))
