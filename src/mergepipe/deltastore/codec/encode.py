"""Encodes bf16 beside bf16: bands of magnitude first, then cells around the base's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.bit_packing import fine_piece, packed_streams
from mergepipe.deltastore.codec.byte_parts import joined
from mergepipe.deltastore.codec.contexts import Contexts
from mergepipe.deltastore.codec.encode_tiles import number_tiles, sample_tiles
from mergepipe.deltastore.codec.error_sums import ERROR_SUMS, SUMS_SHAPE
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.codec.rans import Halves, padded
from mergepipe.deltastore.codec.residual_streams import STREAM_CODES, Exceptions
from mergepipe.deltastore.codec.residual_widths import N_SAMPLE_COUNTS, choose_widths
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.symbol_stages import encode_stages
from mergepipe.deltastore.codec.symbols import EDGE_WIDTHS, FIRST_BODY_CODE, FIRST_REST_CODE, N_WIDTHS
from mergepipe.kernels.compiled import Bytes, Counts, Doubles

_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8
_N_LOOKED_UP = 256


@dataclass(frozen=True, slots=True)
class BandedBlock:
    """One encoded block. `errors`: squared error left at the levels NOTHING, HEAD, HEAD_EXACT, BODY, BODY_EXACT.

    `counts`: elements with |delta| at or above each cut.
    """

    pieces: dict[Piece, NDArray[np.uint8]]
    errors: tuple[float, ...]
    counts: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class BaseRows:
    """What encoding works out of a base block, for all experts beside it: contexts, and by element (padded) which."""

    contexts: Contexts
    rows: Bytes

    @classmethod
    def of(cls, base: Halves) -> BaseRows:
        """Look at a base block (bf16 bits). The rows are in `scratch`: until this thread asks for those of another."""
        base = _plain(base, "encode-base")
        contexts = Contexts.of(base)
        rows = scratch("encode-rows", padded(len(base)), np.uint8)
        contexts.fill_rows(base, rows)
        return cls(contexts, rows)


@dataclass(frozen=True, slots=True)
class _Tables:
    """In how many bits fine numbers are stored: of cells by context, of bands by `width_slot`."""

    low_bits: Bytes
    widths: Bytes


@dataclass(frozen=True, slots=True)
class _Coded:
    """A block as codes: by element (`codes` padded), in `scratch`; sums by context (C) and code (K)."""

    codes: Bytes
    fines: Halves
    own_widths: Bytes
    wrong: NDArray[np.uint32]
    cell_error: float
    counts_CK: Counts
    sums_CK: Doubles
    squares_CK: Doubles


def encode_bands(base: Halves, expert: Halves, bands: Bands, beside: BaseRows | None = None) -> BandedBlock | None:
    """Encode one block; None where a delta is not finite, which this codec does not take. `beside`: those of `base`."""
    base, expert = _plain(base, "encode-base"), _plain(expert, "encode-expert")
    own = BaseRows.of(base) if beside is None else beside
    tables = _sampled(base, expert, own, bands)
    coded = _code(base, expert, own, bands, tables)
    if coded is None:
        return None
    n_contexts = own.contexts.count
    centroids = (coded.sums_CK / np.maximum(coded.counts_CK, 1)).astype(np.float32)
    head, body = encode_stages(own.rows, coded.codes, coded.counts_CK[:n_contexts])
    packed = packed_streams(coded.codes[: len(base)], coded.fines, coded.own_widths)
    fine = [_fine_piece(expert, coded, packed[stream], stream, tables) for stream in range(3)]
    pieces = {
        Piece.HEAD: joined(own.contexts.stored, centroids[:n_contexts, 1:FIRST_BODY_CODE], *head),
        Piece.HEAD_FINE: fine[0],
        Piece.BODY: joined(
            tables.low_bits[:n_contexts], centroids[:n_contexts, FIRST_BODY_CODE:FIRST_REST_CODE], *body
        ),
        Piece.BODY_FINE: fine[1],
        Piece.REST: fine[2],
    }
    return BandedBlock(pieces, _errors(coded), _counts(coded))


def _plain(array: Halves, name: str) -> Halves:
    """The array, or a copy in `scratch`, as compiled code takes it: one kind of array is compiled for."""
    flags = array.flags
    if flags.aligned and flags.writeable and flags.c_contiguous:
        return array
    copied = scratch(name, len(array), np.uint16)
    copied[:] = array
    return copied


def _sampled(base: Halves, expert: Halves, own: BaseRows, bands: Bands) -> _Tables:
    counts = np.zeros(N_SAMPLE_COUNTS, np.uint32)
    stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
    sample_tiles(base, expert, own.rows, int(own.contexts.lows[0]), bands.bits, stride, counts)
    low_bits, widths = np.empty(_N_LOOKED_UP, np.uint8), np.empty(_N_LOOKED_UP, np.uint8)
    choose_widths(counts, own.contexts.count, low_bits, widths)
    return _Tables(low_bits, widths)


def _code(base: Halves, expert: Halves, own: BaseRows, bands: Bands, tables: _Tables) -> _Coded | None:
    n = len(base)
    codes, own_widths = scratch("encode-codes", len(own.rows), np.uint8), scratch("encode-widths", n, np.uint8)
    fines, wrong = scratch("encode-numbers", n, np.uint16), scratch("encode-wrong", n, np.uint32)
    codes[n:] = 0
    sums, errors = np.zeros(SUMS_SHAPE), np.zeros(ERROR_SUMS)
    n_wrong = number_tiles(
        base, expert, own.rows, int(own.contexts.lows[0]), bands.bits, bands.limit, tables.low_bits, tables.widths,
        codes, fines, own_widths, wrong, sums.reshape(-1), errors,
    )  # fmt: skip
    if n_wrong < 0:
        return None
    sums_CKP = sums.sum(axis=0)
    cell_error = float((errors[0] + errors[1]) + (errors[2] + errors[3]))
    counts_CK = sums_CKP[..., 2].astype(np.int64)
    return _Coded(codes, fines, own_widths, wrong[:n_wrong], cell_error, counts_CK, sums_CKP[..., 0], sums_CKP[..., 1])


def _fine_piece(expert: Halves, coded: _Coded, packed: Bytes, stream: int, tables: _Tables) -> NDArray[np.uint8]:
    first, last = STREAM_CODES[stream]
    codes_W = coded.codes[coded.wrong]
    own = coded.wrong[(codes_W >= first) & (codes_W <= last)]
    widths = np.empty(0, np.uint8)
    if last < FIRST_REST_CODE:
        widths = tables.widths[:N_WIDTHS].reshape(-1, EDGE_WIDTHS)[:, first - 1 : last].reshape(-1)
    return fine_piece(packed, widths, Exceptions(own, expert[own]), len(expert))


def _counts(coded: _Coded) -> tuple[int, int, int]:
    counts_K = coded.counts_CK.sum(axis=0)
    first, second, third = (int(counts_K[code : code + 2].sum()) for code in (1, 3, 5))
    return first, first + second, first + second + third


def _errors(coded: _Coded) -> tuple[float, ...]:
    squares_K = coded.squares_CK.sum(axis=0)
    spread_CK = coded.squares_CK - coded.sums_CK**2 / np.maximum(coded.counts_CK, 1)
    spread_K = np.maximum(spread_CK, 0).sum(axis=0)
    head, body, rest = (slice(first, last + 1) for first, last in STREAM_CODES)
    unread = float(squares_K[body].sum() + squares_K[rest].sum())
    rough_head, rough_body = float(spread_K[head].sum()), float(spread_K[body].sum())
    return (
        float(squares_K.sum()),
        rough_head + unread,
        unread,
        rough_head + rough_body + coded.cell_error,
        coded.cell_error,
    )
