"""What a rank notes: one JSON object a line, on disk at once, so that a killed rank leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class EventLog:
    """Appends to a file; a later stretch has a file of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def events_of(file: Path) -> list[dict[str, Any]]:
    """What was noted; a last line cut short by a kill is left out."""
    events = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events
