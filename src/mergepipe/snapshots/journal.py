"""The journal of an unfinished merge: checksummed records, each appended after the bytes it describes are durable."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from mergepipe.core.canonical_json import canonical_json
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.block_digests import DIGEST_BYTES, root_of
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage import owned
from mergepipe.storage.ledger import EXPERT_PURPOSES, Purpose
from mergepipe.storage.limits import JOURNAL_BYTES
from mergepipe.storage.ranges import read_small
from mergepipe.storage.sealed_lines import APPENDING, SealedFile, payload_of, seal_of, sealed

JOURNAL_NAME = "journal"
JOURNAL_FORMAT = "mergepipe-journal/2"

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
        self._check = "" if state is None else state.check
        self._file = SealedFile(path, "writing the journal", lambda: _opened(path, state))

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
        line = sealed(canonical_json(record), self._check)
        self._check = seal_of(line)
        self._file.append(line + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path, state: JournalState | None) -> int:
    if state is None:
        return owned.create_file(path, flags=APPENDING)
    descriptor = owned.open_file(path, flags=APPENDING)
    try:
        os.ftruncate(descriptor, state.valid_bytes)
    except BaseException:  # an interrupt too: nobody else would close it
        os.close(descriptor)
        raise
    return descriptor


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
        line = raw[position:end]
        payload = payload_of(line, check)
        if payload is None:
            break
        state = _read(state, payload)
        if state is None:
            return None
        position, check = end + 1, seal_of(line)
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
