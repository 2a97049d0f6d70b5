"""EP layouts: what is accepted, and what the message says otherwise (cases 11, 13, 14, 15)."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from moe_ep import EPLayout, LayoutError, MoEEPError

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {"model": {"hidden": 128, "num_experts": 8, "top_k": 2}, "parallel": {"expert": 2}}


def write(folder: Path, data: object) -> Path:
    path = folder / "layout.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def merged(**changes: object) -> dict:
    data = {key: dict(value) for key, value in MINIMAL.items()}
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return data


def layouts_in_configs() -> list[Path]:
    files = sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "configs").glob("*.yml"))
    assert files, "configs/ holds no layout"
    return files


@pytest.mark.parametrize("path", layouts_in_configs(), ids=lambda path: path.name)
def test_every_layout_in_configs_loads(path: Path) -> None:
    layout = EPLayout.from_yaml(path)
    assert layout.num_local_experts * layout.parallel.expert == layout.model.num_experts


def test_defaults_and_values(tmp_path: Path) -> None:
    layout = EPLayout.from_yaml(write(tmp_path, MINIMAL))
    assert layout == EPLayout(**MINIMAL) == EPLayout.model_validate(MINIMAL)
    assert hash(layout) == hash(EPLayout(**MINIMAL))
    assert (layout.num_local_experts, layout.parallel.group_size) == (4, 2)
    assert layout.tokens_per_rank is None and layout.backend == "auto"
    assert layout.dispatch.dtype == "bf16" and layout.dispatch.row_alignment == 1
    with pytest.raises((dataclasses.FrozenInstanceError, ValueError)):
        layout.backend = "cuda"
    with pytest.raises((dataclasses.FrozenInstanceError, ValueError)):
        layout.model.hidden = 5


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dispatch__dtpye": "bf16"}, ["dispatch.dtpye", "unknown key", "row_alignment"]),
        ({"modle": {}}, ["modle", "unknown key", "parallel"]),
        ({"model__hidden": "128"}, ["model.hidden", "'128'", "integer"]),
        ({"model__hidden": 128.0}, ["model.hidden", "128.0", "integer"]),
        ({"model__hidden": True}, ["model.hidden", "True", "integer"]),
        ({"model__hidden": 0}, ["model.hidden", "0", "greater"]),
        ({"model__num_experts": 0}, ["model.num_experts", "0"]),
        ({"model__top_k": 9}, ["model.top_k", "9", "8"]),
        ({"model__num_experts": 48, "model__top_k": 33}, ["model.top_k", "33", "32"]),
        ({"model__top_k": -1}, ["model.top_k", "-1"]),
        ({"parallel__expert": 3}, ["parallel.expert", "3", "8", "1, 2, 4, 8"]),
        ({"parallel__expert": 16}, ["parallel.expert", "16", "1, 2, 4, 8"]),
        ({"parallel": 2}, ["parallel", "2"]),
        ({"parallel": {}}, ["parallel.expert", "missing"]),
        ({"dispatch__dtype": "int8"}, ["dispatch.dtype", "int8", "bf16"]),
        ({"dispatch__row_alignment": 0}, ["dispatch.row_alignment", "0"]),
        ({"dispatch__capacity": 0}, ["dispatch.capacity", "0"]),
        ({"dispatch__mode": "fast"}, ["dispatch.mode", "fast", "low_latency"]),
        ({"dispatch__dtype": "fp8_e4m3", "model__hidden": 192}, ["model.hidden", "192", "128"]),
        ({"tokens_per_rank": 0}, ["tokens_per_rank", "0"]),
        ({"backend": "nccl"}, ["backend", "nccl", "reference"]),
        ({"internode": {"transport": "tcp"}}, ["internode.transport", "tcp", "ibgda"]),
        ({"internode": {"max_rdma_tokens": 0}}, ["internode.max_rdma_tokens", "0"]),
        ({"internode": {"ibgda_qp_depth": 8}}, ["internode.ibgda_qp_depth", "8", "16"]),
        ({"internode": {"ib_sl": 16}}, ["internode.ib_sl", "16", "15"]),
        ({"internode": {"sl": 1}}, ["internode.sl", "unknown key", "ib_sl"]),
        ({"timeouts__first_s": 0}, ["timeouts.first_s", "0"]),
        ({"timeouts__steady_s": -1.5}, ["timeouts.steady_s", "-1.5"]),
        ({"timeouts__steady_s": float("nan")}, ["timeouts.steady_s", "nan"]),
        ({"timeouts__steady_s": float("inf")}, ["timeouts.steady_s", "inf"]),
        ({"parallel__expert_tensor": 32}, ["top_k", "expert_tensor", "64", "32"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values_are_named(tmp_path: Path, changes: dict, parts: list[str]) -> None:
    path = write(tmp_path, merged(**changes))
    with pytest.raises(LayoutError) as caught:
        EPLayout.from_yaml(path)
    message = str(caught.value)
    for part in [str(path), *parts]:
        assert part in message, message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, MoEEPError)
    with pytest.raises(LayoutError):
        EPLayout(**merged(**changes))


def test_model_validate_raises_the_same_error() -> None:
    with pytest.raises(LayoutError, match=r"dispatch\.nothing: unknown key"):
        EPLayout.model_validate(merged(dispatch__nothing=1))


def test_several_problems_in_one_message(tmp_path: Path) -> None:
    data = merged(model__hidden=-1, dispatch__sms=4, timeouts__first_s="long")
    with pytest.raises(LayoutError) as caught:
        EPLayout.from_yaml(write(tmp_path, data))
    for key in ("model.hidden", "dispatch.sms", "timeouts.first_s"):
        assert key in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1\n- 2\n", "hello", "5"])
def test_not_a_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(LayoutError, match=r"mapping.*model.*parallel"):
        EPLayout.from_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "model: {hidden: 1",
        "\t- x",
        "a: b: c",
        "!!python/object:os.x {}",
        "a: !!bool x",
        f"a: {'9' * 5000}",
        "[" * 3000,
    ],
    ids=lambda text: text[:24],
)
def test_not_yaml(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(LayoutError, match=re.escape(str(path))):
        EPLayout.from_yaml(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(LayoutError, match=re.escape(str(path))):
            EPLayout.from_yaml(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe\x00")
    with pytest.raises(LayoutError, match=re.escape(str(binary))):
        EPLayout.from_yaml(binary)

    with pytest.raises(LayoutError, match="null byte"):
        EPLayout.from_yaml("a\0b.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "backend: cuda\nmodel: {}\nbackend: reference\n",
            "line 3: the key backend stands in line 1",
        ),
        ("model:\n  top_k: 2\n  hidden: 8\n  top_k: 1\n", "line 4: the key top_k stands in line 2"),
        ("model: {top_k: 2, 'top_k': 1}\n", "line 1: the key top_k stands in line 1"),
    ],
)
def test_a_key_that_stands_twice(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        EPLayout.from_yaml(write(tmp_path, text))


def test_merged_mappings_may_be_overridden(tmp_path: Path) -> None:
    shape = "<<: {hidden: 128, top_k: 2}, <<: {num_experts: 8}"
    text = f"model: {{{shape}, top_k: 1}}\nparallel: {{expert: 2}}\n"
    model = EPLayout.from_yaml(write(tmp_path, text)).model
    assert (model.hidden, model.num_experts, model.top_k) == (128, 8, 1)


def test_a_key_named_self(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="self: unknown key"):
        EPLayout.from_yaml(write(tmp_path, {**MINIMAL, "self": 1}))
    with pytest.raises(LayoutError, match="self: unknown key"):
        EPLayout(**MINIMAL).replace(**{"self": 1})


def test_keys_that_are_not_text(tmp_path: Path) -> None:
    for text in ("1: 2\n", "model: {1: 2, hidden: 8}\n"):
        with pytest.raises(LayoutError, match="1"):
            EPLayout.from_yaml(write(tmp_path, text))


def test_replace_and_differences() -> None:
    layout = EPLayout(**MINIMAL)
    other = layout.replace(**{"dispatch.dtype": "fp32", "parallel.expert": 4})
    assert (other.dispatch.dtype, other.parallel.expert) == ("fp32", 4)
    assert layout.dispatch.dtype == "bf16"
    assert layout.differences(layout) == []
    assert layout.differences(other) == [
        "parallel.expert: 2 and 4",
        "dispatch.dtype: bf16 and fp32",
    ]
    for bad in (
        {"dispatch.dtyp": "x"},
        {"nowhere.key": 1},
        {"backend.x": 1},
        {"parallel.expert": 3},
    ):
        with pytest.raises(LayoutError, match=re.escape(next(iter(bad)).split(".")[0])):
            layout.replace(**bad)
