"""The decode demo agrees with the same model without communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAYERS = 2
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "decode_demo.py"


@pytest.mark.parametrize(("ranks", "extra"), [(2, []), (3, ["--fp8", "--experts", "12"])])
def test_decode_demo(ranks: int, extra: list[str], tmp_path: Path) -> None:
    arguments = ["--ranks", str(ranks), "--tokens", "7", "--steps", "3", "--hidden", "256"]
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    arguments += ["--trace", str(trace)]
    arguments += [] if extra else ["--plot", str(picture)]
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
    assert bool(extra) or picture.read_bytes().startswith(b"\x89PNG\r\n")
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in range(ranks):
        check_order([e for e in events if e["pid"] == rank and e["ph"] == "X"])


def check_order(events: list[dict[str, Any]]) -> None:
    """Between the send and the receipt of a micro-batch the other one computes."""
    begins = {
        (event["name"], event["tid"]): event["ts"] for event in events[: len(events) // LAYERS]
    }
    for verb, work in (("dispatch", "before experts"), ("combine", "experts")):
        assert begins[f"{verb}: send", 0] < begins[work, 1] < begins[f"{verb}: receive", 0]
