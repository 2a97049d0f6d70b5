"""Case 9 through a DeepSpeed layer, and errors that name a rank's mistake."""

import multiprocessing
import os
import time

import pytest
import torch
from deepspeed_support import HIDDEN, start, tokens_of
from torch import nn

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(90)

TIMEOUT_S = 5.0


class DiesInForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(1)


def _one_dies(rank: int) -> None:
    start()
    from deepspeed.moe.layer import MoE

    from moe_ep.integrations.deepspeed import convert

    expert = (DiesInForward if rank == 1 else nn.Linear)(HIDDEN, HIDDEN)
    layer = MoE(HIDDEN, expert, num_experts=3, ep_size=3, k=1, drop_tokens=False, use_rts=False)
    layer.set_deepspeed_parallelism()
    convert(layer, {"timeouts": {"first_s": TIMEOUT_S, "steady_s": TIMEOUT_S}})
    started = time.monotonic()
    try:
        layer(tokens_of(rank, 6))
    finally:
        print(f"rank {rank}: {time.monotonic() - started:.2f} s", flush=True)
        assert time.monotonic() - started < TIMEOUT_S + 5


def test_case_09_a_rank_dies_between_dispatch_and_combine(deepspeed_ranks: RankServer) -> None:
    outcomes = deepspeed_ranks.launch(_one_dies, 3)
    assert outcomes[1].exitcode == 1
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.exitcode not in (0, None)
        assert "PeerTimeoutError" in survivor.error and "rank 1" in survivor.error
    assert not multiprocessing.active_children()


def _bad_input(rank: int) -> str:
    start()
    from deepspeed_support import moe_layer

    layer = moe_layer(2, rank, k=2)
    layer.deepspeed_moe.moe_ep.conversion.restore()
    from moe_ep.integrations.deepspeed import convert

    convert(layer, {"tokens_per_rank": 16})
    try:
        layer(tokens_of(rank, 17 if rank == 0 else 4))
    except Exception as error:
        layer(tokens_of(rank, 16))  # the group can go on
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_too_many_tokens_is_an_error_on_all_ranks(deepspeed_ranks: RankServer) -> None:
    here, there = deepspeed_ranks.run(_bad_input, 2)
    # Each choice travels as a token of its own, which is none of the user's business.
    told = "x has 17 tokens; tokens_per_rank=16"
    assert here.startswith("ValueError") and told in here
    assert there.startswith("PeerError") and "rank 0" in there and told in there
