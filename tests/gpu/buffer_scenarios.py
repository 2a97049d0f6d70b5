"""What the ranks of a GPU test of Buffer do; the cases are those of the CPU tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiprocess"))

import buffer_cases
from buffer_cases import Case, make_inputs, poison, same

from moe_ep import Buffer, PeerError
from moe_ep.errors import BrokenError

NUM_SMS = 8
_BUSY_CYCLES = 1_000_000_000  # about half a second


def make_buffer() -> Buffer:
    Buffer.set_num_sms(NUM_SMS)  # blocks of all ranks must fit on one GPU together
    buffer = Buffer(dist.group.WORLD)
    assert buffer._exchange.device == torch.device("cuda", torch.cuda.current_device())
    return buffer


def check_cases(rank: int, cases: list[Case]) -> None:
    Buffer.set_num_sms(NUM_SMS)
    buffer_cases.check_cases(rank, cases, "cuda")
    torch.cuda.synchronize()


def routed(buffer: Buffer, case: Case, seed: int) -> dict[str, Any]:
    """Arguments of a dispatch."""
    mine = make_inputs(case, seed, buffer.rank, buffer.group_size)
    idx = mine.idx.cuda()
    layout = buffer.get_dispatch_layout(idx, case.local * buffer.group_size)
    return {
        "x": mine.given("cuda"),
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
        "topk_idx": idx,
        "topk_weights": mine.weights.cuda(),
    }


def check_overlap(rank: int) -> None:
    """A dispatch and a combine run while the caller's stream is busy with something else."""
    buffer, case = make_buffer(), Case(tokens=(64, 40), hidden=1024)
    arguments = routed(buffer, case, 1)
    rows, idx, weights, counts, handle, _ = buffer.dispatch(**arguments)
    total = buffer.combine(rows, handle, weights)
    torch.cuda.synchronize()
    dist.barrier()
    ready = buffer.capture()
    torch.cuda._sleep(_BUSY_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    options = {"async_finish": True, "allocate_on_comm_stream": True}
    again = buffer.dispatch(**arguments, previous_event=ready, **options)
    out = buffer.combine(rows, again[4], weights, previous_event=again[5], **options)
    buffer.get_comm_stream().synchronize()
    assert not busy.query(), "the dispatch waited for the caller's stream"
    out[2].current_stream_wait()
    wanted = (rows, idx, weights, total[0], total[1])
    for got, expected in zip((*again[:3], *out[:2]), wanted, strict=True):
        assert torch.equal(got, expected)
    assert again[3] == counts
    torch.cuda.synchronize()
    buffer.destroy()


def check_memory_of_streams(rank: int) -> None:
    """Inputs and results that are dropped at once are not overwritten while they are in use."""
    buffer, case = make_buffer(), Case(tokens=(300, 200), hidden=1024, top_k=4)
    wanted = []
    for seed in range(4):
        rows, _, weights, _, handle, _ = buffer.dispatch(**routed(buffer, case, seed))
        wanted.append([t.clone() for t in buffer.combine(rows, handle, weights)[:2]])
    torch.cuda.synchronize()
    for repeat in range(40):
        seed = repeat % 4
        arguments = routed(buffer, case, seed)
        torch.cuda._sleep(100_000 * (repeat % 3))
        event = buffer.capture()
        rows, _, weights, _, handle, event = buffer.dispatch(
            **arguments, previous_event=event, async_finish=True
        )
        del arguments
        poison("cuda")
        out = buffer.combine(
            rows, handle, weights, previous_event=event, async_finish=repeat % 2 == 0
        )
        del rows, weights, handle
        poison("cuda")
        with out[2]:
            poison("cuda")
        for got, expected in zip(out[:2], wanted[seed], strict=True):
            assert torch.equal(got, expected), repeat
    buffer.destroy()


def check_graph(rank: int, dtype: str, use_async: bool) -> None:
    """num_worst_tokens: an exchange captured in a CUDA graph, replayed with new inputs."""
    buffer, case = make_buffer(), Case(tokens=(24, 9), hidden=512, dtype=dtype, routing="unused")
    worst, size = 33 * buffer.group_size, buffer.group_size
    arguments = routed(buffer, case, 0)
    static = (*_data(arguments["x"]), arguments["topk_idx"], arguments["topk_weights"])

    def exchange() -> list[torch.Tensor]:
        options: dict[str, Any] = {"async_finish": use_async}
        if use_async:
            options["previous_event"] = buffer.capture()
        idx = arguments["topk_idx"]
        layout = buffer.get_dispatch_layout(idx, case.local * size, **options)
        if use_async:
            options["previous_event"] = layout[4]
        x, recv_idx, weights, counts, handle, event = buffer.dispatch(
            arguments["x"],
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
            topk_idx=idx,
            topk_weights=arguments["topk_weights"],
            num_worst_tokens=worst,
            **options,
        )
        event.current_stream_wait()
        assert counts == [] and len(recv_idx) == worst
        rows = _data(x)[0].to(torch.bfloat16)
        if use_async:
            options["previous_event"] = buffer.capture()
        out, out_weights, event = buffer.combine(rows, handle, weights, **options)
        event.current_stream_wait()
        return [*_data(x), recv_idx, weights, out, out_weights]

    exchange()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = exchange()
    for seed in range(1, 9):
        fresh = make_inputs(case, seed, rank, size)
        given = (*_data(fresh.given("cuda")), fresh.idx, fresh.weights)
        for place, value in zip(static, given, strict=True):
            place.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in captured]
        for number, (got, wanted) in enumerate(zip(replayed, exchange(), strict=True)):
            assert same(got, wanted.cpu()), (seed, number)
        if seed == 4:  # rows that need more room elsewhere leave the graph alone
            buffer_cases.check_case(buffer, Case(tokens=(700, 40), hidden=2048), 1, "cuda")
    torch.cuda.synchronize()
    dist.barrier()
    del graph, captured
    buffer.destroy()


def _data(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def check_bad_input(rank: int) -> list[str]:
    """All ranks raise and can go on, whatever is wrong with a new routing, and on whichever use."""
    buffer, told = make_buffer(), []
    last = buffer.group_size - 1
    for number in range(6):
        arguments = routed(buffer, Case(tokens=(9, 5, 4)), number)
        if rank == last:
            wrong = {
                0: {"topk_idx": arguments["topk_idx"] + 500},
                1: {"x": arguments["x"].double()},
                2: {"topk_weights": arguments["topk_weights"].cpu()},
            }[number % 3]
            arguments |= wrong
        try:
            buffer.dispatch(**arguments)
        except (ValueError, TypeError, PeerError) as error:
            told.append(type(error).__name__)
        if number == 2:
            buffer_cases.check_case(buffer, Case(hidden=512), number, "cuda")
    buffer_cases.check_case(buffer, Case(), 9, "cuda")
    torch.cuda.synchronize()
    buffer.destroy()
    return told


def check_static_bad_ids(rank: int) -> list[str]:
    """Bad ids beside num_worst_tokens, once no header is exchanged: what three calls told."""
    buffer, told = make_buffer(), []
    arguments = routed(buffer, Case(tokens=(9, 5, 4)), 0) | {
        "num_worst_tokens": 33 * buffer.group_size
    }
    buffer.dispatch(**arguments)
    for _ in range(3):
        if rank == buffer.group_size - 1:
            arguments["topk_idx"] = arguments["topk_idx"] + 500
        try:
            buffer.dispatch(**arguments)
            told.append("")
        except (ValueError, PeerError, BrokenError) as error:
            told.append(f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        dist.barrier()
    buffer.destroy()
    return told
