"""What can be read of a packed block: its pieces, and the levels that they add up to."""

from __future__ import annotations

from enum import IntEnum

BLOCK_ELEMENTS = 256 * 1024
BANDED_FROM_ELEMENTS = 4096
"""Smaller blocks are in no bands: their tables would be larger than what they save."""
BAND_DENSITIES = (0.2, 0.5)
"""Shares of a tensor's elements, largest deltas first, that its first two and its three bands hold at least."""


class Codec(IntEnum):
    """How the bytes of one block are kept."""

    SAME = 0  # the base's bytes: nothing is stored
    BANDS = 1  # bf16 beside bf16: bands of magnitude, in levels
    BYTES = 2  # any dtype beside the same dtype: ordered differences, byte by byte
    RAW = 3  # as they are


class Piece(IntEnum):
    """One kind of stored bytes. Each has a file of its own, in which the blocks stand in order."""

    HEAD = 0  # which elements are in the first two bands, and their signs
    HEAD_FINE = 1  # which value inside the band
    BODY = 2  # the other elements: the third band, or a cell around the base's value
    BODY_FINE = 3  # which value inside the third band
    REST = 4  # which value inside the cell
    WHOLE = 5  # blocks that have no levels


class Level(IntEnum):
    """How much of an expert is known. Codecs without levels have all from HEAD on."""

    NOTHING = 0
    HEAD = 1  # the largest deltas, roughly
    HEAD_EXACT = 2  # the largest deltas as they are; nothing of the others
    BODY = 3  # all deltas, roughly
    BODY_EXACT = 4  # all deltas of the three bands as they are; the others roughly
    LOSSLESS = 5  # the expert's bits


PIECES_OF: dict[Level, tuple[Piece, ...]] = {
    Level.NOTHING: (),
    Level.HEAD: (Piece.HEAD, Piece.WHOLE),
    Level.HEAD_EXACT: (Piece.HEAD, Piece.HEAD_FINE, Piece.WHOLE),
    Level.BODY: (Piece.HEAD, Piece.BODY, Piece.WHOLE),
    Level.BODY_EXACT: (Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.WHOLE),
    Level.LOSSLESS: tuple(Piece),
}
"""What each level reads of a block; most pieces of a block are empty, since it has one codec."""

RECORDED_LEVELS = (Level.NOTHING, Level.HEAD, Level.HEAD_EXACT, Level.BODY, Level.BODY_EXACT)
"""Levels that leave an error, which is recorded for each block."""

EXACT_BANDS: dict[Level, int] = {Level.HEAD_EXACT: 1, Level.BODY_EXACT: 2}
"""Levels at which the deltas of the bands up to this one are as they are.

All others are smaller than the band's cut: 0, or roughly known.
"""

LADDERS: dict[Level, tuple[Level, ...]] = {
    Level.NOTHING: (),
    Level.HEAD: (Level.HEAD,),
    Level.HEAD_EXACT: (Level.HEAD, Level.HEAD_EXACT),
    Level.BODY: (Level.HEAD, Level.BODY),
    Level.BODY_EXACT: (Level.HEAD, Level.BODY, Level.BODY_EXACT),
    Level.LOSSLESS: (Level.HEAD, Level.BODY, Level.BODY_EXACT, Level.LOSSLESS),
}
"""On the way to a level: each reads all that the one before it reads, and leaves less of an error."""
