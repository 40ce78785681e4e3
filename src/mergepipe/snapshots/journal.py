"""The journal of an unfinished merge: checksummed records, each appended after the bytes it describes are durable."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from mergepipe.core.canonical_json import canonical_json
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.block_digests import DIGEST_BYTES, root_of
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage import owned
from mergepipe.storage.ledger import EXPERT_PURPOSES, Purpose
from mergepipe.storage.limits import JOURNAL_BYTES
from mergepipe.storage.local import os_error
from mergepipe.storage.regular import read_small

JOURNAL_NAME = "journal"
JOURNAL_FORMAT = "mergepipe-journal/2"
_CHECK_DIGITS = 16
_DOING = "writing the journal"

FileUse = tuple[str, Purpose, int]


@dataclass(frozen=True, slots=True)
class JournalState:
    """The state recorded by an interrupted run: its durable tensors, and what it read and wrote.

    `key` identifies the output; `content` are the device and inode of its directory. `usage` is the last recorded one.
    `valid_bytes` is where the valid records end, `check` the checksum of the last one.
    """

    key: str
    content: tuple[int, int]
    digests: tuple[TensorDigest, ...]
    usage: tuple[FileUse, ...]
    valid_bytes: int
    check: str


def expert_bytes_of(usage: Sequence[FileUse]) -> int:
    """Bytes read from experts."""
    return sum(nbytes for _, purpose, nbytes in usage if purpose in EXPERT_PURPOSES)


class Journal:
    """An open journal; a context manager. After a failed write no record is appended.

    Law: a file truncated anywhere reads as the records that are complete before that point.
    """

    def __init__(self, path: Path, state: JournalState | None = None) -> None:
        """Create a journal, or continue one after its last valid record."""
        self._path = path
        self._check = "" if state is None else state.check
        self._descriptor = -1
        try:
            make = owned.create_file if state is None else owned.open_file
            self._descriptor = make(path, flags=os.O_WRONLY | os.O_APPEND)
            if state is not None:
                os.ftruncate(self._descriptor, state.valid_bytes)
        except BaseException as error:  # an interrupt too: nobody else would close it
            self.close()
            if isinstance(error, OSError):
                raise os_error(error, path, _DOING) from error
            raise

    def begin(self, key: str, content: tuple[int, int]) -> None:
        """Write the first record."""
        self._append({"kind": "begin", "format": JOURNAL_FORMAT, "key": key, "content": list(content)})

    def note_durable(self, digests: Sequence[TensorDigest], usage: Sequence[FileUse]) -> None:
        """Record that the next tensors are durable, and what was read and written up to now."""
        tensors = [[d.name, base64.b64encode(b"".join(d.blocks)).decode()] for d in digests]
        self._append({"kind": "durable", "tensors": tensors, "usage": [list(use) for use in usage]})

    def stop(self, usage: Sequence[FileUse]) -> None:
        """Record the exact usage of a run that ends in order."""
        self._append({"kind": "stop", "usage": [list(use) for use in usage]})

    def _append(self, record: Mapping[str, object]) -> None:
        payload = canonical_json(record)
        self._check = _checksum(self._check, payload)
        line = self._check.encode() + b" " + payload + b"\n"
        try:
            owned.write_all(self._descriptor, line)
            owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, _DOING) from error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path) -> JournalState | None:
    """Read the valid records of a journal, up to the first torn one; None if there is nothing to resume.

    Any other format counts as nothing: the output is then made from the start.
    """
    try:
        raw = read_small(path, JOURNAL_BYTES)
    except MergePipeError:
        return None
    state: JournalState | None = None
    check, position = "", 0
    while (end := raw.find(b"\n", position)) >= 0:
        payload = raw[position + _CHECK_DIGITS + 1 : end]
        check = _checksum(check, payload)
        if raw[position : end - len(payload)] != check.encode() + b" ":
            break
        state = _read(state, payload)
        if state is None:
            return None
        position = end + 1
        state = replace(state, valid_bytes=position, check=check)
    return state


def _read(state: JournalState | None, payload: bytes) -> JournalState | None:
    """The state after one more record; None if the record is not of this format."""
    try:
        record = json.loads(payload)
        if not isinstance(record, dict):
            return None
        return _begun(record) if state is None else _advanced(state, record)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _checksum(previous: str, payload: bytes) -> str:
    """Chained, so that a record is valid only at its position."""
    return blake3(previous.encode() + payload).hexdigest(_CHECK_DIGITS // 2)


def _begun(record: Mapping[str, object]) -> JournalState | None:
    content = record.get("content")
    if record.get("kind") != "begin" or record.get("format") != JOURNAL_FORMAT or not isinstance(content, list):
        return None
    return JournalState(str(record["key"]), (int(content[0]), int(content[1])), (), (), 0, "")


def _advanced(state: JournalState, record: Mapping[str, object]) -> JournalState | None:
    match record:
        case {"kind": "durable", "tensors": list(tensors), "usage": list(usage)}:
            digests = tuple(_digest(name, packed) for name, packed in tensors)
            return replace(state, digests=state.digests + digests, usage=_uses(usage))
        case {"kind": "stop", "usage": list(usage)}:
            return replace(state, usage=_uses(usage))
    return None


def _uses(usage: Sequence[Sequence[object]]) -> tuple[FileUse, ...]:
    return tuple((str(file), Purpose(str(purpose)), int(str(nbytes))) for file, purpose, nbytes in usage)


def _digest(name: str, packed: str) -> TensorDigest:
    content = base64.b64decode(packed)
    blocks = tuple(content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))
    return TensorDigest(name, root_of(blocks), blocks)
