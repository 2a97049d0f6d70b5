"""Ten thousand random operations, each checked against a dense fp64 model: always the same ones.

`bash scripts/fuzz.sh` makes fresh ones, more of them, or runs them on a GPU.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fuzz
import pytest
from fuzz import RANKS
from fuzz_machine import run_programs
from fuzz_model import World, make_world
from fuzz_pool import RankPool
from fuzz_steps import Dispatch, Layout, Program

ROOT = Path(__file__).resolve().parents[2]
BATCH = 60  # programs of one seed
LEAST_OPERATIONS = 10_000


@pytest.mark.timeout(900)
def test_ten_thousand_operations() -> None:
    operations, layouts, steps = 0, set(), Counter[str]()
    with RankPool(max(RANKS), "reference", limit_s=880.0) as pool:

        def run(program: Program) -> None:
            nonlocal operations
            operations += pool.run(program)
            layouts.add(program.layout)
            steps.update(type(step).__name__ for step in program.steps)
            assert Program.from_json(program.to_json()) == program

        for seed in range(10):
            if operations < LEAST_OPERATIONS:
                run_programs("reference", RANKS, BATCH, run, seed)
    assert operations >= LEAST_OPERATIONS, operations
    # All that is meant to vary has varied.
    kinds = ("Dispatch", "Again", "Combine", "Backward", "Drop", "Refuse", "Rebuild")
    assert min(steps[kind] for kind in kinds) >= 100, steps
    for key in ("dtype", "mode", "ranks", "expert_tensor", "scale", "alignment", "capacity"):
        assert len({getattr(layout, key) for layout in layouts}) >= 2, key
    assert {layout.dtype for layout in layouts} >= {"bf16", "fp16", "fp32", "fp64", "fp8_e4m3"}
    print(json.dumps({"operations": operations, **steps}))


def test_paths_are_those_of_the_caller(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for flags in (["--save", "mine.json", "--operations", "1"], ["--replay", "mine.json"]):
        done = subprocess.run(
            ["bash", str(ROOT / "scripts" / "fuzz.sh"), "--ranks", "1", *flags],
            env=os.environ | {"PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "mine.json").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--operations", "0"], "--operations 0: give at least 1"),
        (["--save", "/proc/x"], "--save /proc/x: cannot be written"),
        (["--replay", "/nope"], "--replay /nope: cannot be read"),
        (["--replay", "/dev/null"], "--replay /dev/null: there is no program in it"),
        (["--replay", "empty.json"], "line 1 is no program: KeyError('layout')"),
    ],
)
def test_mistakes(
    flags: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}\n")
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(flags)
    assert stopped.value.code == 2 and told in capsys.readouterr().err


LAYOUT = Layout(ranks=2, local_experts=1, top_k=2, hidden=4)


def _world() -> World:
    return make_world(LAYOUT, Dispatch(seed=1, tokens=(3, 2), slots=2, routing="repeated"))


def test_the_model_by_hand() -> None:
    """Rows by expert, source rank, token, slot; sums with the experts' factors."""
    world = _world()
    world.idx[0][:] = -1
    world.idx[1][:] = -1
    world.idx[0][1] = 1
    world.idx[1][0, 1] = 1
    assert world.places(0) == []
    assert world.places(1) == [(0, 1, 0), (0, 1, 1), (1, 0, 1)]
    out = world.out(0, "no", rounds_shares=False).value
    # expert 1 has factor -1
    assert out[1].tolist() == (-2 * world.x[0][1]).tolist() and not out[[0, 2]].any()


@pytest.mark.parametrize("change", [2.0**-22, float("nan")])
def test_a_wrong_number_is_noticed(change: float) -> None:
    expected = _world().out(0, "combine", rounds_shares=False)
    mine = expected.value.clone()
    expected.check(mine, "out")
    mine[1, 2] += change * max(1.0, float(mine[1, 2].abs()))
    with pytest.raises(AssertionError, match=r"out\[1, 2\]"):
        expected.check(mine, "out")


def test_a_failure_is_reported_and_the_pool_goes_on() -> None:
    layout = replace(LAYOUT, tokens_per_rank=3)
    good = Program(layout, (Dispatch(seed=1, tokens=(3, 2), slots=2),))
    bad = Program(layout, (Dispatch(seed=1, tokens=(4, 2), slots=2),))
    with RankPool(2, "reference", limit_s=60.0) as pool:
        with pytest.raises(AssertionError, match="tokens_per_rank=3"):
            pool.run(bad)
        assert pool.run(good) == 1
