"""Runs a script with `install()` in force: `python -m moe_ep.integrations.deepspeed SCRIPT ...`.

Under DeepSpeed's launcher: `deepspeed --module moe_ep.integrations.deepspeed SCRIPT ARGS...`. The
script sees its own name and arguments.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from moe_ep.integrations import deepspeed


def main() -> int:
    # DeepSpeed's launcher puts --local_rank=N before what belongs to the script.
    arguments = sys.argv[1:]
    own = [a for a in arguments[:1] if a.startswith("--local_rank")]
    arguments = arguments[len(own) :]
    if arguments[:1] in (["-h"], ["--help"]):
        print((__doc__ or "").strip())
        return 0
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m moe_ep.integrations.deepspeed SCRIPT [ARGS...]", file=sys.stderr)
        return 2
    script = arguments[0]
    if not Path(script).is_file():
        print(f"moe_ep.integrations.deepspeed: no such script: {script}", file=sys.stderr)
        return 2
    deepspeed.install()
    sys.argv = [script, *own, *arguments[1:]]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
