"""`train_mixtral --framework deepspeed`, as a user starts it."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from training_ranks import read_metrics, train

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_mixtral.py"
STOCK = ["--steps", "20", "--eval-every", "0", "--dispatcher", "alltoall"]


def _run(out: Path, *flags: str, code: int = 0) -> tuple[list[dict], str]:
    command = [sys.executable, str(SCRIPT), "--framework", "deepspeed", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(out), *flags], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == code, done.stdout + done.stderr
    return read_metrics(out) if code == 0 else [], done.stdout + done.stderr


def _train(ranks: RankServer, out: Path, *flags: str) -> list[dict]:
    """The same without torchrun, on two ranks: the metrics of each step."""
    return train(ranks, 2, out, "--framework", "deepspeed", *flags)


def test_sixty_steps_and_the_step_time_of_stock(
    deepspeed_ranks: RankServer, tmp_path: Path
) -> None:
    mine = _train(deepspeed_ranks, tmp_path / "ours", "--steps", "60")
    assert mine[-1]["lm_loss"] < mine[0]["lm_loss"] * 2 / 3
    stock = _train(deepspeed_ranks, tmp_path / "stock", *STOCK)
    for step, (one, other) in enumerate(zip(mine[:20], stock, strict=True), 1):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6), step
    # Every token is moved once per layer and choice: tokens * top-2 * 2 layers.
    tokens = mine[0]["tokens_per_s"] * mine[0]["step_ms"] / 1000
    assert mine[0]["rows_moved"] == pytest.approx(tokens * 2 * 2) and stock[0]["rows_moved"] == 0
    for attempt in ("second", "third"):
        if _quickest(mine) <= _quickest(stock):
            break
        # Other processes may have taken more from one than from the other.
        mine = _train(deepspeed_ranks, tmp_path / f"{attempt} ours", "--steps", "20")
        stock = _train(deepspeed_ranks, tmp_path / f"{attempt} stock", *STOCK)
    print(f"step time {_quickest(mine):.0f} ms, stock {_quickest(stock):.0f} ms")
    assert _quickest(mine) <= _quickest(stock)


def _quickest(records: list[dict]) -> float:
    """Milliseconds of the quickest steps: what other processes took is in all others."""
    return statistics.mean(sorted(record["step_ms"] for record in records[1:20])[:5])


def test_resume_repeats_the_uninterrupted_run(deepspeed_ranks: RankServer, tmp_path: Path) -> None:
    flags = ["--seq-len", "32", "--micro-batch", "2", "--warmup", "2", "--eval-every", "3"]
    saves = ["--save", str(tmp_path / "checkpoints"), "--save-every", "3"]
    through = _train(deepspeed_ranks, tmp_path / "through", *flags, *saves, "--steps", "6")
    middle = str(tmp_path / "checkpoints" / "step_0000003")
    resumed, text = _run(tmp_path / "resumed", *flags, "--steps", "6", "--resume", middle)
    assert "resumed from" in text
    assert {"metrics.jsonl", "loss.png", "experts.png"} <= {
        path.name for path in (tmp_path / "resumed").iterdir()
    }
    assert "validation loss" in text and "compil" not in text.lower()
    assert [r["lm_loss"] for r in resumed] == [r["lm_loss"] for r in through[3:]]


def test_autoep_in_bf16(deepspeed_ranks: RankServer, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    flags = ["--seq-len", "32", "--micro-batch", "2", "--eval-every", "0", "--steps", "8"]
    flags += ["--autoep", "--dtype", "bf16", "--lr", "1e-2", "--statistics-every", "4"]
    records = _train(deepspeed_ranks, tmp_path, *flags)
    assert records[-1]["lm_loss"] < records[0]["lm_loss"]
    assert records[-1]["rows_moved"] > 0 and records[-1]["aux_loss"] > 0
    noted = records[3]["statistics"]  # that of the last step counts the validation, too
    rows = sum(noted[f"Train/moe_ep/rank_{rank}/rows"] for rank in (0, 1))
    assert rows == sum(record["rows_moved"] for record in records[:4])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "2"], "--tp 2"),
        (["--dispatcher", "allgather"], "alltoall"),
        (["--zero", "3"], "--autoep"),
    ],
)
def test_flags_deepspeed_does_not_take(tmp_path: Path, flags: list[str], words: str) -> None:
    _, text = _run(tmp_path, *flags, code=2)
    assert words in text and "Traceback" not in text
