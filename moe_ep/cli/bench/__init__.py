"""moe-ep bench: how long dispatch and combine take here, beside a floor and peers."""

from __future__ import annotations

from moe_ep.cli.bench.options import add_parser
from moe_ep.cli.bench.runner import run

__all__ = ["add_parser", "run"]
