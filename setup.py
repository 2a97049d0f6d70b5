"""Metadata is in setup.cfg. Here: the CUDA core moe_ep._C, built by CMake where nvcc is found, and
moe_ep._C_nvshmem, where NVSHMEM is found too (the wheel nvidia-nvshmem-cu12 or -cu13, whichever
matches nvcc, in the environment that is installed into; or NVSHMEM_DIR).

MOE_EP_BUILD_CUDA=0 leaves both out, 1 insists on _C. MOE_EP_CUDA_ARCHS="8.0;9.0;10.0" chooses the
GPU architectures; without it, those of the three that nvcc knows.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NVCC = os.environ.get("CUDACXX", "nvcc")
ARCHITECTURES = ("8.0", "9.0", "10.0")  # as in CMakeLists.txt


def wants_cuda() -> bool:
    choice = os.environ.get("MOE_EP_BUILD_CUDA", "")
    if choice == "0":
        return False
    if choice == "1":
        return True
    found = shutil.which(NVCC) is not None
    if not found:
        print("moe_ep: no nvcc on the PATH, installing without the CUDA core", file=sys.stderr)
    return found


def architectures() -> str:
    """What to compile for: CUDA before 12.8 knows no 10.0. Empty: what CMakeLists.txt says."""
    asked = os.environ.get("MOE_EP_CUDA_ARCHS", "")
    if asked or shutil.which(NVCC) is None:  # CMake looks elsewhere, too, and says what it lacks
        return asked
    listing = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    names = listing.stdout.split()
    known = [arch for arch in ARCHITECTURES if f"compute_{arch.replace('.', '')}" in names]
    left_out = ", ".join(arch for arch in ARCHITECTURES if arch not in known)
    if not known:
        raise SystemExit(f"moe_ep: {NVCC} knows none of the architectures {left_out}")
    if left_out:
        print(f"moe_ep: {NVCC} does not know architecture {left_out}: left out", file=sys.stderr)
    return ";".join(known)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if ext.name != "moe_ep._C":
            return  # CMake makes both at once
        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        source, folder = Path(__file__).resolve().parent, Path(self.build_temp).resolve()
        configure = ["-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        for step in (
            [
                *configure,
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DMOE_EP_CUDA_ARCHS={architectures()}",
            ],
            ["--build", folder],
            ["--install", folder, "--prefix", destination],
        ):
            subprocess.run(["cmake", *map(str, step)], check=True)


if wants_cuda():
    setup(
        ext_modules=[
            Extension("moe_ep._C", sources=[]),
            Extension("moe_ep._C_nvshmem", sources=[], optional=True),
        ],
        cmdclass={"build_ext": CMakeBuild},
        setup_requires=["cmake>=3.22", "ninja", "pybind11>=2.13"],
    )
else:
    setup()
