"""A machine as the probes see it: files, outputs of commands, environment. Live, or recorded.

A recorded tree holds copies of files under their own paths (`proc/...`, `sys/...`, `dev/...`,
`etc/...`), the output of each command in `commands/NAME.txt` (its exit code in `commands/NAME.exit`
if not 0), and `environment`, one NAME=value a line. A path that is not in it was not there.
"""

from __future__ import annotations

import errno
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ep import env
from moe_ep.doctor.commands import COMMANDS, Output, run_command
from moe_ep.doctor.names import VARIABLES

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODEV, errno.ENXIO)
_GPU_DEVICES = (*(f"/dev/nvidia{number}" for number in range(16)), "/dev/dxg")  # dxg: in WSL


class NotRecordedError(Exception):
    """A recorded tree does not hold what a probe wants to know."""


class Machine(ABC):
    """Base of live and recorded machines.

    Attributes:
        root: folder that paths are relative to.
        environment: the variables of `names.VARIABLES` and MOE_EP_* that are set.
        live: whether this is the machine the doctor runs on.
    """

    live = False

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self.environment = environment

    def read_text(self, path: str) -> str | None:
        """A small text file, stripped; None if there is none (or the kernel says "no such value").

        Raises:
            OSError: it is there but cannot be read.
        """
        try:
            return self._at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise

    def list_dir(self, path: str) -> list[str]:
        """Sorted names in a folder; empty if there is none."""
        try:
            return sorted(entry.name for entry in self._at(path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    @abstractmethod
    def command(self, name: str) -> Output | None:
        """The output of a command of `commands.COMMANDS`; None if it is not installed.

        Raises:
            TimeoutError: it did not end in time.
            NotRecordedError: the recorded tree does not have it.
        """

    def facts(self, name: str) -> dict[str, Any]:
        """The JSON object that a command printed.

        Raises:
            RuntimeError: it ended without printing one.
        """
        output = self.command(name)
        if output is None:
            raise NotRecordedError(f"{name} is not there")
        try:
            facts = json.loads(output.text)
        except json.JSONDecodeError:
            last = (output.text.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"{name} ended with exit code {output.exit_code}: {last}") from None
        if not isinstance(facts, dict):
            raise RuntimeError(f"{name} printed {type(facts).__name__}, not an object")
        return facts

    def has_gpus(self) -> bool:
        """Whether device files of NVIDIA GPUs are here (in a container: were passed to it)."""
        return any(self.exists(path) for path in _GPU_DEVICES)

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


class LiveMachine(Machine):
    """The machine this process runs on. Each command runs once, whoever asks for it."""

    live = True

    def __init__(self) -> None:
        super().__init__(Path("/"), env.named(VARIABLES))
        self._outputs: dict[str, Output | TimeoutError | None] = {}
        self._locks = {name: threading.Lock() for name in COMMANDS}

    def command(self, name: str) -> Output | None:
        with self._locks[name]:
            if name not in self._outputs:
                try:
                    self._outputs[name] = run_command(COMMANDS[name])
                except TimeoutError as error:
                    self._outputs[name] = error
        output = self._outputs[name]
        if isinstance(output, TimeoutError):
            raise output
        return output


class RecordedTree(Machine):
    """A machine recorded with `moe-ep doctor --record DIR`.

    Raises:
        ValueError: `root` holds no recorded machine.
    """

    def __init__(self, root: Path) -> None:
        if not (root / "environment").is_file():
            raise ValueError(
                f"{root}: not a recorded machine (it has no file 'environment'); "
                "record one with: moe-ep doctor --record DIR"
            )
        lines = (root / "environment").read_text(encoding="utf-8").splitlines()
        pairs = (line.split("=", 1) for line in lines if "=" in line)
        super().__init__(root, {name: value for name, value in pairs})

    def command(self, name: str) -> Output | None:
        folder = self.root / "commands"
        if (folder / f"{name}.absent").exists():
            return None
        if (folder / f"{name}.timeout").exists():
            raise TimeoutError((folder / f"{name}.timeout").read_text().strip())
        if not (folder / f"{name}.txt").exists():
            raise NotRecordedError(f"commands/{name}.txt is not in {self.root}")
        code = folder / f"{name}.exit"
        return Output(
            (folder / f"{name}.txt").read_text(encoding="utf-8"),
            int(code.read_text()) if code.exists() else 0,
        )
