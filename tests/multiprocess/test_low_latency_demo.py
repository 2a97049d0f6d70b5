"""The decode demo agrees with the same model without communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "decode_demo.py"


@pytest.mark.parametrize(("ranks", "extra"), [(2, []), (3, ["--fp8", "--experts", "12"])])
def test_decode_demo(ranks: int, extra: list[str]) -> None:
    arguments = ["--ranks", str(ranks), "--tokens", "7", "--steps", "3", "--hidden", "256"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, *extra],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MOE_EP_BACKEND": "reference", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["rank"] for line in lines] == list(range(ranks))
    for line in lines:
        if "--fp8" in extra:  # rounding to three bits is seen
            assert 1e-3 < line["relative_error"] < 0.12, line
        else:
            assert line["relative_error"] < 0.02, line
        assert len(line["tokens"]) == 7
