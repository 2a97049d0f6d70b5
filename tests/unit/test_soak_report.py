"""The report of a soak: what it must not let pass. tests/integrations/test_soak.py runs one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import soak_low_latency  # noqa: E402

from soak import options, report, workload  # noqa: E402

STEPS, RANKS = 250, 2


def run_of(phase: str, first: int, last: int, **more: Any) -> list[list[dict[str, Any]]]:
    """Events of all ranks: losses fall, memory is flat but for noise."""
    noise = random.Random(f"{phase} {first}")
    ranks = []
    for _ in range(RANKS):
        events = [
            {
                "event": "step",
                "step": step,
                "loss": 5.0 / step,
                "rows": 10,
                "rss": (300 << 20) + noise.randrange(4 << 20) + more.get("leak", 0) * step,
                "live": (90 << 20) + noise.randrange(1 << 20) + more.get("live_leak", 0) * step,
                "blocks": 500_000 + noise.randrange(2000) + more.get("object_leak", 0) * step,
                "cuda": (20 << 20) + more.get("cuda_leak", 0) * step,
            }
            for step in range(first, last + 1)
        ]
        ranks.append([*events, {"event": "end", "step": last}])
    return ranks


def good() -> tuple[dict[str, Any], list[report.Stretch]]:
    """Rank 1 dies in step 55 of 250; the last checkpoint is of step 50."""
    killed = run_of("disturbed", 1, 54)
    killed[0][-1] = {"event": "error", "time": 12.0, "step": 55, "text":
                     "PeerTimeoutError: rank 0 lost its connection to rank 1"}  # fmt: skip
    killed[1][-1] = {"event": "kill", "time": 10.0, "step": 55, "verb": "combine"}
    killed[1].insert(3, {"event": "stall", "step": 3, "verb": "dispatch", "seconds": 0.5})
    state = {
        "settings": {"ranks": RANKS, "kills": 1},
        "steps": STEPS,
        "seconds": 100.0,
        "phase": "done",
        "stretches": [],
    }
    return state, [
        report.Stretch("disturbed", "stretch_000", "kill", {"rank": 1}, killed),
        report.Stretch("disturbed", "stretch_001", "steps", None, run_of("disturbed", 51, STEPS)),
        report.Stretch("alone", "stretch_002", "steps", None, run_of("alone", 1, STEPS)),
    ]


def failing(state: dict[str, Any], stretches: list[report.Stretch]) -> list[str]:
    found = report.judge(state, stretches)
    return [verdict["name"] for verdict in found.verdicts if not verdict["holds"]]


def test_a_good_soak_passes() -> None:
    state, stretches = good()
    found = report.judge(state, stretches)
    assert found.all_hold, found.text()
    assert found.figures["losses"]["bit_equal"]
    assert found.figures["losses"]["steps_done_again"] == 4  # 51 to 54
    assert found.figures["errors"][0]["after_s"] == 2.0
    # The first stretch was too short to tell.
    assert {one["stretch"] for one in found.figures["memory"]} == {"stretch_001", "stretch_002"}


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_a_loss_that_differs(phase: int) -> None:
    state, stretches = good()
    stretches[phase].ranks[0][25]["loss"] += 2e-6
    assert failing(state, stretches) == ["losses"]


def test_a_step_that_is_missing() -> None:
    state, stretches = good()
    del stretches[2].ranks[0][40]
    assert failing(state, stretches) == ["losses"]
    for stretch in stretches:  # in both trainings
        stretch.ranks[0] = [e for e in stretch.ranks[0] if e.get("step") != 80]
    assert failing(state, stretches) == ["losses"]


def test_an_error_that_names_nobody_or_another() -> None:
    for text in ("RuntimeError: Connection closed", "rank 0 waited 5 s for rank 12 in dispatch"):
        state, stretches = good()
        stretches[0].ranks[0][-1]["text"] = text
        assert failing(state, stretches) == ["errors"]


def test_a_survivor_without_an_error() -> None:
    state, stretches = good()
    del stretches[0].ranks[0][-1]
    assert failing(state, stretches) == ["errors"]


def test_an_error_without_a_kill() -> None:
    state, stretches = good()
    stretches[2].ranks[1][-1] = {"event": "error", "time": 1.0, "step": 9, "text": "to rank 1"}
    assert failing(state, stretches) == ["errors"]


def test_a_kill_that_did_not_happen() -> None:
    state, stretches = good()
    state["settings"]["kills"] = 2
    assert failing(state, stretches) == ["faults"]


@pytest.mark.parametrize(
    "leak",
    [{"leak": 32 << 10}, {"live_leak": 16 << 10}, {"object_leak": 100}, {"cuda_leak": 2 << 10}],
)
def test_a_leak(leak: dict[str, int]) -> None:
    state, stretches = good()
    stretches[2].ranks = run_of("alone", 1, STEPS, **leak)
    assert failing(state, stretches) == ["memory"]


def test_growth_is_that_of_most_steps() -> None:
    flat = [(step, 1 << 20) for step in range(50)] + [(step, 9 << 20) for step in range(50, 60)]
    assert report.growth(flat) == 0.0  # one jump of an allocator
    assert report.growth([(step, 7 * step) for step in range(50)]) == 7000.0
    assert report.growth([(1, 5)]) == 0.0


def test_unfinished_is_not_judged() -> None:
    state, stretches = good()
    state["phase"] = "alone"
    assert failing(state, stretches[:2]) == ["finished"]


def test_the_workload_is_a_function_of_seed_step_and_rank() -> None:
    wanted = [[next(workload.lengths(7, step, rank, 64)) for step in range(200)] for rank in (0, 1)]
    again = [next(workload.lengths(7, step, 0, 64)) for step in range(200)]
    assert wanted[0] == again and wanted[0] != wanted[1]
    assert min(wanted[0]) == 1 and max(wanted[0]) == 64
    biases = [workload.skew(7, step, 8) for step in range(15)]
    assert not biases[0].any() and 0 < biases[5].abs().max() < 20
    assert (biases[10] == 100).sum() == 2
    assert all(torch.equal(workload.skew(7, step, 8), bias) for step, bias in enumerate(biases))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "19", "--kills", "1", "--save-every", "10"], "--steps 19 has no room"),
        (["--ranks", "3"], "1, 2, 4 or 8 ranks"),
        (["--ranks", "1"], "a survivor has to notice"),
        (["--minutes", "0"], "not a positive number"),
    ],
)
def test_wrong_options(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        options.parse(flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "0"], "--ranks: 0 is not a positive number"),
        (["--rounds", "0"], "--rounds: 0 is not a positive number"),
        (["--minutes", "nan"], "--minutes: nan is not a positive number"),
        (["--top-k", "99"], "99 slots a token; with num_experts=16 it can have 1 to 16"),
        (["--hidden", "100"], "hidden=100; it must be a multiple of 8"),
    ],
)
def test_wrong_options_of_low_latency_mode(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        soak_low_latency.parse(flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_help_needs_nothing_installed() -> None:
    command = ["bash", str(ROOT / "scripts" / "soak.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--limit-minutes" in done.stdout, done.stderr
