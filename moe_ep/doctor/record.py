"""Recording a machine: everything the probes read, and nothing else, as a tree of small files."""

from __future__ import annotations

from pathlib import Path

from moe_ep.doctor.commands import Output
from moe_ep.doctor.machine import LiveMachine, Machine


class Recorder(Machine):
    """A live machine that also writes down what it is asked, as `RecordedTree` reads it.

    Args:
        folder: new or empty.

    Raises:
        ValueError: `folder` is not empty, or cannot be made.
    """

    live = True

    def __init__(self, machine: LiveMachine, folder: Path) -> None:
        super().__init__(machine.root, machine.environment)
        self._machine, self.folder = machine, folder
        self._listed: list[str] = []
        try:
            (folder / "commands").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--record {folder}: cannot be made ({error.strerror})") from None
        if len(list(folder.iterdir())) > 1:
            raise ValueError(f"--record {folder}: the folder is not empty; give a new one")
        lines = (f"{name}={' '.join(text.split())}" for name, text in self.environment.items())
        self._write("environment", "\n".join(lines))

    def read_text(self, path: str) -> str | None:
        text = self._machine.read_text(path)
        # A port has hundreds of unset GIDs: the recorded tree leaves them out.
        if text is not None and not ("/gids/" in path and not text.strip("0:")):
            self._write(path, text)
        return text

    def list_dir(self, path: str) -> list[str]:
        names = self._machine.list_dir(path)
        if not path.endswith("/gids"):
            self._listed += [f"{path}/{name}" for name in names]
        return names

    def exists(self, path: str) -> bool:
        found = self._machine.exists(path)
        if found:
            self._listed.append(path)
        return found

    def command(self, name: str) -> Output | None:
        file = f"commands/{name}"
        try:
            output = self._machine.command(name)
        except TimeoutError as error:
            self._write(f"{file}.timeout", str(error))
            raise
        if output is None:
            self._write(f"{file}.absent", "")
            return None
        self._write(f"{file}.txt", output.text)
        if output.exit_code:
            self._write(f"{file}.exit", str(output.exit_code))
        return output

    def finish(self) -> int:
        """Adds empty files for what was only listed or looked for; returns the number of files."""
        for path in sorted(set(self._listed)):
            if not self._target(path).exists():
                self._write(path, "")
        return sum(1 for path in self.folder.rglob("*") if path.is_file())

    def _write(self, path: str, text: str) -> None:
        target = self._target(path)
        if target.is_dir():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n" if text and not text.endswith("\n") else text)

    def _target(self, path: str) -> Path:
        return self.folder / path.lstrip("/")
