"""The "moe_ep" section: what it takes, what it refuses, and switching it on and off."""

import base64
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed_support import Model, config, engine_for, moe_layer, start

from moe_ep import LayoutError
from moe_ep.testing import RankServer

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.timeout(90)

from moe_ep.integrations import deepspeed as ours  # noqa: E402
from moe_ep.integrations.deepspeed.config import (  # noqa: E402
    ConfigError,
    MoEEPConfig,
    read_config,
)

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "model: {{hidden: {hidden}, num_experts: 4, top_k: 2}}\nparallel: {{expert: 2}}\n"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True, "layuot": "x"}, r"^moe_ep\.layuot: unknown key; known here: enabled"),
        ({"timeouts": {"steady": 1}}, r"^moe_ep\.timeouts\.steady: unknown key.*steady_s"),
        ({"backend": "nccl"}, r"^moe_ep\.backend: 'nccl'"),
        ({"enabled": "yes"}, r"^moe_ep\.enabled: 'yes'"),
        ({"timeouts": {"first_s": 0}}, r"^moe_ep\.timeouts\.first_s: 0: .*greater than 0"),
        ({"timeouts": {"first_s": float("inf")}}, r"^moe_ep\.timeouts\.first_s: inf: .*604800"),
        ({"timeouts": {"steady_s": 1e9}}, r"^moe_ep\.timeouts\.steady_s: 1000000000.0: .*604800"),
        ({"tokens_per_rank": -1}, r"^moe_ep\.tokens_per_rank: -1"),
        ([], r"^moe_ep: \[\] must be an object"),
    ],
)
def test_mistakes_are_named_by_their_path(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoEEPConfig.parse(section)
    # Found before DeepSpeed is asked for anything: there is no model, and no process group.
    with pytest.raises(ConfigError, match=message):
        ours.initialize(config={"moe_ep": section})


def test_layout_file_mistakes(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"^moe_ep\.layout: .*missing\.yaml: cannot be read"):
        ours.initialize(
            config={"moe_ep": {"enabled": True, "layout": str(tmp_path / "missing.yaml")}}
        )
    bad = tmp_path / "bad.yaml"
    bad.write_text(LAYOUT.format(hidden=128) + "tokens: 1\n")
    with pytest.raises(LayoutError, match=r"^moe_ep\.layout: .*tokens: unknown key"):
        ours.initialize(config={"moe_ep": {"enabled": True, "layout": str(bad)}})


def test_config_is_found_where_deepspeed_finds_it(tmp_path: Path) -> None:
    content = {"moe_ep": {"enabled": True}}
    path = tmp_path / "config.json"
    path.write_text("// a comment, as DeepSpeed allows\n" + json.dumps(content))
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    for where in (content, str(path), path, encoded):
        assert read_config(where, None, None) == content
    assert read_config(None, str(path), None) == content
    assert read_config(None, None, SimpleNamespace(deepspeed_config=str(path))) == content
    assert read_config(None, None, None) == {}
    assert read_config("no such file", None, None) == {}


def test_signature_is_deepspeeds() -> None:
    def shape(function: Any) -> list:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default, p.kind) for p in parameters]

    assert shape(ours.initialize) == shape(deepspeed.initialize)


def test_install_and_uninstall() -> None:
    stock = deepspeed.initialize
    try:
        first = ours.install()
        assert deepspeed.initialize is not stock and ours.install() is first
        assert inspect.signature(deepspeed.initialize) == inspect.signature(stock)
        with pytest.raises(ConfigError, match=r"moe_ep\.oops"):
            deepspeed.initialize(config={"moe_ep": {"oops": 1}})
    finally:
        ours.uninstall()
    assert deepspeed.initialize is stock
    ours.uninstall()


def test_ready_files_are_valid() -> None:
    files = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
    assert len(files) >= 4
    for file in files:
        content = json.loads(file.read_text())
        options = MoEEPConfig.parse(content["moe_ep"])
        assert options.enabled, file
        assert not options.exact_clipping, file  # a copy must have the losses of stock DeepSpeed


def _switch(rank: int, folder: str) -> None:
    start()
    model = Model(2, rank)
    for section in (None, {}, {"enabled": False}):
        content = config(ours=False)
        if section is not None:
            content["moe_ep"] = section
        engine = engine_for(Model(2, rank), content)
        assert type(engine.module.moe.deepspeed_moe) is deepspeed.moe.sharded_moe.MOELayer
        assert not hasattr(engine, "moe_ep") and "destroy" not in vars(engine)
    # A file for the model at hand is taken; one for another model is refused with both values.
    fits, other = Path(folder, f"fits{rank}.yaml"), Path(folder, f"other{rank}.yaml")
    fits.write_text(LAYOUT.format(hidden=128) + "timeouts: {steady_s: 7}\ntokens_per_rank: 99\n")
    other.write_text(LAYOUT.format(hidden=256))
    engine = engine_for(model, config(moe_ep={"enabled": True, "layout": str(fits)}))
    (ep,) = engine.moe_ep.pool._members.values()
    assert ep.layout.timeouts.steady_s == 7 and ep.layout.dispatch.dtype == "fp32"
    engine.destroy()
    assert len(engine.moe_ep.pool) == 0
    with pytest.raises(LayoutError, match=r"moe\.deepspeed_moe .*model\.hidden: 256 and 128"):
        engine_for(Model(2, rank), config(moe_ep={"enabled": True, "layout": str(other)}))


def test_switch_and_layout_file(deepspeed_ranks: RankServer, tmp_path: Path) -> None:
    deepspeed_ranks.run(_switch, 2, str(tmp_path))


def _unknown_layer(rank: int) -> None:
    start()
    layer = moe_layer(2, rank)
    layer.deepspeed_moe.moe_ep.conversion.restore()
    kind = type("OtherLayer", (type(layer.deepspeed_moe),), {})
    layer.deepspeed_moe.__class__ = kind
    with pytest.raises(ValueError, match=r"deepspeed_moe: a .*OtherLayer can't be converted"):
        ours.convert(layer)


def test_unknown_kinds_of_layer_are_refused(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_unknown_layer, 2)


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, deepspeed\n"
        "assert hasattr(deepspeed.initialize, 'moe_ep_integration')\n"
        "assert sys.argv[1:] == ['--local_rank=3', '--flag'], sys.argv\n"
        "print('seen', __name__)\n"
    )
    import subprocess
    import sys

    command = [sys.executable, "-m", "moe_ep.integrations.deepspeed"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=80)
    assert done.returncode == 0 and "deepspeed --module" in done.stdout
    done = subprocess.run(
        [*command, "--local_rank=3", str(script), "--flag"],
        capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "seen __main__" in done.stdout
