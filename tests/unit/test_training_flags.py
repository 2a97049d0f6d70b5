"""The flags of the training example: what they become, and what is refused before any rank runs."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from mixtral import cli, deepspeed_config, ep_layout, launch, megatron_lm, memory, resume
from mixtral.metrics import ExpertCounter, MetricsLog, expert_metrics, read_metrics
from moe_ep import EPLayout, backends


def resolved(world, *flags):
    options = cli.parse([*flags])
    cli.resolve(options, world)
    return options


def test_defaults_are_two_ranks_that_share_the_experts():
    options = cli.parse([])
    assert cli.ranks_wanted(options, num_gpus=0) == 2
    cli.resolve(options, 2)
    assert (options.ep, options.dp, options.global_batch, options.num_micro_batches) == (
        2,
        2,
        16,
        2,
    )


@pytest.mark.parametrize(
    ("flags", "gpus", "ranks"),
    [
        ([], 8, 8),
        (["--nproc", "3"], 8, 3),
        (["--tp", "2", "--pp", "2"], 0, 4),
        (["--ep", "4", "--expert-tp", "2"], 0, 8),
        (["--tp", "2"], 1, 2),
    ],
)
def test_number_of_ranks(flags, gpus, ranks):
    assert cli.ranks_wanted(cli.parse(flags), gpus) == ranks


@pytest.mark.parametrize(
    ("world", "flags", "ep"),
    [
        (4, ["--pp", "2"], 2),
        (4, ["--tp", "2"], 4),
        (4, ["--tp", "2", "--expert-tp", "2"], 2),
        (6, [], 2),
        (32, [], 8),
    ],
)
def test_experts_spread_as_far_as_ranks_and_experts_allow(world, flags, ep):
    assert resolved(world, *flags).ep == ep


@pytest.mark.parametrize(
    ("world", "flags", "message"),
    [
        (2, ["--ep", "3"], r"--nproc \(2\) must be a multiple of --ep x --expert-tp x --pp \(3\)"),
        (3, ["--ep", "3"], r"number of experts \(8\).*--ep \(3\)"),
        (3, ["--tp", "2"], r"--nproc \(3\).*--tp x --pp \(2\)"),
        (8, ["--pp", "4"], r"number of layers \(2\).*--pp \(4\)"),
        (2, ["--global-batch", "6"], r"--global-batch \(6\).*\(8\)"),
    ],
)
def test_sizes_that_do_not_fit_name_both_numbers(world, flags, message):
    with pytest.raises(ValueError, match=message):
        resolved(world, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--top-k", "9"],
        ["--lr", "-1"],
        ["--resume"],
        ["--data", "/no/such"],
        ["--", "--bf16"],
        ["--out", "/dev/null"],
        ["--out", "/proc/x"],
        ["--save", "/proc/x/y"],
    ],
)
def test_mistakes_end_with_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(flags)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_frameworks_do_not_overwrite_each_other():
    megatron, deepspeed = (cli.parse(["--framework", name]).out for name in cli.FRAMEWORKS)
    assert megatron == cli.ROOT / "runs" / "mixtral_tiny"
    assert deepspeed == cli.ROOT / "runs" / "mixtral_tiny_deepspeed"


def test_a_backend_that_cannot_run_is_one_line_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "layout.yaml"
    layout.write_text("model: {hidden: 8, num_experts: 8, top_k: 2}\nparallel: {expert: 3}\n")
    monkeypatch.setattr(backends, "reasons", lambda layout: {"cuda": "no core", "nvshmem": None})
    monkeypatch.delenv("MOE_EP_BACKEND", raising=False)

    def told(*flags: str) -> str:
        assert launch.launch(cli.parse(["--device", "cpu", *flags]), "script", []) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "backend cuda cannot run: no core; --backend reference" in told("--backend", "cuda")
    assert "nvshmem cannot run: this run is on the CPU" in told("--backend", "nvshmem")
    assert "3 does not divide model.num_experts=8" in told("--layout", str(layout))
    monkeypatch.setenv("MOE_EP_BACKEND", "cuda")
    assert "backend cuda cannot run: no core" in told()


def test_timeout_s_is_for_the_dispatcher_too(tmp_path: Path) -> None:
    def seconds(*flags: str) -> tuple[float, float]:
        limits = ep_layout.layout_of(resolved(2, *flags), on_gpu=False).timeouts
        return limits.first_s, limits.steady_s

    assert seconds("--timeout-s", "400") == (400.0, 400.0)
    assert seconds() == (120.0, 60.0) and cli.parse([]).timeout_s == 300
    flags = ["--framework", "deepspeed", "--timeout-s", "400"]
    section = deepspeed_config.build(resolved(2, *flags), True)["moe_ep"]
    assert section["timeouts"] == {"first_s": 400.0, "steady_s": 400.0}
    options = resolved(2, "--megatron-lm", str(tmp_path), "--timeout-s", "400")
    assert megatron_lm.environment(options)["MOE_EP_TIMEOUT_S"] == "400"


def test_the_tiny_layout_is_of_the_tiny_model() -> None:
    layout = EPLayout.from_yaml(cli.ROOT / "configs" / "mixtral_tiny_cpu.yaml")
    assert layout == ep_layout.layout_of(resolved(2), on_gpu=False)


def test_parameters_match_the_real_mixtral():
    options = resolved(1, "--model", "mixtral_8x7b")
    assert memory.parameters_per_rank(options) == pytest.approx(46.7e9, rel=0.002)
    assert memory.parameters_per_rank(resolved(8, "--model", "mixtral_8x7b")) < 8e9


def test_a_model_that_cannot_fit_is_refused_with_both_numbers():
    options = resolved(2, "--model", "mixtral_8x7b")
    message = memory.refusal(options, 12 * 2**30, "here")
    assert "GiB per rank are needed" in message and "12.0 GiB per rank are available" in message
    assert memory.refusal(resolved(2), 12 * 2**30, "here") is None
    assert memory.refusal(options, None, "unknown") is None


def test_help_teaches_without_anything_installed():
    python = shutil.which("python3") or sys.executable
    script = str(cli.ROOT / "scripts" / "train_mixtral.py")
    # -S -E: the standard library alone.
    shown = subprocess.run([python, "-S", "-E", script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for flag in ("--dispatcher", "--expert-tp", "--resume", "examples", "--megatron-lm"):
        assert flag in shown.stdout


def test_hand_over_to_megatron_lm(tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    flags = ["--megatron-lm", str(tmp_path), "--backend", "reference", "--tp", "2"]
    options = resolved(4, *flags, "--", "--log-throughput")
    target = megatron_lm.arguments(options)
    assert target[:2] == ["-m", "moe_ep.integrations.megatron"]
    assert target[2:5] == ["--moe-ep-backend", "reference", str(tmp_path / "pretrain_gpt.py")]
    assert target[-1] == "--log-throughput"
    for name, value in (
        ("--moe-token-dispatcher-type", "deepep"),
        ("--expert-model-parallel-size", "4"),
        ("--tensor-model-parallel-size", "2"),
        ("--num-experts", "8"),
    ):
        assert target[target.index(name) + 1] == value
    assert "--sequence-parallel" in target and "--mock-data" in target


def test_hand_over_needs_the_script(tmp_path):
    with pytest.raises(ValueError, match=r"no pretrain_gpt\.py"):
        megatron_lm.arguments(resolved(2, "--megatron-lm", str(tmp_path)))


def test_newest_checkpoint_is_found_and_compared(tmp_path):
    options = resolved(2)
    for step in (20, 40):
        folder = tmp_path / f"step_{step:07d}"
        folder.mkdir()
        record = {"step": step, "settings": resume.settings(options)}
        (folder / "run.json").write_text(json.dumps(record))
    (tmp_path / "step_0000060").mkdir()  # a folder without its record is not complete
    newest = resume.latest(tmp_path)
    assert newest.name == "step_0000040" == resume.latest(newest).name
    assert resume.check(newest, resume.settings(options), steps=60) == 40
    with pytest.raises(ValueError, match=r"lr was 0\.003, is 0\.1"):
        resume.check(newest, resume.settings(resolved(2, "--lr", "0.1")), steps=60)
    with pytest.raises(ValueError, match="ask for more steps"):
        resume.check(newest, resume.settings(options), steps=40)
    with pytest.raises(ValueError, match="no checkpoint in"):
        resume.latest(tmp_path / "nowhere")


def test_no_gpu_is_said_clearly(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU"):
        launch.num_gpus(argparse.Namespace(device="cuda"))


def test_a_resumed_log_holds_each_step_once(tmp_path):
    log = MetricsLog(tmp_path, 1)
    for step in (1, 2, 3):
        log.write({"step": step, "run": "first"})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')  # killed while writing
    log = MetricsLog(tmp_path, 3)
    log.write({"step": 3, "run": "second"})
    log.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["run"]) for r in records] == [(1, "first"), (2, "first"), (3, "second")]


class _Router(torch.nn.Module):
    def forward(self, routing_map):
        return routing_map.float(), routing_map


def test_expert_counter_counts_training_passes_once():
    router = _Router()
    counter = ExpertCounter([(1, router)], num_layers=2, num_experts=3)
    routing_map = torch.tensor([[True, True, False], [False, True, False]])
    router(routing_map)
    router(routing_map)
    router.eval()
    router(routing_map)
    counts = counter.take()
    assert counts.tolist() == [[0, 0, 0], [2, 4, 0]]
    assert counter.take().sum() == 0
    numbers = expert_metrics(counts)
    assert numbers["tokens_per_expert_max"] == 4 and numbers["tokens_per_expert_mean"] == 1.0
    counter.close()
    router.train()(routing_map)
    assert counter.take().sum() == 0


def test_ranks_that_share_a_gpu_get_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch._sharing(2, 2) == [] and launch._sharing(2, 0) == []
    assert launch._sharing(4, 1) == [] and "without MPS" in capsys.readouterr().err
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\n")
    control.chmod(0o755)
    script, separator = launch._sharing(4, 1)
    assert Path(script).name == "with_mps.sh" and os.access(script, os.X_OK) and separator == "--"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")  # the user's own server
    assert launch._sharing(4, 1) == []
