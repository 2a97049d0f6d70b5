"""What this machine can run, what is wrong with it, and how to mend it.

Exit code 0: nothing is wrong. 1: warnings, jobs may be slow or lack a backend. 2: failures, or what
the layout asks for cannot run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import moe_ep
from moe_ep import env
from moe_ep.doctor import PROBES, ranks
from moe_ep.doctor.finding import Wish
from moe_ep.doctor.machine import LiveMachine, Machine, RecordedTree
from moe_ep.doctor.probe import examine
from moe_ep.doctor.record import Recorder
from moe_ep.doctor.report import Report, as_json, as_text
from moe_ep.doctor.verdicts import of_wish, verdicts
from moe_ep.layout import EPLayout

_EPILOG = """examples
  moe-ep doctor                                           this machine
  moe-ep doctor --layout configs/mixtral_8x7b_ep8.yaml    can it run this?
  moe-ep doctor --record ticket/                          write down what was seen
  moe-ep doctor --root ticket/                            look at it elsewhere
  torchrun --nproc-per-node 8 -m moe_ep doctor            compare ranks; names the odd one out

docs/doctor.md explains every finding."""


def add_parser(commands: Any, name: str) -> None:
    parser = commands.add_parser(
        name,
        help="what this machine can run, what is wrong, and how to mend it",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print everything as JSON")
    add("--layout", type=Path, metavar="FILE", help="EP layout to judge the machine for")
    add("--root", type=Path, metavar="DIR", help="a recorded machine in place of this one")
    add("--record", type=Path, metavar="DIR", help="write what was seen to a new folder")
    add(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="under torchrun: longest wait for other ranks (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    if options.root is not None and options.record is not None:
        raise ValueError("--root and --record: a recorded machine cannot be recorded; give one")
    if not 0 < options.wait < math.inf:
        raise ValueError(f"--wait {options.wait}: give a positive number of seconds")
    layout = EPLayout.from_yaml(options.layout) if options.layout else None
    machine = _machine(options)
    rank = int(machine.environment["RANK"]) if machine.live and env.under_torchrun() else None
    wish = _wish(machine, options.layout, layout)
    examined = examine(machine, wish, PROBES)
    findings = [finding for probe in examined for finding in probe.findings]
    backends = verdicts(machine, wish, findings)
    later = of_wish(wish, backends)
    if rank is not None:
        mine = ranks.report_of(rank, moe_ep.__version__, [*findings, *later], machine.environment)
        later += ranks.meet(mine, machine.environment, options.wait)
    source = str(options.root) if options.root else "this machine"
    if isinstance(machine, Recorder):
        source += f" (recorded in {machine.folder}: {machine.finish()} files)"
    report = Report(moe_ep.__version__, source, wish, examined, later, backends)
    if not rank:
        print(json.dumps(as_json(report), indent=2) if options.json else as_text(report))
    else:  # rank 0 prints for all, unless it was not reached
        for finding in later:
            if finding.id in ranks.NOT_JOINED:
                print(f"rank {rank}: {finding.seen}", file=sys.stderr)
    return report.exit_code()


def _machine(options: argparse.Namespace) -> Machine:
    if options.root is not None:
        return RecordedTree(options.root)
    machine = LiveMachine()
    if options.record is None:
        return machine
    rank = f"rank{machine.environment['RANK']}" if env.under_torchrun() else ""
    return Recorder(machine, options.record / rank)


def _wish(machine: Machine, path: Path | None, layout: EPLayout | None) -> Wish:
    """The backend asked for by name: MOE_EP_BACKEND's, else the layout's, unless it is auto."""
    chosen = machine.environment.get(env.BACKEND)
    asked_by = env.BACKEND if chosen else str(path)
    backend = chosen or (layout.backend if layout else "auto")
    return Wish(None if backend == "auto" else backend, layout, asked_by)
