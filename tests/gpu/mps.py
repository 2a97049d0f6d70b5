"""An MPS server for the ranks of a test session, restarted around tests that may harm it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class MpsServer:
    """MPS in folders of its own; processes started after `start` use it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(self.folder / "pipe")
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(self.folder / "log")

    def start(self) -> None:
        for name in ("pipe", "log"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)

    def stop(self) -> None:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=b"quit -t 5\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
