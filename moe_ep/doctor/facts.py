"""Facts about this Python, as JSON. Runs as a script (`python facts.py TOPIC`), so that nothing of
moe_ep is imported and a library that crashes or hangs takes only this process with it."""

from __future__ import annotations

import configparser
import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
WATCHED = ("torch", "pydantic", "PyYAML", "tqdm", "megatron-core", "deepspeed")
NVSHMEM_WHEELS = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
LIBRARY = "libnvshmem_host.so.3"


def packages() -> dict[str, Any]:
    """Versions, the ranges that moe_ep supports, and whether they fit (None: cannot be told)."""
    wanted = _requirements()
    return {
        "python": platform.python_version(),
        "python_fits": _fits(f"python{wanted.get('python', '')}", platform.python_version()),
        "moe_ep": _version("moe-ep"),
        "packages": {name: _package(name, wanted.get("requirements", [])) for name in WATCHED},
        "nvshmem_wheels": {name: _version(name) for name in NVSHMEM_WHEELS if _version(name)},
    }


def core() -> dict[str, Any]:
    """Whether `moe_ep._C` is there and loads, and what it was compiled for."""
    return _extension("_C")


def torch() -> dict[str, Any]:
    """What torch was built for, and the GPUs it can use."""
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    try:
        torch.zeros(1, device="cuda")
        count = torch.cuda.device_count()
        found["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
    except Exception as error:
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())
    return found


def nvshmem() -> dict[str, Any]:
    """The module `moe_ep._C_nvshmem`, the NVSHMEM library it would load, and its transports."""
    libraries = [
        Path(str(file.locate()))
        for wheel in NVSHMEM_WHEELS
        if _version(wheel)
        for file in importlib.metadata.files(wheel) or []
        if file.name == LIBRARY
    ]
    found: dict[str, Any] = {
        "backend": (PACKAGE / "backends" / "nvshmem.py").exists(),
        "library": str(libraries[0]) if libraries else None,
    }
    if libraries:
        names = (path.name.split(".")[0] for path in libraries[0].parent.glob("*_transport_*"))
        found["transports"] = sorted(name.rpartition("_")[2] for name in names)
        found["loaded"] = _library_version(libraries[0])  # so that the module finds it, too
    return found | _extension("_C_nvshmem")


def _extension(name: str) -> dict[str, Any]:
    files = [PACKAGE / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return {"found": False}
    spec = importlib.util.spec_from_file_location(f"moe_ep.{name}", path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return {"found": True, "error": str(error)}
    return {
        "found": True,
        "architectures": getattr(module, "ARCHITECTURES", None),
        "built": getattr(module, "NVSHMEM_VERSION", None),
    }


def _library_version(path: Path) -> str:
    numbers = [ctypes.c_int() for _ in range(3)]
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    return ".".join(str(number.value) for number in numbers)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> dict[str, Any]:
    """From the installed metadata, or from setup.cfg where a checkout is on the PYTHONPATH."""
    try:
        metadata = importlib.metadata.metadata("moe-ep")
        return {
            "python": metadata["Requires-Python"] or "",
            "requirements": importlib.metadata.requires("moe-ep") or [],
        }
    except importlib.metadata.PackageNotFoundError:
        config = configparser.ConfigParser()
        config.read(PACKAGE.parent / "setup.cfg")
        if not config.has_section("options"):
            return {}
        lines = config["options"]["install_requires"].splitlines()
        for text in config["options.extras_require"].values():
            lines += text.splitlines()
        return {
            "python": config["options"]["python_requires"],
            "requirements": [line for line in lines if line.strip()],
        }


def _package(name: str, requirements: list[str]) -> dict[str, Any]:
    version = _version(name)
    lines = [line for line in requirements if line.lower().startswith(name.lower())]
    answers = [(line, _fits(line, version)) for line in lines if _applies(line)]
    supported = [_range(line) for line, _ in answers]
    fits = None if not answers else all(fit is True for _, fit in answers)
    if any(fit is None for _, fit in answers):
        fits = None
    return {"version": version, "supported": ", ".join(supported), "fits": fits}


def _range(line: str) -> str:
    text = line.split(";")[0].strip()
    return text[next((i for i, letter in enumerate(text) if letter in "<>=!~ "), len(text)) :]


def _applies(line: str) -> bool:
    """Whether a requirement is for this Python, in any of our extras."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    marker = Requirement(line).marker
    return marker is None or any(
        marker.evaluate({"extra": extra}) for extra in ("", "megatron", "deepspeed")
    )


def _fits(line: str, version: str | None) -> bool | None:
    """Whether a version is in a requirement's range; None where that cannot be told."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return None
    if version is None:
        return None
    return Requirement(line).specifier.contains(version, prereleases=True)


TOPICS = {"packages": packages, "core": core, "torch": torch, "nvshmem": nvshmem}

if __name__ == "__main__":
    sys.path[0] = ""  # as with `python -c`: not this folder, whose names are common ones
    print(json.dumps(TOPICS[sys.argv[1]]()))
