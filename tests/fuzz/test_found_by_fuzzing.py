"""What fuzzing has found, each as a small program of its own."""

import gc
import weakref

import torch

from moe_ep import EPLayout, ExpertParallel, PeerError
from moe_ep.testing import run_ranks


def _refused_calls(rank: int) -> None:
    layout = EPLayout(
        model={"hidden": 8, "num_experts": 2, "top_k": 1},
        parallel={"expert": 2},
        dispatch={"dtype": "fp32", "mode": "low_latency"},
        backend="reference",
        timeouts={"first_s": 20.0, "steady_s": 20.0},
    )
    ep = ExpertParallel(layout)
    gc.collect()
    gc.disable()  # what is in a cycle stays

    def refused(flaw: str) -> list[weakref.ref[torch.Tensor]]:
        x = torch.ones(2, 8)
        d = ep.dispatch(x, torch.tensor([[0], [1]]))
        rows = d.tokens
        if rank == 0:
            rows = rows[:-1] if flaw == "rows" else rows
            x = torch.ones(2, 4) if flaw == "x" else x
        try:
            if flaw == "rows":
                ep.combine(rows, d.handle)
            else:
                ep.dispatch(x, torch.tensor([[0], [1]]))
        except (ValueError, PeerError):
            return [weakref.ref(d.tokens), weakref.ref(x)]
        raise AssertionError(f"no error for bad {flaw}")

    for flaw in ("rows", "x", "rows"):
        assert all(tensor() is None for tensor in refused(flaw)), f"rank {rank}: {flaw}"
        assert ep.live_handles == 0
    # Dropped dispatches are not in flight: two more are allowed, on the refused rank too.
    kept = [ep.dispatch(torch.ones(2, 8), torch.tensor([[0], [1]])) for _ in range(2)]
    for d in kept:
        assert torch.equal(ep.combine(d.tokens, d.handle), torch.ones(2, 8))


def test_an_error_keeps_neither_tensors_nor_handles() -> None:
    """The error and its traceback formed a cycle with the call's record: until the garbage
    collector ran, the caller's tensors stayed, and in low-latency mode its dispatch in flight."""
    run_ranks(_refused_calls, 2)
