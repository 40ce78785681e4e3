"""Kills a process at its n-th storage operation, for every n: an operation is never reached, or torn in half."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mergepipe.storage import owned
from support.faults import replaced

OPERATIONS: tuple[tuple[object, str], ...] = (
    (os, "open"),
    (os, "mkdir"),
    (os, "write"),
    (os, "pwrite"),
    (os, "posix_fallocate"),
    (os, "ftruncate"),
    (os, "truncate"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (owned, "renameat2"),
)
"""Everything that changes what is stored, and the opening of files; directories are opened by many of these."""

_TORN = ("write", "pwrite")


class Death(StrEnum):
    """How the process ends."""

    BEFORE = "before"  # the operation never happens
    TORN = "torn"  # of a write only the first half gets through


@dataclass(slots=True)
class Operations:
    """Counts storage operations in order, and kills the process at number `at` (from 0)."""

    at: int | None = None
    death: Death = Death.BEFORE
    names: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wrap(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What makes a counted operation of a function."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                if name == "open" and args[1] & os.O_DIRECTORY:  # changes nothing: as good as death at the next one
                    return function(*args, **options)
                with self._lock:
                    is_last = len(self.names) == self.at
                    self.names.append(name)
                    if is_last:
                        if self.death is Death.TORN and name in _TORN:
                            descriptor, content, *rest = args
                            function(descriptor, memoryview(content)[: len(content) // 2 // 512 * 512], *rest)
                        os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return counted

        return make

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count while the context lasts."""
        with ExitStack() as stack:
            for owner, name in OPERATIONS:
                stack.enter_context(replaced(owner, name, self.wrap(name)))
            yield


def count_operations(action: Callable[[], object]) -> Sequence[str]:
    """The names of the operations of an action, in order, in a process of its own."""
    names = mmap.mmap(-1, 1 << 20)

    def counted() -> None:
        operations = Operations()
        with operations.watched():
            action()
        names.write(" ".join(operations.names).encode())

    if run_forked(counted) != 0:
        raise AssertionError("the action fails by itself")
    return names[:].rstrip(b"\0").decode().split()


def run_killed(action: Callable[[], object], at: int, death: Death) -> bool:
    """Run an action in a process of its own that is killed at operation `at`; whether it came that far."""

    def dying() -> None:
        with Operations(at, death).watched():
            action()

    return run_forked(dying) == -signal.SIGKILL


def run_forked(action: Callable[[], object]) -> int:
    """Run an action in a copy of this process, which must have no other threads; its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
