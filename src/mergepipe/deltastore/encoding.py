"""Encodes bf16 beside bf16: bands of magnitude first, then cells around the base's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.bitpacking import cheapest_widths, fine_piece, packed_streams
from mergepipe.deltastore.contexts import Contexts
from mergepipe.deltastore.fines import (
    STREAM_CODES,
    WIDTH_COUNTS,
    WIDTH_SLOTS,
    Exceptions,
)
from mergepipe.deltastore.levels import Piece
from mergepipe.deltastore.loops import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    HEAD_SYMBOLS,
    MAX_LOW,
    N_CODES,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
    band_rows,
    body_contexts,
    cell_error,
    fine_rows,
    sample_rows,
    split_codes,
    sum_codes,
)
from mergepipe.deltastore.parts import joined
from mergepipe.deltastore.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.stages import encode_stage
from mergepipe.kernels.compiled import Bytes, Counts, Doubles, Floats

_TABLE = (MAX_CONTEXTS + 1) * N_CODES
_QUANTILE_PER_MILLE = 996
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8


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
    return np.minimum(low_C, MAX_LOW).astype(np.uint8)


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
