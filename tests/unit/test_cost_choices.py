"""Cluster descriptions, and the choice of EP and expert-tensor sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ep.cost import Cluster, ExpertWeights, choices, predict, recommend
from moe_ep.layout import EPLayout

ROOT = Path(__file__).resolve().parents[2]
PLAIN: dict[str, Any] = {
    "gpus_per_host": 2,
    "sms": 10,
    "hbm_GBps": 1.0,
    "nvlink_GBps": 0.5,
    "nic_GBps": 0.25,
}


def make(experts: int, top_k: int, expert: int, copies: int = 1) -> EPLayout:
    return EPLayout(
        model={"hidden": 8, "num_experts": experts, "top_k": top_k},
        parallel={"expert": expert, "expert_tensor": copies},
    )


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "clusters").glob("*.yaml")))
def test_every_cluster(file: Path) -> None:
    cluster = Cluster.named(file.stem)
    assert cluster == Cluster.from_yaml(file) and cluster.name == file.stem
    assert predict(make(8, 2, 8), cluster, 4096).us > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "a cluster is a mapping with the keys name, gpus_per_host"),
        ("gpus_per_host: 8", "sms: missing; hbm_GBps: missing"),
        ("{gpus_per_host: 8, sms: 1, hbm_GBps: 1.0, speed: 3}", "speed: unknown key; known: name"),
        ("{gpus_per_host: 0, sms: 1, hbm_GBps: 1.0}", "gpus_per_host: 0: "),
        ("{gpus_per_host: 8, sms: 1, hbm_GBps: 1.0, nic_efficiency: 1.5}", "nic_efficiency: 1.5: "),
        ("{gpus_per_host: 8, sms: 1, hbm_GBps: .inf}", "hbm_GBps: inf: "),
        ("sms: 1\ngpus_per_host: 8\nsms: 2\n", "line 3: the key sms stands in line 1"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_clusters(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        Cluster.named(str(file))
    assert str(caught.value).startswith(f"{file}: ") and told in str(caught.value)


def test_unknown_cluster_and_missing_links() -> None:
    with pytest.raises(ValueError, match=r"no cluster 'h1000'; known: .*h100_cx7"):
        Cluster.named("h1000")
    with pytest.raises(ValueError, match=r"/no/such\.yaml: cannot be read"):
        Cluster.named("/no/such.yaml")
    with pytest.raises(ValueError, match="no nic_GBps, but 4 ranks need more than one host of 2"):
        predict(make(4, 2, 4), Cluster(**{**PLAIN, "nic_GBps": None}), 1)
    with pytest.raises(ValueError, match="share one GPU or have one each"):
        predict(make(4, 2, 4), Cluster(**{**PLAIN, "ranks_per_gpu": 2}), 1)


def test_choices_without_a_limit() -> None:
    """Products of 8 with EP dividing 12 experts and top-k x ETP at most 32."""
    found = choices(make(12, 8, 4), Cluster(**PLAIN), 64, 8)
    assert {c.name for c in found} == {"EP 4 x ETP 2", "EP 2 x ETP 4"}
    best, reason = recommend(found)
    assert best is not None and best.prediction.us == min(c.prediction.us for c in found)
    assert reason.startswith("EP 2 x ETP 4, the next, takes ")
    with pytest.raises(ValueError, match="no expert x expert_tensor of 5 ranks"):
        choices(make(12, 8, 4), Cluster(**PLAIN), 64, 5)


def test_choices_with_a_limit() -> None:
    """4 experts of 3 x 8 x 100 parameters, 2 bytes each: 19200 bytes, or a part of them."""
    layout, cluster = make(4, 2, 4).replace(tokens_per_rank=64), Cluster(**PLAIN)
    free = ExpertWeights(100, 2.0, None)
    assert free.per_gpu(make(4, 2, 1)) == 19200
    assert free.per_gpu(make(4, 2, 2)) == free.per_gpu(make(4, 2, 1, 2)) == 9600
    assert {c.replicas for c in choices(layout, cluster, 64, 4, free)} == {1}
    generous = choices(layout, cluster, 64, 4, ExpertWeights(100, 2.0, 1e9))
    best, _ = recommend(generous)
    assert best is not None and best.name == "EP 1 x ETP 1" and best.replicas == 4
    # All experts on every GPU are 6 MB here, a quarter of them 1.5 MB; buffers are small.
    weights = ExpertWeights(31250, 2.0, 2e6)
    tight = choices(layout, cluster, 64, 4, weights)
    best, reason = recommend(tight)
    assert best is not None and best.replicas == 1 and best.weight_bytes == 1.5e6
    assert "would be faster but needs" in reason
    assert all(c.refusal == "" for c in tight if c.replicas == 1)
    assert all("limit 0.0 GB" in c.refusal for c in tight if c.replicas > 1)
    nothing, reason = recommend(choices(layout, cluster, 64, 4, ExpertWeights(100, 2.0, 1.0)))
    assert nothing is None and reason.startswith("none fits: the smallest, ")
