"""Record which output and process a staging folder belongs to, and lock it while that process lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergepipe.core.records import RecordFormat
from mergepipe.errors import MergePipeError
from mergepipe.storage.contract import OWNER_BYTES
from mergepipe.storage.owned import (
    STAGING_SUFFIX,
    list_folder,
    marked_name,
    read_file,
    remove_file,
    rename,
    sync_folder,
    write_file,
)

OWNER_NAME = "owner.json"
LOG_NAME = "log"
_NEW_NAME = f"{OWNER_NAME}.new"
SILENCE_SECONDS = 900.0
"""A process of another machine, of which nothing can be known, is taken for dead after so long without a write."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc")
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, distinguished from later ones with the same number by start time and boot."""

    pid: int
    started: str
    boot: str
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class _StagingRecord:
    """The record in a staging directory: the name of the output that grows there, and the process that makes it."""

    output: str
    owner: Owner


_FORMAT: Final = RecordFormat("mergepipe-staging", 2, _StagingRecord, "run again", is_sealed=False)


def this_process() -> Owner:
    """The owner value of this process."""
    return Owner(os.getpid(), _start_time(os.getpid()), _boot_id(), socket.gethostname())


def is_alive(owner: Owner, silent_seconds: float) -> bool:
    """Whether the process may still run; `silent_seconds` is how long ago it last wrote anything."""
    if owner.boot == _boot_id():
        return _start_time(owner.pid) == owner.started
    if owner.host == socket.gethostname():
        return False  # this machine was started again since
    return silent_seconds < SILENCE_SECONDS


def staging_name(output: str) -> str:
    """The name of the directory, beside the output of this name, in which it grows."""
    return marked_name(output, STAGING_SUFFIX)


def is_ours(directory: Path) -> bool:
    """Whether a directory with the name of a staging directory carries the record of its output, or holds nothing."""
    if read_output(directory) is not None:
        return True
    return [name for name, _ in list_folder(directory)] in ([], [_NEW_NAME])  # of a process that died in between


def read_output(directory: Path) -> str | None:
    """The name of the output that a staging directory belongs to; None if it carries no record of that."""
    record = _read_record(directory)
    return record.output if record is not None and staging_name(record.output) == directory.name else None


def read_owner(directory: Path) -> Owner | None:
    """The owner noted in a directory; None where there is no such note or it makes no sense."""
    record = _read_record(directory)
    return None if record is None else record.owner


def write_owner(directory: Path, output: str) -> None:
    """Record durably that a directory is the staging of `output`, and this process its owner."""
    new = directory / _NEW_NAME
    with contextlib.suppress(FileNotFoundError):
        remove_file(new)
    write_file(new, _FORMAT.to_json(_StagingRecord(output, this_process())))
    rename(new, directory / OWNER_NAME)
    sync_folder(directory)


def _read_record(directory: Path) -> _StagingRecord | None:
    """Return the record of a directory; None where there is none of this format."""
    with contextlib.suppress(OSError, MergePipeError):
        return _FORMAT.parse(read_file(directory / OWNER_NAME, OWNER_BYTES), directory / OWNER_NAME)
    return None


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
    return owner if is_alive(owner, time.time() - newest_change(directory)) else None


def newest_change(directory: Path) -> float:
    """Return when a file in a directory was last changed, in seconds since 1970; 0 if there is none."""
    newest = 0.0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                newest = max(newest, (Path(folder) / name).lstat().st_mtime)
    return newest


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return f"host {socket.gethostname()}"


def _start_time(pid: int) -> str:
    """Return the start of a process, in ticks since the boot; empty if there is none of that number."""
    with contextlib.suppress(OSError):
        return (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    return "" if (_PROCESSES / "self").exists() else _existence_mark(pid)


def _existence_mark(pid: int) -> str:
    """Return a stand-in for the time of start where the system tells none: only whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:  # it is another user's
        pass
    return "running"
