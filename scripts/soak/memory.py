"""What a process holds of memory, by measures of different sharpness."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2; sums over all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


def held() -> dict[str, int]:
    """Bytes, but for `blocks`.

    live: what C code has allocated and not freed (glibc only). blocks: what Python has, in objects.
    rss: resident pages, after the allocator has given back what it can. cuda: allocated by torch on
    the GPU, cuda_reserved: held by it.
    """
    found = {"blocks": sys.getallocatedblocks()}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _MallInfo2
        info = libc.mallinfo2()
        found["live"] = info.uordblks + info.hblkhd
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found["rss"] = pages * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.memory_allocated()
        found["cuda_reserved"] = torch.cuda.memory_reserved()
    return found
