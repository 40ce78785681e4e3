"""Decodes bf16 beside bf16, as far as a level reads it: values, or deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.contexts import Contexts
from mergepipe.deltastore.fines import (
    STREAM_CODES,
    WIDTH_SLOTS,
    Exceptions,
    ValueTables,
    decode_values,
    take_stream,
)
from mergepipe.deltastore.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.loops import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    HEAD_SYMBOLS,
    LAST_REST_CODE,
    MAX_LOW,
    N_CODES,
    ZERO_CELL,
    Integers,
    body_contexts,
    join_codes,
)
from mergepipe.deltastore.parts import Parts, corrupt
from mergepipe.deltastore.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.stages import decode_stage
from mergepipe.deltastore.taking import centroid_rows, difference_rows
from mergepipe.kernels.compiled import Bytes, Floats

_FINE_PIECES = (Piece.HEAD_FINE, Piece.BODY_FINE, Piece.REST)
Pieces = Mapping[Piece, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class DecodedBands:
    """What a level says of a block: by element the nearest value, and whether it stands for itself, by code."""

    base: Halves
    values: Halves
    rows: Bytes
    codes: Bytes
    is_value: NDArray[np.uint8]
    centroids: NDArray[np.float32]
    limit: np.float32

    def deltas(self, out: Floats) -> None:
        """Write differences from the base: of exact values, else of the centre of band or cell, else 0."""
        n = len(self.base)
        difference_rows(self.base, self.values, self.codes, self.limit, n, out)
        if not self.is_value[: LAST_REST_CODE + 1].all():
            centroid_rows(self.rows, self.codes, self.is_value, self.centroids, n, out)


def decode_bands(pieces: Pieces, level: Level, base: Halves, bands: Bands, where: str) -> DecodedBands:
    """Decode the pieces that `level` reads; at LOSSLESS the values are the expert's bits.

    Raises:
        CorruptError: they are not what `encode_bands` writes.
    """
    n = len(base)
    wanted = PIECES_OF[level]
    parts = Parts(pieces[Piece.HEAD], where)
    contexts = Contexts.taken(parts, where)
    rows = contexts.rows(base)
    centroids = np.zeros((MAX_CONTEXTS + 1, N_CODES), np.float32)
    n_head = FIRST_BODY_CODE - 1
    taken = parts.take(np.float32, contexts.count * n_head)
    centroids[: contexts.count, 1:FIRST_BODY_CODE] = taken.reshape(-1, n_head)
    head = decode_stage(parts, rows, contexts.count, HEAD_SYMBOLS, where)
    low_bits = np.zeros(0, np.uint8)
    codes = head
    if Piece.BODY in wanted:
        low_bits, codes = _decode_body(Parts(pieces[Piece.BODY], where), contexts.count, rows, head, centroids, where)
    is_value = np.zeros(N_CODES, np.uint8)
    is_value[0] = is_value[FIRST_REST_CODE:] = 1  # code 0: nothing is known, the base's own value
    widths, packed, exceptions = _take_fine_pieces(pieces, wanted, n, contexts.count, low_bits, where)
    for piece, (first, last) in zip(_FINE_PIECES, STREAM_CODES, strict=True):
        if piece in wanted:
            is_value[first : last + 1] = 1
    values = base.copy()
    if any(piece in wanted for piece in (Piece.HEAD_FINE, Piece.BODY)):  # else there are centroids only
        tables = ValueTables(widths, bands.signed, _cell_starts(low_bits, middle=Piece.REST not in wanted))
        values = decode_values(base, rows, codes, tables, packed, where)
    for exception in exceptions:
        exception.apply(values)
    return DecodedBands(base, values, rows, codes, is_value, centroids.reshape(-1), bands.limit)


def _decode_body(
    parts: Parts, n_contexts: int, rows: Bytes, head: Bytes, centroids: NDArray[np.float32], where: str
) -> tuple[NDArray[np.uint8], Bytes]:
    low_bits = parts.take(np.uint8, n_contexts)
    if (low_bits > MAX_LOW).any():
        raise corrupt(where, f"cells of 2**{int(low_bits.max())} values")
    taken = parts.take(np.float32, n_contexts * 2).reshape(-1, 2)
    centroids[:n_contexts, FIRST_BODY_CODE:FIRST_REST_CODE] = taken
    body_rows = np.empty(len(rows), np.uint8)
    body_contexts(rows, head, len(rows), body_rows)
    body = decode_stage(parts, body_rows, n_contexts, BODY_SYMBOLS, where)
    codes = np.empty(len(rows), np.uint8)
    join_codes(head, body, len(rows), codes)
    return low_bits, codes


def _take_fine_pieces(
    pieces: Pieces, wanted: tuple[Piece, ...], n: int, n_contexts: int, low_bits: NDArray[np.uint8], where: str
) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]], list[Exceptions]]:
    """Widths by `width_slot`, packed numbers and exceptions of the three streams; nothing of those not wanted."""
    widths = np.zeros(WIDTH_SLOTS, np.uint8)
    widths_CKD = widths.reshape(-1, N_CODES, 2)
    packed = []
    exceptions = []
    for stream, piece in enumerate(_FINE_PIECES):
        first, last = STREAM_CODES[stream]
        content = pieces[piece] if piece in wanted else np.empty(0, np.uint8)
        taken = take_stream(content, stream, n, n_contexts, where)
        if piece is not Piece.REST:
            widths_CKD[:n_contexts, first : last + 1] = taken.widths.reshape(n_contexts, -1, 2)
        elif piece in wanted:
            widths_CKD[: len(low_bits), first : last + 1] = low_bits[:, None, None]
        packed.append(taken.packed)
        exceptions.append(taken.exceptions)
    return widths, packed, exceptions


def _cell_starts(low_bits: NDArray[np.uint8], *, middle: bool) -> Integers:
    """By context and code: the first difference of a cell, or the one in its middle."""
    starts_CK = np.zeros((MAX_CONTEXTS + 1, N_CODES), np.int64)
    cells_K = np.arange(FIRST_REST_CODE, LAST_REST_CODE + 1) - FIRST_REST_CODE - ZERO_CELL
    low_C = np.zeros(MAX_CONTEXTS + 1, np.int64)
    low_C[: len(low_bits)] = low_bits
    starts_CK[:, FIRST_REST_CODE : LAST_REST_CODE + 1] = cells_K[None, :] * (1 << low_C[:, None])
    if middle:
        starts_CK[:, FIRST_REST_CODE : LAST_REST_CODE + 1] += ((1 << low_C) >> 1)[:, None]
    return starts_CK.reshape(-1).astype(np.int32)
