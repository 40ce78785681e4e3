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
from mergepipe.deltastore.codec.levels import Codec, Piece, RawBytes
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
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.snapshots.work_log import LoggedWork, WorkLog, content_identity, forget_work_log, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.output import sync_directory, write_durably
from mergepipe.storage.ranges import os_error, read_head, start_writing_back

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
    """The files of a store in the staging directory `directory`, which belongs to the caller. A context manager.

    Blocks are appended in the order of rows. Memory: `chunk_bytes` for each of five files, a byte a row.
    With `durable` it resumes an earlier writer, whose files were truncated to these sizes.
    """

    def __init__(
        self, directory: Path, ledger: Ledger, durable: DurableStore | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
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
                self._files[name] = _GrowingFile(directory / name, start, chunk_bytes)
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
        file = self._files[name]
        file.append(content)
        self._ledger.charge(file.charged_name, Purpose.OUTPUT, len(content))

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _GrowingFile:
    """A file appended to in chunks: a new one, or one that already has `start_bytes`."""

    def __init__(self, path: Path, start_bytes: int | None, chunk_bytes: int) -> None:
        self._path = path
        self.charged_name = str(path)
        self._chunk = np.empty(chunk_bytes, np.uint8)
        self._filled = 0
        self._written = start_bytes or 0
        self._is_synced = False
        try:
            make = owned.create_file if start_bytes is None else owned.open_file
            self._descriptor = make(path, flags=os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise os_error(error, path, "creating it") from error

    @property
    def size_bytes(self) -> int:
        """Bytes appended, including those still in memory."""
        return self._written + self._filled

    def append(self, content: RawBytes) -> None:
        done = 0
        while done < len(content):
            count = min(len(self._chunk) - self._filled, len(content) - done)
            self._chunk[self._filled : self._filled + count] = content[done : done + count]
            self._filled += count
            done += count
            if self._filled == len(self._chunk):
                self._flush()

    def _flush(self) -> None:
        unwritten = self._chunk.data[: self._filled]
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        except OSError as error:
            raise os_error(error, self._path, f"writing at byte {self._written}") from error
        start_writing_back(self._descriptor, self._written, self._filled)  # so that little is left when it is synced
        self._written += self._filled
        self._filled = 0
        self._is_synced = False

    def sync(self) -> None:
        if self._filled:
            self._flush()
        if self._is_synced:
            return
        try:
            owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, "making it durable") from error
        self._is_synced = True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_rows(directory: Path, n_rows: int) -> bytes:
    """Read the first rows of a store's index; fewer if it ends before."""
    path = directory / INDEX_NAME
    return read_head(path, n_rows * ROW_BYTES)


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
    try:
        owned.keep_only(directory / CONTENT_NAME, progress.durable.file_bytes)
    except OSError as error:
        raise os_error(error, directory, "resuming it") from error
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
