"""Decodes bf16 beside bf16, as far as a level reads it: values, or deltas."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.bit_spread import HAS_SPREADING
from mergepipe.deltastore.codec.byte_parts import corrupt
from mergepipe.deltastore.codec.decode_tiles import BY_16, BY_FOUR, decode_tiles
from mergepipe.deltastore.codec.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.codec.piece_headers import AT, CURSOR_FIELDS, FAULT, FOUND, MESSAGES, NEEDED, STOP, Fault
from mergepipe.deltastore.codec.range_decoder import has_vectors
from mergepipe.deltastore.codec.rans import SKIPPED, TOTAL, Halves, padded
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compiled import Bytes, Counts, Floats

BAND_PIECES = (Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.REST)
SPARE_BYTES = 1024
_WAYS = (BY_16 if has_vectors() else 0) | (BY_FOUR if HAS_SPREADING else 0)
_NOTHING = np.empty(0, np.uint8)
_NO_DELTAS, _NO_VALUES = np.empty(0, np.float32), np.empty(0, np.uint16)
Pieces = Mapping[Piece, NDArray[np.uint8]]


def decode_band_values(pieces: Pieces, base: Halves, bands: Bands, where: str, out: Halves, ways: int = _WAYS) -> None:
    """Write the expert's bits, from all pieces.

    Raises:
        CorruptError: they are not what `encode_bands` writes.
    """
    values = out if _is_plain(out) else scratch("values", len(out), np.uint16)
    _decode(pieces, Level.LOSSLESS, base, bands, where, values, _NO_DELTAS, ways)
    if values is not out:
        out[:] = values


def decode_band_deltas(
    pieces: Pieces, level: Level, base: Halves, bands: Bands, where: str, out: Floats, ways: int = _WAYS
) -> None:
    """Write differences from the base: of exact values, else of the centre of band or cell, else 0.

    Raises:
        CorruptError: the pieces that `level` reads are not what `encode_bands` writes.
    """
    deltas = out if _is_plain(out) else scratch("deltas", len(out), np.float32)
    _decode(pieces, level, base, bands, where, _NO_VALUES, deltas, ways)
    if deltas is not out:
        out[:] = deltas


def _is_plain(array: NDArray[np.generic]) -> bool:
    """Whether compiled code takes the array as it is: one kind of array is compiled for."""
    return array.flags.aligned and array.flags.writeable and array.flags.c_contiguous


def _decode(
    pieces: Pieces, level: Level, base: Halves, bands: Bands, where: str, values: Halves, deltas: Floats, ways: int
) -> None:
    n = len(base)
    if len(values) + len(deltas) != n:  # compiled code does not look
        raise ValueError(f"{n} elements of the base, room for {len(values)} values and {len(deltas)} deltas")
    if not n:
        return
    own = base
    if not _is_plain(base):
        own = scratch("base", n, np.uint16)
        own[:] = base
    wanted = np.array([piece in PIECES_OF[level] for piece in BAND_PIECES], np.uint8)
    stored, cursors_PF = _gathered(pieces, level, n, where)
    table, body_table = (scratch(name, (SKIPPED + 1) * TOTAL, np.uint32) for name in ("table", "body-table"))
    codes = scratch("codes", n, np.uint8)
    cuts = np.array(bands.cuts, np.float32)
    decode_tiles(stored, cursors_PF, wanted, own, cuts, bands.limit, ways, table, body_table, codes, values, deltas)
    for cursor in cursors_PF:
        if cursor[FAULT]:
            message = MESSAGES[Fault(int(cursor[FAULT]))]
            raise corrupt(where, message.format(found=int(cursor[FOUND]), needed=int(cursor[NEEDED])))


def _gathered(pieces: Pieces, level: Level, n: int, where: str) -> tuple[Bytes, Counts]:
    """The pieces in one array, with room after them for what a lying one would read, and cursors on them."""
    cursors_PF = np.zeros((len(BAND_PIECES), CURSOR_FIELDS), np.int64)
    contents = [pieces[piece] if piece in PIECES_OF[level] else _NOTHING for piece in BAND_PIECES]
    total = sum(map(len, contents))
    if total > len(contents) * (2 * n + SPARE_BYTES):
        raise corrupt(where, f"{total} bytes are stored for a block of {2 * n}")
    stored = scratch("pieces", total + 2 * padded(n) + SPARE_BYTES, np.uint8)
    at = 0
    for cursor, content in zip(cursors_PF, contents, strict=True):
        stored[at : at + len(content)] = content
        cursor[AT], cursor[STOP] = at, at + len(content)
        at += len(content)
    return stored, cursors_PF
