"""What torch.compile is to leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def eager(verb: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Runs a verb without gradients and, in code that torch.compile traces, as it is: a graph ends
    before it. (`torch.compiler.disable` as a decorator would load the compiler at import.)"""

    @functools.wraps(verb)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(torch.no_grad()(verb))(*args, **kwargs)
        with torch.no_grad():
            return verb(*args, **kwargs)

    return run


@torch._disable_dynamo  # as torch.compiler.disable, but loads the compiler at the first call only
def untraced(verb: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Calls a verb, with gradients, from a branch of its own that only torch.compile takes: a graph
    ends before it. As a decorator it would cost every call a microsecond."""
    return verb(*args, **options)
