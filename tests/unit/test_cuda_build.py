"""The CUDA core builds with the compilers that people have."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
FIND_NVSHMEM = ROOT / "csrc" / "nvshmem" / "find_nvshmem.py"
# libcu++ and CUB: up to CUDA 12 in include/ like all other headers, from 13 on in include/cccl.
LIBRARIES = ("cub", "cuda", "nv", "thrust")

Architectures = Callable[[str], str]  # of the names that nvcc lists


def sources(*suffixes: str, nvshmem: bool) -> list[str]:
    found = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes]
    return sorted(
        str(path.relative_to(ROOT)) for path in found if ("nvshmem" in path.parts) == nvshmem
    )


# -- case 48: where headers are -------------------------------------------------------------------


@pytest.fixture(scope="module", params=[12, 13])
def include(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of the CUDA at hand, laid out as in that version."""
    if NVCC is None:
        pytest.skip("no nvcc on the PATH")
    given = toolkit_headers()
    folder = tmp_path_factory.mktemp(f"cuda{request.param}") / "include"
    folder.mkdir()
    for path in given.iterdir():
        if path.name not in (*LIBRARIES, "cccl"):
            (folder / path.name).symlink_to(path)
    libraries = given / "cccl" if (given / "cccl").is_dir() else given
    (folder / "nv").symlink_to(libraries / "nv")  # in both
    place = folder if request.param == 12 else folder / "cccl"
    place.mkdir(exist_ok=True)
    for name in LIBRARIES:
        if not (place / name).exists():
            (place / name).symlink_to(libraries / name)
    return folder


def toolkit_headers() -> Path:
    """nvcc may be a link or a script: it says itself where it looks."""
    assert NVCC is not None
    plan = subprocess.run(
        [NVCC, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    )
    (top,) = (line for line in plan.stderr.splitlines() if line.startswith("#$ _HERE_="))
    return (Path(top.partition("=")[2]).parent / "include").resolve()


@pytest.fixture(scope="module")
def nvshmem_flags(include: Path) -> list[str]:
    """For NVSHMEM, of the wheel for whichever CUDA (their headers are alike), and what it wants."""
    found = os.environ.get("NVSHMEM_DIR", "")
    for major in ("13", "12"):
        command = [sys.executable, str(FIND_NVSHMEM), major]
        found = found or subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not found:
        pytest.skip("no NVSHMEM: set NVSHMEM_DIR or install its wheel")
    folders = [Path(found) / "include", include / "cccl"]
    return [flag for folder in folders if folder.is_dir() for flag in ("-isystem", str(folder))]


def headers_are_found(source: str, include: Path, *flags: str) -> None:
    """Preprocesses it with no other headers of CUDA than these."""
    compiler = ["g++"]
    if source.endswith(".cu"):
        assert NVCC is not None
        compiler = [NVCC, "-noprof", "-arch=sm_90"]  # without the places where it looks otherwise
    flags = ("-std=c++17", "-E", "-Icsrc", f"-I{include}", *flags)
    done = subprocess.run(
        [*compiler, *flags, source], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f'"{include}/' in done.stdout


@pytest.mark.parametrize("source", sources(".cu", nvshmem=False))
def test_case_48_headers_of_kernels(source: str, include: Path) -> None:
    headers_are_found(source, include)


@pytest.mark.parametrize(
    "source",
    [name for name in sources(".cc", nvshmem=False) if "cuda" in (ROOT / name).read_text()],
)
def test_case_48_headers_of_the_host_part(source: str, include: Path) -> None:
    headers_are_found(source, include)


@pytest.mark.parametrize("source", sources(".cu", ".cc", nvshmem=True))
def test_case_48_headers_that_nvshmem_wants(
    source: str, include: Path, nvshmem_flags: list[str]
) -> None:
    headers_are_found(source, include, *nvshmem_flags)


# -- architectures --------------------------------------------------------------------------------


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Architectures:
    """What setup.py compiles for with an nvcc that knows the named ones."""
    monkeypatch.delenv("MOE_EP_CUDA_ARCHS", raising=False)

    def of(names: str) -> str:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(f'#!/bin/sh\n[ "$*" = --list-gpu-arch ] && printf "%s\\n" {names}\n')
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(nvcc))
        monkeypatch.setenv("MOE_EP_BUILD_CUDA", "0")
        monkeypatch.setattr(setuptools, "setup", lambda **_: None)
        chosen: Callable[[], str] = runpy.run_path(str(ROOT / "setup.py"))["architectures"]
        return chosen()

    return of


@pytest.mark.parametrize(
    ("names", "chosen", "told"),
    [
        ("compute_75 compute_80 compute_90 compute_100 compute_120", "8.0;9.0;10.0", ""),
        ("compute_50 compute_80 compute_86 compute_90", "8.0;9.0", "10.0: left out"),
        ("compute_90 compute_100", "9.0;10.0", "8.0: left out"),
    ],
)
def test_what_nvcc_does_not_know_is_left_out(
    architectures: Architectures,
    capsys: pytest.CaptureFixture[str],
    names: str,
    chosen: str,
    told: str,
) -> None:
    assert architectures(names) == chosen
    said = capsys.readouterr().err
    assert told in said and bool(told) == bool(said)


def test_those_that_cmake_builds_by_itself_are_the_same(architectures: Architectures) -> None:
    ours = architectures("compute_80 compute_90 compute_100")
    assert f'set(MOE_EP_CUDA_ARCHS "{ours}")' in (ROOT / "CMakeLists.txt").read_text()


def test_architectures_that_are_asked_for(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_EP_CUDA_ARCHS", "9.0a")
    assert architectures("compute_80") == "9.0a"


def test_without_nvcc_cmake_has_the_word(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert architectures("compute_80") == ""


def test_an_nvcc_too_old_for_all(architectures: Architectures) -> None:
    with pytest.raises(SystemExit, match=r"none of the architectures 8\.0, 9\.0, 10\.0"):
        architectures("compute_70 compute_75")
