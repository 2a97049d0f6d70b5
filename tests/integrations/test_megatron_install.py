"""install and uninstall, the options that are refused, layouts, sharing, and the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_layer import make_config, make_layer, megatron

from moe_ep import EPLayout, LayoutError
from moe_ep.testing import RankServer

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 180.0
FITTING = EPLayout(
    model={"hidden": 32, "num_experts": 8, "top_k": 2},
    parallel={"expert": 2},
    dispatch={"dtype": "fp32"},
    backend="reference",
)


def _check_install(rank: int) -> None:
    with megatron():
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        from moe_ep.integrations import megatron as integration

        stock = MoELayer.__init__, TransformerConfig.__post_init__
        with pytest.raises(ValueError, match="deepep"):
            make_layer(make_config("deepep"))  # Megatron itself knows no such type
        first = integration.install(backend="reference")
        assert integration.install(backend="reference") is first
        with pytest.raises(RuntimeError, match="uninstall"):
            integration.install(FITTING)
        with pytest.raises(LayoutError, match="backend: 'foo': one of auto, reference"):
            integration.install(backend="foo")
        layers = [make_layer(make_config("deepep")) for _ in range(48)]
        assert len({id(layer.token_dispatcher.ep) for layer in layers}) == 1  # case 42
        untouched = make_layer(make_config("allgather"))
        assert type(untouched.token_dispatcher) is MoEAllGatherTokenDispatcher
        config = make_config("deepep")
        assert config.moe_token_dispatcher_type == "deepep"
        integration.uninstall()
        integration.uninstall()
        assert (MoELayer.__init__, TransformerConfig.__post_init__) == stock
        with pytest.raises(ValueError, match="deepep"):
            make_layer(make_config("deepep"))


def test_install_and_uninstall(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_install, 2, limit_s=LIMIT_S)


def _check_refusals(rank: int) -> None:
    with megatron():
        from moe_ep.integrations import megatron as integration

        integration.install(FITTING.replace(**{"model.hidden": 64, "model.top_k": 4}))
        with pytest.raises(LayoutError) as caught:
            make_layer(make_config("deepep"))
        assert "model.hidden: 64 and 32" in str(caught.value)
        assert "model.top_k: 4 and 2" in str(caught.value)
        integration.uninstall()
        integration.install(FITTING)
        with pytest.raises(LayoutError, match=r"dispatch\.dtype: fp32 and bf16"):
            make_layer(make_config("deepep", params_dtype=torch.bfloat16))
        layer = make_layer(make_config("deepep"))
        assert layer.token_dispatcher.ep.layout == FITTING
        graphs = make_config("deepep")
        graphs.cuda_graph_impl = "local"
        with pytest.raises(ValueError, match="cannot honour cuda_graph"):
            make_layer(graphs)
        inference = make_config("deepep")
        inference.transformer_impl = "inference_optimized"
        with pytest.raises(ValueError, match="transformer_impl"):
            make_layer(inference)
        budget = make_config("deepep")
        budget.moe_expert_rank_capacity_factor = 1.5
        with pytest.raises(ValueError, match=r"dispatch\.capacity"):
            make_layer(budget)
        assert budget.moe_token_dispatcher_type == "deepep"  # a failed build leaves configs alone


def test_refused_options_and_layouts(megatron_ranks: RankServer) -> None:
    megatron_ranks.run(_check_refusals, 2, limit_s=LIMIT_S)


def test_experts_of_map() -> None:
    pytest.importorskip("megatron.core")
    from moe_ep.integrations.megatron.dispatcher import experts_of_map

    routing_map = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]]).bool()
    expected = [[1, 3], [-1, -1], [0, -1], [2, 3]]
    assert experts_of_map(routing_map, 2).tolist() == expected
    assert experts_of_map(routing_map[:0], 2).shape == (0, 2)
    with pytest.raises(ValueError, match="routed to 3 experts"):
        experts_of_map(torch.tensor([[1, 1, 1, 0]]).bool(), 2)


SCRIPT = """
import argparse, json, sys
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"])
    parser.add_argument("--num-experts", type=int)
    options = parser.parse_args()
    from moe_ep.integrations.megatron.integration import MegatronIntegration
    layout = MegatronIntegration.installed().layout
    print(json.dumps([vars(options), layout and layout.model.hidden, sys.argv[0]]))
"""


def _launch(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-W", "ignore", "-m", "moe_ep.integrations.megatron", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_launcher_runs_a_script_with_our_type(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    script, layout = tmp_path / "pretrain.py", tmp_path / "layout.yaml"
    script.write_text(SCRIPT)
    layout.write_text("model: {hidden: 24, num_experts: 4, top_k: 2}\nparallel: {expert: 2}\n")
    arguments = [str(script), "--moe-token-dispatcher-type", "deepep", "--num-experts", "4"]
    expected = {"moe_token_dispatcher_type": "deepep", "num_experts": 4}
    done = _launch([*arguments, "--moe-ep-layout", str(layout)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, 24, str(script)]
    done = _launch(arguments, MOE_EP_LAYOUT=str(layout))
    assert json.loads(done.stdout.splitlines()[-1])[1] == 24


def test_launcher_explains_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    done = _launch([str(tmp_path / "absent.py")])
    assert done.returncode == 2 and "no such script" in done.stderr
    assert "--moe-ep-layout" in _launch(["--help"]).stdout
    done = _launch([__file__, "--moe-ep-backend", "foo"])
    assert done.returncode == 2 and "invalid choice: 'foo'" in done.stderr
    bad = tmp_path / "layout.yaml"
    bad.write_text("model: {hidden: 7}")
    done = _launch(["--moe-ep-layout", str(bad), __file__])
    assert done.returncode == 2 and "model.top_k: missing" in done.stderr
    assert "Traceback" not in done.stderr
