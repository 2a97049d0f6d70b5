"""Checks of the files that a command is to write, before any of its work is done."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path


def check_file(flag: str, file: Path | None) -> None:
    """Raises ValueError where the file cannot be written. Leaves nothing behind."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {file}: there is no folder {file.parent}; make it first")
    try:
        if file.is_dir():
            raise ValueError(f"{flag} {file}: a folder; give the name of a file")
        if file.is_file():
            file.open("ab").close()
        elif not file.exists():  # what else there is, such as a pipe, is not opened twice
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{flag} {file}: cannot be written ({error.strerror})") from None


def check_plot(file: Path | None) -> None:
    """Raises ValueError where --plot cannot draw to the file."""
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'moe-ep[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in kinds and not file.is_dir():
        raise ValueError(f"--plot {file}: its name must end in one of .{', .'.join(kinds)}")
    check_file("--plot", file)
