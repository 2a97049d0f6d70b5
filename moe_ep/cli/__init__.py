"""The command `moe-ep` (also `python -m moe_ep`)."""

from __future__ import annotations

import argparse
import sys

from moe_ep.cli import bench, doctor, plan
from moe_ep.errors import MoEEPError

_COMMANDS = {"bench": bench, "doctor": doctor, "plan": plan}


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. A user's mistake is one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="moe-ep", description="Tools around moe_ep's expert-parallel dispatch and combine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_parser(commands, name)
    options = parser.parse_args(arguments)
    try:
        return int(_COMMANDS[options.command].run(options))
    except (MoEEPError, ValueError, OSError) as error:
        print(f"moe-ep {options.command}: {error}", file=sys.stderr)
        return 2
