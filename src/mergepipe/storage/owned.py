"""Everything that changes what is stored: by directory descriptors, never through a link, only in what is ours.

A path is walked from a folder that the user named, which may lie behind links, to the folder that is ours: the staging
or parts directory of an output (told by its name), or the `root` that a caller gives, such as a snapshot that is
repaired. That folder and everything below it must be reached without a link. Without either, the folder of the file is
the user's, and only the file itself must not be a link. Functions raise `OSError` where the operating system refused,
and `OutputError` (`output.link`, `output.not-ours`) where something that is not ours is in the way; then nothing was
touched.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.errors import MergePipeError, OutputError
from mergepipe.storage.regular import read_up_to
from mergepipe.storage.system_calls import switch_direct

STAGING_SUFFIX: Final = ".mergepipe-staging"
PARTS_MARK: Final = ".mergepipe-parts-"
FINISHED_SUFFIX: Final = ".finished"
_PARTS_NAME = re.compile(rf"\..*{re.escape(PARTS_MARK)}[0-9a-f]{{32}}({re.escape(FINISHED_SUFFIX)})?")
_NEW_SUFFIX = ".mergepipe-new"
_UNNAMED = ".mergepipe-scratch"
_MAX_NAME_BYTES = 255
_DIGEST_DIGITS = 16
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
_NO_FLAGS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NAMES_TRIED = 100
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


# --- walking ---


def _split(path: Path, root: Path | None) -> tuple[Path, tuple[str, ...]]:
    """The folder that may lie behind links, and the names to be walked below it."""
    absolute = path.absolute()
    work_root = _staging_root(absolute) if root is None else root.absolute()
    anchor = absolute.parent if work_root is None else work_root.parent
    names = absolute.relative_to(anchor).parts
    if not names or ".." in names:
        raise ValueError(f"{path} does not lie in {work_root}")
    return anchor, names


def _staging_root(path: Path) -> Path | None:
    """The outermost staging or parts directory that `path` lies in, or is."""
    for number, name in enumerate(path.parts):
        if (name.startswith(".") and name.endswith(STAGING_SUFFIX)) or is_parts_name(name):
            return Path(*path.parts[: number + 1])
    return None


@contextlib.contextmanager
def _walked(anchor: Path, names: tuple[str, ...]) -> Iterator[int]:
    """Open a folder by its names below `anchor`, for as long as the context lasts; no name may be a link."""
    descriptor = os.open(anchor, _WALK)
    try:
        for number, name in enumerate(names):
            try:
                inner = os.open(name, _WALK | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                _refuse(error, descriptor, anchor.joinpath(*names[: number + 1]), wants_folder=True)
                raise
            outer, descriptor = descriptor, inner
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _parent(path: Path, root: Path | None) -> Iterator[tuple[int, str]]:
    """The open folder that `path` is in, and its name there."""
    anchor, names = _split(path, root)
    with _walked(anchor, names[:-1]) as descriptor:
        yield descriptor, names[-1]


def _refuse(error: OSError, folder: int, path: Path, *, wants_folder: bool = False) -> None:
    """Raise the typed error if what could not be opened is not of the kind that we make."""
    if error.errno not in (*_IN_THE_WAY, errno.EEXIST):
        return
    try:
        mode = os.lstat(path.name, dir_fd=folder).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise _link(path) from error
    is_kind = stat.S_ISDIR(mode) if wants_folder else stat.S_ISREG(mode)
    if error.errno != errno.EEXIST and not is_kind:
        raise _not_ours(path, f"is {_kind(mode)}") from error


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a named pipe"))
    return next((text for is_kind, text in kinds if is_kind(mode)), "a device or a socket")


def _link(path: Path) -> MergePipeError:
    return OutputError.of(
        "output.link", path, "is a link, and nothing is written through links", "remove the link, and run again"
    )


def _not_ours(path: Path, what: str) -> MergePipeError:
    message = f"{what}, where only files that MergePipe made can be written"
    return OutputError.of("output.not-ours", path, message, "move it away, and run again")


# --- files ---


def create_file(path: Path, root: Path | None = None, *, flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """Make a new file; return its descriptor.

    Raises:
        FileExistsError: something is there already.
    """
    with _parent(path, root) as (folder, name):
        try:
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        except OSError as error:
            _refuse(error, folder, path)
            raise


def create_unnamed_file(folder: Path) -> int:
    """Make a file without a name in a folder, to write and read; its space is given back when it is closed."""
    with _parent(folder / _UNNAMED, None) as (descriptor, name):
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):  # the file system has none; what else is wrong shows below
                return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=descriptor)
        unique = f"{name}-{os.getpid()}-{threading.get_ident()}"
        file = os.open(
            unique, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=descriptor
        )
        os.unlink(unique, dir_fd=descriptor)
        return file


def open_file(path: Path, root: Path | None = None, *, flags: int = os.O_WRONLY) -> int:
    """Open a file that is ours: a regular one that has no other name."""
    with _parent(path, root) as (folder, name):
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            _refuse(error, folder, path)
            raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_ours(path, f"is {_kind(status.st_mode)}")
        if status.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OutputError.of(
                "output.link", path, "has another name too (a hard link), and what that names would be changed",
                "replace it by a copy, and run again",
            )  # fmt: skip
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, limit_bytes: int, root: Path | None = None) -> bytes:
    """The first `limit_bytes` of a small file that is ours."""
    descriptor = open_file(path, root, flags=os.O_RDONLY)
    try:
        return read_up_to(descriptor, 0, min(limit_bytes, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def truncate_file(path: Path, size_bytes: int, root: Path | None = None) -> None:
    """Cut a file that is ours."""
    descriptor = open_file(path, root)
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            os.ftruncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def replace_by_hole(path: Path, root: Path | None = None) -> None:
    """Give the space of a file that is ours back, in one step: it keeps its size, and its bytes read as zeros."""
    hole = path.with_name(f"{path.name}.hole")
    with contextlib.suppress(FileNotFoundError):
        remove_file(hole, root)
    descriptor = create_file(hole, root)
    try:
        os.ftruncate(descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)
    rename(hole, path, root)


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


def bypass_page_cache(descriptor: int, *, wanted: bool = True) -> bool:
    """Switch direct writes on or off; whether they are on then."""
    return switch_direct(descriptor, wanted=wanted)


def write_all(descriptor: int, content: bytes) -> None:
    """Write at the end of an open file."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_file(descriptor: int) -> None:
    """Make an open file durable; on macOS, `fsync` leaves bytes in the disk's cache, and another call does not."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # the file system has none
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def write_file(path: Path, content: bytes, root: Path | None = None) -> None:
    """Write a small new file and make it durable; one that could not be written is removed."""
    descriptor = create_file(path, root)
    try:
        write_all(descriptor, content)
        sync_file(descriptor)
    except BaseException:
        with contextlib.suppress(OSError, MergePipeError):
            remove_file(path, root)
        raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, root: Path | None = None) -> None:
    """Put a small file in place of what is there, in one step, durably: a new file beside it, then renamed."""
    _write_and_move(path, content, root, rename)


def create_whole(path: Path, content: bytes, root: Path | None = None) -> None:
    """Write a small file that appears whole and durable under a name that is not there, on shared file systems too.

    Raises:
        FileExistsError: something has that name.
    """
    _write_and_move(path, content, root, _rename_new_file)


def _write_and_move(
    path: Path, content: bytes, root: Path | None, move: Callable[[Path, Path, Path | None], None]
) -> None:
    """Write a new file beside `path` and move it there, durably; nothing of it is left where that fails."""
    beside = _write_beside(path, content, root)
    try:
        move(beside, path, root)
    except BaseException:
        with contextlib.suppress(OSError, MergePipeError):
            remove_file(beside, root)
        raise
    sync_folder(path.parent, root)


def _rename_new_file(old: Path, new: Path, root: Path | None) -> None:
    """Rename a file to a name that is not there, in one step: by flag, else by a second link."""
    with _parent(old, root) as (folder, name), _parent(new, root) as (new_folder, new_name):
        if renameat2(folder, name, new_folder, new_name, _NOREPLACE):
            return
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
        os.unlink(name, dir_fd=folder)


def _write_beside(path: Path, content: bytes, root: Path | None) -> Path:
    """Write a new file beside `path`, under a name that nothing has."""
    for number in range(_NAMES_TRIED):
        beside = path.with_name(marked_name(path.name, f".{os.getpid()}-{number}{_NEW_SUFFIX}"))
        with contextlib.suppress(FileExistsError):  # of a killed process of this number, or not ours
            write_file(beside, content, root)
            return beside
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def remove_file(path: Path, root: Path | None = None) -> None:
    """Remove a file, or a link itself."""
    with _parent(path, root) as (folder, name):
        os.unlink(name, dir_fd=folder)


def is_there(path: Path, root: Path | None = None) -> bool:
    """Whether there is anything of this name, a link too."""
    try:
        with _parent(path, root) as (folder, name):
            os.lstat(name, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# --- folders ---


def make_folder(path: Path, root: Path | None = None) -> None:
    """Make a folder.

    Raises:
        FileExistsError: something is there already.
    """
    with _parent(path, root) as (folder, name):
        try:
            os.mkdir(name, dir_fd=folder)
        except FileExistsError as error:
            _refuse(error, folder, path)
            raise


def make_folders(path: Path, root: Path | None = None) -> None:
    """Make what is missing of a folder that is ours, or of one of the user's."""
    if root is None and _staging_root(path.absolute()) is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    anchor, names = _split(path, root)
    for number in range(1, len(names) + 1):
        with _walked(anchor, names[: number - 1]) as folder, contextlib.suppress(FileExistsError):
            os.mkdir(names[number - 1], dir_fd=folder)
    with _walked(anchor, names):
        pass


def open_folder(path: Path, root: Path | None = None) -> int:
    """Open a folder that is ours for reading, locking and making durable."""
    with _parent(path, root) as (folder, name):
        try:
            return os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            _refuse(error, folder, path, wants_folder=True)
            raise


def sync_folder(path: Path, root: Path | None = None) -> None:
    """Make the names in a folder durable, where the file system can; the user's folder may be a link."""
    is_ours = root is not None or _staging_root(path.absolute()) is not None
    descriptor = open_folder(path, root) if is_ours else os.open(path, _LIST)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def list_folder(path: Path, root: Path | None = None) -> list[tuple[str, os.stat_result]]:
    """The names in a folder that is ours with what they are, in order; links are not followed."""
    descriptor = open_folder(path, root)
    try:
        listed = []
        for name in sorted(os.listdir(descriptor)):  # noqa: PTH208 - of an open folder
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                listed.append((name, os.lstat(name, dir_fd=descriptor)))
        return listed
    finally:
        os.close(descriptor)


def check_tree(path: Path, root: Path | None = None) -> None:
    """Refuse a folder that is ours if anything in it is no folder and no regular file with a single name."""
    for name, status in list_folder(path, root):
        if stat.S_ISDIR(status.st_mode):
            check_tree(path / name, root)
        elif not (stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise _not_ours(path / name, f"is {_kind(status.st_mode)}")
        elif stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
            raise _link(path / name)


def remove_folder(path: Path, root: Path | None = None) -> None:
    """Remove an empty folder."""
    with _parent(path, root) as (folder, name):
        os.rmdir(name, dir_fd=folder)


def remove_tree(path: Path, root: Path | None = None, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all in it; of links, only the links themselves."""
    try:
        with _parent(path, root) as (folder, name):
            shutil.rmtree(name, dir_fd=folder, ignore_errors=ignore_errors)
    except FileNotFoundError:
        if not ignore_errors:
            raise


def keep_only(path: Path, sizes: Mapping[str, int], root: Path | None = None) -> None:
    """Remove everything in a folder but the files of the given names, and cut these to their sizes."""
    for name, status in list_folder(path, root):
        if stat.S_ISDIR(status.st_mode):
            remove_tree(path / name, root)
        elif name in sizes:
            truncate_file(path / name, sizes[name], root)
        else:
            remove_file(path / name, root)


# --- renaming ---


def rename(old: Path, new: Path, root: Path | None = None, new_root: Path | None = None) -> None:
    """Rename; a file (or a link itself) of the new name is replaced. `root` is for both unless `new_root` is given."""
    with _parent(old, root) as (folder, name), _parent(new, new_root or root) as (new_folder, new_name):
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)


def rename_new(old: Path, new: Path) -> None:
    """Rename to a name that is not there.

    Raises:
        FileExistsError: it is.
    """
    if not _renamed_by_flag(old, new, _NOREPLACE):
        if is_there(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        rename(old, new)


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap two folders. Without kernel support the old one steps aside first: both stay whole all the time."""
    if not _renamed_by_flag(new, old, _EXCHANGE):
        rename(old, aside)
        try:
            rename(new, old)
        except BaseException:
            if not is_there(old):
                rename(aside, old)
            raise


def _renamed_by_flag(old: Path, new: Path, flags: int) -> bool:
    with _parent(old, None) as (folder, name), _parent(new, None) as (new_folder, new_name):
        return renameat2(folder, name, new_folder, new_name, flags)


def renameat2(folder: int, name: str, new_folder: int, new_name: str, flags: int) -> bool:
    """One system call; False where the system or the file system does not know the flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(folder, os.fsencode(name), new_folder, os.fsencode(new_name), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), name, None, new_name)
