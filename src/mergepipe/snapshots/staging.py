"""Stage an output in a hidden sibling directory and publish it in one atomic step; no other module publishes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mergepipe.checkpoints.directory import require_text_path
from mergepipe.core.outcome import note_committed
from mergepipe.core.strict_json import parse_object
from mergepipe.core.units import first_names, format_bytes
from mergepipe.errors import ConflictError, MergePipeError, OutputError, PublishedError, StorageError
from mergepipe.snapshots.manifest import MANIFEST_NAME, record_folder
from mergepipe.storage import owned
from mergepipe.storage.contract import BESIDE, MANIFEST_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owners import (
    LOG_NAME,
    OWNER_NAME,
    Owner,
    is_alive,
    is_ours,
    living_owner,
    read_output,
    read_owner,
    staging_name,
    this_process,
    try_lock,
    write_owner,
)
from mergepipe.storage.ranges import os_error

_UNKNOWN = Owner(0, "", "", "this machine")
_SWEEP_TRIES = 40
_SWEEP_SECONDS = 0.05
CONTENT_NAME = "snapshot"
ASIDE_NAME = "old"


def kept_note(out: Path, share: float) -> str:
    """Tell how much of an unfinished output is durable, and what becomes of it."""
    return f"{share:.0%} of {out.name} is durable: the same command resumes there, `mergepipe gc` removes it"


def check_target(out: Path, inputs: Iterable[Location], *, force: bool | None) -> None:
    """Refuse an output that exists, overlaps an input, or would replace files that mergepipe did not make.

    An empty directory may be there. `force` is None where replacing is not possible.
    """
    if out.name.encode(errors="ignore").decode() != out.name:  # its folders are in no record, and may be anything
        require_text_path(Location.local(out))
    resolved = out.resolve()
    for path in (path for path in inputs if path.is_local):
        source = path.local_path.resolve()
        if resolved == source or source in resolved.parents or resolved in source.parents:
            hint = "choose a folder apart from every input"
            raise OutputError.of("output.place", out, f"overlaps the input {path}", hint)
    for folder in out.absolute().parents:
        if folder.is_file():
            raise OutputError.of(
                "output.place", folder, f"is a file, so {out} cannot be created in it", "choose another place"
            )
    record = record_folder(out)
    with contextlib.suppress(FileNotFoundError):  # of a working folder that is gone
        if resolved in (here := Path.cwd(), *here.parents):
            hint = f"choose a name in it, as {out / 'merged'}"
            raise OutputError.of("output.place", out, "is the working folder, or holds it: it would be replaced", hint)
    if not _is_there(out) or (record == out and is_empty_folder(out)):
        if record != out and _is_there(record):
            _check_replaceable(record)  # of a file that is gone
        return
    if not force:
        remove_left_staging(out)
        hint = "choose another name"
        if force is not None and _is_replaceable(out):
            hint = f"{hint}, or replace it with --force"
        raise OutputError.of("output.exists", out, "already exists", hint)
    _check_replaceable(out)


def _is_replaceable(out: Path) -> bool:
    """Whether `--force` would replace what is there."""
    try:
        _check_replaceable(out)
    except MergePipeError:
        return False
    return True


def _is_there(out: Path) -> bool:
    """Whether the name exists, as a link too."""
    try:
        out.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError.of(
            "output.place", out, f"cannot be the name of an output: {error.strerror}", "choose another name"
        ) from error
    return True


def is_empty_folder(out: Path) -> bool:
    """Whether there is an empty directory, not a link to one, at `out`."""
    try:
        return stat.S_ISDIR(out.lstat().st_mode) and not any(out.iterdir())
    except OSError:  # it is not there, or nobody may look into it
        return False


def _check_replaceable(out: Path) -> None:
    """Refuse to replace anything but an empty directory, or what holds only files that mergepipe made."""
    record = record_folder(out)
    if record != out:
        if out.is_symlink() or not out.is_file():
            raise OutputError.of("output.place", out, "exists and is not a file", "remove it yourself")
        if not _is_there(record):  # which an interrupted replacement left aside
            record = staging_directory(out.absolute()) / ASIDE_NAME
        if BESIDE + out.name not in _recorded_files(record / MANIFEST_NAME):
            message = f"has no record in {record_folder(out).name}: --force replaces only outputs of MergePipe"
            raise OutputError.of("output.not-ours", out, message, "remove it yourself, or choose another name")
        out = record
    if out.is_symlink() or not out.is_dir():
        raise OutputError.of("output.place", out, "exists and is not a directory", "remove it yourself")
    held = sorted(_files_in(out))
    if not held and not any(out.iterdir()):
        return
    if MANIFEST_NAME not in held:
        raise OutputError.of(
            "output.not-ours",
            out,
            f"holds files but no {MANIFEST_NAME}: --force replaces only outputs of MergePipe",
            "remove it yourself, or choose another name",
        )
    listed = {MANIFEST_NAME, *_recorded_files(out / MANIFEST_NAME)}
    strangers = [name for name in held if name not in listed]
    if strangers:
        raise OutputError.of(
            "output.not-ours",
            out,
            f"holds files that its {MANIFEST_NAME} does not list, and --force would remove them: "
            f"{first_names(strangers)}",
            "move them away, or choose another name",
        )


def _files_in(directory: Path) -> Iterator[str]:
    """The relative names of all files in a directory, at any depth."""
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (str((Path(folder) / name).relative_to(directory)) for name in (*names, *links))


def _recorded_files(path: Path) -> Iterator[str]:
    """The files that a manifest (of a snapshot, a composite or a delta) lists; none if it is damaged."""
    try:
        content = parse_object(owned.read_file(path, MANIFEST_BYTES), where=path, code="manifest.damaged")
    except (OSError, MergePipeError):
        return
    for key in ("files", "sidecars"):
        listed = content.get(key)
        yield from filter(None, map(_name_of, listed if isinstance(listed, list) else ()))
    yield _name_of(content.get("blocks")) or ""


def _name_of(record: object) -> str | None:
    """The name in the record of a file, or a name itself."""
    name = record.get("name") if isinstance(record, dict) else record
    return name if isinstance(name, str) else None


SPARE_BYTES = 16 << 20  # for small files and records beside the weights


def needed_bytes(weight_bytes: int, small_files: Mapping[str, bytes]) -> int:
    """Return the space that an output needs: its weights, the small files that are known, and some for records."""
    return weight_bytes + sum(map(len, small_files.values())) + SPARE_BYTES


def check_free_space(out: Path, needed_bytes: int) -> None:
    """Refuse to start if the file system of `out` cannot hold the result."""
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    usage = shutil.disk_usage(parent)
    if not usage.total:
        message = f"cannot be written: {parent} is on a file system that stores no files"
        raise OutputError.of("output.place", out, message, "choose another folder")
    held = allocated_bytes(staging_directory(out.absolute()))  # left by a dead run, to be resumed or removed
    free = usage.free + held
    if free < needed_bytes:
        message = f"needs {format_bytes(needed_bytes)}, {format_bytes(free)} are free"
        raise StorageError.of("storage.no-space", out, message, "free some space and run again")


def allocated_bytes(directory: Path) -> int:
    """Sum the space of the files in a directory; what goes meanwhile counts as nothing."""
    total = 0
    for folder, _, names in () if directory.is_symlink() else os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


class Staging:
    """The invisible directory in which a snapshot grows; a context manager.

    `.<name>.mergepipe-staging` beside the output, one for each output: it holds the snapshot to be, its log and a
    record of the output and the process, which locks it while it lives. The snapshot is written in `path`, which alone
    is published at `out`, of all that is in `directory`. Only `publish` makes anything visible. Leaving the context
    without it removes the directory, unless `keep` was called. What a killed process left is taken over: continued
    where `can_continue` says so of the directory, else removed. Only what carries the record of this very output is:
    anything else of that name is refused.
    """

    def __init__(self, out: Path, *, force: bool, can_continue: Callable[[Path], bool] | None = None) -> None:
        self.out: Final = out.absolute()
        self._force = force
        self._can_continue = can_continue
        self._made_parents: list[Path] = []
        self.directory: Final = staging_directory(self.out)
        self.path: Final = self.directory / CONTENT_NAME
        self._lock = -1
        self._keeps = False
        self._patience = _SWEEP_TRIES
        self._is_new = False
        self.is_continued = False

    @property
    def record_path(self) -> Path:
        """The directory to write the manifest in, and all that is no weights."""
        record = record_folder(self.out)
        return self.path if record == self.out else self.path / record.name

    def __enter__(self) -> Staging:
        try:
            while self._lock < 0:
                _make_parents(self.out.parent, self._made_parents)  # which another process may remove meanwhile
                self._lock = self._acquire()
            self._keeps = not self._is_new  # whatever is wrong, what an interrupted run left stays
            write_owner(self.directory, self.out.name)
            _bring_back(self.directory, self.out)
            self.is_continued = self._can_continue is not None and self._can_continue(self.directory)
            if not self.is_continued:
                if self._can_continue is None:
                    with contextlib.suppress(FileNotFoundError):
                        owned.remove_file(self.directory / LOG_NAME)
                _empty(self.directory)
                owned.make_folder(self.path)
            self._keeps = False
        except BaseException as error:  # also on an interrupt: no other code removes it
            self._abandon()
            if isinstance(error, OSError):
                raise os_error(error, self.directory, "creating the staging directory") from error
            raise
        return self

    def _acquire(self) -> int:
        """Make or take over the directory; return the descriptor that holds its lock, -1 to try again."""
        try:
            self._is_new = owned.make_private_folder(self.directory) or self._is_new
            descriptor = owned.open_folder(self.directory)
        except FileNotFoundError:  # its owner has just finished
            return -1
        try:
            is_locked = try_lock(descriptor)
            if is_locked is False:
                self._wait_for_sweep(read_owner(self.directory))
            if is_locked is False or not _is_same(descriptor, self.directory):
                os.close(descriptor)
                return -1
            if not is_ours(self.directory):
                message = f"holds files that were not written for {self.out.name}, where it would grow"
                hint = "move the directory away, or choose another name"
                raise OutputError.of("output.not-ours", self.directory, message, hint)
            self._is_new = self._is_new or read_output(self.directory) is None
            owner = living_owner(self.directory, is_locked=is_locked)
            if owner is not None and owner != this_process():
                raise _busy(self.out, owner)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _wait_for_sweep(self, owner: Owner | None) -> None:
        """Wait briefly if the lock is held by a process that removes a dead run's files."""
        if self._patience == 0 or (owner is not None and is_alive(owner, 0.0)):
            raise _busy(self.out, owner)
        self._patience -= 1
        time.sleep(_SWEEP_SECONDS)

    def __exit__(self, *_: object) -> None:
        try:
            self._abandon()
        except BaseException:  # an interrupt of the clearing itself
            self._abandon()
            raise

    def keep(self) -> None:
        """Keep the directory when the context ends, so that another run can resume it."""
        self._keeps = True

    def publish(self) -> None:
        """Make the finished directory visible as `out`, durably."""
        for directory, _, _ in os.walk(self.path):
            sync_directory(Path(directory))
        replaced = self._force and self.out.exists()
        if replaced:  # it, or something in it, may have been put there since the run began
            _check_replaceable(self.out)
        try:
            if self.record_path != self.path:
                self._publish_file(record_folder(self.out))
            elif replaced:
                owned.exchange(self.path, self.out, self.directory / ASIDE_NAME)
            elif is_empty_folder(self.out):
                owned.rename(self.path, self.out)  # which fails if a file has appeared in it
            else:
                owned.rename_new(self.path, self.out)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                message = "was created, or written to, by somebody else meanwhile"
                raise ConflictError.of("output.changed", self.out, message, "choose another name") from error
            raise os_error(error, self.out, "publishing it") from error
        self._made_parents.clear()
        self._keeps = False
        note_committed(self.out)
        try:
            sync_directory(self.out.parent)
        except StorageError as error:
            raise PublishedError.of(
                "output.not-durable",
                self.out,
                "is complete and in its place, but making its name durable failed",
                "check the disk before you rely on it",
            ) from error

    def _publish_file(self, record: Path) -> None:
        """Put the record of a file in its place, then the file; an old record steps aside until the file is there."""
        aside = self.directory / ASIDE_NAME
        if owned.is_there(record):
            _check_replaceable(record)
            owned.rename(record, aside)
        try:
            owned.rename_new(self.record_path, record)
            sync_directory(record.parent)
            move = owned.rename if self._force else owned.rename_new
            move(self.path / self.out.name, self.out)
        except BaseException:
            if owned.is_there(self.path / self.out.name) and not owned.is_there(self.record_path):
                owned.rename(record, self.record_path)
            _bring_back(self.directory, self.out)
            raise

    def _abandon(self) -> None:
        """Let go of the directory, and remove it unless it is kept; may be called again after an interrupt."""
        if self._lock >= 0:
            if not self._keeps and _is_same(self._lock, self.directory):
                _remove_all(self.directory)
            lock, self._lock = self._lock, -1
            os.close(lock)
        else:  # an interrupt may have come between making and locking it; another's is not empty, or tried again
            with contextlib.suppress(OSError, MergePipeError):
                owned.remove_folder(self.directory)
        for directory in reversed(self._made_parents):
            with contextlib.suppress(OSError, MergePipeError):  # somebody else uses it by now, or it was never made
                owned.remove_folder(directory)
        self._made_parents.clear()


@contextlib.contextmanager
def temporary_folder(job: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder, deleted on exit, or by `gc` after a crash."""
    name = f"mergepipe-{job}-{uuid.uuid4().hex}"
    with Staging((parent or Path(tempfile.gettempdir())) / name, force=False) as staging:
        yield staging.path


def staging_directory(out: Path) -> Path:
    """The staging directory of the output `out`."""
    return out.parent / staging_name(out.name)


def find_staging(parent: Path) -> Iterator[tuple[Path, Owner | None]]:
    """Find all staging directories in `parent`, by name, each with the process that works in it (None: dead)."""
    for directory in sorted(parent.glob(f".*{owned.STAGING_SUFFIX}")):
        if _may_be_removed(directory):
            with _probed(directory) as owner:
                state = directory, owner
            yield state


def is_dead(directory: Path) -> bool:
    """Whether a staging directory exists whose process is dead."""
    with _probed(directory) as owner:
        return owner is None and _may_be_removed(directory)


def remove_dead(directory: Path) -> bool:
    """Remove a staging directory of which the process is dead; whether that was done.

    What a half-done replacement without kernel support left aside is brought back first. What does not carry the
    record of the output that its name belongs to stays, unless it is empty.
    """
    with _probed(directory) as owner:
        if owner is not None or not _may_be_removed(directory):
            return False
        output = read_output(directory)
        if output is not None:
            _bring_back(directory, directory.parent / output)
        _remove_all(directory)
        return not directory.exists()


def remove_left_staging(out: Path) -> None:
    """Remove what a process that was killed after it had published an output left beside it.

    A staging directory with files of an output stays: the same command with `--force` may resume there.
    """
    directory = staging_directory(out.absolute())
    content = directory / CONTENT_NAME
    if not _is_there(content) or is_empty_folder(content):
        remove_dead(directory)


def _may_be_removed(directory: Path) -> bool:
    """Whether this is a staging directory by its record, or an empty directory with such a name.

    In a folder where others may put theirs, as `/tmp`, those of this user alone are.
    """
    try:
        is_shared = directory.parent.stat().st_mode & stat.S_ISVTX
        is_of_others = is_shared and directory.lstat().st_uid != os.geteuid()
        return not is_of_others and not directory.is_symlink() and is_ours(directory)
    except OSError:  # missing, or unreadable
        return False


@contextlib.contextmanager
def _probed(directory: Path) -> Iterator[Owner | None]:
    """Lock the directory if it is free, and return the process that works there; holds the lock in the context."""
    try:
        descriptor = owned.open_folder(directory)
    except (OSError, MergePipeError):  # it has just been removed, or is none
        yield None
        return
    try:
        is_locked = try_lock(descriptor)
        if is_locked is False:
            yield read_owner(directory) or _UNKNOWN
        else:
            yield living_owner(directory, is_locked=is_locked)
    finally:
        os.close(descriptor)


def _busy(out: Path, owner: Owner | None) -> MergePipeError:
    who = str(owner) if owner is not None else "another process"
    return ConflictError.of("output.busy", out, f"is being made by {who}", "wait for it, or choose another name")


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether `path` still is the opened directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _empty(directory: Path) -> None:
    """Remove everything but the record of the owner and the log of the work; plain files first."""
    listed = [(name, stat.S_ISDIR(status.st_mode)) for name, status in owned.list_folder(directory)]
    for name, is_folder in sorted(listed, key=lambda entry: entry[1]):
        if is_folder:
            owned.remove_tree(directory / name)
        elif name not in (OWNER_NAME, LOG_NAME):
            owned.remove_file(directory / name)


def _remove_all(directory: Path) -> None:
    """Remove a directory as far as that can be done; the record of the owner goes last, for the rest is known by it."""
    with contextlib.suppress(OSError, MergePipeError):
        _empty(directory)
        for name in (LOG_NAME, OWNER_NAME):
            with contextlib.suppress(FileNotFoundError):
                owned.remove_file(directory / name)
        owned.remove_folder(directory)


def _bring_back(directory: Path, out: Path) -> None:
    """Undo an interrupted publication: what stepped aside returns where the new one was never moved in.

    The record of a file is moved in before the file, and moved out again where the file is still staged.
    """
    aside, record, staged = directory / ASIDE_NAME, record_folder(out), directory / CONTENT_NAME
    was_moved = record != out and owned.is_there(staged / out.name) and not owned.is_there(staged / record.name)
    if was_moved and owned.is_there(record) and (owned.is_there(aside) or not owned.is_there(out)):
        owned.rename(record, staged / record.name)
    if owned.is_there(aside) and not owned.is_there(record):
        owned.rename(aside, record)


def _make_parents(parent: Path, made: list[Path]) -> None:
    """Create missing directories, noting each in `made` before, outermost first; the caller removes them."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for directory in reversed(missing):
        made.append(directory)
        try:
            owned.make_folder(directory)
        except FileExistsError:
            continue
        except OSError as error:
            raise os_error(error, missing[0], "creating it") from error
