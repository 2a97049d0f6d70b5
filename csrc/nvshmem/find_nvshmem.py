"""Prints the folder of the NVSHMEM wheel for one CUDA version; nothing where there is none.

python find_nvshmem.py 13      looks for nvidia-nvshmem-cu13

Run by CMake with the Python that builds. pip builds in an environment of its own, whose sys.path
lacks the packages of the one it installs into: so site-packages are looked up by their folders too.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path


def find(cuda_major: str) -> Path | None:
    """The folder with include/ and lib/ of the wheel nvidia-nvshmem-cu<cuda_major>."""
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages()]
    for place in map(Path, filter(None, places)):
        folder = place / "nvidia" / "nvshmem"
        # The wheels of all CUDA versions unpack into one folder; their metadata tells them apart.
        installed = list(place.glob(f"nvidia_nvshmem_cu{cuda_major}-*.dist-info"))
        if installed and (folder / "lib" / "libnvshmem_device.a").exists():
            return folder.resolve()
    return None


if __name__ == "__main__":
    print(find(sys.argv[1]) or "", end="")
