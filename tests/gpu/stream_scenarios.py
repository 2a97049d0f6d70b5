"""What the ranks of a GPU test do with streams, events and tensors of any place."""

from __future__ import annotations

import torch
from scenarios import Case, backend_name, call, make_backend, make_inputs, make_layout
from torch import Tensor

from moe_ep import ExpertParallel
from moe_ep.events import EventHandle, EventOverlap


def check_streams(rank: int) -> None:
    """Operations on several streams keep their order and their memory."""
    case = Case(tokens=(200,), hidden=512, repeats=1)
    backend = make_backend(case)
    x, idx, probs = make_inputs(case)
    plan = backend.prepare(idx, call())
    wanted = backend.combine(plan, backend.dispatch(plan, x, probs, call()).rows, call())[0]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            rows = backend.dispatch(plan, x, probs, call()).rows
        with torch.cuda.stream(streams[(i + 1) % 3]):
            torch.cuda.current_stream().wait_stream(streams[i % 3])
            out = backend.combine(plan, rows, call())[0]
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), i
    backend.destroy()


def check_async(rank: int) -> None:
    """async_finish and previous_event change when an exchange runs, not what it returns.

    The first dispatch also needs more room than there is."""
    case = Case(tokens=(300, 129), hidden=1024, top_k=4, repeats=1)
    ep = ExpertParallel(make_layout(case).replace(backend="cuda"))
    x, idx, probs = make_inputs(case)
    for number in range(1, 9):
        torch.cuda._sleep(4_000_000)  # about 2 ms: what is dispatched is written late
        fresh = x * number
        ready = EventOverlap(EventHandle())
        d = ep.dispatch(fresh, idx, probs, async_finish=True, previous_event=ready)
        d.event.current_stream_wait()
        rows = d.tokens * 2
        ready = EventOverlap(EventHandle())
        out, event = ep.combine(rows, d.handle, async_finish=True, previous_event=ready)
        event.current_stream_wait()
        wanted = ep.dispatch(fresh, idx, probs)
        assert torch.equal(d.tokens, wanted.tokens), number
        assert torch.equal(d.probs, wanted.probs), number
        assert torch.equal(out, ep.combine(wanted.tokens * 2, wanted.handle)), number
    ep.destroy()


def check_unaligned(rank: int) -> None:
    """Tensors that begin at any element, on one rank alone, give what others give."""
    case = Case(tokens=(21, 13), hidden=64, top_k=3)
    ep = ExpertParallel(make_layout(case).replace(backend=backend_name()))
    x, idx, probs = make_inputs(case)

    def moved(tensor: Tensor) -> Tensor:
        if rank != 0:
            return tensor
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    wanted = ep.dispatch(x, idx, probs)
    d = ep.dispatch(moved(x), idx, moved(probs))
    assert torch.equal(d.tokens, wanted.tokens) and torch.equal(d.probs, wanted.probs)
    out = ep.combine(moved(d.tokens), d.handle, weights=moved(d.probs))
    assert torch.equal(out, ep.combine(wanted.tokens, wanted.handle, weights=wanted.probs))
    ep.destroy()
