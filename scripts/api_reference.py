"""Writes docs/api.md from the docstrings of everything public.

python scripts/api_reference.py            writes it
python scripts/api_reference.py --check    exits 1 if it is not up to date"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"

# Heading, module, and its public names; None: the module's __all__.
SECTIONS: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("Expert parallelism", "moe_ep", None),
    ("Sections of a layout", "moe_ep.layout",
     ("ModelShape", "ParallelShape", "DispatchOptions", "InternodeOptions", "Timeouts")),
    ("Statistics", "moe_ep.statistics",
     ("GroupStatistics", "Statistics", "LayerStatistics", "VerbStatistics", "Link")),
    ("FP8", "moe_ep.quant", ("quantize_fp8", "dequantize_fp8")),
    ("Megatron", "moe_ep.integrations.megatron", ("install", "uninstall", "log_statistics")),
    ("", "moe_ep.integrations.megatron.integration", ("MegatronIntegration",)),
    ("", "moe_ep.integrations.megatron.cpu", ("cpu_shims",)),
    ("DeepSpeed", "moe_ep.integrations.deepspeed",
     ("initialize", "install", "uninstall", "convert", "log_statistics")),
    ("", "moe_ep.integrations.deepspeed.conversion", ("Conversion",)),
    ("", "moe_ep.integrations.deepspeed.integration", ("DeepSpeedIntegration",)),
    ("", "moe_ep.integrations.deepspeed.config", ("ConfigError",)),
    ("", "moe_ep.integrations.deepspeed.cpu", ("no_op_compilation",)),
    ("DeepEP's name", "moe_ep.deep_ep", ("install", "uninstall")),
    ("Tests with several ranks", "moe_ep.testing",
     ("run_ranks", "launch_ranks", "RankServer", "Outcome")),
)  # fmt: skip

_INTRODUCTION = """# API

Made from the docstrings by `python scripts/api_reference.py`; change them, not this page.

T tokens of this rank, H hidden, E experts, K top-k, R ranks of the group, L local experts (E /
`parallel.expert`), N rows a rank receives. Times are seconds unless a name says otherwise.
"""
_TITLES = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")


def public_objects() -> Iterator[tuple[str, str, Any]]:
    """(section heading, full name, object) of everything public."""
    for heading, module_name, names in SECTIONS:
        module = importlib.import_module(module_name)
        for name in names or module.__all__:
            yield heading, f"{module_name}.{name}", getattr(module, name)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class or a base of ours defines, as written."""
    seen = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("moe_ep") or owner.__name__.startswith("_"):
            continue
        for name, value in vars(owner).items():
            plain = isinstance(value, (staticmethod, classmethod, property))
            if name.startswith("_") or name in seen or not (plain or inspect.isfunction(value)):
                continue
            seen.add(name)
            yield name, value


def signature(function: Any, drop_first: bool) -> str:
    """As in a call: names, types and defaults."""
    function = inspect.unwrap(function)
    parameters = list(inspect.signature(function).parameters.values())[int(drop_first) :]
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword_only |= star == "*"
        text = f"{star}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        shown.append(text)
    returned = inspect.signature(function).return_annotation
    arrow = f" -> {returned}" if returned not in (inspect.Signature.empty, "None") else ""
    line = f"({', '.join(shown)}){arrow}"
    return line if len(line) < 80 else "(\n    " + ",\n    ".join(shown) + f",\n){arrow}"


def render() -> str:
    """The whole page."""
    lines, last = [_INTRODUCTION], None
    for heading, name, thing in public_objects():
        if heading and heading != last:
            lines.append(f"\n## {heading}\n")
        last = heading or last
        lines += _class(name, thing) if inspect.isclass(thing) else _function(name, thing)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _function(name: str, function: Any) -> list[str]:
    short = name.rpartition(".")[2]
    call = f"{short}{signature(function, False)}"
    return [f"### {name}\n", f"```python\n{call}\n```\n", _text(function), ""]


def _class(name: str, kind: type) -> list[str]:
    lines = [f"### {name}\n"]
    short = name.rpartition(".")[2]
    if issubclass(kind, BaseException):
        bases = ", ".join(base.__name__ for base in kind.__bases__)
        return [f"### {name}({bases})\n", _text(kind), ""]
    if issubclass(kind, BaseModel):
        lines += [_text(kind), "", *_fields(kind)]
    else:
        lines += [f"```python\n{short}{signature(kind, False)}\n```\n", _text(kind)]
    for member, value in members(kind):
        if isinstance(value, property):
            returned = inspect.signature(value.fget).return_annotation  # type: ignore[arg-type]
            lines += ["", f"**`{short}.{member}`**`: {returned}`", "", _text(value)]
            continue
        drop = not isinstance(value, staticmethod)
        function = value if inspect.isfunction(value) else value.__func__
        call = f"{short}.{member}{signature(function, drop)}"
        lines += ["", f"```python\n{call}\n```\n", _text(function)]
    return [*lines, ""]


def _fields(model: type[BaseModel]) -> list[str]:
    annotations = inspect.get_annotations(model)
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = str(annotations[name]).replace("|", "\\|")
        default = "required" if field.is_required() else f"`{_plain(field.default)}`"
        lines.append(f"| `{name}` | `{kind}` | {default} | {field.description or ''} |")
    return lines


def _plain(default: Any) -> str:
    return "its defaults" if isinstance(default, BaseModel) else repr(default)


def _text(thing: Any) -> str:
    """A docstring as Markdown: titles in bold, what is listed below them as a list."""
    shown: list[str] = []
    title, items = "", list[str]()

    def finish() -> None:
        nonlocal title
        shown.extend(items if title == "Returns:" else map(_item, items))
        title = ""
        items.clear()

    for line in (inspect.getdoc(thing) or "").splitlines():
        if line in _TITLES:
            finish()
            title = line
            shown.append(f"**{line[:-1]}**\n")
        elif title and line.startswith("    "):
            text = line.strip()
            if title != "Returns:" and line.startswith("     ") and items:
                items[-1] += f" {text}"
            else:
                items.append(text)
        else:
            finish()
            shown.append(line)
    finish()
    return "\n".join(shown)


def _item(text: str) -> str:
    """ "a, b: meaning" as an item of a list, wrapped."""
    names, colon, rest = text.partition(": ")
    if colon and re.fullmatch(r"[\w.`]+(, [\w.`]+)*", names):
        text = ", ".join(f"`{name.strip('`')}`" for name in names.split(", ")) + f": {rest}"
    return textwrap.fill(
        text,
        98,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def omissions() -> list[str]:
    """What is public and has no docstring, and parameters that a docstring does not name."""
    missing = []
    for _, name, thing in public_objects():
        documented = [(name, thing)]
        if inspect.isclass(thing):
            for member, value in members(thing):
                inner = value.fget if isinstance(value, property) else value
                documented.append((f"{name}.{member}", getattr(inner, "__func__", inner)))
        for full, function in documented:
            text = inspect.getdoc(function) or ""
            free = inspect.isclass(function) and issubclass(function, (BaseException, BaseModel))
            if not text:
                missing.append(f"{full}: no docstring")
            elif not free and "rguments" not in text:  # "same arguments", "DeepSpeed's arguments"
                names = set(inspect.signature(inspect.unwrap(function)).parameters) - {
                    "self",
                    "cls",
                }
                missing += [f"{full}: {n}" for n in sorted(names) if not _named(n, text)]
    return missing


def _named(parameter: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(parameter)}\b", text) is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    missing = omissions()
    if missing:
        print("docstrings leave out:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    page = render()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} is not up to date: python scripts/api_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
