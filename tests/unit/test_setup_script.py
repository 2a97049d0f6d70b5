"""What scripts/setup.sh says before it installs anything."""

import configparser
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
EXTRAS = " ".join(SETTINGS["options.extras_require"])


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (["--help"], 0, "scripts/setup.sh [EXTRA ...]"),
        (["plot", "-h"], 0, "scripts/setup.sh [EXTRA ...]"),
        (["plot", "plots"], 1, f"setup: no extra plots; there are: {EXTRAS}\n"),
    ],
)
def test_nothing_is_set_up(flags: list[str], status: int, told: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), *flags],
        env=os.environ | {"PYTHON": "no-python-to-set-up-with"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status
    assert (done.stderr == told) if status else (told in done.stdout)
