"""The command `moe-ep plan`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from moe_ep.cli import main, plan_plot
from moe_ep.cost import Cluster, predict, step
from moe_ep.layout import EPLayout

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = sorted((ROOT / "configs").glob("*.yaml"))
SWEEP = ("--sweep", "--ffn-hidden", "14336")
MIXTRAL = str(ROOT / "configs" / "mixtral_8x7b_ep8.yaml")
CLUSTER = """
gpus_per_host: 2
sms: 10
hbm_GBps: 1.0
nvlink_GBps: 0.5
hbm_efficiency: 1.0
nvlink_efficiency: 1.0
sm_load_GBps: 0.4
sm_store_GBps: 0.2
launch_us: 1.0
nvlink_signal_us: 0.25
notify_us: 7.0
"""


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("file", LAYOUTS, ids=lambda file: file.stem)
def test_every_layout(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--sweep", "--ffn-hidden", "2048", "--memory-gb", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == f"# moe-ep plan: {file.name} on h100_cx7; a model, not a measurement"
    assert any(line.startswith("# take EP ") for line in lines)
    for name in ("dispatch", "combine", "all-to-all there", "all-to-all back", "moe_ep"):
        (row,) = (line for line in lines if line.startswith(f"  {name} ") and " + " not in line)
        assert float(row[24:36]) > 0


def test_figures_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--cluster", "h200_cx7", "--tokens", "512", "--imbalance", "1.3", "--host-limit", "4")
    file = ROOT / "configs" / "deepseek_v3_ep64.yaml"
    data = planned(capsys, str(file), *flags)
    layout = EPLayout.from_yaml(file).replace(tokens_per_rank=512)
    found = predict(layout, Cluster.named("h200_cx7"), 512, 1.3, 4)
    assert (data["us"], data["all_to_all_us"]) == (found.us, found.peer_us)
    assert data["buffer_bytes"] == found.buffer_bytes
    assert data["costs"]["combine"]["nic_bytes"] == found.combine.nic_bytes
    assert data["step"]["moe_ep"]["us"] == step(found).us
    phases = {p["name"]: p["us"] for p in data["costs"]["dispatch"]["phases"]}
    assert sum(phases.values()) + 40 == pytest.approx(data["costs"]["dispatch"]["us"])
    for point in data["row_alignment"]:
        other = layout.replace(**{"dispatch.row_alignment": point["value"]})
        expected = predict(other, Cluster.named("h200_cx7"), 512, 1.3, 4)
        assert point["us"] == expected.us
        assert point["padding_rows"] == expected.routing.padding_rows
    assert [p["value"] for p in data["row_alignment"]] == [1, 16, 32, 64, 128]
    assert [p["value"] for p in data["imbalances"]] == [1.0, 1.1, 1.25, 1.3, 1.5, 2.0]
    assert next(p["us"] for p in data["imbalances"] if p["value"] == 1.3) == found.us


def test_three_tokens_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, 4 experts, top-2, 3 tokens of 8 bf16 columns: a token goes to 5/3 ranks (of the
    six pairs of experts two are on one rank). Rates in bytes a microsecond: HBM 1000, NVLink 500.

    stage  48 read + 48 written, 1 us of launch
    pull   80 read + 96 written (40 of the 80 from the other rank), 1 + 0.25 us
    push   96 read + 80 written, 1 + 0.25 us; sum 80 read + 48 written, the same kernel
    """
    cluster, layout = tmp_path / "tiny.yaml", tmp_path / "layout.yaml"
    cluster.write_text(CLUSTER)
    layout.write_text(
        "model: {hidden: 8, num_experts: 4, top_k: 2, num_moe_layers: 10}\n"
        "parallel: {expert: 2}\ntokens_per_rank: 3\n"
    )
    data = planned(capsys, str(layout), "--cluster", str(cluster))
    dispatch, combine = data["costs"]["dispatch"], data["costs"]["combine"]
    assert data["destinations_per_token"] == pytest.approx(5 / 3)
    assert (dispatch["hbm_bytes"], combine["hbm_bytes"]) == pytest.approx((272, 304))
    assert (dispatch["nvlink_bytes"], combine["nvlink_bytes"]) == pytest.approx((40 + 80, 40))
    # The counts: 80 bytes over NVLink.
    assert dispatch["us"] == pytest.approx(7 + (0.16 + 0.25) + 1.096 + (0.176 + 1.25))
    assert combine["us"] == pytest.approx(0.176 + 1.25 + 0.128)
    both = dispatch["us"] + combine["us"]
    assert data["step"]["moe_ep"]["us"] == pytest.approx(10 * (2 * both - 7 - 0.41))
    # Signals 7 x 64 words; counts 2 x 10 words; lists 3 x 2 x 16 and 3 x 2 x 8; two slots of 48
    # and 24; partial sums 3 x 2 x 16; 24 and 24. Each rounded up to 256, the rows of a slot too.
    assert data["buffer_bytes"] == 3584 + 256 + 256 + 256 + 2 * 512 + 256 + 256 + 256
    assert main(["plan", str(layout), "--cluster", str(cluster)]) == 0
    text = capsys.readouterr().out
    assert "3 tokens x 8, top-2 of 4 experts, bf16" in text
    assert "a token goes to 1.67 ranks on 1.00 hosts; a rank gets 6 expert rows + 0" in text
    assert f"  {'dispatch + combine':<22}{both:>10.1f}" in text


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, MIXTRAL, "--sweep")["sweep"]
    assert [c["name"] for c in data["choices"]] == [
        "EP 8 x ETP 1",
        "EP 4 x ETP 2",
        "EP 2 x ETP 4",
        "EP 1 x ETP 8",
    ]
    assert data["recommended"] == "EP 8 x ETP 1" and "the next, takes" in data["reason"]
    assert all(c["weight_bytes"] is None for c in data["choices"])
    weights = ("--ffn-hidden", "14336", "--bytes-per-parameter", "2")
    data = planned(capsys, MIXTRAL, "--sweep", "--gpus", "4", *weights, "--memory-gb", "48")[
        "sweep"
    ]
    # 32 layers x 8 experts x 3 x 4096 x 14336 x 2 bytes = 90.2 GB; a half fits 48 GB.
    fitting = {c["name"]: c["replicas"] for c in data["choices"] if not c["refusal"]}
    assert fitting["EP 2 x ETP 1"] == 2 and fitting["EP 4 x ETP 1"] == 1
    assert "EP 1 x ETP 1" not in fitting
    (half,) = (c for c in data["choices"] if c["name"] == "EP 2 x ETP 1")
    assert half["weight_bytes"] == 32 * 8 * 3 * 4096 * 14336 * 2 / 2
    assert "EP 1 x ETP 1 would be faster but needs 90.2 GB a GPU" in data["reason"]
    assert main(["plan", MIXTRAL, "--sweep", *weights, "--memory-gb", "1"]) == 0
    assert "# none fits: the smallest, EP 8 x ETP 1, needs 11.4 GB" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--sweep",)])
def test_plot(tmp_path: Path, flags: tuple[str, ...]) -> None:
    file = tmp_path / "plan.png"
    assert main(["plan", MIXTRAL, "--plot", str(file), *flags]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_bars_are_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, MIXTRAL)
    ends = {name: start + width for name, start, width, _ in plan_plot.bars(data)}
    assert ends == {name: pytest.approx(cost["us"]) for name, cost in data["costs"].items()}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("/no/such.yaml",), "/no/such.yaml: cannot be read"),
        ((MIXTRAL, "--cluster", "x"), "no cluster 'x'; known: b200_cx7, gb200_nvl72, h100_cx7"),
        ((MIXTRAL, "--tokens", "0"), "--tokens: 0; give at least 1"),
        ((MIXTRAL, "--imbalance", "0.9"), "imbalance: 0.9"),
        ((MIXTRAL, "--imbalance", "nan"), "imbalance: nan"),
        ((MIXTRAL, "--host-limit", "2"), "host limit 2: there are 1 hosts"),
        ((MIXTRAL, "--gpus", "8"), "--gpus is for --sweep"),
        ((MIXTRAL, "--sweep", "--gpus", "-8"), "--gpus: -8; give a positive number"),
        ((MIXTRAL, *SWEEP, "--memory-gb", "nan"), "--memory-gb: nan; give a positive number"),
        ((MIXTRAL, *SWEEP, "--memory-gb", "inf"), "--memory-gb: inf; give a positive number"),
        ((MIXTRAL, *SWEEP, "--bytes-per-parameter", "nan"), "--bytes-per-parameter: nan"),
        ((MIXTRAL, *SWEEP, "--bytes-per-parameter", "1e308"), "--bytes-per-parameter: 1e+308"),
        ((MIXTRAL, "--plot", "/proc/x.png"), "--plot /proc/x.png: cannot be written ("),
        ((MIXTRAL, "--plot", "plan.xyz"), "--plot plan.xyz: its name must end in one of ."),
        ((MIXTRAL, "--plot", "/"), "--plot /: a folder; give the name of a file"),
        ((MIXTRAL, "--sweep", "--memory-gb", "80"), "--memory-gb needs --ffn-hidden"),
        ((MIXTRAL, "--sweep", "--host-limit", "1"), "leave --host-limit out"),
        ((MIXTRAL, "--sweep", "--gpus", "17"), "no expert x expert_tensor of 17 ranks"),
        ((MIXTRAL, "--plot", "/no/such/folder/p.png"), "there is no folder /no/such/folder"),
    ],
)
def test_mistakes(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.startswith("moe-ep plan: ") and not captured.out


def test_a_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.png"

    def draw(*_: Any) -> None:
        assert not file.exists()  # the check beforehand has left nothing
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(plan_plot, "draw", draw)
    assert main(["plan", MIXTRAL, "--plot", str(file)]) == 2
    assert capsys.readouterr().err.startswith("moe-ep plan: [Errno 28] No space left on device")


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", MIXTRAL, "--plot", "p.png"]) == 2
    assert "--plot needs matplotlib: pip install 'moe-ep[plot]'" in capsys.readouterr().err


def test_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*flags: str) -> str:
        return " | ".join(planned(capsys, *flags)["notes"])

    two_hosts = str(ROOT / "configs" / "mixtral_8x22b_two_hosts.yaml")
    assert "backend cuda works within one host" in notes(two_hosts)
    assert "(dispatch.num_sms)" in notes(MIXTRAL)
    assert "backend reference" in notes(str(ROOT / "configs" / "mixtral_tiny_cpu.yaml"))
    file = tmp_path / "large.yaml"
    file.write_text(
        "model: {hidden: 128, num_experts: 2048, top_k: 8}\nparallel: {expert: 2048}\n"
        "tokens_per_rank: 64\ndispatch: {capacity: 100, num_sms: 132}\n"
    )
    told = notes(str(file))
    assert "end at 256 ranks: an extrapolation" in told
    assert "dispatch.capacity 100 is less than the 512 rows" in told


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert text.count("moe-ep plan configs/") >= 4 and max(map(len, text.splitlines())) <= 100
