"""Writes the files of one store from start to end, block by block, in memory of some chunks."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.budget import Ledger, Purpose
from mergepipe.deltastore.block import EncodedBlock, RawBytes
from mergepipe.deltastore.header import HEADER_NAME, HEADERS_NAME, INDEX_NAME, PIECE_NAMES, StoreHeader
from mergepipe.deltastore.levels import Piece
from mergepipe.storage.local import os_error
from mergepipe.storage.output import write_durably

_BUFFER_BYTES = 1 << 20


class StoreWriter:
    """The files of a store in `directory`, which is staging and belongs to the caller. A context manager.

    Blocks come in the order of tensors and blocks. Memory: a buffer of 1 MiB a file, and the index (140 bytes a block).
    """

    def __init__(self, directory: Path, ledger: Ledger) -> None:
        self._directory = directory
        self._ledger = ledger
        self._files: dict[str, BinaryIO] = {}
        self._rows: list[NDArray[np.void]] = []
        for name in (*PIECE_NAMES.values(), HEADERS_NAME):
            self._files[name] = self._create(name)

    @property
    def n_rows(self) -> int:
        return len(self._rows)

    def append(self, block: EncodedBlock, row: NDArray[np.void]) -> None:
        """Write the next block and its `index.make_row`."""
        self._rows.append(row)
        for piece in Piece:
            content = block.pieces.get(piece)
            if content is not None and len(content):
                self._write(PIECE_NAMES[piece], content)

    def append_header(self, content: bytes) -> None:
        """Write the header (length prefix included) of the next weight file."""
        self._write(HEADERS_NAME, np.frombuffer(content, np.uint8))

    def index(self) -> bytes:
        """The bytes of the index of what was appended."""
        return b"".join(row.tobytes() for row in self._rows)

    def finish(self, header: StoreHeader) -> int:
        """Make all files durable, the header last; return their bytes. `header.index_blake3` is that of `index`."""
        for name, stream in self._files.items():
            try:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
            except OSError as error:
                raise os_error(error, self._directory / name, "making it durable") from error
        write_durably(self._directory / INDEX_NAME, self.index(), self._ledger)
        write_durably(self._directory / HEADER_NAME, header.to_json(), self._ledger)
        names = (*self._files, INDEX_NAME, HEADER_NAME)
        return sum((self._directory / name).stat().st_size for name in names)

    def _create(self, name: str) -> BinaryIO:
        path = self._directory / name
        try:
            return path.open("xb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise os_error(error, path, "creating it") from error

    def _write(self, name: str, content: RawBytes) -> None:
        try:
            self._files[name].write(content.data)
        except OSError as error:
            raise os_error(error, self._directory / name, f"writing {len(content)} bytes") from error
        self._ledger.charge(str(self._directory / name), Purpose.OUTPUT, len(content))

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._files.values():
            stream.close()


def index_digest(content: bytes) -> str:
    """What a header says of its index: BLAKE3-128, in hex."""
    return blake3(content).hexdigest(16)
