"""Metadata is in setup.cfg. Here: the CUDA core moe_ep._C, built by CMake where nvcc is found, and
moe_ep._C_nvshmem, where NVSHMEM is found too (the wheel nvidia-nvshmem-cu12 or -cu13, whichever
matches nvcc, in the environment that is installed into; or NVSHMEM_DIR).

MOE_EP_BUILD_CUDA=0 leaves both out, 1 insists on _C. MOE_EP_CUDA_ARCHS="8.0;9.0;10.0" chooses the
GPU architectures.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def wants_cuda() -> bool:
    choice = os.environ.get("MOE_EP_BUILD_CUDA", "")
    if choice == "0":
        return False
    if choice == "1":
        return True
    found = shutil.which(os.environ.get("CUDACXX", "nvcc")) is not None
    if not found:
        print("moe_ep: no nvcc on the PATH, installing without the CUDA core", file=sys.stderr)
    return found


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if ext.name != "moe_ep._C":
            return  # CMake makes both at once
        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        source, folder = Path(__file__).resolve().parent, Path(self.build_temp).resolve()
        configure = ["-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        for step in (
            [*configure, f"-DPython_EXECUTABLE={sys.executable}"],
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
