"""Make the system calls that only some platforms have, or what does the same without them.

Each function looks at every call whether the platform has it, so that a test can take it away.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
from functools import cache

_SYNC_FILE_RANGE_WRITE = 2


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read into `buffer` from `offset`; return the count, which is less than asked for where the system gave less."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    content = os.pread(descriptor, len(buffer), offset)
    buffer[: len(content)] = content
    return len(content)


def stop_read_ahead(descriptor: int) -> None:
    """Switch the kernel's read-ahead off for an open file, where it can be: bytes nobody asked for stay unread."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
        fcntl.fcntl(descriptor, fcntl.F_RDAHEAD, 0)


def start_writing_back(descriptor: int, first: int, nbytes: int) -> None:
    """Let the system begin to write bytes of an open file to its disk, where it can be told; failures show in fsync."""
    function = getattr(_c_library(), "sync_file_range", None)  # Linux
    if function is not None:
        function(descriptor, ctypes.c_int64(first), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def switch_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switch direct reads and writes of an open file on or off, where it can be; return whether they are on then."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # the file system has none
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident."""
    import resource

    unit_bytes = {"darwin": 1}.get(sys.platform, 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
