"""Small programs around the headers of csrc/shared, built with the system's g++, that answer
questions from their standard input: one JSON object a line. ("-ftrapv": an overflow of a signed
integer ends the program.)"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Ask = Callable[[list[str]], list[dict[str, int]]]


def build(source: str, folder: Path) -> Ask:
    """Builds tests/unit/csrc/SOURCE. The lines that the program understands are in its source."""
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is not on the PATH; the tests need a C++17 compiler"
    program = folder / "program"
    path = ROOT / "tests" / "unit" / "csrc" / source
    flags = ["-std=c++17", "-O1", "-ftrapv", "-Wall", "-Wextra", "-Werror"]
    built = subprocess.run(
        [compiler, *flags, "-I", str(ROOT / "csrc"), str(path), "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr

    def ask(questions: list[str]) -> list[dict[str, int]]:
        done = subprocess.run(
            [program], input="\n".join(questions), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(questions)
        return answers

    return ask
