"""The GPU record: what the last run on a GPU found, and of which sources.

tests/gpu/record.json goes with the code. A test compares its hash with the sources as they are, so
that a change of the kernels without a run on a GPU is either noted honestly or noticed. Needs
nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "gpu" / "record.json"
RUN_COMMAND = "bash scripts/test.sh --gpu"
NOTE_COMMAND = 'bash scripts/test.sh --gpu --record-only "REASON"'

_FOLDERS = ("csrc", "moe_ep/backends")
_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cc", ".cpp")
_ABOUT_RUN = ("date", "gpu", "driver", "cuda", "torch", "python")
_COUNTS = ("passed", "failed", "skipped")


def source_files(root: Path = ROOT) -> list[Path]:
    """The sources whose change asks for a new run on a GPU, in a fixed order."""
    found = [
        path
        for folder in _FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in _SUFFIXES or path.name == "CMakeLists.txt"
    ]
    return sorted([*found, root / "CMakeLists.txt"], key=lambda path: path.relative_to(root).parts)


def sources_hash(root: Path = ROOT) -> str:
    """SHA-256 over names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def not_run(reason: str, root: Path = ROOT) -> dict[str, Any]:
    """The record that says that these sources have not been run, and why."""
    if not reason.strip():
        raise ValueError(f"a record without a run needs a reason: {NOTE_COMMAND}")
    return {"ran": False, "reason": reason.strip(), "sources": sources_hash(root)}


def write(record: dict[str, Any], *files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")


def problems(record: Any, sources: str) -> list[str]:
    """What is wrong with a record for sources of this hash; empty if nothing is."""
    again = f"on a machine with a GPU run {RUN_COMMAND}; without one, {NOTE_COMMAND}"
    if not isinstance(record, dict) or not isinstance(record.get("ran"), bool):
        return [f"'ran' must be true or false; {again}"]
    found = []
    if record.get("sources") != sources:
        found.append(
            f"the record is of other sources ({record.get('sources')}) than there are now "
            f"({sources}): csrc/, moe_ep/backends/ or CMakeLists.txt changed; {again}"
        )
    if not record["ran"]:
        if not str(record.get("reason") or "").strip():
            found.append(f"a record without a run needs a 'reason'; {again}")
        return found
    found += [f"{key!r} must be a text; {again}" for key in _ABOUT_RUN if not _is_text(record, key)]
    for key, kind in (("bench", list), ("not_run", dict)):
        if not isinstance(record.get(key), kind):
            found.append(f"{key!r} must be a {kind.__name__}; {again}")
    for step, reason in (record.get("not_run") or {}).items():
        if step.split()[0] in ("build", "tests"):
            found.append(f"{step}: {reason}; {again}")
    tests = record.get("tests")
    if not isinstance(tests, dict) or any(not isinstance(tests.get(k), int) for k in _COUNTS):
        found.append(f"'tests' must hold numbers of {', '.join(_COUNTS)}; {again}")
    elif tests["failed"] or not tests["passed"]:
        found.append(
            f"{tests['failed']} of the GPU tests failed and {tests['passed']} passed when these "
            f"sources were run; mend them, then {again}"
        )
    return found


def _is_text(record: dict[str, Any], key: str) -> bool:
    value = record.get(key)
    return isinstance(value, str) and bool(value)
