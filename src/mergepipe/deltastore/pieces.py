"""Codecs, pieces and levels of packed blocks, a block as it is stored, and its arrays between kernels.

Format: the table of files, "Index row" and "Levels" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, F32, DType
from mergepipe.errors import CorruptError
from mergepipe.storage.ranges import scratch

BLOCK_ELEMENTS = 256 * 1024
BANDED_FROM_ELEMENTS = 4096
"""Smaller blocks are not encoded in bands: the tables would cost more than they save."""
BYTES_TRIED_BELOW = 1 << 14
"""Smaller blocks are encoded without levels where that is smaller: their tables are a noticeable part of them."""
BANDED_DTYPES = (BF16, F16)
"""Dtypes that bands support, beside the same dtype."""
CONVERTED_DTYPES = (BF16, F16, F32)
"""Dtypes of bases that an expert of another of them is encoded relative to, after a conversion of the base."""
HEAD_DENSITY = 0.2
"""Share of a tensor's elements, largest deltas first, that HEAD holds at least."""


def can_be_base_of(base_dtype: DType, dtype: DType) -> bool:
    """Whether a tensor can be encoded relative to a base of this dtype."""
    return base_dtype is dtype or (base_dtype in CONVERTED_DTYPES and dtype in CONVERTED_DTYPES)


class Codec(IntEnum):
    """The encoding of one block."""

    SAME = 0  # equal to the base: nothing is stored
    BANDS = 1  # bf16 beside bf16, fp16 beside fp16: the largest deltas, and the rest
    BYTES = 2  # any dtype beside the same dtype, or a base converted to it: ordered differences, byte by byte
    RAW = 3  # the expert's bytes, unencoded
    STANDALONE = 4  # any dtype, without the base: exponents coded, sign and mantissa kept


class Piece(IntEnum):
    """A kind of stored bytes. Each has its own file, with the blocks in the order of the index."""

    HEAD = 0  # which elements have the largest deltas, and their values
    REST = 1  # the values of the other elements
    WHOLE = 2  # blocks that have no levels


class Level(IntEnum):
    """The share of an expert's encoding that is read. Codecs without levels are exact from HEAD on."""

    NOTHING = 0
    HEAD = 1  # the largest deltas exactly; 0 for the others
    LOSSLESS = 2  # the expert's bits


PIECES_OF: dict[Level, tuple[Piece, ...]] = {
    Level.NOTHING: (),
    Level.HEAD: (Piece.HEAD, Piece.WHOLE),
    Level.LOSSLESS: tuple(Piece),
}
"""The pieces of a block that each level reads; most are empty, as a block has one codec."""

RECORDED_LEVELS = (Level.NOTHING, Level.HEAD)
"""Levels with an approximation error, which is recorded for each block."""

LADDERS: dict[Level, tuple[Level, ...]] = {
    Level.NOTHING: (),
    Level.HEAD: (Level.HEAD,),
    Level.LOSSLESS: (Level.HEAD, Level.LOSSLESS),
}
"""Levels that lead to each level: every one reads all pieces of the one before it, and has a smaller error."""


RawBytes = NDArray[np.uint8]
NO_ERRORS = (0.0,) * len(RECORDED_LEVELS)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block as stored; absent pieces are empty.

    `errors`: squared error left at each of `RECORDED_LEVELS`; deltas that are not finite do not count.
    `count`: elements whose deltas are in HEAD; 0 for codecs without levels.
    """

    codec: Codec
    pieces: Mapping[Piece, RawBytes]
    errors: tuple[float, ...] = NO_ERRORS
    count: int = 0

    @property
    def nbytes(self) -> int:
        return sum(len(content) for content in self.pieces.values())


# --- arrays between kernels ---


T = TypeVar("T", bound=np.generic)


def in_layout(name: str, array: NDArray[T]) -> NDArray[T]:
    """Return the array, or `scratch` of its size if kernels do not take it: they are compiled for one array layout."""
    flags = array.flags
    if flags.aligned and flags.writeable and flags.c_contiguous:
        return array
    return scratch(name, len(array), array.dtype.type)


def copied_to_layout(name: str, array: NDArray[T]) -> NDArray[T]:
    """Return the array, or a copy of it in `scratch` if kernels do not take it."""
    taken = in_layout(name, array)
    if taken is not array:
        taken[:] = array
    return taken


# --- read arrays from untrusted bytes with every length checked, and concatenate arrays to bytes ---


def corrupt(where: object, message: str) -> CorruptError:
    """Make the error of a store whose content contradicts its format."""
    return CorruptError.of("store.damaged", where, message, "copy the store again, or pack the expert again")  # type: ignore[return-value]


class ByteReader:
    """Reads one piece of a block from its start; every length is checked against the bytes left."""

    def __init__(self, content: NDArray[np.uint8], where: str) -> None:
        self._content = content
        self._where = where
        self._position = 0

    def take(self, dtype: type[T], count: int) -> NDArray[T]:
        """Read the next `count` values as a copy: little-endian, at any alignment."""
        nbytes = np.dtype(dtype).itemsize * count
        left_bytes = len(self._content) - self._position
        if nbytes > left_bytes:
            raise corrupt(self._where, f"{nbytes} bytes are needed, {left_bytes} are left")
        part = self._content[self._position : self._position + nbytes]
        self._position += nbytes
        return part.copy().view(dtype)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._position != len(self._content):
            raise corrupt(self._where, f"{len(self._content) - self._position} bytes are left over")


def concatenate_bytes(*arrays: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Concatenate the bytes of arrays."""
    return np.frombuffer(bytearray().join([np.ascontiguousarray(array).data for array in arrays]), np.uint8)
