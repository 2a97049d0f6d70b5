"""Train a Mixtral with expert parallelism: `python scripts/train_mixtral.py --help`.

Started by hand it checks the flags against the machine and becomes torchrun; started by torchrun it
is one rank of the training.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mixtral import cli, launch


def main() -> int:
    options = cli.parse()
    if not launch.under_torchrun():
        return launch.launch(options, __file__, sys.argv[1:])
    module, function = cli.FRAMEWORKS[options.framework].split(":")
    try:
        run = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        return launch.fail(f"--framework {options.framework} can't be used here: {error}")
    return run(options)


# Saving a checkpoint spawns processes that import this file again: they must not train.
if __name__ == "__main__":
    sys.exit(main())
