"""The header of a delta store, `mergepipe-store.json`, and its index: a row per block, read when it is first needed.

Format: "Header" and "Index row" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Final, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import range_cost_bytes
from mergepipe.checkpoints.directory import STORE_HEADER_NAME, is_plain_name
from mergepipe.core.blocks import DTYPES, BlockGrid, DType, element_count
from mergepipe.core.records import AsText, RecordFormat, Size
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.pieces import (
    BLOCK_ELEMENTS,
    PIECES_OF,
    RECORDED_LEVELS,
    Codec,
    EncodedBlock,
    Level,
    Piece,
    RawBytes,
    can_be_base_of,
    corrupt,
)
from mergepipe.storage.contract import Digested, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

HEADER_NAME = STORE_HEADER_NAME
INDEX_NAME = "mergepipe-store.index"
HEADERS_NAME = "mergepipe-store.headers"
PIECE_NAMES: dict[Piece, str] = {
    piece: f"mergepipe-store.{piece.name.lower().replace('_', '-')}.bin" for piece in Piece
}
OWN_NAMES = frozenset({HEADER_NAME, INDEX_NAME, HEADERS_NAME, *PIECE_NAMES.values()})


_NamedDType: TypeAlias = Annotated[DType, AsText(attrgetter("name"), DTYPES.__getitem__)]


def is_own_name(name: str) -> bool:
    """Whether a file of this name belongs to the store, not to the expert."""
    return name in OWN_NAMES


def _check_name(name: str) -> None:
    """Refuse what is no relative posix path of plain parts, and the store's own names."""
    if not all(is_plain_name(part) for part in name.split("/")) or is_own_name(name):
        raise ValueError(f"invalid name: {shown(name)}")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One weight file of the original; the headers file holds the bytes of all their headers, one after another."""

    name: str
    size_bytes: Size
    version: str
    header_bytes: Size
    header_blake3: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, slots=True)
class KeptFile(Digested):
    """A file of the original that is stored unchanged, under the same name."""

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One tensor: its weight file, its first row of the index.

    `base_dtype`: that of the base's tensor that it is encoded relative to; None where there is none. `is_plain`: such a
    tensor whose blocks are all RAW, so that it is one byte range.
    """

    name: str
    dtype: _NamedDType
    shape: tuple[Size, ...]
    file: Size
    first_row: Size
    base_dtype: _NamedDType | None
    is_plain: bool

    def __post_init__(self) -> None:
        if self.is_plain and self.has_base:
            raise ValueError(f"tensor {shown(self.name)} is plain and has a base")
        if self.base_dtype is not None and not can_be_base_of(self.base_dtype, self.dtype):
            raise ValueError(f"invalid base_dtype: {self.base_dtype.name}")

    @property
    def has_base(self) -> bool:
        return self.base_dtype is not None

    @property
    def n_rows(self) -> int:
        return BlockGrid(element_count(self.shape), BLOCK_ELEMENTS).n_blocks

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The fields of a header; tensors are ordered by file, then by offset, their rows by name.

    `base` and `expert` are the paths that were packed, as hints; `base` is empty where no base was named.
    `base_files` is a digest of the base's file fingerprints. `content_id` is that of the expert
    (`checkpoints.content_id`). `depth`: the number of stores below it that it is packed on, one on another; `base` is
    then a store itself.
    """

    base: str
    base_files: str
    expert: str
    is_bare_file: bool
    index_blake3: str
    files: tuple[PackedFile, ...]
    kept: tuple[KeptFile, ...]
    tensors: tuple[PackedEntry, ...]
    content_id: str
    depth: Size = 0

    @property
    def block_elements(self) -> int:
        return BLOCK_ELEMENTS

    def __post_init__(self) -> None:
        """Refuse duplicate names, tensors out of order, and files whose size is not that of their parts."""
        outputs = [file.name for file in self.files] + [file.name for file in self.kept]
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors) or len(set(outputs)) != len(outputs):
            raise ValueError("two tensors, or two files, have the same name")
        row = 0
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.name):
            if tensor.first_row != row:
                raise ValueError(f"tensor {shown(tensor.name)} does not follow the one before it")
            row += tensor.n_rows
        stored_bytes = [file.header_bytes for file in self.files]
        last = 0
        for tensor in self.tensors:
            if not last <= tensor.file < len(self.files):
                raise ValueError(f"tensor {shown(tensor.name)} does not follow the one before it")
            stored_bytes[tensor.file] += tensor.nbytes
            last = tensor.file
        for file, stored in zip(self.files, stored_bytes, strict=True):
            if stored != file.size_bytes:
                raise ValueError(f"{shown(file.name)} has {file.size_bytes} bytes, its parts have {stored}")


HEADER_FORMAT: Final = RecordFormat(
    "mergepipe-delta-store", 7, StoreHeader, "pack the expert again", stated=("block_elements",)
)


# --- the index of a delta store: one fixed-size row per block, checked as a whole; offsets are sums of lengths ---
#
# Format: "Index row" in docs/internals/formats/delta-store.md.


DIGEST_BYTES = 16
CHECK_BYTES = 8
N_PIECES = len(Piece)

ROW = np.dtype([
    ("codec", "u1"),
    ("reserved", "u1", (3,)),
    ("count", "<u4"),
    ("errors", "<f4", (len(RECORDED_LEVELS),)),
    ("lengths", "<u4", (N_PIECES,)),
    ("checks", f"V{CHECK_BYTES}", (N_PIECES,)),
    ("base", f"V{DIGEST_BYTES}"),
    ("expert", f"V{DIGEST_BYTES}"),
])  # fmt: skip
ROW_BYTES = ROW.itemsize
_ROW_FIELDS = struct.Struct(
    f"<B3xI{len(RECORDED_LEVELS)}f{N_PIECES}I" + f"{CHECK_BYTES}s" * N_PIECES + f"{DIGEST_BYTES}s" * 2
)
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = np.empty(0, np.uint8)


def digest(content: RawBytes, length: int = DIGEST_BYTES) -> bytes:
    """BLAKE3 of bytes, truncated to `length` bytes."""
    return blake3(content.data).digest(length)


def index_digest(content: bytes) -> str:
    """The digest of an index as the header has it: BLAKE3-128, in hex."""
    return blake3(content).hexdigest(16)


def make_row(block: EncodedBlock, base_digest: bytes | None, expert: RawBytes) -> NDArray[np.void]:
    """Make the index row of a block, an array of one. `base_digest` is that of the base's bytes of the block."""
    contents = [block.pieces.get(piece, _NOTHING) for piece in Piece]
    fields = _ROW_FIELDS.pack(
        int(block.codec),
        block.count,
        *(min(error, _LARGEST) for error in block.errors),
        *map(len, contents),
        *(digest(content, CHECK_BYTES) if len(content) else b"" for content in contents),
        base_digest or b"",
        digest(expert),
    )
    return np.frombuffer(fields, ROW)


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """All rows, and the offset of each piece of each block in its file: `offsets_PR` has one more column than rows."""

    rows: NDArray[np.void]
    offsets_PR: NDArray[np.int64]

    @classmethod
    def of(cls, rows: NDArray[np.void]) -> StoreIndex:
        return cls(rows, _offsets(rows["lengths"].T.astype(np.int64)))

    @classmethod
    def parse(cls, content: bytes, where: str) -> StoreIndex:
        """Parse and check an index."""
        if len(content) % ROW_BYTES:
            raise corrupt(where, f"{len(content)} bytes are not a whole number of rows of {ROW_BYTES} bytes")
        rows = np.frombuffer(content, ROW)
        if len(rows) and int(rows["codec"].max()) > max(Codec):
            raise corrupt(where, f"unknown codec {int(rows['codec'].max())}")
        if not (rows["errors"] >= 0).all() or np.isinf(rows["errors"]).any():
            raise corrupt(where, "a recorded squared error is negative or not finite")
        return cls.of(rows)

    def codec(self, row: int) -> Codec:
        return Codec(int(self.rows["codec"][row]))

    def file_bytes(self, piece: Piece) -> int:
        """The length of the file of a piece."""
        return int(self.offsets_PR[piece, -1])

    def piece_range(self, piece: Piece, first: int, stop: int) -> tuple[int, int]:
        """The byte range that holds a piece of the rows `[first, stop)` in its file."""
        return int(self.offsets_PR[piece, first]), int(self.offsets_PR[piece, stop])

    def check_pieces(
        self, piece: Piece, first: int, offsets: Sequence[int], content: RawBytes, where: Callable[[int], str]
    ) -> None:
        """Check the pieces of rows from `first` on, which lie side by side in `content`, against their checksums.

        `offsets` is where they begin in their file, and where the last ends; `where` tells errors where a row is.
        """
        checks = self.rows["checks"][first : first + len(offsets) - 1, piece].tobytes()
        for i, (start, stop) in enumerate(pairwise(offsets)):
            if start == stop:
                continue
            actual = digest(content[start - offsets[0] : stop - offsets[0]], CHECK_BYTES)
            if actual != checks[CHECK_BYTES * i : CHECK_BYTES * (i + 1)]:
                name = piece.name.lower().replace("_", "-")
                raise corrupt(where(first + i), f"the {name} piece of block {first + i} is damaged")

    def errors(self, level: Level, first: int, stop: int) -> NDArray[np.float64]:
        """Squared errors of the blocks at `level`."""
        if level is Level.LOSSLESS:
            return np.zeros(stop - first, np.float64)
        column = RECORDED_LEVELS.index(level)
        return np.asarray(self.rows["errors"][first:stop, column], np.float64)


def _offsets(lengths_PR: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets_PR = np.zeros((N_PIECES, lengths_PR.shape[1] + 1), np.int64)
    np.cumsum(lengths_PR, axis=1, out=offsets_PR[:, 1:])
    return offsets_PR


# --- read the index of a delta store when it is first needed ---


def read_index(store: Store, path: Location, nbytes: int, purpose: Purpose) -> bytes:
    """Read bytes charged as metadata, for callers that read the whole store, or to the expert: a budget counts them."""
    if purpose is Purpose.METADATA:
        return store.read_metadata(path, 0, nbytes)
    with closing(store.open(path)) as file:
        return read_exact(file, 0, nbytes, purpose).tobytes()


class StoreIndexReader:
    """Reads the index of one store when first needed, once; its cost is known before. Safe to use from many threads.

    Memory, once it is read: the index (84 bytes per block) and its offsets (24).
    """

    def __init__(
        self, store: Store, root: Location, header: StoreHeader, sizes: Mapping[str, int], purpose: Purpose
    ) -> None:
        self._store = store
        self._root = root
        self._header = header
        self._sizes = sizes
        self._purpose = purpose
        self._lock = threading.Lock()
        self._index: StoreIndex | None = None
        self._paths = {piece: root / name for piece, name in PIECE_NAMES.items()}
        self.granularity_bytes = store.terms(root).granularity_bytes

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
                    content = read_index(self._store, self.index_file, self.n_rows * ROW_BYTES, self._purpose)
                    self._index = self._checked_index(content)
        return self._index

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
