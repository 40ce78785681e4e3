"""Decode a block of codec BANDS: exact values from all pieces, or deltas from the pieces of a level.

Format: "BANDS" and "Levels" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.entropy.rans import SKIPPED, TOTAL, Bits16, padded_length
from mergepipe.deltastore.codec.entropy.rans_vector_decoder import has_vector_decoder
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.codec.piece_headers import CURSOR_FIELDS, END, FAULT, FOUND, MESSAGES, NEEDED, POSITION, Fault
from mergepipe.deltastore.codec.residuals.bit_unpacking import HAS_PDEP
from mergepipe.deltastore.codec.scratch import copied_to_layout, in_layout, scratch
from mergepipe.deltastore.codec.tiles.decode import VECTOR_RESIDUALS, VECTOR_SYMBOLS, decode_tiles
from mergepipe.deltastore.codec.tiles.element_codes import BF16_MANTISSA_BITS
from mergepipe.kernels.compilation.compiled import Bytes, Counts, Floats

BAND_PIECES = (Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.REST)
SPARE_BYTES = 1024
_FEATURES = (VECTOR_SYMBOLS if has_vector_decoder() else 0) | (VECTOR_RESIDUALS if HAS_PDEP else 0)
_NOTHING = np.empty(0, np.uint8)
_NO_DELTAS, _NO_VALUES = np.empty(0, np.float32), np.empty(0, np.uint16)
Pieces = Mapping[Piece, NDArray[np.uint8]]
_REQUESTED_P = {level: np.array([piece in PIECES_OF[level] for piece in BAND_PIECES], np.uint8) for level in Level}


def decode_band_values(
    pieces: Pieces, base: Bits16, bands: Bands, where: str, out: Bits16, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode the expert's 16 bits an element from all pieces.

    Raises:
        CorruptError: the pieces are not a valid encoding.
    """
    blocks = _one_block(pieces, Level.LOSSLESS, base, where)
    decode_band_blocks(blocks, Level.LOSSLESS, bands, lambda _: where, out, _NO_DELTAS, features, mantissa_bits)


def decode_band_deltas(
    pieces: Pieces, level: Level, base: Bits16, bands: Bands, where: str, out: Floats, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode deltas: exact where residuals are read, else the centroid of the band or the centre of the cell, else 0.

    Raises:
        CorruptError: the pieces that `level` reads are not a valid encoding.
    """
    blocks = _one_block(pieces, level, base, where)
    decode_band_blocks(blocks, level, bands, lambda _: where, _NO_VALUES, out, features, mantissa_bits)


@dataclass(frozen=True, slots=True)
class BandBlocks:
    """Pieces and base of consecutive blocks of BANDS; all but the last have `block_elements` elements.

    The pieces of block b lie in `stored`, from POSITION to END of `cursors_BPF[b]`; after the last, `stored` has
    `padding_bytes`.
    """

    stored: Bytes
    cursors_BPF: Counts
    base: Bits16
    block_elements: int


def padding_bytes(block_elements: int) -> int:
    """Bytes that must be readable after the last piece, for corrupt ones."""
    return 2 * padded_length(block_elements) + SPARE_BYTES


def decode_band_blocks(
    blocks: BandBlocks, level: Level, bands: Bands, where: Callable[[int], str], values: Bits16, deltas: Floats,
    features: int = _FEATURES, mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode consecutive blocks in one call, like `decode_band_values`, or `decode_band_deltas` without `values`.

    `where` tells errors where the block of a number is.

    Raises:
        CorruptError: the pieces that `level` reads are not a valid encoding.
    """
    n = len(blocks.base)
    if len(values) + len(deltas) != n:  # compiled code does not check bounds
        raise ValueError(f"{n} elements of the base, room for {len(values)} values and {len(deltas)} deltas")
    if not n:
        return
    table, body_table = (scratch(name, (SKIPPED + 1) * TOTAL, np.uint32) for name in ("table", "body-table"))
    decoded_values, decoded_deltas = in_layout("values", values), in_layout("deltas", deltas)
    base, cursors_BPF = copied_to_layout("base", blocks.base), blocks.cursors_BPF.copy()
    decode_tiles(
        blocks.stored,
        cursors_BPF,
        _REQUESTED_P[level],
        base,
        blocks.block_elements,
        mantissa_bits,
        np.array(bands.cuts, np.float32),
        bands.limit,
        features,
        table,
        body_table,
        scratch("codes", padded_length(min(n, blocks.block_elements)), np.uint8),
        decoded_values,
        decoded_deltas,
    )
    _check_faults(cursors_BPF, where)
    if decoded_values is not values:
        values[:] = decoded_values
    if decoded_deltas is not deltas:
        deltas[:] = decoded_deltas


def _check_faults(cursors_BPF: Counts, where: Callable[[int], str]) -> None:
    faults_BP = cursors_BPF[:, :, FAULT]
    if faults_BP.any():
        block, piece = np.argwhere(faults_BP)[0].tolist()
        cursor = cursors_BPF[block, piece]
        message = MESSAGES[Fault(int(cursor[FAULT]))]
        raise corrupt(where(block), message.format(found=int(cursor[FOUND]), needed=int(cursor[NEEDED])))


def _one_block(pieces: Pieces, level: Level, base: Bits16, where: str) -> BandBlocks:
    """Concatenate the pieces of one block, with readable padding after them."""
    n = len(base)
    cursors_PF = np.zeros((len(BAND_PIECES), CURSOR_FIELDS), np.int64)
    contents = [pieces[piece] if piece in PIECES_OF[level] else _NOTHING for piece in BAND_PIECES]
    total = sum(map(len, contents))
    if total > len(contents) * (2 * n + SPARE_BYTES):
        raise corrupt(where, f"{total} bytes are stored for a block of {2 * n}")
    stored = scratch("pieces", total + padding_bytes(n), np.uint8)
    position = 0
    for cursor, content in zip(cursors_PF, contents, strict=True):
        stored[position : position + len(content)] = content
        cursor[POSITION], cursor[END] = position, position + len(content)
        position += len(content)
    return BandBlocks(stored, cursors_PF[None], base, max(n, 1))
