"""Read the index of a delta store when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from mergepipe.checkpoints.contract import range_cost_bytes
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.codec.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, PIECES_OF, Level, Piece
from mergepipe.deltastore.header import INDEX_NAME, PIECE_NAMES, StoreHeader
from mergepipe.deltastore.index import ROW_BYTES, StoreIndex
from mergepipe.deltastore.writer import index_digest
from mergepipe.storage.buffers import PAGE_BYTES
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

Charged = Callable[[Store, Location, int], bytes]
"""Reads the given number of bytes from the start of a file and charges them to one purpose."""


def as_metadata(store: Store, path: Location, nbytes: int) -> bytes:
    """Read bytes charged as metadata, for callers that read the whole store."""
    return store.read_metadata(path, 0, nbytes)


def as_expert(store: Store, path: Location, nbytes: int) -> bytes:
    """Read bytes charged to the expert, for merges: a budget counts the index."""
    file = store.open(path)
    try:
        return read_exact(file, 0, nbytes, Purpose.EXPERT).tobytes()
    finally:
        file.close()


class StoreIndexReader:
    """Reads the index of one store when first needed, once; its cost is known before. Safe to use from many threads.

    It pickles with its index: that is read and charged once, however many processes read the store's tensors.

    Memory, once it is read: the index (140 bytes per block) and its offsets (48).
    """

    def __init__(
        self,
        store: Store | None,
        root: Location,
        header: StoreHeader,
        sizes: Mapping[str, int],
        read: Charged,
    ) -> None:
        self._store = store
        self._root = root
        self._header = header
        self._sizes = sizes
        self._read = read
        self._lock = threading.Lock()
        self._index: StoreIndex | None = None
        self._paths = {piece: root / name for piece, name in PIECE_NAMES.items()}
        self.granularity_bytes = PAGE_BYTES if store is None else store.terms(root).granularity_bytes

    def __reduce__(self) -> tuple[object, ...]:
        rows = self.index.rows.tobytes()
        return _with_index, (self._root, self._header, dict(self._sizes), rows, self.granularity_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreIndexReader) and (self._root, self._header) == (other._root, other._header)

    def __hash__(self) -> int:
        return hash((self._root, self._header.index_blake3))

    @property
    def n_rows(self) -> int:
        return sum(tensor.n_rows for tensor in self._header.tensors)

    @property
    def cost_bytes(self) -> int:
        """Bytes requested to read the index, in whole pages."""
        return range_cost_bytes(0, self.n_rows * ROW_BYTES, self.granularity_bytes)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all pieces of all tensors."""
        return sum(self._sizes[name] for name in PIECE_NAMES.values())

    @property
    def least_bytes(self) -> int:
        """The bytes of the index and of the pieces that every level reads."""
        return self.cost_bytes + sum(self._sizes[PIECE_NAMES[piece]] for piece in PIECES_OF[Level.HEAD])

    @property
    def is_read(self) -> bool:
        """Whether the index has been read."""
        return self._index is not None

    @property
    def files(self) -> frozenset[Location]:
        """The files that hold pieces."""
        return frozenset(self._paths.values())

    def path_of(self, piece: Piece) -> Location:
        """The file that holds the pieces of a kind."""
        return self._paths[piece]

    @property
    def content(self) -> bytes:
        """The bytes of the index, for another process to `adopt`; the first access reads it."""
        return self.index.rows.tobytes()

    def adopt(self, content: bytes) -> None:
        """Use the bytes of the index that another process has read: nothing is charged."""
        with self._lock:
            self._index = self._checked_index(content)

    @property
    def index_file(self) -> Location:
        return self._root / INDEX_NAME

    @property
    def index(self) -> StoreIndex:
        """The index; the first access reads it."""
        if self._index is None:
            with self._lock:
                if self._index is None:
                    self._index = self._read_index()
        return self._index

    def _read_index(self) -> StoreIndex:
        if self._store is None:
            raise ValueError(f"{self._root}: no store to read the index from")
        return self._checked_index(self._read(self._store, self.index_file, self.n_rows * ROW_BYTES))

    def _checked_index(self, content: bytes) -> StoreIndex:
        path = self.index_file
        if index_digest(content) != self._header.index_blake3:
            raise corrupt(path, "the index is damaged: its digest does not fit the header's")
        index = StoreIndex.parse(content, str(path))
        self._check_lengths(index, path)
        for piece in Piece:
            needed_bytes = index.file_bytes(piece)
            if self._sizes[PIECE_NAMES[piece]] != needed_bytes:
                message = f"has {self._sizes[PIECE_NAMES[piece]]} bytes, {needed_bytes} bytes are needed"
                raise corrupt(self.path_of(piece), message)
        return index

    def _check_lengths(self, index: StoreIndex, path: Location) -> None:
        """Refuse blocks whose pieces have more bytes than the block, as they are read into memory."""
        stored_R = index.rows["lengths"].sum(axis=1, dtype=np.int64)
        for tensor in self._header.tensors:
            room_B = np.full(tensor.n_rows, BLOCK_ELEMENTS * tensor.dtype.itemsize)
            room_B[tensor.n_rows - 1 :] = tensor.nbytes - room_B[: tensor.n_rows - 1].sum()
            over_B = np.flatnonzero(stored_R[tensor.first_row : tensor.first_row + tensor.n_rows] > room_B)
            if len(over_B):
                stored = int(stored_R[tensor.first_row + over_B[0]])
                message = f"tensor {shown(tensor.name)}, block {over_B[0]}: {stored} bytes are stored for a block"
                raise corrupt(path, f"{message} of {room_B[over_B[0]]}")


def _with_index(
    root: Location, header: StoreHeader, sizes: Mapping[str, int], rows: bytes, granularity_bytes: int
) -> StoreIndexReader:
    """Unpickle: the rows were checked when they were read."""
    reader = StoreIndexReader(None, root, header, sizes, as_expert)
    reader.granularity_bytes = granularity_bytes
    reader.adopt(rows)
    return reader
