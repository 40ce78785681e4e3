"""Decode a block of codec BANDS: exact values from all pieces, or deltas from the pieces of a level.

Format: "BANDS" and "Levels" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.entropy.rans import SKIPPED, TOTAL, Bits16, padded_length
from mergepipe.deltastore.codec.entropy.rans_vector_decoder import has_vector_decoder
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.codec.piece_headers import CURSOR_FIELDS, END, FAULT, FOUND, MESSAGES, NEEDED, POSITION, Fault
from mergepipe.deltastore.codec.residuals.bit_unpacking import HAS_PDEP
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.tiles.decode import VECTOR_RESIDUALS, VECTOR_SYMBOLS, decode_tiles
from mergepipe.deltastore.codec.tiles.element_codes import BF16_MANTISSA_BITS
from mergepipe.kernels.compilation.compiled import Bytes, Counts, Floats

BAND_PIECES = (Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.REST)
SPARE_BYTES = 1024
_FEATURES = (VECTOR_SYMBOLS if has_vector_decoder() else 0) | (VECTOR_RESIDUALS if HAS_PDEP else 0)
_NOTHING = np.empty(0, np.uint8)
_NO_DELTAS, _NO_VALUES = np.empty(0, np.float32), np.empty(0, np.uint16)
Pieces = Mapping[Piece, NDArray[np.uint8]]


def decode_band_values(
    pieces: Pieces, base: Bits16, bands: Bands, where: str, out: Bits16, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode the expert's 16 bits an element from all pieces.

    Raises:
        CorruptError: the pieces are not a valid encoding.
    """
    values = out if _is_contiguous(out) else scratch("values", len(out), np.uint16)
    _decode(pieces, Level.LOSSLESS, base, bands, where, values, _NO_DELTAS, features, mantissa_bits)
    if values is not out:
        out[:] = values


def decode_band_deltas(
    pieces: Pieces, level: Level, base: Bits16, bands: Bands, where: str, out: Floats, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode deltas: exact where residuals are read, else the centroid of the band or the centre of the cell, else 0.

    Raises:
        CorruptError: the pieces that `level` reads are not a valid encoding.
    """
    deltas = out if _is_contiguous(out) else scratch("deltas", len(out), np.float32)
    _decode(pieces, level, base, bands, where, _NO_VALUES, deltas, features, mantissa_bits)
    if deltas is not out:
        out[:] = deltas


def _is_contiguous(array: NDArray[np.generic]) -> bool:
    """Whether the array can be passed to the kernels, which are compiled for one array layout."""
    return array.flags.aligned and array.flags.writeable and array.flags.c_contiguous


def _decode(
    pieces: Pieces, level: Level, base: Bits16, bands: Bands, where: str, values: Bits16, deltas: Floats, features: int,
    mantissa_bits: int,
) -> None:  # fmt: skip
    n = len(base)
    if len(values) + len(deltas) != n:  # compiled code does not check bounds
        raise ValueError(f"{n} elements of the base, room for {len(values)} values and {len(deltas)} deltas")
    if not n:
        return
    base_bits = base
    if not _is_contiguous(base):
        base_bits = scratch("base", n, np.uint16)
        base_bits[:] = base
    requested_P = np.array([piece in PIECES_OF[level] for piece in BAND_PIECES], np.uint8)
    stored, cursors_PF = _concatenate_pieces(pieces, level, n, where)
    table, body_table = (scratch(name, (SKIPPED + 1) * TOTAL, np.uint32) for name in ("table", "body-table"))
    codes = scratch("codes", padded_length(n), np.uint8)
    cuts = np.array(bands.cuts, np.float32)
    decode_tiles(
        stored,
        cursors_PF,
        requested_P,
        base_bits,
        mantissa_bits,
        cuts,
        bands.limit,
        features,
        table,
        body_table,
        codes,
        values,
        deltas,
    )
    for cursor in cursors_PF:
        if cursor[FAULT]:
            message = MESSAGES[Fault(int(cursor[FAULT]))]
            raise corrupt(where, message.format(found=int(cursor[FOUND]), needed=int(cursor[NEEDED])))


def _concatenate_pieces(pieces: Pieces, level: Level, n: int, where: str) -> tuple[Bytes, Counts]:
    """Concatenate the pieces, with readable padding after them for corrupt ones; return cursors on the pieces."""
    cursors_PF = np.zeros((len(BAND_PIECES), CURSOR_FIELDS), np.int64)
    contents = [pieces[piece] if piece in PIECES_OF[level] else _NOTHING for piece in BAND_PIECES]
    total = sum(map(len, contents))
    if total > len(contents) * (2 * n + SPARE_BYTES):
        raise corrupt(where, f"{total} bytes are stored for a block of {2 * n}")
    stored = scratch("pieces", total + 2 * padded_length(n) + SPARE_BYTES, np.uint8)
    position = 0
    for cursor, content in zip(cursors_PF, contents, strict=True):
        stored[position : position + len(content)] = content
        cursor[POSITION], cursor[END] = position, position + len(content)
        position += len(content)
    return stored, cursors_PF
