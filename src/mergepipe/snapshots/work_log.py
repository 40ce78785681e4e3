"""The log of an unfinished output: what the one process that makes it has made durable, and what it has read.

It lies in the staging directory, beside the folder in which the output grows. Merges, parts and packs keep one, each
with records of its own; decision 035 has the design. Whatever one process leaves for another is sealed: the checksum in
front tells what is torn or changed from what is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.core.records import RefusedError, Size, decode
from mergepipe.core.strict_json import canonical_json
from mergepipe.errors import MergePipeError, StorageError
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.storage import owned
from mergepipe.storage.contract import WORK_LOG_BYTES
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owners import LOG_NAME
from mergepipe.storage.ranges import os_errors

_CHECK_DIGITS: Final = 16


def sealed(payload: bytes, previous: str = "") -> bytes:
    """Return a line without its newline: the checksum, a space, the payload.

    Sealed with the checksum of the `previous` line, it is valid only at its position.
    """
    return blake3(previous.encode() + payload).hexdigest(_CHECK_DIGITS // 2).encode() + b" " + payload


def seal_of(line: bytes) -> str:
    """Return the checksum that a sealed line begins with."""
    return line[:_CHECK_DIGITS].decode()


def payload_of(line: bytes, previous: str = "") -> bytes | None:
    """Return the payload of a line without its newline; None if the line is torn or changed."""
    payload = line[_CHECK_DIGITS + 1 :]
    return payload if line == sealed(payload, previous) else None


UNIT_BYTES = 256 << 20
"""About how much is written between two units, at most: with the unfinished tensor, the work that a crash costs."""
UNIT_SECONDS = 1.0
"""The same in time."""
WORTH_KEEPING: Final = (KeyboardInterrupt, SystemExit, MemoryError, StorageError)
"""Errors after which the same work may succeed when it is resumed."""
LOG_FORMAT: Final = "mergepipe-log/2"
NO_CONTENT: Final = (0, 0)  # device and inode of no folder
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
        with os_errors(self._directory / LOG_NAME, _DOING):
            with self._lock:
                if self._descriptor < 0:
                    self._open()
                self._write(record)
            if is_durable:
                owned.sync_file(self._descriptor)
                if not self._has_durable_name:
                    sync_directory(self._directory)
                    sync_directory(self._directory.parent)
                    self._has_durable_name = True

    def restart(self) -> None:
        """Record durably that what earlier runs made is given up, before it is removed."""
        self._is_resumed = False
        with os_errors(self._directory / LOG_NAME, _DOING):
            self._descriptor = self._descriptor_of_file()
            self._write({"kind": "restart"})
            owned.sync_file(self._descriptor)
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
        self._write(begin_record(self._key, identity))

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


def begin_record(key: str, content: tuple[int, int] = NO_CONTENT) -> Record:
    """Return the record that what follows is about the folder `content`; of none, nothing before it is resumed."""
    return {"kind": "begin", "format": LOG_FORMAT, "key": key, "content": list(content)}


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


# --- the records of a merge ---


@dataclass(frozen=True, slots=True)
class MergeState:
    """The state of an interrupted merge by its log: durable tensors, bytes used, and bytes that it may have read.

    `sent` are the digests of shards that lie in a bucket or on the Hub, by name. `attempt` is the last one that made
    it as a part.
    """

    digests: tuple[TensorDigest, ...] = ()
    usage: FileUses = ()
    expert_bytes: int = 0
    sent: Mapping[str, str] = field(default_factory=dict)
    attempt: int | None = None


def merge_state(logged: LoggedWork) -> MergeState | None:
    """Return what the records of a log tell of a merge; None if they are not those of a merge."""
    state = MergeState()
    digests: list[TensorDigest] = []
    try:
        for record in logged.records:
            match record:
                case {"kind": "unit", "tensors": tensors, "usage": uses}:
                    digests += decode(tuple[TensorDigest, ...], tensors)
                    usage = decode(FileUses, uses)
                    expert_bytes = max(state.expert_bytes, usage_of(usage).expert_bytes)
                    state = replace(state, usage=usage, expert_bytes=expert_bytes)
                case {"kind": "read", "expert_bytes": int(expert_bytes)}:
                    state = replace(state, expert_bytes=expert_bytes)
                case {"kind": "sent", "shard": str(shard), "digest": str(digest)}:
                    state = replace(state, sent={**state.sent, shard: digest})
                case {"kind": "stop", "usage": uses}:
                    usage = decode(FileUses, uses)
                    state = replace(state, usage=usage, expert_bytes=usage_of(usage).expert_bytes)
                case {"kind": "claim", "attempt": int(attempt)}:
                    state = replace(state, attempt=attempt)
                case {"kind": "restart"}:
                    digests.clear()
                    state = MergeState(expert_bytes=state.expert_bytes, attempt=state.attempt)
                case {"kind": "begin" | "resume"}:
                    pass
                case _:
                    return None
    except RefusedError:
        return None
    return replace(state, digests=tuple(digests))


FileUse = tuple[str, Purpose, Size]
"""A file, the purpose, and the bytes requested."""
FileUses = tuple[FileUse, ...]


def usage_of(uses: Sequence[FileUse]) -> Usage:
    """Sum uses by purpose."""
    by_purpose: dict[Purpose, int] = {}
    for _, purpose, nbytes in uses:
        by_purpose[purpose] = by_purpose.get(purpose, 0) + nbytes
    return Usage(by_purpose, {(file, purpose): nbytes for file, purpose, nbytes in uses})


def uses_of(usage: Usage) -> FileUses:
    """List what was used, in order. Law: `usage_of(uses_of(u)) == u`, but that paths of no text are escaped."""
    texts = {file: os.fsencode(file).decode(errors="backslashreplace") for file, _ in usage.by_file}
    return tuple((texts[file], purpose, nbytes) for (file, purpose), nbytes in sorted(usage.by_file.items()))
