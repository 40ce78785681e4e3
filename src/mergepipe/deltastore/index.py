"""The index of a delta store: one fixed-size row per block, checked as a whole; offsets are sums of lengths.

Format: "Index row" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.deltastore.codec.block import EncodedBlock, RawBytes
from mergepipe.deltastore.codec.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import RECORDED_LEVELS, Codec, Level, Piece

DIGEST_BYTES = 16
CHECK_BYTES = 8
N_PIECES = len(Piece)

ROW = np.dtype([
    ("codec", "u1"),
    ("reserved", "u1", (3,)),
    ("counts", "<u4", (3,)),
    ("errors", "<f4", (len(RECORDED_LEVELS),)),
    ("lengths", "<u4", (N_PIECES,)),
    ("checks", f"V{CHECK_BYTES}", (N_PIECES,)),
    ("base", f"V{DIGEST_BYTES}"),
    ("expert", f"V{DIGEST_BYTES}"),
])  # fmt: skip
ROW_BYTES = ROW.itemsize
_ROW_FIELDS = struct.Struct(
    f"<B3x3I{len(RECORDED_LEVELS)}f{N_PIECES}I" + f"{CHECK_BYTES}s" * N_PIECES + f"{DIGEST_BYTES}s" * 2
)
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = np.empty(0, np.uint8)


def digest(content: RawBytes, length: int = DIGEST_BYTES) -> bytes:
    """BLAKE3 of bytes, truncated to `length` bytes."""
    return blake3(content.data).digest(length)


def make_row(block: EncodedBlock, base_digest: bytes | None, expert: RawBytes) -> NDArray[np.void]:
    """Make the index row of a block, an array of one. `base_digest` is that of the base's bytes of the block."""
    contents = [block.pieces.get(piece, _NOTHING) for piece in Piece]
    fields = _ROW_FIELDS.pack(
        int(block.codec),
        *block.counts,
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

    def bytes_of(self, pieces: Sequence[Piece], first: int, stop: int) -> int:
        """The total length of some pieces of the rows `[first, stop)`."""
        return sum(high - low for low, high in (self.piece_range(piece, first, stop) for piece in pieces))

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
