"""Low-latency calls that are wrong on one rank only: nobody waits in vain. On gloo and the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from buffer_cases import in_environment
from expected_errors import expect
from low_latency_cases import Case, check_case, make_buffer, make_inputs, send

from moe_ep import BrokenError, OrderError
from moe_ep.testing import run_ranks

BAD = 1
FLOAT_LIMIT, FLOAT_EXPERTS = {"num_max_dispatch_tokens_per_rank": 16.0}, {"num_experts": 8.5}


def _misfits(rank: int) -> None:
    """Where all use a known shape that is not the one they agreed on last, and where what the rank
    gives makes no shape at all. All go on."""
    cases = [Case(), Case(scales="fp32"), Case(hidden=512)]
    buffer = make_buffer(cases)
    for case in (*cases, cases[0]):
        check_case(buffer, case, 0, "cpu")
    mine = make_inputs(cases[0], 1, rank, 2)
    x, idx = mine.x, mine.idx
    changes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": x.float()}, TypeError, "float32"),
        ({"x": None}, TypeError, "NoneType"),
        ({"x": x[:, :252]}, ValueError, "hidden=252"),
        ({"x": x.to("meta")}, ValueError, "x is on meta, without values"),
        ({"x": x.to_sparse()}, ValueError, "x is sparse or nested"),
        (
            {"topk_idx": torch.nested.nested_tensor([*idx])},
            ValueError,
            "topk_idx is sparse or nested",
        ),
        ({"topk_idx": idx.to("meta")}, ValueError, "topk_idx is on meta; it must be on cpu"),
        (FLOAT_LIMIT, TypeError, "num_max_dispatch_tokens_per_rank is a float"),
        (FLOAT_EXPERTS, TypeError, "num_experts is a float"),
        ({"use_fp8": torch.ones(2)}, RuntimeError, "Boolean value of Tensor"),
    ]
    for change, kind, words in changes:
        given = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": 16, "num_experts": 8}
        given["use_fp8"] = False
        given |= change if rank == BAD else {}
        action = lambda given=given: buffer.low_latency_dispatch(**given)  # noqa: E731
        expect(rank, BAD, words, action, kind, (words,))
        check_case(buffer, cases[0], 2, "cpu")


def test_bad_input_that_may_make_no_shape() -> None:
    run_ranks(in_environment, 2, _misfits)


def _out_of_turn(rank: int) -> None:
    case = Case()
    for what, hooks, kind, words in (
        ("a copy of the handle", 2, TypeError, "handle is a tuple"),
        ("no handle", 2, TypeError, "handle is a NoneType"),
        ("an operation that was not received", 1, OrderError, "call its hook"),
        ("a third operation", 0, OrderError, "call its hook"),
    ):
        buffer = make_buffer([case])
        one, other = (send(buffer, case, seed, "cpu") for seed in (1, 2))
        handle = one.handle
        if rank == BAD:
            handle = {"no handle": None, "a copy of the handle": tuple(handle)}.get(what, handle)
        for flight in (other, one)[: hooks if rank == BAD else 2]:
            flight.hook()

        def action(
            what: str = what, buffer: Any = buffer, flight: Any = one, handle: Any = handle
        ) -> None:
            if what == "a third operation":
                send(buffer, case, 3, "cpu").hook()
            else:
                x = torch.zeros(flight.recv_x.shape).bfloat16()
                buffer.low_latency_combine(x, flight.idx, flight.weights, handle)

        expect(rank, BAD, what, action, kind, (words,))
        with pytest.raises(BrokenError):
            send(buffer, case, 4, "cpu")


def test_calls_out_of_turn() -> None:
    run_ranks(in_environment, 2, _out_of_turn)
