"""The command line of `moe-ep bench`, its table and its plot."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from moe_ep.cli import main
from moe_ep.cli.bench import options, plot, report
from moe_ep.cli.bench.runner import Timing


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_parser(parser.add_subparsers(), "bench")
    return parser.parse_args(["bench", *flags])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--backend", "cuda,fast"), "'fast'; choose from auto, reference, cuda, nvshmem"),
        (("--dtype", "int8"), "'int8'; choose from bf16"),
        (("--peer", "nccl"), "'nccl'; choose from all_to_all, megatron, deep_ep"),
        (("--tokens", "8,many"), "'8,many' is not a number, or several"),
        (("--iterations", "0"), "--iterations: 0; it must be at least 1"),
        (("--warmup", "-1"), "--warmup: -1; it must be at least 0"),
        (("--json", "/no/such/folder/r.json"), "there is no folder /no/such/folder"),
        (("--plot", "/no/such/folder/r.png"), "there is no folder /no/such/folder"),
        (("--json", "/"), "--json /: a folder; give the name of a file"),
        (("--json", "/proc/r.json"), "--json /proc/r.json: cannot be written ("),
        (("--plot", "/proc/r.png"), "--plot /proc/r.png: cannot be written ("),
        (("--plot", "r"), "--plot r: its name must end in one of ."),
        (("--tokens", "0", "--backend", "reference"), "tokens_per_rank: 0"),
        (("--num-sms", "0", "--backend", "reference"), "dispatch.num_sms: 0"),
        (("--layout", "/no/such.yaml"), "/no/such.yaml: cannot be read"),
    ],
)
def test_mistakes(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(["bench", *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert told in capsys.readouterr().err


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "r.png"]) == 2
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_layouts() -> None:
    flags = ("--tokens", "8,4", "--dtype", "fp32", "--backend", "cuda,reference", "--top-k", "3")
    found = options.layouts(parsed(*flags, "--exact-combine", "--num-sms", "7"), 4)
    order = [(layout.tokens_per_rank, layout.backend) for layout in found]
    assert order == [(8, "cuda"), (8, "reference"), (4, "cuda"), (4, "reference")]
    for layout in found:
        assert (layout.model.top_k, layout.parallel.expert) == (3, 4)
        assert layout.dispatch.exact_combine and layout.dispatch.num_sms == 7
    found = options.layouts(parsed("--num-sms", "16,8", "--tokens", "4,2"), 2)
    order = [(layout.dispatch.num_sms, layout.tokens_per_rank) for layout in found]
    assert order == [(16, 4), (16, 2), (8, 4), (8, 2)]
    (plain,) = options.layouts(parsed(), 16)
    assert (plain.tokens_per_rank, plain.model.num_experts, plain.backend) == (4096, 16, "auto")
    assert not plain.dispatch.exact_combine


def test_a_layout_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(
        "model: {hidden: 256, num_experts: 8, top_k: 2}\nparallel: {expert: 2}\n"
        "dispatch: {dtype: fp8_e4m3, exact_combine: true}\nbackend: reference\n"
    )
    (layout,) = options.layouts(parsed("--layout", str(file), "--hidden", "128"), 2)
    assert (layout.model.hidden, layout.tokens_per_rank) == (128, 4096)
    assert layout.dispatch.exact_combine and layout.dispatch.dtype == "fp8_e4m3"
    assert not options.wants_gpu(parsed("--layout", str(file)))
    assert options.wants_gpu(parsed("--layout", str(file), "--backend", "cuda,reference"))
    assert options.wants_gpu(parsed()) and not options.wants_gpu(parsed("--backend", "reference"))


def timing(name: str, **figures: Any) -> dict[str, Any]:
    return dataclasses.asdict(Timing(name, "cuda", **figures))


SHARED = {
    "ranks": 8,
    "devices": 1,
    "device": "H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11",
    "all_to_all_backend": "gloo",
    "threads_per_rank": 1,
    "iterations": 20,
    "copy_GBps": 4200.0,
}


def run(tokens: int, **changes: Any) -> dict[str, Any]:
    (layout,) = options.layouts(parsed("--tokens", str(tokens), "--backend", "cuda"), 8)
    timings = [
        timing(
            "dispatch",
            median_us=100.0,
            min_us=90.0,
            max_us=120.0,
            alone_us={"median": 95.5, "min": 1.0, "max": 2.0},
            payload_bytes=1_000_000,
            hbm_bytes=300_000_000,
            link_bytes=2_500_000,
            floor_us=71.4,
            ratio_to_floor=1.4,
        ),
        timing("combine", error="rank 3: ValueError: no"),
    ]
    return {
        "layout": layout.model_dump(),
        "backend": "cuda",
        "tokens": tokens,
        "peers": {"all_to_all": "2.11", "megatron": "0.19.2"},
        "timings": timings,
        "whole_way_us": 250.0,
        "ratios": {"floor": 1.5, "all_to_all": 0.5, "megatron": 0.25},
        "errors": {"combine": "rank 3: ValueError: no", "peer deep_ep": "rank 0: ImportError: x"},
        **changes,
    }


def test_table() -> None:
    lines = report.table(SHARED, run(4096)).splitlines()
    assert "backend cuda, 8 ranks on 1 x H200, 24 SMs a rank" in lines[0]
    assert "CUDA 13.0, driver 580.1, a copy moves 4200 GB/s" in lines[2]
    assert "megatron 0.19.2" in lines[2]
    dispatch = next(line for line in lines if line.startswith("  dispatch"))
    # 300 MB in 100 us are 3000 GB/s; no graph and no host time.
    figures = "100.0 90.0 120.0 95.5 - - 1.00 300.00 2.50 3000.00 71.4 1.40"
    assert dispatch.split() == ["dispatch", *figures.split()]
    assert lines.count("  combine   failed: rank 3: ValueError: no") == 1
    assert lines[-2] == "# peer deep_ep failed: rank 0: ImportError: x"
    assert lines[-1] == (
        "# dispatch + combine: 250 us, 1.50 x the floor, 0.50 x all_to_all there and back, "
        "0.25 x megatron whole way"
    )


def test_table_gives_the_signal_beside_the_floor() -> None:
    lines = report.table(SHARED, run(128, signal_round_trip_us=1.234)).splitlines()
    assert lines[-2] == "# a signal from rank 0 to rank 1 and back: 1.23 us"


def test_table_on_a_cpu() -> None:
    text = report.table({**SHARED, "copy_GBps": None}, run(64, whole_way_us=None))
    assert "SMs" not in text and "HBM" not in text and "1 threads a rank" in text
    assert "dispatch + combine" not in text


def test_plot_series(tmp_path: Path) -> None:
    runs = [run(512), run(64), run(64, backend="reference", ratios={})]
    times = plot.collect(runs, plot._times)
    assert times == {
        "cuda bf16: dispatch": [(64, 100.0), (512, 100.0)],
        "reference bf16: dispatch": [(64, 100.0)],
    }
    file = tmp_path / "r.png"
    plot.draw(file, SHARED, runs)
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    nothing = run(64, timings=[], ratios={})
    plot.draw(file, SHARED, [nothing])  # a run in which everything failed
