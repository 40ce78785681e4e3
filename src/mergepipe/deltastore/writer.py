"""Write the files of one store sequentially, and log what of it is durable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.records import decode
from mergepipe.deltastore.index import (
    HEADER_FORMAT,
    HEADER_NAME,
    HEADERS_NAME,
    INDEX_NAME,
    PIECE_NAMES,
    ROW,
    ROW_BYTES,
    StoreHeader,
    index_digest,
)
from mergepipe.deltastore.pieces import Codec, Piece, RawBytes
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.snapshots.work_log import LoggedWork, WorkLog, content_identity, forget_work_log, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.output import sync_directory, write_durably
from mergepipe.storage.ranges import os_errors, read_head, start_writing_back

# --- write the files of one store sequentially, with bounded memory ---


CHUNK_BYTES = 1 << 20
GROWING_FILES = (*PIECE_NAMES.values(), HEADERS_NAME, INDEX_NAME)


@dataclass(frozen=True, slots=True)
class DurableStore:
    """The durable part of an unfinished store: number of rows, bytes of each file, digest of the index so far."""

    n_rows: int
    file_bytes: Mapping[str, int]
    index_blake3: str


class StoreWriter:
    """The files of a store in the staging directory `directory`, which belongs to the caller.

    Blocks are appended in the order of rows. Memory: 1 MiB and a block for each of five files, a byte a row.
    With `durable` it resumes an earlier writer, whose files were truncated to these sizes.
    """

    def __init__(self, directory: Path, ledger: Ledger, durable: DurableStore | None) -> None:
        self._directory = directory
        self._ledger = ledger
        self._files: dict[str, _GrowingFile] = {}
        self._index_hasher = blake3()
        self._codecs = bytearray()
        self.n_rows = 0
        try:
            if durable is not None:
                self.n_rows = durable.n_rows
                rows = read_rows(directory, durable.n_rows)
                self._index_hasher.update(rows)
                self._codecs += np.frombuffer(rows, ROW)["codec"].tobytes()
            for name in GROWING_FILES:
                start = None if durable is None else durable.file_bytes[name]
                self._files[name] = _GrowingFile(directory / name, start)
        except BaseException:  # also on an interrupt: no other code closes them
            self.close()
            raise

    @property
    def index_blake3(self) -> str:
        """The digest of the index rows appended so far."""
        return self._index_hasher.hexdigest(16)

    def are_raw(self, first: int, stop: int) -> bool:
        """Whether all blocks of the rows `[first, stop)` are unencoded."""
        return self._codecs.count(int(Codec.RAW), first, stop) == stop - first

    def append(self, row: NDArray[np.void], pieces: Mapping[Piece, RawBytes]) -> None:
        """Append the next block: its row from `index.make_row`, and its pieces."""
        for piece in Piece:
            content = pieces.get(piece)
            if content is not None and len(content):
                self._write(PIECE_NAMES[piece], content)
        raw = row.view(np.uint8)
        self._index_hasher.update(raw.data)
        self._codecs.append(raw[0])
        self._write(INDEX_NAME, raw)
        self.n_rows += 1

    def append_header(self, content: bytes) -> None:
        """Append the header (length prefix included) of the next weight file."""
        self._write(HEADERS_NAME, np.frombuffer(content, np.uint8))

    def sync(self) -> DurableStore:
        """Make everything appended durable, and describe it."""
        for file in self._files.values():
            file.sync()
        sizes = {name: file.size_bytes for name, file in self._files.items()}
        return DurableStore(self.n_rows, sizes, self.index_blake3)

    def finish(self, header: StoreHeader) -> None:
        """Make all files durable, the header last. `header.index_blake3` must be that of the index."""
        self.sync()
        write_durably(self._directory / HEADER_NAME, HEADER_FORMAT.to_json(header), self._ledger)

    def close(self) -> None:
        """Close the files; bytes still in memory are lost."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, content: RawBytes) -> None:
        self._files[name].append(content)
        self._ledger.charge(str(self._directory / name), Purpose.OUTPUT, len(content))


class _GrowingFile:
    """A file appended to in chunks: a new one, or one that already has `start_bytes`."""

    def __init__(self, path: Path, start_bytes: int | None) -> None:
        self._path = path
        self._unwritten = bytearray()
        self._written = start_bytes or 0
        self._is_synced = False
        make = owned.create_file if start_bytes is None else owned.open_file
        with os_errors(path, "creating it"):
            self._descriptor = make(path, flags=os.O_WRONLY | os.O_APPEND)

    @property
    def size_bytes(self) -> int:
        """Bytes appended, including those still in memory."""
        return self._written + len(self._unwritten)

    def append(self, content: RawBytes) -> None:
        self._unwritten += content.data
        if len(self._unwritten) >= CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        with os_errors(self._path, f"writing at byte {self._written}"):
            owned.write_all(self._descriptor, self._unwritten)
        start_writing_back(self._descriptor, self._written, len(self._unwritten))  # so that a sync has little left
        self._written += len(self._unwritten)
        self._unwritten.clear()
        self._is_synced = False

    def sync(self) -> None:
        if self._unwritten:
            self._flush()
        if not self._is_synced:
            with os_errors(self._path, "making it durable"):
                owned.sync_file(self._descriptor)
            self._is_synced = True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_rows(directory: Path, n_rows: int) -> bytes:
    """Read the first rows of a store's index; fewer if it ends before."""
    return read_head(directory / INDEX_NAME, n_rows * ROW_BYTES)


# --- log which part of an unfinished store is durable, and read that to resume the store ---


@dataclass(frozen=True, slots=True)
class PackProgress:
    """The durable part of an unfinished store, and the log that tells of it.

    `cuts` are those of the tensors that were begun, in order.
    """

    durable: DurableStore
    cuts: tuple[float | None, ...]
    logged: LoggedWork


def note_progress(log: WorkLog, directory: Path, durable: DurableStore, new_cuts: Sequence[float | None]) -> None:
    """Log the part of the store in a staging directory that is durable, with the cuts of tensors begun since."""
    sync_directory(directory / CONTENT_NAME)
    log.append({"kind": "unit", "durable": asdict(durable), "cuts": list(new_cuts)}, is_durable=True)


def find_progress(directory: Path, key: str) -> PackProgress | None:
    """Find progress to resume in a staging directory, truncated to its durable part; None if there is none.

    The blocks were durable before they were recorded; the index is checked against its digest.
    """
    logged = read_work_log(directory)
    progress = None if logged is None or logged.key != key else _progress(logged)
    if (
        progress is None
        or progress.logged.content != content_identity(directory)
        or not _is_complete(directory / CONTENT_NAME, progress.durable)
    ):
        forget_work_log(directory)
        return None
    with os_errors(directory, "resuming it"):
        owned.keep_only(directory / CONTENT_NAME, progress.durable.file_bytes)
    return progress


def _progress(logged: LoggedWork) -> PackProgress | None:
    durable: DurableStore | None = None
    cuts: list[float | None] = []
    try:
        for record in logged.records:
            match record:
                case {"kind": "unit", "durable": dict(part), "cuts": list(new_cuts)}:
                    durable = decode(DurableStore, part)
                    cuts.extend(None if cut is None else float(cut) for cut in new_cuts)
    except (ValueError, TypeError, LookupError, OverflowError):
        return None
    return None if durable is None else PackProgress(durable, tuple(cuts), logged)


def _is_complete(content: Path, durable: DurableStore) -> bool:
    if durable.file_bytes.keys() != set(GROWING_FILES) or durable.file_bytes[INDEX_NAME] != durable.n_rows * ROW_BYTES:
        return False
    try:
        if any((content / name).stat().st_size < size for name, size in durable.file_bytes.items()):
            return False
        return index_digest(read_rows(content, durable.n_rows)) == durable.index_blake3
    except (OSError, MergePipeError):
        return False
