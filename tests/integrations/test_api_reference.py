"""docs/api.md is what the docstrings say, and these name every parameter of everything public."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_api_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "api_reference.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "api.md").read_text()
    for name in (
        "moe_ep.ExpertParallel",
        "moe_ep.integrations.deepspeed.convert",
        "moe_ep.integrations.megatron.log_statistics",
        "moe_ep.layout.InternodeOptions",
        "moe_ep.EPLayout",
    ):
        assert f"### {name}" in page
