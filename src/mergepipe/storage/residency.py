"""How much of a file lies in the page cache, asked of the kernel without reading the file."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


def resident_fraction(descriptor: int, size_bytes: int) -> float:
    """Share of the file's pages in the page cache, in [0, 1]; 0 where the kernel cannot be asked.

    A process that neither owns nor may write the file is told "all of it": then ordinary reads are used, which are
    never wrong, only slower.
    """
    if size_bytes == 0 or not hasattr(mmap, "PROT_READ"):
        return 0.0
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            pages = np.empty(-(-size_bytes // mmap.PAGESIZE), np.uint8)
            failed = libc.mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_void_p(pages.ctypes.data)
            )
    except (OSError, ValueError, AttributeError, BufferError):
        return 0.0
    return 0.0 if failed else float(np.mean(pages & 1))
