"""scripts/soak, short: interrupted, gone on with, and equal to a training that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
# Each check is one of the soak's own verdicts; memory needs longer runs than this one.
VERDICTS = ["finished", "faults", "errors", "losses", "rows", "memory"]


def soak(state: Path, *flags: str, code: int) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "soak"), "--state", str(state), *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_soak_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    flags = ("--steps", "8", "--save-every", "4", "--kills", "1")
    # Time is up at once: the first call ends at the first checkpoint.
    told = soak(tmp_path, *flags, "--limit-minutes", "0.001", code=3)
    assert "the same command goes on" in told
    assert "with other options (kills was 1, is 0)" in soak(
        tmp_path, "--steps", "8", "--save-every", "4", "--kills", "0", code=2
    )
    soak(tmp_path, *flags, code=0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [verdict["name"] for verdict in report["verdicts"]] == VERDICTS
    assert [stretch["end"] for stretch in report["stretches"]] == ["call", "kill", "steps", "steps"]
    (kill,) = report["kills"]
    assert kill["rank"] == 1234 % 2 and kill["step"] == 6  # between checkpoints 4 and 8
    (error,) = report["errors"]
    assert error["rank"] == 1 and error["text"].startswith("PeerTimeoutError: rank 1 ")
    assert "rank 0 " in error["text"]
    assert report["losses"]["compared_steps"] == 8 and report["losses"]["bit_equal"]
    assert report["losses"]["steps_done_again"] == 1
    # Eight steps alone, eight disturbed, one of them twice: 2 layers, 2 micro-batches, 2 ranks, at
    # least 2 sequences of 1 token with 2 experts each.
    assert report["rows_dispatched"] >= 17 * 2 * 2 * 2 * 2 * 1 * 2
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in tmp_path.rglob("unfinished_*")]
