"""Makes chosen system calls fail, stop short or be interrupted, and tells what a run left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergepipe.storage.local import resident_fraction

PAGE_BYTES = 4096


@dataclass(slots=True)
class Fault:
    """Counts the calls of one function; the call number `at` (from 0) raises `error` instead of, or after, working."""

    at: int | None = None
    error: BaseException = field(default_factory=lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
    afterwards: bool = False
    on_fire: Callable[[], None] = lambda: None
    calls: int = 0
    fired: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _is_due(self) -> bool:
        with self._lock:
            due = self.calls == self.at
            self.calls += 1
            self.fired = self.fired or due
            return due

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the fault built in."""

        def faulty(*args: Any, **options: Any) -> Any:
            if not self._is_due():
                return function(*args, **options)
            self.on_fire()
            if self.afterwards:
                with suppress(OSError):
                    function(*args, **options)
            raise self.error

        return faulty


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `owner.name` by what `make` makes of it, for a while."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def system_error(number: int) -> OSError:
    """The error that the operating system would give."""
    return OSError(number, os.strerror(number))


def is_direct(descriptor: int) -> bool:
    """Whether an open file bypasses the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _part(descriptor: int, nbytes: int) -> int:
    """About a third of a request, on the page grid where the file needs it, and never nothing."""
    third = max(1, nbytes // 3)
    return min(nbytes, max(PAGE_BYTES, third // PAGE_BYTES * PAGE_BYTES)) if is_direct(descriptor) else third


def short_reads(preadv: Callable[..., int]) -> Callable[..., int]:
    """`os.preadv` that delivers a third of what is asked for."""

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        (buffer,) = buffers
        return preadv(descriptor, [memoryview(buffer)[: _part(descriptor, len(buffer))]], offset)

    return read


def short_writes(pwrite: Callable[..., int]) -> Callable[..., int]:
    """`os.pwrite` that takes a third of what it is given."""

    def write(descriptor: int, content: memoryview, offset: int) -> int:
        return pwrite(descriptor, content[: _part(descriptor, len(content))], offset)

    return write


def _drop(descriptor: int) -> None:
    """Drop a file's pages; again where the kernel held on to some, as it may while the machine is busy."""
    size = os.fstat(descriptor).st_size
    for _ in range(100):
        os.fdatasync(descriptor)  # not fsync, which tests replace
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if size == 0 or resident_fraction(descriptor, size) == 0:
            return


def drop_from_page_cache(*places: Path) -> None:
    """Make the files below `places` cold."""
    for place in places:
        for path in [place, *place.rglob("*")]:
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    _drop(descriptor)
                finally:
                    os.close(descriptor)


def worker_threads(patience_seconds: float = 0.0) -> list[str]:
    """Names of the engine's threads that still live after `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while True:
        # A thread whose start was interrupted is listed and never ran: it is not alive.
        listed = [thread for thread in threading.enumerate() if thread.name.startswith("mergepipe-")]
        alive = [thread.name for thread in listed if thread.is_alive()]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def open_descriptors() -> set[tuple[str, str]]:
    """The files that this process holds open, as (number, target).

    Without sockets: clients of object stores close theirs when they like, also long after their test.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if not target.startswith("socket:"):
            found.add((entry.name, target))
    return found
