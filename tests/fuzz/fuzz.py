"""Fuzzes ExpertParallel: random layouts, routings and orders of calls, each result checked against
a dense fp64 model. Programs come from hypothesis; the first failure is shrunk and printed.

examples
  bash scripts/fuzz.sh                                  fresh programs, reference backend
  bash scripts/fuzz.sh --operations 100000              more of them
  bash scripts/fuzz.sh --save programs.json --backend cuda    make programs, run nothing
  bash scripts/fuzz.sh --save programs.json --ranks 2,4       of two and of four ranks only
  bash scripts/fuzz.sh --replay programs.json           run them: needs no hypothesis
  bash scripts/fuzz.sh --backend cuda                   on one GPU that the ranks share under MPS"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from fuzz_pool import RankPool
from fuzz_steps import Program

from moe_ep.cli.outputs import check_file

_OPERATIONS_PER_PROGRAM = 40  # on average
_BATCH = 60  # programs of one seed
RANKS = (2, 1, 2, 1, 2, 3, 2, 4)
"""From which a program's number of ranks is drawn, unless --ranks says else."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=("reference", "cuda"), default="reference")
    add("--operations", type=int, default=10000, help="about how many (default: %(default)s)")
    add("--seed", type=int, help="of the first programs; CI's is 0 (default: a fresh one)")
    add("--ranks", type=_ranks, default=RANKS, metavar="R[,...]", help="of a program, at random")
    add("--save", type=Path, metavar="FILE", help="write the programs, run nothing")
    add("--replay", type=Path, metavar="FILE", help="run the programs of a file, one a line")
    add("--shrink", action="store_true", help="after a failure look for a smaller program, minutes")
    add("--limit", type=float, default=3600.0, metavar="SECONDS", help="of the whole run")
    options = parser.parse_args(arguments)
    if options.save is not None and options.replay is not None:
        parser.error("--save and --replay: give one")
    if options.operations < 1:
        parser.error(f"--operations {options.operations}: give at least 1")
    try:
        check_file("--save", options.save)
        replayed = [] if options.replay is None else _programs(options.replay)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    programs: list[Program] = []
    operations = 0
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    if options.replay is None:  # a file of programs needs no hypothesis
        from fuzz_machine import run_programs

        print(f"fuzz: --seed {options.seed}", flush=True)
    if options.save is not None:
        count = max(options.operations // _OPERATIONS_PER_PROGRAM, 1)
        run_programs(options.backend, options.ranks, count, programs.append, options.seed)
        options.save.write_text("".join(f"{p.to_json()}\n" for p in programs))
        print(f"fuzz: {len(programs)} programs written to {options.save}")
        return 0
    wanted = [program.layout.ranks for program, _ in replayed] or options.ranks
    with RankPool(max(wanted), options.backend, options.limit) as pool:

        def run(program: Program) -> None:
            nonlocal operations
            operations += pool.run(program)
            programs.append(program)

        if options.replay is None:
            seed = options.seed
            while operations < options.operations:
                run_programs(options.backend, options.ranks, _BATCH, run, seed, options.shrink)
                seed += 1
        else:
            for program, line in replayed:
                try:
                    run(program)
                except AssertionError:
                    print(f"fuzz: the program: {line}", flush=True)
                    raise
    summary = {
        "backend": options.backend,
        "programs": len(programs),
        "operations": operations,
        "failures": 0,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(f"fuzz: {json.dumps(summary)}")
    return 0


def _programs(file: Path) -> list[tuple[Program, str]]:
    """The programs of a file, each with its line."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--replay {file}: cannot be read ({error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            program = Program.from_json(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--replay {file}: line {number} is no program: {error!r}") from None
        found.append((program, line))
    if not found:
        raise ValueError(f"--replay {file}: there is no program in it")
    return found


def _ranks(text: str) -> tuple[int, ...]:
    ranks = tuple(int(part) for part in text.split(","))
    if not set(ranks) <= set(RANKS):
        raise argparse.ArgumentTypeError(f"{text!r}: programs are of 1 to {max(RANKS)} ranks")
    return ranks


if __name__ == "__main__":
    raise SystemExit(main())
