"""The log of an unfinished output: what the one process that makes it has made durable, and what it has read.

It lies in the staging directory, beside the folder in which the output grows. Merges, parts and packs keep one, each
with records of its own; decision 035 has the design.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergepipe.core.canonical_json import canonical_json
from mergepipe.errors import MergePipeError, StorageError
from mergepipe.snapshots.block_digests import packed_digests, root_of, unpacked_digests
from mergepipe.snapshots.shards import ShardLayout, TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.storage import owned
from mergepipe.storage.limits import WORK_LOG_BYTES
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owner import LOG_NAME
from mergepipe.storage.ranges import os_error
from mergepipe.storage.sealed_lines import payload_of, seal_of, sealed

UNIT_BYTES = 256 << 20
"""About how much is written between two units, at most: with the unfinished tensor, the work that a crash costs."""
UNIT_SECONDS = 1.0
"""The same in time."""
WORTH_KEEPING: Final = (KeyboardInterrupt, SystemExit, MemoryError, StorageError)
"""Errors after which the same work may succeed when it is resumed."""
LOG_FORMAT: Final = "mergepipe-log/1"
_APPENDING: Final = os.O_WRONLY | os.O_APPEND
_DOING: Final = "writing the log of what is done"

Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LoggedWork:
    """The valid records of a log, in order: the first is a `begin`. `check` is the seal of the last one."""

    key: str
    records: tuple[Record, ...]
    valid_bytes: int
    check: str

    @property
    def n_runs(self) -> int:
        """How many runs have written to it."""
        return 1 + sum(record["kind"] in ("resume", "restart") for record in self.records)

    @property
    def content(self) -> tuple[int, int] | None:
        """Device and inode of the folder that the last records tell of; None if that was given up."""
        for record in reversed(self.records):
            match record:
                case {"kind": "restart"}:
                    return None
                case {"kind": "begin", "content": [int(device), int(inode)]}:
                    return device, inode
        return None


class WorkLog:
    """The log of one run, which is its only writer. Used from many threads.

    The file is made or continued by the first record. Records that are durable survive a loss of power, and what they
    tell of must be durable before; others survive the end of the process. After a failed write no record is believed.

    Law: a file truncated anywhere reads as the records that are complete before that point.
    """

    def __init__(self, directory: Path, key: str, earlier: LoggedWork | None = None) -> None:
        """Log work in a staging directory, after what an `earlier` run of the same key left there."""
        self._directory = directory
        self._key = key
        self._earlier = earlier
        self._check = "" if earlier is None else earlier.check
        self._is_resumed = earlier is not None
        self._lock = threading.Lock()
        self._descriptor = -1
        self._has_durable_name = False

    def append(self, record: Record, *, is_durable: bool) -> None:
        """Append a record, which has a `kind`."""
        try:
            with self._lock:
                if self._descriptor < 0:
                    self._open()
                self._write(record)
            if is_durable:
                self._sync()
        except OSError as error:
            raise os_error(error, self._directory / LOG_NAME, _DOING) from error

    def restart(self) -> None:
        """Record durably that what earlier runs made is given up, before it is removed."""
        self._is_resumed = False
        try:
            self._descriptor = self._descriptor_of_file()
            self._write({"kind": "restart"})
            owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._directory / LOG_NAME, _DOING) from error
        self.close()  # a record of a new content follows once there is one

    def close(self) -> None:
        """Close the file; once is enough."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = self._descriptor_of_file()
        if self._is_resumed:
            self._write({"kind": "resume"})
            return
        identity = content_identity(self._directory)
        if identity is None:
            raise StorageError.of("storage.io", self._directory / CONTENT_NAME, "is gone", "run again")
        self._write({"kind": "begin", "format": LOG_FORMAT, "key": self._key, "content": list(identity)})

    def _descriptor_of_file(self) -> int:
        path = self._directory / LOG_NAME
        if self._earlier is None:
            return owned.create_file(path, flags=_APPENDING)
        descriptor = owned.open_file(path, flags=_APPENDING)
        if self._check == self._earlier.check:
            try:
                os.ftruncate(descriptor, self._earlier.valid_bytes)
            except BaseException:  # an interrupt too: nobody else would close it
                os.close(descriptor)
                raise
        return descriptor

    def _write(self, record: Record) -> None:
        line = sealed(canonical_json(record), self._check)
        self._check = seal_of(line)
        owned.write_all(self._descriptor, line + b"\n")

    def _sync(self) -> None:
        owned.sync_file(self._descriptor)
        if not self._has_durable_name:
            sync_directory(self._directory)
            sync_directory(self._directory.parent)
            self._has_durable_name = True


def read_work_log(directory: Path) -> LoggedWork | None:
    """Read the valid records of a log, up to the first torn one; None if there is none.

    Any other format counts as nothing: the output is then made from the start.
    """
    try:
        raw = owned.read_file(directory / LOG_NAME, WORK_LOG_BYTES)
    except (OSError, MergePipeError):
        return None
    records: list[Record] = []
    check, position = "", 0
    while (end := raw.find(b"\n", position)) >= 0:
        line = raw[position:end]
        payload = payload_of(line, check)
        if payload is None:
            break
        record = _record_of(payload)
        if record is None or (not records and not _is_beginning(record)):
            return None
        records.append(record)
        position, check = end + 1, seal_of(line)
    return LoggedWork(str(records[0]["key"]), tuple(records), position, check) if records else None


def _record_of(payload: bytes) -> Record | None:
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _is_beginning(record: Record) -> bool:
    match record:
        case {"kind": "begin", "format": str(written), "key": str(), "content": [int(), int()]}:
            return written == LOG_FORMAT
    return False


def forget_work_log(directory: Path) -> None:
    """Remove the log of earlier runs, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        owned.remove_file(directory / LOG_NAME)


def content_identity(directory: Path) -> tuple[int, int] | None:
    """Return device and inode of the folder in which an output grows; None if it is gone."""
    try:
        status = (directory / CONTENT_NAME).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class UnitLog:
    """The units that one process makes of some shards: a `DurableProgress` that logs them. Used from many threads.

    A unit is the tensors that became durable since the last one.
    """

    def __init__(self, key: str, shards: Sequence[ShardLayout]) -> None:
        """`key` digests everything that must be equal for one run to resume another."""
        self._key = key
        self._shards = shards
        self._recorded_at = time.monotonic()
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._log: WorkLog | None = None
        self.done: tuple[TensorDigest, ...] = ()
        self.n_durable = 0

    def can_continue(self, directory: Path) -> bool:
        """Decide whether to resume what lies in a staging directory; if so, prepare its files."""
        self._directory = directory
        logged = read_work_log(directory)
        digests = None if logged is None or logged.key != self._key else unit_digests(logged)
        if logged is None or digests is None or self._refusal(directory, logged, digests):
            forget_work_log(directory)
            return False
        self._take_up(directory, logged, digests)
        return True

    def _refusal(self, directory: Path, logged: LoggedWork, digests: Sequence[TensorDigest]) -> str:
        """Return the reason why logged work cannot be resumed; empty if it can."""
        names = [spec.name for shard in self._shards for spec in shard.tensors]
        if not digests or [digest.name for digest in digests] != names[: len(digests)]:
            return "it was stopped before any of its tensors was durable"
        if logged.content is None or content_identity(directory) != logged.content:
            return "its output is gone"
        for shard, nbytes in self._durable_files(len(digests)):
            path = directory / CONTENT_NAME / shard.name
            if not path.is_file() or path.stat().st_size < nbytes:
                return f"{shard.name} is shorter than it was"
        return ""

    def _take_up(self, directory: Path, logged: LoggedWork, digests: tuple[TensorDigest, ...]) -> None:
        """Go on behind what is durable, and remove the rest."""
        self.done, self.n_durable = digests, len(digests)
        self._log = WorkLog(directory, self._key, logged)
        self.remove_undurable()

    def remove_undurable(self) -> None:
        """Remove everything but the durable bytes of the first tensors."""
        sizes = {shard.name: nbytes for shard, nbytes in self._durable_files(self.n_durable)}
        owned.keep_only(self.directory / CONTENT_NAME, sizes)

    def _durable_files(self, n_tensors: int) -> Iterator[tuple[ShardLayout, int]]:
        """Yield the files that hold the first `n_tensors`, with the bytes of header and those tensors in each."""
        for shard in self._shards:
            durable_tensors = shard.tensors[:n_tensors]
            if not durable_tensors:
                return
            n_tensors -= len(durable_tensors)
            yield shard, len(shard.header) + sum(spec.nbytes for spec in durable_tensors)

    def is_due(self, pending_bytes: int) -> bool:
        """Whether to record now: after `UNIT_BYTES` or `UNIT_SECONDS`."""
        now = time.monotonic()
        if pending_bytes < UNIT_BYTES and now < self._recorded_at + UNIT_SECONDS:
            return False
        self._recorded_at = now
        return True

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record that the next tensors are durable. Called by the writer."""
        sync_directory(self.directory / CONTENT_NAME)
        tensors = [[digest.name, packed_digests(digest.blocks)] for digest in digests]
        self.append({"kind": "unit", "tensors": tensors, **self.unit_facts()}, is_durable=True)
        self.n_durable += len(digests)

    def unit_facts(self) -> Record:
        """Return what else a unit tells."""
        return {}

    def append(self, record: Record, *, is_durable: bool) -> None:
        """Append a record; see `WorkLog.append`."""
        with self._lock:
            if self._log is None:
                self._log = WorkLog(self.directory, self._key)
        self._log.append(record, is_durable=is_durable)

    @property
    def directory(self) -> Path:
        """The staging directory that it works in."""
        if self._directory is None:
            raise ValueError("not in a staging directory")
        return self._directory

    def close(self) -> None:
        """Close the log; once is enough."""
        if self._log is not None:
            self._log.close()


def unit_digests(logged: LoggedWork) -> tuple[TensorDigest, ...] | None:
    """Return the digests of the tensors that a log tells to be durable; None if its units are not of tensors."""
    digests: list[TensorDigest] = []
    try:
        for record in logged.records:
            match record:
                case {"kind": "unit", "tensors": list(tensors)}:
                    digests.extend(_digest(name, packed) for name, packed in tensors)
                case {"kind": "unit"}:
                    return None
                case {"kind": "restart"}:
                    digests.clear()
    except (ValueError, TypeError):
        return None
    return tuple(digests)


def _digest(name: str, packed: str) -> TensorDigest:
    blocks = unpacked_digests(packed)
    return TensorDigest(name, root_of(blocks), blocks)
