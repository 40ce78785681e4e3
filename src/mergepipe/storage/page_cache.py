"""Ask the kernel how much of a file is in the page cache, without reading the file."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

SAMPLE_WINDOWS = 32
WINDOW_PAGES = 64


def resident_fraction(descriptor: int, size_bytes: int) -> float:
    """Share of the file's pages in the page cache, in [0, 1], from a sample; 0 where the kernel cannot be asked.

    A process that neither owns nor may write the file is told "all of it": then ordinary reads are used, which are
    never wrong, only slower.
    """
    if size_bytes == 0 or not hasattr(mmap, "PROT_READ"):
        return 0.0
    n_pages = -(-size_bytes // mmap.PAGESIZE)
    window = min(n_pages, WINDOW_PAGES)
    starts = {(n_pages - window) * i // (SAMPLE_WINDOWS - 1) for i in range(SAMPLE_WINDOWS)}
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            pages_SW = np.zeros((len(starts), window), np.uint8)
            for row, start in enumerate(sorted(starts)):
                place = ctypes.c_void_p(address + start * mmap.PAGESIZE)
                answer = ctypes.c_void_p(pages_SW[row].ctypes.data)
                if libc.mincore(place, ctypes.c_size_t(window * mmap.PAGESIZE), answer):
                    return 0.0
    except (OSError, ValueError, AttributeError, BufferError):
        return 0.0
    return float(np.mean(pages_SW & 1))
