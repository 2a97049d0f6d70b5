"""One rank's exchanges, small, for compute-sanitizer:

compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist
from scenarios import Case, check_cases


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        cases = [
            Case(tokens=(37,), top_k=3, alignment=8, routing="unused"),
            Case(tokens=(33,), hidden=2880, local=16, top_k=12),
            Case(tokens=(20,), fp8_scale="fp32", hidden=384, alignment=4),
            Case(tokens=(9,), dtype="fp32", hidden=4100),
        ]
        check_cases(0, cases)
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
