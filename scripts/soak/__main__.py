"""`python scripts/soak --help`: see options.py. `scripts/soak.sh` sets up and then runs this."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak import options as soak_options


def main(argv: list[str]) -> int:
    options = soak_options.parse(argv)
    from soak import driver, report

    # As timeout(1) ends a call: the ranks and their MPS server end with it, a later call goes on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    soak = driver.Soak(options)
    problem = soak.mismatch()
    if options.report_only and not soak.file.exists():
        problem = f"{soak.folder} holds no soak"
    if problem is not None and not (options.report_only and soak.file.exists()):
        print(f"soak: {problem}", file=sys.stderr)
        return 2
    finished = True
    if not options.report_only:
        try:
            finished = soak.run()
        except driver.SoakError as error:
            print(f"soak: {error}", file=sys.stderr)
    if not soak.state["stretches"]:
        print("soak: nothing has run yet", file=sys.stderr)
        return 3
    found = report.judge(*(read := report.read(soak.folder)))
    print(report.write(soak.folder, found, read[1]), end="")
    if not finished:
        print("soak: time of this call is up; the same command goes on", file=sys.stderr)
        return 3
    return 0 if found.all_hold else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
