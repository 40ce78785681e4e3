"""The only publisher: an output grows in an invisible sibling directory and appears in one atomic step, or never."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from mergepipe.errors import ConflictError, OutputError, StorageError
from mergepipe.manifest import MANIFEST_NAME
from mergepipe.storage.local import os_error
from mergepipe.storage.output import sync_directory

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_ASIDE = "-old"


def check_target(out: Path, inputs: Iterable[Path], *, force: bool) -> None:
    """Refuse an output that exists, overlaps an input, or would replace something that is not a snapshot.

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
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise OutputError.of("output.exists", out, "already exists", "choose another name, or replace it with --force")
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
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise StorageError.of(
            "storage.no-space", out, f"needs {needed_bytes} bytes, {free} are free", "free some space and run again"
        )


class Staging:
    """The invisible directory in which a snapshot grows; a context manager.

    Only `publish` makes anything visible. Leaving the context without it removes the directory. The directory is
    locked while its process lives, so that what a killed process left behind is known as such and swept away by the
    next merge to the same place.
    """

    def __init__(self, out: Path, *, force: bool) -> None:
        self._out = out.absolute()
        self._force = force
        self._made_parents: tuple[Path, ...] = ()
        self._prefix = f".{self._out.name}.mergepipe-"
        self._path = self._out.parent / f"{self._prefix}{secrets.token_hex(6)}"
        self._lock = -1

    @property
    def path(self) -> Path:
        """Where to write."""
        return self._path

    def __enter__(self) -> Staging:
        try:
            self._made_parents = _make_parents(self._out.parent)
            self._sweep()
            self._path.mkdir()
            self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:  # an interrupt too: nobody else would remove what was made
            self._abandon()
            if isinstance(error, OSError):
                raise os_error(error, self._path, "creating the staging directory") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def publish(self) -> None:
        """Make the finished directory visible as `out`, durably.

        Raises:
            ConflictError: `out` appeared meanwhile.
            OutputError: what is to be replaced is no snapshot (any more).
            StorageError: the operating system refused.
        """
        for directory, _, _ in os.walk(self._path):
            sync_directory(Path(directory))
        replaced = self._force and self._out.exists()
        if replaced:  # it may have been put there since the run began
            check_target(self._out, (), force=True)
        try:
            if replaced:
                _exchange(self._path, self._out)
            else:
                _rename_new(self._path, self._out)
        except FileExistsError as error:
            raise ConflictError.of(
                "output.appeared", self._out, "was created by somebody else meanwhile", "choose another name"
            ) from error
        except OSError as error:
            raise os_error(error, self._out, "publishing it") from error
        self._made_parents = ()
        try:
            sync_directory(self._out.parent)
        except StorageError as error:
            raise StorageError.of(
                "output.not-durable",
                self._out,
                "is complete and in its place, but making its name durable failed",
                "check the disk before you rely on it",
            ) from error
        if replaced:
            shutil.rmtree(self._path, ignore_errors=True)

    def _abandon(self) -> None:
        if self._path.exists():
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        _remove_empty(self._made_parents)
        self._made_parents = ()

    def _sweep(self) -> None:
        """Remove staging directories of this output whose process is gone."""
        for stale in self._out.parent.glob(f"{_escape_glob(self._prefix)}*"):
            if stale.name.endswith(_ASIDE) and not self._out.exists():
                continue  # the only copy of a snapshot: `_exchange` was killed half way
            with contextlib.suppress(OSError):  # another sweep was faster, or it is alive
                descriptor = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(stale, ignore_errors=True)
                finally:
                    os.close(descriptor)


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


def _exchange(staged: Path, out: Path) -> None:
    """Swap the two directories. Without kernel support the old one steps aside first: both stay whole all the time."""
    if not _renameat2(staged, out, _RENAME_EXCHANGE):
        aside = staged.with_name(f"{staged.name}{_ASIDE}")
        out.rename(aside)
        try:
            staged.rename(out)
        except BaseException:
            if not out.exists():
                aside.rename(out)
            raise
        aside.rename(staged)
