"""The only publisher: an output grows in an invisible sibling directory and appears in one atomic step, or never."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mergepipe.errors import ConflictError, MergePipeError, OutputError, StorageError
from mergepipe.manifest import MANIFEST_NAME
from mergepipe.storage.local import os_error
from mergepipe.storage.output import sync_directory
from mergepipe.storage.ownership import (
    OWNER_NAME,
    Owner,
    is_alive,
    living_owner,
    read_owner,
    this_process,
    try_lock,
    write_owner,
)

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_STAGING_MARK = ".mergepipe-"
_UNKNOWN = Owner(0, "", "", "this machine")
_SWEEP_TRIES = 40
_SWEEP_SECONDS = 0.05
_BIRTH_SECONDS = 5.0
CONTENT_NAME = "snapshot"
ASIDE_NAME = "old"


def check_target(out: Path, inputs: Iterable[Path], *, force: bool | None) -> None:
    """Refuse an output that exists, overlaps an input, or would replace something that mergepipe did not make.

    `force` is None where nothing can be replaced.

    Raises:
        OutputError: naming what is in the way.
    """
    resolved = out.resolve()
    for path in inputs:
        source = path.resolve()
        if resolved == source or source in resolved.parents or resolved in source.parents:
            raise OutputError.of(
                "output.overlaps-input", out, f"overlaps the input {path}", "choose a folder apart from every input"
            )
    for folder in out.absolute().parents:
        if folder.is_file():
            raise OutputError.of(
                "output.not-a-directory", folder, f"is a file; {out} cannot be in it", "choose another place"
            )
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        hint = "choose another name" + ("" if force is None else ", or replace it with --force")
        raise OutputError.of("output.exists", out, "already exists", hint)
    if out.is_symlink() or not out.is_dir():
        raise OutputError.of("output.not-a-directory", out, "exists and is not a directory", "remove it yourself")
    if any(out.iterdir()) and not (out / MANIFEST_NAME).is_file():
        raise OutputError.of(
            "output.not-a-snapshot",
            out,
            f"holds files but no {MANIFEST_NAME}: --force replaces only what mergepipe made",
            "remove it yourself, or choose another name",
        )


def check_free_space(out: Path, needed_bytes: int) -> None:
    """Refuse to start where the file system of `out` cannot hold the result.

    Raises:
        StorageError: with the free and the needed bytes.
    """
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    held = _allocated_bytes(staging_directory(out.absolute()))  # left by a dead run, to be continued or removed
    free = shutil.disk_usage(parent).free + held
    if free < needed_bytes:
        raise StorageError.of(
            "storage.no-space", out, f"needs {needed_bytes} bytes, {free} are free", "free some space and run again"
        )


def _allocated_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


class Staging:
    """The invisible directory in which a snapshot grows; a context manager.

    `.<name>.mergepipe-staging` beside the output, one for each output: it holds the snapshot to be, the journal and a
    note of the process, which locks it while it lives. Only `publish` makes anything visible. Leaving the context
    without it removes the directory, unless `keep` was called. What a killed process left is taken over: continued
    where `can_continue` says so of the directory, else removed.
    """

    def __init__(self, out: Path, *, force: bool, can_continue: Callable[[Path], bool] | None = None) -> None:
        self._out = out.absolute()
        self._force = force
        self._can_continue = can_continue
        self._made_parents: tuple[Path, ...] = ()
        self._directory = staging_directory(self._out)
        self._lock = -1
        self._keeps = False
        self._patience = _SWEEP_TRIES
        self._is_new = False
        self.is_continued = False

    @property
    def path(self) -> Path:
        """Where to write the snapshot."""
        return self._directory / CONTENT_NAME

    @property
    def directory(self) -> Path:
        """The whole of the staging directory; what lies beside `path` is never published."""
        return self._directory

    def __enter__(self) -> Staging:
        try:
            self._made_parents = _make_parents(self._out.parent)
            _sweep_old(self._out)
            while self._lock < 0:
                self._lock = self._acquire()
            write_owner(self._directory)
            _bring_back(self._directory, self._out)
            self._keeps = not self._is_new  # whatever is wrong, what an interrupted run left stays
            self.is_continued = self._can_continue is not None and self._can_continue(self._directory)
            self._keeps = False
            if not self.is_continued:
                _empty(self._directory)
                self.path.mkdir()
        except BaseException as error:  # an interrupt too: nobody else would remove what was made
            self._abandon()
            if isinstance(error, OSError):
                raise os_error(error, self._directory, "creating the staging directory") from error
            raise
        return self

    def _acquire(self) -> int:
        """Make or take over the directory; return the descriptor that holds its lock, -1 to try again.

        Raises:
            ConflictError: `output.busy`, a living process works there.
        """
        with contextlib.suppress(FileExistsError):
            self._directory.mkdir()
            self._is_new = True
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # its owner has just finished
            return -1
        try:
            is_locked = try_lock(descriptor)
            if is_locked is False:
                self._wait_for_sweep(read_owner(self._directory))
            if is_locked is False or not _is_same(descriptor, self._directory):
                os.close(descriptor)
                return -1
            owner = living_owner(self._directory, is_locked=is_locked)
            if owner is not None and owner != this_process():
                raise _busy(self._out, owner)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _wait_for_sweep(self, owner: Owner | None) -> None:
        """Wait a moment where the lock is not held by a run, but by somebody who removes what a dead one left."""
        if self._patience == 0 or (owner is not None and is_alive(owner, 0.0)):
            raise _busy(self._out, owner)
        self._patience -= 1
        time.sleep(_SWEEP_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def keep(self) -> None:
        """Leave the directory where it is when the context ends: another run can continue it."""
        self._keeps = True

    def publish(self) -> None:
        """Make the finished directory visible as `out`, durably.

        Raises:
            ConflictError: `out` appeared meanwhile.
            OutputError: what is to be replaced is no snapshot (any more).
            StorageError: the operating system refused.
        """
        for directory, _, _ in os.walk(self.path):
            sync_directory(Path(directory))
        replaced = self._force and self._out.exists()
        if replaced:  # it may have been put there since the run began
            check_target(self._out, (), force=True)
        try:
            if replaced:
                _exchange(self.path, self._out, self._directory / ASIDE_NAME)
            else:
                _rename_new(self.path, self._out)
        except FileExistsError as error:
            raise ConflictError.of(
                "output.appeared", self._out, "was created by somebody else meanwhile", "choose another name"
            ) from error
        except OSError as error:
            raise os_error(error, self._out, "publishing it") from error
        self._made_parents = ()
        self._keeps = False
        try:
            sync_directory(self._out.parent)
        except StorageError as error:
            raise StorageError.of(
                "output.not-durable",
                self._out,
                "is complete and in its place, but making its name durable failed",
                "check the disk before you rely on it",
            ) from error

    def _abandon(self) -> None:
        if self._lock >= 0:
            if not self._keeps:
                _remove_all(self._directory)
            os.close(self._lock)
            self._lock = -1
        else:  # an interrupt may have come between making and locking it; another's is not empty, or tried again
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        _remove_empty(self._made_parents)
        self._made_parents = ()


def staging_directory(out: Path) -> Path:
    """Where the snapshot that is to become `out` grows."""
    return out.parent / f".{out.name}{_STAGING_MARK}staging"


@dataclass(frozen=True, slots=True)
class LeftStaging:
    """A staging directory that was found: who works in it, None if nobody lives."""

    directory: Path
    owner: Owner | None


def find_staging(parent: Path) -> Iterator[LeftStaging]:
    """Every staging directory in `parent`, in order of name; the living as well as the dead."""
    for directory in sorted(parent.glob(f".*{_STAGING_MARK}*")):
        if not directory.is_symlink() and directory.is_dir():
            with _probed(directory) as owner:
                found = LeftStaging(directory, owner)
            yield found


def is_dead(directory: Path) -> bool:
    """Whether a staging directory is there of which the process is dead."""
    with _probed(directory) as owner:
        return owner is None and directory.exists()


def remove_dead(directory: Path) -> bool:
    """Remove a staging directory of which the process is dead; whether that was done.

    What a half-done replacement without kernel support left aside is brought back first.
    """
    with _probed(directory) as owner:
        out = directory.parent / directory.name.removeprefix(".").rpartition(_STAGING_MARK)[0]
        is_only_copy = directory.name.endswith(f"-{ASIDE_NAME}") and not out.exists()  # of an earlier version's
        if owner is not None or is_only_copy or not directory.exists():
            return False
        _bring_back(directory, out)
        _remove_all(directory)
        return not directory.exists()


@contextlib.contextmanager
def _probed(directory: Path) -> Iterator[Owner | None]:
    """Lock the directory if nobody has, and tell who works there; the lock is held while the context lasts."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it has just been removed
        yield None
        return
    try:
        is_locked = try_lock(descriptor)
        if is_locked is False:
            yield read_owner(directory) or _UNKNOWN
        else:
            owner = living_owner(directory, is_locked=is_locked)
            yield _UNKNOWN if owner is None and _is_newborn(directory) else owner
    finally:
        os.close(descriptor)


def _is_newborn(directory: Path) -> bool:
    """Whether a process may just be about to lock it and to write its name into it."""
    try:
        return not (directory / OWNER_NAME).exists() and time.time() - directory.stat().st_mtime < _BIRTH_SECONDS
    except FileNotFoundError:
        return False


def _busy(out: Path, owner: Owner | None) -> MergePipeError:
    who = str(owner) if owner is not None else "another process"
    return ConflictError.of("output.busy", out, f"is being made by {who}", "wait for it, or choose another name")


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether `path` is still what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _empty(directory: Path) -> None:
    """Remove everything but the note of the owner."""
    for path in directory.iterdir():
        if path.name == OWNER_NAME:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_all(directory: Path) -> None:
    """Remove a directory as far as that can be done. Plain files first: that works even where none can be opened."""
    for path in _listed(directory):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in _listed(directory):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _bring_back(directory: Path, out: Path) -> None:
    """Undo half an exchange: the old snapshot stepped aside, and the new one never came."""
    aside = directory / ASIDE_NAME
    if aside.is_dir() and not (out.exists() or out.is_symlink()):
        aside.rename(out)


def _sweep_old(out: Path) -> None:
    """Remove what killed processes of earlier versions left, which named staging directories at random."""
    for stale in out.parent.glob(f"{_escape_glob(f'.{out.name}{_STAGING_MARK}')}*"):
        if stale != staging_directory(out):
            remove_dead(stale)


def _escape_glob(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _make_parents(parent: Path) -> tuple[Path, ...]:
    """Create missing directories; return those created, outermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    missing.reverse()
    try:
        for directory in missing:
            directory.mkdir(exist_ok=True)
    except BaseException as error:
        _remove_empty(missing)
        if isinstance(error, OSError):
            raise os_error(error, missing[-1], "creating it") from error
        raise
    return tuple(missing)


def _remove_empty(directories: Sequence[Path]) -> None:
    for directory in reversed(directories):
        with contextlib.suppress(OSError):  # somebody else uses it by now, or it was never made
            directory.rmdir()


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """One `renameat2`; False where the system or the file system does not know the flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))


def _rename_new(staged: Path, out: Path) -> None:
    if not _renameat2(staged, out, _RENAME_NOREPLACE):
        if out.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
        staged.rename(out)


def _exchange(staged: Path, out: Path, aside: Path) -> None:
    """Swap the two directories. Without kernel support the old one steps aside first: both stay whole all the time."""
    if not _renameat2(staged, out, _RENAME_EXCHANGE):
        out.rename(aside)
        try:
            staged.rename(out)
        except BaseException:
            if not out.exists():
                aside.rename(out)
            raise
