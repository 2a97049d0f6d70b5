"""`moe-ep bench`: what it writes is what it measured, and the reference backend keeps its speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def bench(file: Path, *flags: str, ranks: int = 2) -> tuple[dict[str, Any], str]:
    start = LAUNCHER if ranks == 2 else ["-m"]
    command = [sys.executable, *start, "moe_ep", "bench", "--json", str(file), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text()), done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_report(tmp_path: Path, ranks: int) -> None:
    shape = ("--tokens", "64", "--hidden", "32", "--top-k", "4", "--experts", "6")
    flags = (*shape, "--dtype", "fp32", "--iterations", "3", "--backend", "reference")
    report, table = bench(tmp_path / "r.json", *flags, ranks=ranks)
    assert (report["ranks"], report["backend"], report["tokens"]) == (ranks, "reference", 64)
    timings = {timing["name"]: timing for timing in report["timings"]}
    for name in ("dispatch", "combine", "all_to_all there", "all_to_all back"):
        assert timings[name]["payload_bytes"] == 64 * 4 * 32 * 4
        assert 0 < timings[name]["min_us"] <= timings[name]["median_us"] <= timings[name]["max_us"]
        assert name in table
    ours = timings["dispatch"]["median_us"] + timings["combine"]["median_us"]
    bare = timings["all_to_all there"]["median_us"] + timings["all_to_all back"]["median_us"]
    assert report["ratio_to_all_to_all"] == pytest.approx(ours / bare)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_ep", "bench", "--hidden", "100", "--dtype", "fp8_e4m3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("moe-ep bench: model.hidden: 100;"), done.stderr


@pytest.mark.timeout(500)
def test_at_most_twice_an_all_to_all(tmp_path: Path) -> None:
    """The best of up to three runs: whatever else the machine does can only slow one down."""
    shape = ("--tokens", "4096", "--hidden", "1024", "--top-k", "2", "--experts", "8")
    ratios: list[float] = []
    while len(ratios) < 3 and min(ratios, default=9.0) > 2.0:
        flags = (*shape, "--dtype", "bf16", "--backend", "reference")
        ratios.append(bench(tmp_path / "r.json", *flags)[0]["ratio_to_all_to_all"])
    assert min(ratios) <= 2.0, ratios
