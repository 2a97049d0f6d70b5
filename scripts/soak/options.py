"""The command line of `soak.sh`. Standard library only: `--help` works before any install."""

from __future__ import annotations

import argparse
from pathlib import Path

from flag_types import positive, positive_number

ROOT = Path(__file__).resolve().parents[2]

_DESCRIPTION = """\
Trains the tiny Mixtral twice. The first training is disturbed: ranks stall at random inside
dispatch and combine, one is killed in the middle of a step, and everything is restarted from the
last checkpoint. The second is left alone. Both see the same text, cut to uneven lengths that differ
between ranks, and routing that is skewed, now and then until two experts get every token; and
between their steps the exchange itself is called with token counts from 0 up. At the end:

  losses    of every step equal those of the undisturbed training
  rows      every row that a router sent has arrived, in each step
  errors    each survivor of a kill has raised an error that names the dead rank
  memory    of every process is flat

A report is written to the state folder: report.json, report.txt and, with matplotlib, soak.png."""

_EXAMPLES = """\
examples
  a minute on the CPU:                          bash scripts/soak.sh --minutes 1
  exactly 60 steps, one kill:                   bash scripts/soak.sh --steps 60 --kills 1
  two ranks that share one GPU, ten minutes:    bash scripts/soak.sh --device cuda --minutes 10
  the same in two calls of five minutes; the second goes on where the first stopped:
      bash scripts/soak.sh --device cuda --minutes 10 --limit-minutes 5 --state runs/soak
      bash scripts/soak.sh --device cuda --minutes 10 --limit-minutes 5 --state runs/soak
  the report once more, say with pictures, without running anything:
      bash scripts/soak.sh --state runs/soak --report-only
  low-latency mode instead of a training:
      bash scripts/soak.sh --mode low_latency --help

exit status: 0 all holds; 1 something does not; 2 wrong options; 3 not finished, call again."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="soak.sh",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=("training", "low_latency"), default="training")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=positive_number, help="for both trainings (default: 1)")
    length.add_argument("--steps", type=positive, help="of each training, in place of --minutes")
    add("--limit-minutes", type=positive_number, help="of this call; a later one goes on")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=positive, default=2, help="processes; experts over all (default: 2)")
    add("--kills", type=int, help="ranks to kill (default: 1, with --minutes 3 and more: 2)")
    add("--save-every", type=positive, default=10, help="steps between checkpoints (default: 10)")
    add("--seed", type=int, default=1234, help="of weights, text and disturbances (default: 1234)")
    add("--timeout-s", type=positive_number, help="a rank waits for another at most so long; on a "
        "GPU also how long a kill takes to be noticed (default: cpu 60, cuda 20)")  # fmt: skip
    add("--num-sms", type=positive, default=8, help="blocks of a kernel, --device cuda "
        "(default: 8, so that other work fits beside it)")  # fmt: skip
    add("--state", type=Path, default=ROOT / "runs" / "soak",
        help="folder of checkpoints, logs and report; what it holds is continued, so name another "
        "or remove it to begin anew (default: runs/soak)")  # fmt: skip
    add("--report-only", action="store_true", help="of what the state folder holds")
    options = parser.parse_args(argv)
    if options.steps is None and options.minutes is None:
        options.minutes = 1.0
    if options.kills is None:
        options.kills = 2 if (options.minutes or 0) >= 3 else 1
    if options.kills < 0:
        parser.error(f"--kills {options.kills} is negative")
    if options.kills and options.ranks < 2:
        parser.error("--kills needs --ranks 2 or more: a survivor has to notice; or use --kills 0")
    if 8 % options.ranks:
        parser.error(f"--ranks {options.ranks}: the 8 experts need 1, 2, 4 or 8 ranks")
    least = (options.kills + 1) * options.save_every
    if options.steps is not None and options.steps < least:
        parser.error(
            f"--steps {options.steps} has no room for {options.kills} kills between checkpoints "
            f"every {options.save_every} steps: at least {least}, or fewer --kills"
        )
    if options.timeout_s is None:
        options.timeout_s = 60.0 if options.device == "cpu" else 20.0
    return options


def settings(options: argparse.Namespace) -> dict:
    """What must not change while a soak goes on."""
    names = ("minutes", "steps", "device", "ranks", "kills", "save_every", "seed", "num_sms")
    return {name: getattr(options, name) for name in names}
