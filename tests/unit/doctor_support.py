"""Helpers of the doctor's tests: runs it on recorded machines."""

import json
import shutil
from pathlib import Path

import pytest

from moe_ep import cli

MACHINES = Path(__file__).parent / "machines"


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = cli.main(["doctor", "--json", *map(str, arguments)])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return code, report


def levels(report: dict) -> dict[str, str]:
    found = {finding["id"]: finding["level"] for finding in report["findings"]}
    assert len(found) == len(report["findings"]), "an id came twice"
    return found


def finding(report: dict, name: str) -> dict:
    return next(each for each in report["findings"] if each["id"] == name)


def layout(folder: Path, backend: str, ranks_per_host: int = 8, **dispatch: object) -> Path:
    """A layout file of 8 EP ranks."""
    lines = [
        "model: {hidden: 4096, num_experts: 8, top_k: 2}",
        f"parallel: {{expert: 8, ranks_per_host: {ranks_per_host}}}",
        "tokens_per_rank: 128",
        f"backend: {backend}",
        f"dispatch: {json.dumps(dispatch)}",
    ]
    path = folder / f"{backend}.yaml"
    path.write_text("\n".join(lines))
    return path


def copy_machine(name: str, folder: Path) -> Path:
    """A copy of a recorded machine that the test may change."""
    return Path(shutil.copytree(MACHINES / name, folder / name))


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
