"""Everything that changes what is stored: no file is opened through a link, and what is told durable is.

An output grows in a private folder beside it (`make_private_folder`), into which no other user can put anything.
Functions raise `OSError` where the operating system refused, and `OutputError` (`output.link`, `output.not-ours`) where
something that is not ours is in the way; then nothing was touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.errors import OutputError
from mergepipe.storage.ranges import read_up_to

STAGING_SUFFIX: Final = ".mergepipe-staging"
PARTS_MARK: Final = ".mergepipe-parts-"
_PARTS_NAME = re.compile(rf"\..*{re.escape(PARTS_MARK)}[0-9a-f]{{32}}")
_NEW_SUFFIX = ".mergepipe-new"
_MAX_NAME_BYTES = 255
_DIGEST_DIGITS = 16
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
_NO_FLAGS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NAMES_TRIED = 100
_WORKING_DIRECTORY = -100
_NOREPLACE = 1
_EXCHANGE = 2


def marked_name(name: str, suffix: str) -> str:
    """The hidden name beside `name` that ends in `suffix`; a name that gets too long is cut and told by its digest."""
    marked = f".{name}{suffix}"
    if len(os.fsencode(marked)) <= _MAX_NAME_BYTES:
        return marked
    digest = blake3(os.fsencode(name)).hexdigest(_DIGEST_DIGITS // 2)
    left_bytes = _MAX_NAME_BYTES - len(f".~{digest}{suffix}")
    while len(os.fsencode(name)) > left_bytes:
        name = name[:-1]
    return f".{name}~{digest}{suffix}"


def is_parts_name(name: str) -> bool:
    """Whether a directory of this name holds the parts of an output."""
    return _PARTS_NAME.fullmatch(name) is not None


def _open(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open what `path` names itself, not what it links to."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if path.is_symlink():
            message, hint = "is a link, and nothing is written through links", "remove the link, and run again"
            raise OutputError.of("output.link", path, message, hint) from error
        raise


# --- files ---


def create_file(path: Path, *, flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """Make a new file; return its descriptor."""
    return _open(path, flags | os.O_CREAT | os.O_EXCL, mode)


def create_unnamed_file(folder: Path) -> int:
    """Make a file without a name in a folder, to write and read; its space is given back when it is closed."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # the file system has none; what else is wrong shows below
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = folder / f".mergepipe-scratch-{os.getpid()}-{threading.get_ident()}"
    descriptor = create_file(path, flags=os.O_RDWR, mode=0o600)
    path.unlink()
    return descriptor


def open_file(path: Path, *, flags: int = os.O_WRONLY) -> int:
    """Open a regular file that is ours."""
    descriptor = _open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        message = "is not a regular file, and only files that MergePipe made are replaced"
        raise OutputError.of("output.not-ours", path, message, "move it away, and run again")
    return descriptor


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The first `limit_bytes` of a small file that is ours."""
    descriptor = open_file(path, flags=os.O_RDONLY)
    try:
        return read_up_to(descriptor, 0, min(limit_bytes, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def replace_by_hole(path: Path) -> None:
    """Give the space of a file that is ours back, in one step: it keeps its size, and its bytes read as zeros."""
    hole = path.with_name(f"{path.name}.hole")
    hole.unlink(missing_ok=True)
    descriptor = create_file(hole)
    try:
        os.ftruncate(descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)
    rename(hole, path)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the space of a new file; where the file system cannot, give it its size only."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(descriptor, size_bytes)
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        os.ftruncate(descriptor, size_bytes)


def write_all(descriptor: int, content: bytes | bytearray) -> None:
    """Write at the end of an open file."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_at(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write at an offset of an open file."""
    rest = memoryview(content)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def sync_file(descriptor: int) -> None:
    """Make an open file durable; on macOS, `fsync` leaves bytes in the disk's cache, and another call does not."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # the file system has none
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a small new file and make it durable; one that could not be written is removed."""
    descriptor = create_file(path)
    try:
        write_all(descriptor, content)
        sync_file(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Put a small file in place of what is there, in one step, durably: a new file beside it, then renamed."""
    _write_and_move(path, content, rename)


def create_whole(path: Path, content: bytes) -> None:
    """Write a small file that appears whole and durable under a name that is not there, on shared file systems too."""
    _write_and_move(path, content, _rename_new_file)


def _write_and_move(path: Path, content: bytes, move: Callable[[Path, Path], None]) -> None:
    """Write a new file beside `path` and move it there, durably; nothing of it is left where that fails."""
    beside = _write_beside(path, content)
    try:
        move(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def _rename_new_file(old: Path, new: Path) -> None:
    """Rename a file to a name that is not there, in one step: by flag, else by a second link."""
    if not renameat2(old, new, _NOREPLACE):
        os.link(old, new, follow_symlinks=False)
        old.unlink()


def _write_beside(path: Path, content: bytes) -> Path:
    """Write a new file beside `path`, under a name that nothing has."""
    for number in range(_NAMES_TRIED):
        beside = path.with_name(marked_name(path.name, f".{os.getpid()}-{number}{_NEW_SUFFIX}"))
        with contextlib.suppress(FileExistsError):  # of a killed process of this number, or not ours
            write_file(beside, content)
            return beside
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def remove_file(path: Path) -> None:
    """Remove a file, or a link itself."""
    path.unlink()


def is_there(path: Path) -> bool:
    """Whether there is anything of this name, a link too."""
    return os.path.lexists(path)


# --- folders ---


def make_folder(path: Path) -> None:
    """Make a folder."""
    path.mkdir()


def make_private_folder(path: Path) -> bool:
    """Make a folder that only this user may look into, or make one that is there so; whether it was made."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
        return True
    descriptor = open_folder(path)
    try:
        with contextlib.suppress(OSError):  # the file system has no modes
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return False


def make_folders(path: Path) -> None:
    """Make what is missing of a folder."""
    path.mkdir(parents=True, exist_ok=True)


def open_folder(path: Path) -> int:
    """Open a folder that is ours for reading, locking and making durable."""
    return _open(path, _LIST)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    descriptor = os.open(path, _LIST)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def list_folder(path: Path) -> list[tuple[str, os.stat_result]]:
    """The names in a folder with what they are, in order; links are not followed."""
    listed = []
    for place in sorted(path.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            listed.append((place.name, place.lstat()))
    return listed


def file_states(path: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes with each file in a folder, at any depth, by its relative name; links are not followed."""
    states: dict[str, tuple[int, ...]] = {}
    for folder, folders, names in os.walk(path):
        for name in names + folders:
            place = Path(folder) / name
            status = place.lstat()
            state: tuple[int, ...] = (status.st_mode, status.st_ino)
            if not stat.S_ISDIR(status.st_mode):
                state += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            states[str(place.relative_to(path))] = state
    return states


def link_folder(path: Path, folder: Path) -> None:
    """Make a symbolic link to a folder."""
    path.symlink_to(folder.absolute(), target_is_directory=True)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all in it; of links, only the links themselves."""
    shutil.rmtree(path, ignore_errors=ignore_errors)


def keep_only(path: Path, sizes: Mapping[str, int]) -> None:
    """Remove everything in a folder but the files of the given names, and cut these to their sizes."""
    for name, status in list_folder(path):
        if stat.S_ISDIR(status.st_mode):
            remove_tree(path / name)
        elif name not in sizes:
            remove_file(path / name)
        elif status.st_size != sizes[name]:
            descriptor = open_file(path / name)
            try:
                os.ftruncate(descriptor, sizes[name])
            finally:
                os.close(descriptor)


# --- renaming ---


def rename(old: Path, new: Path) -> None:
    """Rename; a file (or a link itself) of the new name is replaced."""
    os.rename(old, new)  # noqa: PTH104


def link_or_copy(old: Path, new: Path) -> None:
    """Give a file that is ours a second name; where the file system has no such names, copy it durably."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
        descriptor = open_file(new)
        try:
            sync_file(descriptor)
        finally:
            os.close(descriptor)


def rename_new(old: Path, new: Path) -> None:
    """Rename to a name that is not there."""
    if not renameat2(old, new, _NOREPLACE):
        if is_there(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        rename(old, new)


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap two folders. Without kernel support the old one steps aside first: both stay whole all the time."""
    if not renameat2(new, old, _EXCHANGE):
        rename(old, aside)
        try:
            rename(new, old)
        except BaseException:
            if not is_there(old):
                rename(aside, old)
            raise


def renameat2(old: Path, new: Path, flags: int) -> bool:
    """One system call; False where the system or the file system does not know the flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_WORKING_DIRECTORY, os.fsencode(old), _WORKING_DIRECTORY, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))
