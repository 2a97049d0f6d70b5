"""Loading moe_ep/_C_nvshmem and the NVSHMEM library that it was compiled with."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

from moe_ep import env

_WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_LIBRARY = "libnvshmem_host.so.3"
INSTALL = (
    "pip install nvidia-nvshmem-cu13 (or -cu12: the CUDA version of nvcc), then install moe_ep "
    "from its sources again with nvcc on the PATH"
)


def load() -> Any:
    """The module moe_ep._C_nvshmem. Works without a driver.

    Raises:
        ImportError: it was not built, or the NVSHMEM library is not there.
    """
    library = find_library()
    if library is not None:
        # The module finds it then, wherever it is: no LD_LIBRARY_PATH is needed.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("moe_ep._C_nvshmem")


def find_library() -> Path | None:
    """NVSHMEM's host library: in NVSHMEM_DIR, or of an installed wheel."""
    folder = env.nvshmem_dir()
    if folder is not None:
        path = Path(folder) / "lib" / _LIBRARY
        return path if path.exists() else None
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if file.name == _LIBRARY and path.exists():
                return path
    return None


def problem(core: Any) -> str | None:
    """Why the library that is loaded does not fit the module; None where it does."""
    built, loaded = core.NVSHMEM_VERSION, core.loaded_version()
    if built == loaded:
        return None
    return (
        f"moe_ep/_C_nvshmem was compiled with NVSHMEM {built}, this process has loaded NVSHMEM "
        f"{loaded}; device code of one version must not meet the host library of another: install "
        f"the wheel nvidia-nvshmem-cu13=={built} (or -cu12), or install moe_ep from its sources "
        f"again beside NVSHMEM {loaded}"
    )
