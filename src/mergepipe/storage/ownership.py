"""Who works in a directory: a lock while its process lives, and a note of the process for where locks mean nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mergepipe.errors import MergePipeError
from mergepipe.storage.limits import OWNER_BYTES
from mergepipe.storage.regular import read_small

OWNER_NAME = "owner.json"
ACCOUNT_NAME = "reads"
SILENCE_SECONDS = 900.0
"""A process of another machine, of which nothing can be known, is taken for dead after so long without a write."""

_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, told apart from any later one of the same number by when it started and on which boot."""

    pid: int
    started: str
    boot: str
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """The owner that this process is."""
    return Owner(os.getpid(), _start_time(os.getpid()), _boot_id(), socket.gethostname())


def is_alive(owner: Owner, silent_seconds: float) -> bool:
    """Whether the process may still run; `silent_seconds` is how long ago it last wrote anything."""
    if owner.boot == _boot_id():
        return _start_time(owner.pid) == owner.started
    if owner.host == socket.gethostname():
        return False  # this machine was started again since
    return silent_seconds < SILENCE_SECONDS


def read_owner(directory: Path) -> Owner | None:
    """The owner noted in a directory; None where there is no such note or it makes no sense."""
    try:
        content = json.loads(read_small(directory / OWNER_NAME, OWNER_BYTES))
        return Owner(int(content["pid"]), str(content["started"]), str(content["boot"]), str(content["host"]))
    except (MergePipeError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_owner(directory: Path) -> None:
    """Note this process as the owner. It need not be durable: after a power failure nobody of that boot lives."""
    (directory / OWNER_NAME).write_text(json.dumps(asdict(this_process()), allow_nan=False), encoding="utf-8")


def try_lock(descriptor: int) -> bool | None:
    """Lock an open directory until it is closed: whether that worked, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in _BUSY:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise


def living_owner(directory: Path, *, is_locked: bool | None) -> Owner | None:
    """The process that works in `directory`, None if it is dead; `is_locked` is what `try_lock` said.

    A lock that was got means that no process of this machine works there. One of another machine may.
    """
    owner = read_owner(directory)
    if owner is None or (is_locked and owner.boot == _boot_id()):
        return None
    return owner if is_alive(owner, time.time() - _newest_change(directory)) else None


def _newest_change(directory: Path) -> float:
    newest = 0.0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                newest = max(newest, (Path(folder) / name).stat().st_mtime)
    return newest


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _start_time(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if there is none of that number."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
