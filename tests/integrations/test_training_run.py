"""The training example end to end: real processes, real text, a few steps.

What a user starts is started so: the run of fifty steps, a killed rank, and refusals. Runs that are
compared with it are the same ranks' code in processes that need no start.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_ranks import read_metrics
from training_ranks import train as train_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_mixtral.py"
LIMIT_S = 240

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.timeout(2 * LIMIT_S),
]
SMALL = ("--device", "cpu", "--micro-batch", "2", "--seq-len", "64", "--warmup", "2")


def start(out, *flags):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, "--out", str(out), *map(str, flags)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_script(out, *flags):
    """Runs to the end; the metrics of each step, and what was printed."""
    process = start(out, *flags)
    try:
        printed, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, errors[-4000:]
    return read_metrics(out), printed, errors


@pytest.fixture
def train(training_server):
    """train(out, *flags, ranks=2): the metrics of each step of a run without torchrun."""

    def run(out, *flags, ranks=2):
        return train_ranks(training_server, ranks, out, *SMALL, *flags)

    return run


def losses(records):
    return [record["lm_loss"] for record in records]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Fifty steps on two ranks with moe_ep, a checkpoint every twenty."""
    folder = tmp_path_factory.mktemp("reference")
    flags = ("--steps", 50, "--eval-every", 25, "--save", folder / "ckpt", "--save-every", 20,
             "--statistics-every", 20)  # fmt: skip
    return folder, *run_script(folder / "out", *flags)


def test_it_learns_and_reports(reference):
    folder, records, printed, errors = reference
    assert [record["step"] for record in records] == list(range(1, 51))
    assert 5.4 < records[0]["lm_loss"] < 5.7  # ln 256 = 5.55: nothing known yet
    assert records[-1]["lm_loss"] < records[0]["lm_loss"] * 2 / 3
    assert [r["step"] for r in records if "validation_loss" in r] == [25, 50]
    for record in records:
        per_layer = record["tokens_per_expert"]
        # Each of 8 x 64 tokens goes to two experts of each layer, on whatever ranks they are.
        assert [sum(layer) for layer in per_layer] == [2 * 8 * 64] * 2
        assert record["tokens_per_expert_max"] == max(map(max, per_layer))
        assert record["loss"] > record["lm_loss"] and record["grad_norm"] > 0
    for name in ("loss.png", "experts.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")
        assert str(folder / "out" / name) in printed
    assert "train:" in errors and "arning" not in errors, errors[-4000:]


def test_statistics_say_what_the_routers_decided(reference):
    _, records, *_ = reference
    noted = {r["step"]: r["statistics"] for r in records if "statistics" in r}
    assert sorted(noted) == [20, 40]
    for step, scalars in noted.items():
        since = [r["tokens_per_expert"] for r in records if step - 20 < r["step"] <= step]
        trained = sum(sum(map(sum, layers)) for layers in since)
        # Validation, after step 25, routes 8 micro-batches of 2 x 64 tokens a rank: forward only.
        validated = 2 * 2 * 2 * 8 * 2 * 64 if step == 40 else 0
        rows = sum(scalars[f"moe_ep/rows_{link}"] for link in ("own_rank", "own_host"))
        assert rows == 4 * trained + 2 * validated and scalars["moe_ep/rows_other_hosts"] == 0
        assert sum(scalars[f"moe_ep/rank_{rank}/rows"] for rank in (0, 1)) == trained + validated
        assert scalars["moe_ep/bytes_own_host"] == scalars["moe_ep/rows_own_host"] * 64 * 4
        assert 1 <= scalars["moe_ep/imbalance"] <= 8
        for name in ("dispatch_us", "combine_backward_us_max", "layer_1/dispatch_us"):
            assert scalars[f"moe_ep/{name}"] > 0
        assert {name.split("/")[1] for name in scalars if "layer_" in name} == {
            "layer_1", "layer_2",
        }  # fmt: skip


def test_a_resumed_run_repeats_an_uninterrupted_one(reference, train, tmp_path):
    folder, whole, *_ = reference
    checkpoint = folder / "ckpt" / "step_0000020"
    resumed = train(tmp_path / "out", "--steps", 40, "--resume", checkpoint, "--eval-every", 0)
    assert [record["step"] for record in resumed] == list(range(21, 41))
    repeated = whole[20:40]
    assert losses(resumed) == pytest.approx(losses(repeated), abs=1e-6)
    assert [r["tokens_per_expert"] for r in resumed] == [r["tokens_per_expert"] for r in repeated]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_case_27_megatrons_own_dispatchers_give_the_same_losses(
    reference, train, tmp_path, dispatcher
):
    own = train(tmp_path / "out", "--steps", 50, "--dispatcher", dispatcher, "--eval-every", 0)
    assert losses(own) == pytest.approx(losses(reference[1]), rel=1e-5)


def test_bf16_losses_are_those_of_allgather(train, tmp_path):
    # One micro-batch a step: bf16 is slow on a CPU.
    flags = ("--steps", 50, "--dtype", "bf16", "--global-batch", 4, "--eval-every", 0)
    runs = [
        train(tmp_path / name, *flags, "--dispatcher", name) for name in ("deepep", "allgather")
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=5e-3)


@pytest.mark.parametrize(
    "flags",
    [
        ("--pp", 2, "--ep", 2, "--global-batch", 16),
        ("--tp", 2, "--ep", 2),
        ("--tp", 2, "--ep", 2, "--expert-tp", 2),
    ],
    ids=["pp2-ep2", "tp2-ep2", "tp2-ep2-etp2"],
)
def test_four_ranks_train_with_the_losses_of_allgather(train, tmp_path, flags):
    runs = []
    for dispatcher in ("deepep", "allgather"):
        more = ("--dispatcher", dispatcher, "--steps", 8, "--lr", 1e-2)
        runs.append(train(tmp_path / dispatcher, *flags, *more, ranks=4))
    own, stock = runs
    assert losses(own) == pytest.approx(losses(stock), rel=1e-5)
    assert own[-1]["lm_loss"] < own[0]["lm_loss"] - 0.3
    tokens = 64 * (16 if "--global-batch" in flags else 8)
    assert [sum(layer) for layer in own[0]["tokens_per_expert"]] == [2 * tokens] * 2


def test_bf16_on_one_text_file(train, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text that is easy to learn\n" for i in range(400)))
    flags = ("--dtype", "bf16", "--data", text, "--steps", 6, "--save", tmp_path / "ckpt")
    records = train(tmp_path / "out", *flags, "--lr", 1e-2)
    assert records[-1]["lm_loss"] < records[0]["lm_loss"] - 0.3
    resumed = train(tmp_path / "more", *flags[:4], "--steps", 7, "--lr", 1e-2, "--resume",
                        tmp_path / "ckpt")  # fmt: skip
    assert [record["step"] for record in resumed] == [7]


def test_a_killed_rank_ends_the_run(tmp_path):
    psutil = pytest.importorskip("psutil")
    process = start(tmp_path / "out", "--steps", 100_000, "--eval-every", 0)
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children()
        victim = next(rank for rank in ranks if rank.environ().get("RANK") == "1")
        victim.send_signal(signal.SIGKILL)
        process.communicate(timeout=90)
        assert process.returncode != 0
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def refused(tmp_path, *flags):
    process = start(tmp_path / "out", *flags)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "Traceback" not in errors
    return errors


def test_the_real_mixtral_is_refused_politely(tmp_path):
    errors = refused(tmp_path, "--model", "mixtral_8x7b", "--expert-tp", "2")
    assert "GiB per rank are needed" in errors and "GiB per rank are available" in errors


def test_nothing_to_resume_is_told_plainly(tmp_path):
    assert "no checkpoint in" in refused(tmp_path, "--resume", tmp_path / "nowhere")
