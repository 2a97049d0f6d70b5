"""How the package is put together: directions of imports, one reader of the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moe_ep"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, at its top or in a function, by its whole name."""
    package = ["moe_ep", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(files: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in files
        for module in imported(path)
        if any(module == name or module.startswith(name + ".") for name in forbidden)
    ]


def test_the_library_knows_no_framework() -> None:
    assert len(FILES) > 10
    assert not breaches(
        FILES, ("megatron", "deepspeed", "moe_ep.integrations", "transformer_engine")
    )


def test_backends_know_nothing_above_them() -> None:
    above = ("dispatcher", "autograd", "handle", "pool", "cli", "testing", "buffer")
    above += ("buffer_checks", "buffer_verbs", "rank_exchange", "rank_rows", "events", "deep_ep")
    backends = [path for path in FILES if path.parent.name == "backends"]
    assert len(backends) >= 4
    assert not breaches(backends, tuple(f"moe_ep.{name}" for name in above))


def test_the_check_itself_finds_imports() -> None:
    found = set(imported(PACKAGE / "autograd.py"))
    assert {"torch", "moe_ep.backends.base", "moe_ep.backends.base.Plan"} <= found


def test_one_reader_of_the_environment() -> None:
    for path in FILES:
        if path.name in ("env.py", "testing.py") and path.parent == PACKAGE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in ("environ", "getenv", "environb"), f"{path}:{node.lineno}: {name}"


def test_testing_only_sets_the_environment() -> None:
    tree = ast.parse((PACKAGE / "testing.py").read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        assert node.attr != "getenv"
        if isinstance(node.value, ast.Attribute) and node.value.attr == "environ":
            assert node.attr in ("setdefault", "update", "pop"), node.attr


QUIET = """
import os, sys, threading
before = dict(os.environ)
import moe_ep
loaded = set(sys.modules)
for name in ("matplotlib", "megatron", "deepspeed", "moe_ep.integrations", "pytest"):
    assert name not in loaded, name
import torch
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
assert dict(os.environ) == before
assert moe_ep.__version__ and all(hasattr(moe_ep, name) for name in moe_ep.__all__)
"""


def test_import_does_no_work() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


@pytest.mark.parametrize("text", ["abc", "0", "-3", "nan", "inf"])
def test_bad_time_out_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from moe_ep import env

    monkeypatch.setenv(env.TIMEOUT_S, text)
    with pytest.raises(ValueError, match=f"{env.TIMEOUT_S}.*{text}"):
        env.timeout_s()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_ep import env

    for name, read in ((env.LAYOUT, env.layout_path), (env.BACKEND, env.backend)):
        monkeypatch.delenv(name, raising=False)
        assert read() is None
        monkeypatch.setenv(name, "")
        assert read() is None
        monkeypatch.setenv(name, "reference")
        assert read() == "reference"
    monkeypatch.setenv(env.TIMEOUT_S, "2.5")
    assert env.timeout_s() == 2.5
    monkeypatch.delenv(env.TIMEOUT_S)
    assert env.timeout_s() is None
