"""What README and docs tell people to type: run where that is cheap, checked where it is not.

Every command in a ```bash block is run here, or is run by another test (`ELSEWHERE`), or says in a
comment what it needs (`MARKS`). Of all commands, in the text too, scripts, modules and options must
exist. Python, JSON and YAML blocks must parse, EP layouts be valid, and whole Python programs run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from moe_ep import EPLayout, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# What CI runs by another way: a pattern, and the file that does.
ELSEWHERE = {
    r"bash scripts/train_mixtral\.sh": "tests/integrations/test_training_run.py",
    r"bash scripts/test\.sh( tests/unit)?$": ".ci/run",
    r"bash \.ci/run$": ".ci/run",
    r"bash scripts/fuzz\.sh( --seed 0)?$": "tests/fuzz/test_fuzz.py",
    r"python scripts/api_reference\.py$": "tests/integrations/test_api_reference.py",
    r"torchrun .* -m moe_ep doctor$": "tests/multiprocess/test_doctor_ranks.py",
    r"torchrun .* -m moe_ep bench ": "tests/multiprocess/test_bench.py",
}
# Comments that say why a command cannot run in CI.
MARKS = ("on a machine with", "on several", "on each host", "on a cluster", "needs", "takes")
# Programs that are not ours: nothing is checked but that they are meant to be there.
OTHERS = {"cd", "deepspeed", "docker", "echo", "export", "git", "mpirun", "pip", "pytest", "sbatch"}
OTHERS |= {"sleep", "source", "srun", "sudo", "ssh", "scontrol", "torchrun", "python", "python3"}
OTHERS |= {"bash", "moe-ep", "for", "do", "done", "while", "nvidia-smi", "ruff", "mypy"}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def commands(content: str) -> Iterator[tuple[str, str]]:
    """(command, comment) of a block's lines, continued ones joined."""
    above = ""
    for line in content.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition("#")
        if command.strip():
            yield " ".join(command.split()), f"{above} {comment}".strip()
            above = ""
        else:
            above = comment  # a comment of its own is about the next line


def bash(page: Path) -> list[tuple[str, str]]:
    return [
        c for language, content in blocks(page) if language == "bash" for c in commands(content)
    ]


ALL = [(page, command, comment) for page in PAGES for command, comment in bash(page)]


def test_there_are_commands() -> None:
    assert len(ALL) >= 8
    for page in PAGES:
        for language, content in blocks(page):
            first = content.split(maxsplit=1)[0] if content.strip() else ""
            told = language or first not in ("bash", "moe-ep", "torchrun", "python")
            assert told, f"{page.name}: label this block bash: {content}"


@pytest.mark.parametrize(("page", "command", "comment"), ALL)
def test_every_command_is_run_or_says_what_it_needs(
    page: Path,
    command: str,
    comment: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = [file for pattern, file in ELSEWHERE.items() if re.match(pattern, command)]
    if elsewhere:
        assert (ROOT / elsewhere[0]).is_file()
    elif command.startswith("moe-ep ") and not command.startswith("moe-ep bench"):
        folder = tmp_path_factory.getbasetemp() / page.stem  # shared: some write what others read
        folder.mkdir(exist_ok=True)
        if not (folder / "configs").exists():
            (folder / "configs").symlink_to(ROOT / "configs")
        monkeypatch.chdir(folder)
        assert cli.main(shlex.split(command)[1:]) in (0, 1)
    else:
        assert any(mark in comment for mark in MARKS), (
            f"{page.name}: {command!r} is not run by a test: say what it needs, as in "
            f"'# {MARKS[0]} GPUs', or add it to ELSEWHERE"
        )


def in_text(page: Path) -> list[str]:
    """Commands in the running text: `bash ...`, `moe-ep ...` and the like."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"`((?:bash|moe-ep|torchrun|python|scripts/[\w./-]+|sbatch) ?[^`]*)`", text)
    return [" ".join(command.split()) for command in found]


MENTIONED = sorted(
    {(page, command) for page, command, _ in ALL}
    | {(page, command) for page in PAGES for command in in_text(page)}
)


@pytest.mark.parametrize(("page", "command"), MENTIONED)
def test_scripts_modules_and_options_exist(page: Path, command: str) -> None:
    words = command.replace("|", " ").split()
    program = words[0].split("=")[0]
    is_file = (ROOT / words[0]).is_file()
    known = program in OTHERS or is_file or "=" in words[0] or words[0].startswith("python.")
    assert known, f"{page.name}: what is {program!r}? Add it to OTHERS, or correct it"
    sources = ""
    for number, word in enumerate(words):
        if re.match(r"(scripts|tests|configs|\.ci)/[\w./-]+$", word):
            assert (ROOT / word).exists(), f"{page.name}: {word} does not exist"
            sources += source(ROOT / word)
        elif word in ("-m", "--module") and number + 1 < len(words):
            module = words[number + 1]
            if module.startswith("moe_ep"):
                assert importlib.util.find_spec(module), f"{page.name}: no module {module}"
                sources += source_of_module(module)
        elif word == "moe-ep":
            sources += source_of_module("moe_ep")
    ours = re.sub(r"^.* (?=(-m|--module) moe_ep)", "", command)  # what comes before: the launcher's
    if program == "torchrun":
        ours = ours.rpartition(" -- ")[2]  # what comes before is torchrun's own
    for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)", ours) if sources else ():
        if option in ("--help", "--module", "--moe-token-dispatcher-type"):  # the last: Megatron's
            continue
        assert option in sources or f'"{option[2:]}"' in sources, (
            f"{page.name}: {command!r}: nothing it runs knows {option}"
        )


@functools.cache
def source_of_module(module: str) -> str:
    """The text of a command's package; of `moe_ep` itself, its command line."""
    folder = ROOT / ("moe_ep/cli" if module == "moe_ep" else module.replace(".", "/"))
    folder = Path(str(folder).replace("moe_ep/integrations", "integrations"))
    return "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))


@functools.cache
def source(path: Path) -> str:
    """The text of a script and of all of the repository's scripts that it names."""
    if path.is_dir() or path.suffix not in (".sh", ".py", ""):
        return ""
    text, seen, todo = "", set(), [path]
    while todo:
        file = todo.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        content = file.read_text()
        text += content
        todo += [
            ROOT / name for name in re.findall(r"(?:scripts|tests)/[\w./]+\.(?:sh|py)", content)
        ]
        todo += [file.parent / name for name in re.findall(r"\w+\.(?:sh|py)", content)]
        for package in re.findall(r"^from (\w+)[. ]", content, re.M):
            todo += (file.parent / package).glob("*.py")
            todo.append(file.parent / f"{package}.py")
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_blocks_parse(page: Path) -> None:
    for language, content in blocks(page):
        if language == "python" and page.name != "api.md":  # that has signatures
            ast.parse(content)
        elif language == "json":
            json.loads(content if content.lstrip().startswith("{") else f"{{{content}}}")
        elif language == "yaml":
            data = yaml.safe_load(content)
            if "model" in data:
                EPLayout(**data)
        else:
            assert language in ("", "text", "bash", "python", "cpp", "cuda"), language


PROGRAMS = [
    pytest.param(content, id=page.name)
    for page in PAGES
    for language, content in blocks(page)
    if language == "python" and "__main__" in content
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_whole_programs_run(program: str, tmp_path: Path) -> None:
    if "megatron.core" in program:
        pytest.importorskip("megatron.core")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[("), "what both ranks returned"


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(PROGRAMS) >= 2
    assert not [p.name for p in PAGES if p.name != "README.md" and f"{p.name})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            text = file.read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs or f'id="{anchor}"' in text, f"{page.name}: {target}"
