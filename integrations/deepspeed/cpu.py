"""Starting DeepSpeed on a CPU without its minute of compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_OP = "deepspeed_shm_comm"


@contextlib.contextmanager
def no_op_compilation() -> Iterator[None]:
    """While it is open, DeepSpeed sets up its process groups with torch's collectives only.

    On a CPU it otherwise compiles an all-reduce over shared memory at the first start, for about a
    minute and with a compiler. Open it around `deepspeed.init_distributed` or the first
    `deepspeed.initialize`.
    """
    import deepspeed.ops

    compatible = deepspeed.ops.__compatible_ops__
    before = compatible.get(_OP)
    compatible[_OP] = False
    try:
        yield
    finally:
        if before is None:
            del compatible[_OP]
        else:
            compatible[_OP] = before
