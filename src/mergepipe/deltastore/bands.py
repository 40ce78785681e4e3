"""The codec for bf16 beside bf16: bands of magnitude first, then cells around the base's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.contexts import Contexts
from mergepipe.deltastore.fines import (
    STREAM_CODES,
    WIDTH_COUNTS,
    WIDTH_SLOTS,
    Exceptions,
    ValueTables,
    cheapest_widths,
    decode_values,
    fine_piece,
    packed_streams,
    take_stream,
)
from mergepipe.deltastore.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.loops import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    HEAD_SYMBOLS,
    LAST_REST_CODE,
    N_CODES,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
    ZERO_CELL,
    Integers,
    band_rows,
    body_contexts,
    cell_error,
    fine_rows,
    join_codes,
    sample_rows,
    split_codes,
    sum_codes,
)
from mergepipe.deltastore.parts import Parts, corrupt, joined
from mergepipe.deltastore.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.stages import decode_stage, encode_stage
from mergepipe.deltastore.taking import centroid_rows, difference_rows
from mergepipe.kernels.compiled import Bytes, Counts, Doubles, Floats

_TABLE = (MAX_CONTEXTS + 1) * N_CODES
_QUANTILE_PER_MILLE = 996
_MAX_LOW = 15
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8
_BAND_CODES = range(1, FIRST_REST_CODE)
_FINE_PIECES = (Piece.HEAD_FINE, Piece.BODY_FINE, Piece.REST)
Pieces = Mapping[Piece, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Bands:
    """Where the three bands of a tensor begin: positive magnitudes, descending."""

    cuts: tuple[float, float, float]

    def __post_init__(self) -> None:
        first, second, third = (np.float32(cut) for cut in self.cuts)
        if not (np.isfinite(first) and first >= second >= third > 0):
            raise ValueError(f"not descending positive cuts: {self.cuts}")

    @property
    def bits(self) -> Integers:
        return np.array(self.cuts, np.float32).view(np.int32)

    @property
    def limit(self) -> np.float32:
        """Magnitude below which an element is in no band."""
        return np.float32(self.cuts[2])

    @property
    def signed(self) -> NDArray[np.float32]:
        """Where a band begins, by code; 0 for cells."""
        table = np.zeros(N_CODES, np.float32)
        for code in _BAND_CODES:
            # Codes 1, 2 are the first band (largest deltas), 3, 4 the second, 5, 6 the third; up, then down.
            cut = self.cuts[(code - 1) // 2]
            table[code] = cut if code % 2 else -cut
        return table


@dataclass(frozen=True, slots=True)
class BandedBlock:
    """One encoded block. `errors`: squared error left at the levels NOTHING, HEAD, HEAD_EXACT, BODY, BODY_EXACT.

    `counts`: elements with |delta| at or above each cut.
    """

    pieces: dict[Piece, NDArray[np.uint8]]
    errors: tuple[float, ...]
    counts: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Coded:
    """A block as codes: rows are by element, tables by context (C) and code (K)."""

    base: Halves
    expert: Halves
    contexts: Contexts
    rows: Bytes
    codes: Bytes
    deltas: Floats
    low_bits: NDArray[np.uint8]
    widths: NDArray[np.uint8]
    fines: Halves
    own_widths: Bytes
    wrong: NDArray[np.uint32]
    counts_CK: Counts
    sums_CK: Doubles
    squares_CK: Doubles

    @property
    def n(self) -> int:
        return len(self.base)


def encode_bands(base: Halves, expert: Halves, bands: Bands) -> BandedBlock | None:
    """Encode one block; None where a delta is not finite, which this codec does not take."""
    coded = _code(base, expert, bands)
    if coded is None:
        return None
    n_contexts = coded.contexts.count
    centroids = (coded.sums_CK / np.maximum(coded.counts_CK, 1)).astype(np.float32)
    head, body = _encode_stages(coded)
    packed = packed_streams(coded.codes, coded.fines, coded.own_widths)
    fine = [_fine_piece(coded, packed[stream], stream) for stream in range(3)]
    pieces = {
        Piece.HEAD: joined(coded.contexts.stored, centroids[:n_contexts, 1:FIRST_BODY_CODE], head),
        Piece.HEAD_FINE: fine[0],
        Piece.BODY: joined(coded.low_bits[:n_contexts], centroids[:n_contexts, FIRST_BODY_CODE:FIRST_REST_CODE], body),
        Piece.BODY_FINE: fine[1],
        Piece.REST: fine[2],
    }
    return BandedBlock(pieces, _errors(coded, bands), _counts(coded))


def _code(base: Halves, expert: Halves, bands: Bands) -> _Coded | None:
    n = len(base)
    deltas, codes = np.empty(n, np.float32), np.empty(n, np.uint8)
    if not band_rows(base, expert, bands.bits, deltas, codes):
        return None
    contexts = Contexts.of(base)
    rows = contexts.rows(base)
    width_counts = np.zeros(WIDTH_SLOTS * WIDTH_COUNTS, np.int64)
    step_counts = np.zeros((MAX_CONTEXTS + 1) * QUANTILE_BUCKETS, np.int64)
    stride = _SAMPLE_STRIDE if n >= _SAMPLED_FROM else 1
    sample_rows(base, expert, rows, codes, bands.signed, stride, width_counts, step_counts)
    low_bits = _low_bits(step_counts.reshape(-1, QUANTILE_BUCKETS))
    widths = cheapest_widths(width_counts.reshape(-1, WIDTH_COUNTS))
    widths.reshape(-1, N_CODES, 2)[:, FIRST_REST_CODE:] = low_bits[:, None, None]
    fines, own_widths, wrong = np.empty(n, np.uint16), np.empty(n, np.uint8), np.empty(n + 1, np.uint32)
    n_wrong = fine_rows(base, expert, rows, codes, bands.signed, low_bits, widths, fines, own_widths, wrong)
    sums = np.zeros(2 * _TABLE * 4, np.float64)
    sum_codes(deltas, rows, codes, sums)
    sums_CKP = sums.reshape(2, -1, N_CODES, 4).sum(axis=0)
    return _Coded(
        base, expert, contexts, rows, codes, deltas, low_bits, widths, fines, own_widths, wrong[:n_wrong].copy(),
        sums_CKP[:, :, 0].astype(np.int64), sums_CKP[:, :, 1], sums_CKP[:, :, 2],
    )  # fmt: skip


def _low_bits(counts_CQ: Counts) -> NDArray[np.uint8]:
    """By context: bits of a difference that are left to the fine number, so that few cells hold nearly all."""
    sums_CQ = counts_CQ.cumsum(axis=1)
    wanted_C = -(-sums_CQ[:, -1] * _QUANTILE_PER_MILLE // 1000)
    bucket_C = (sums_CQ < wanted_C[:, None]).sum(axis=1)
    shift_C = np.maximum(bucket_C - 8, 0) // 8
    largest_C = (bucket_C - shift_C * 8) << shift_C
    low_C = np.zeros(len(largest_C), np.int64)
    while ((largest_C >> low_C) > NEAR_CELLS).any():
        low_C += (largest_C >> low_C) > NEAR_CELLS
    return np.minimum(low_C, _MAX_LOW).astype(np.uint8)


def _encode_stages(coded: _Coded) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    n_contexts, n_rows = coded.contexts.count, len(coded.rows)
    head, body, body_rows = (np.zeros(n_rows, np.uint8) for _ in range(3))
    split_codes(coded.codes, coded.n, head, body)
    body_contexts(coded.rows, head, n_rows, body_rows)
    counts_CK = coded.counts_CK[:n_contexts]
    head_counts_CS = counts_CK[:, :HEAD_SYMBOLS].copy()
    head_counts_CS[:, 0] = counts_CK[:, FIRST_BODY_CODE:].sum(axis=1)
    body_counts_CS = counts_CK[:, FIRST_BODY_CODE : FIRST_BODY_CODE + BODY_SYMBOLS].copy()
    return encode_stage(head, coded.rows, head_counts_CS), encode_stage(body, body_rows, body_counts_CS)


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


def _fine_piece(coded: _Coded, packed: NDArray[np.uint8], stream: int) -> NDArray[np.uint8]:
    first, last = STREAM_CODES[stream]
    codes_W = coded.codes[coded.wrong]
    own = coded.wrong[(codes_W >= first) & (codes_W <= last)]
    return fine_piece(packed, coded.widths, stream, coded.contexts.count, Exceptions(own, coded.expert[own]))


def _counts(coded: _Coded) -> tuple[int, int, int]:
    counts_K = coded.counts_CK.sum(axis=0)
    first, second, third = (int(counts_K[code : code + 2].sum()) for code in (1, 3, 5))
    return first, first + second, first + second + third


def _errors(coded: _Coded, bands: Bands) -> tuple[float, ...]:
    squares_K = coded.squares_CK.sum(axis=0)
    spread_CK = coded.squares_CK - coded.sums_CK**2 / np.maximum(coded.counts_CK, 1)
    spread_K = np.maximum(spread_CK, 0).sum(axis=0)
    head, body, rest = (slice(first, last + 1) for first, last in STREAM_CODES)
    unread = float(squares_K[body].sum() + squares_K[rest].sum())
    rough_head, rough_body = float(spread_K[head].sum()), float(spread_K[body].sum())
    rough_rest = cell_error(coded.base, coded.deltas, coded.rows, coded.codes, coded.low_bits, bands.limit)
    return (
        float(squares_K.sum()),
        rough_head + unread,
        unread,
        rough_head + rough_body + rough_rest,
        rough_rest,
    )


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
    if (low_bits > _MAX_LOW).any():
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
