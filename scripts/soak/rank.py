"""`python -m soak.rank PLAN.json`: one rank of a stretch, as the launcher starts it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(plan: Path) -> int:
    """Runs to the end of the stretch; the exit status."""
    # Saving a checkpoint spawns a process that imports the main program: it needs nothing of this.
    from soak.worker import run

    return run(json.loads(plan.read_text()))


def start(plan: Path, output: Path, environment: dict[str, Any]) -> None:
    """The same in a forked process, which gets a group, variables and an output of its own."""
    os.setsid()
    os.environ.update({name: str(value) for name, value in environment.items()})
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(main(plan))


if __name__ == "__main__":
    os.setpgid(0, 0)  # so that its own children can end with it
    sys.exit(main(Path(sys.argv[1])))
