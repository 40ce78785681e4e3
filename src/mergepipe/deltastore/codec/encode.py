"""Encode a bf16 or fp16 block relative to a base of that dtype: bands of magnitude, and cells around the base.

Format: "BANDS" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.values import dataclass
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.entropy.contexts import Contexts
from mergepipe.deltastore.codec.entropy.rans import Bits16, padded_length
from mergepipe.deltastore.codec.entropy.symbol_stages import encode_stages
from mergepipe.deltastore.codec.error_sums import ERROR_SUMS, SUMS_SHAPE
from mergepipe.deltastore.codec.generic.byte_reader import concatenate_bytes
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.codec.residuals.bit_packing import pack_streams, residual_piece
from mergepipe.deltastore.codec.residuals.streams import EXCEPTION_BITS, STREAM_CODES, Exceptions
from mergepipe.deltastore.codec.residuals.widths import N_SAMPLE_COUNTS, choose_widths
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.tiles.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    N_WIDTHS,
    TILE,
    WIDTHS_PER_CLASS,
    are_finite,
)
from mergepipe.deltastore.codec.tiles.encode import count_sample, encode_tiles
from mergepipe.kernels.compilation.compiled import Bytes, Counts, Doubles

T = TypeVar("T", bound=np.generic)

_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8
_ESTIMATE_STRIDE = 16
_FAR_FACTOR = 8.0
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
class BaseContexts:
    """The contexts of a base block, and which of them each element (padded) is in; shared by all its experts."""

    contexts: Contexts
    by_element: Bytes

    @classmethod
    def of(cls, base: Bits16, mantissa_bits: int = BF16_MANTISSA_BITS) -> BaseContexts:
        """Compute the contexts of a base block (bits of bf16 or fp16).

        `by_element` is in `scratch`: valid until the same thread calls this for another block.
        """
        base = _contiguous(base, "encode-base")
        contexts = Contexts.of(base, mantissa_bits)
        by_element = scratch("encode-contexts", padded_length(len(base)), np.uint8)
        contexts.fill_rows(base, by_element)
        return cls(contexts, by_element)


@dataclass(frozen=True, slots=True)
class _WidthTables:
    """Widths of residuals in bits: of cells by context, of bands by `width_index`."""

    cell_bits: Bytes
    widths: Bytes


@dataclass(frozen=True, slots=True)
class _EncodedElements:
    """A block as codes. Arrays by element (`codes` padded) are in `scratch`; sums are by context (C) and code (K)."""

    codes: Bytes
    residuals: Bits16
    residual_widths: Bytes
    exceptions: NDArray[np.uint32]
    cell_error: float
    counts_CK: Counts
    sums_CK: Doubles
    squares_CK: Doubles


def encode_bands(
    base: Bits16,
    expert: Bits16,
    bands: Bands,
    prepared: BaseContexts | None = None,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> BandedBlock | None:
    """Encode one block; None where a delta is not finite, which this codec does not support.

    `prepared` are the contexts of `base`, if the caller has them.
    """
    base, expert = _contiguous(base, "encode-base"), _contiguous(expert, "encode-expert")
    if not _are_supported(base, expert, mantissa_bits):
        return None
    base_contexts = BaseContexts.of(base, mantissa_bits) if prepared is None else prepared
    tables = _choose_tables(base, expert, base_contexts, bands)
    elements = _encode_elements(base, expert, base_contexts, bands, tables)
    if elements is None:
        return None
    n_contexts = base_contexts.contexts.count
    centroids = (elements.sums_CK / np.maximum(elements.counts_CK, 1)).astype(np.float32)
    head, body = encode_stages(base_contexts.by_element, elements.codes, elements.counts_CK[:n_contexts])
    packed = pack_streams(elements.codes[: len(base)], elements.residuals, elements.residual_widths)
    residual_pieces = [_residual_piece(expert, elements, packed[stream], stream, tables) for stream in range(3)]
    pieces = {
        Piece.HEAD: concatenate_bytes(base_contexts.contexts.stored, centroids[:n_contexts, 1:FIRST_BODY_CODE], *head),
        Piece.HEAD_FINE: residual_pieces[0],
        Piece.BODY: concatenate_bytes(
            tables.cell_bits[:n_contexts], centroids[:n_contexts, FIRST_BODY_CODE:FIRST_CELL_CODE], *body
        ),
        Piece.BODY_FINE: residual_pieces[1],
        Piece.REST: residual_pieces[2],
    }
    return BandedBlock(pieces, _errors(elements), _counts(elements))


def estimate_bands(base: Bits16, expert: Bits16, bands: Bands, base_contexts: BaseContexts) -> float | None:
    """Estimate the bytes of a block that `encode_bands` encodes, from a sample of its tiles; tables are not counted.

    None where cuts small beside the base's values promise few bytes, and where `encode_bands` may return None.
    """
    contexts = base_contexts.contexts
    if not _are_far_apart(contexts, bands):
        return None
    base, expert = _contiguous(base, "encode-base"), _contiguous(expert, "encode-expert")
    if not _are_supported(base, expert, contexts.mantissa_bits):
        return None
    tables = _choose_tables(base, expert, base_contexts, bands)
    stride = _ESTIMATE_STRIDE if len(base) >= _SAMPLED_FROM else 1
    base_S, expert_S = _sample_tiles(base, stride), _sample_tiles(expert, stride)
    contexts_S = _sample_tiles(base_contexts.by_element[: len(base)], stride)
    elements = _encode_elements(base_S, expert_S, BaseContexts(contexts, contexts_S), bands, tables)
    if elements is None:
        return None
    counts_CK = elements.counts_CK
    shares_CK = np.maximum(counts_CK, 1) / np.maximum(counts_CK.sum(axis=1, keepdims=True), 1)
    residual_bits = int(elements.residual_widths.sum(dtype=np.int64)) + EXCEPTION_BITS * len(elements.exceptions)
    return float(residual_bits - (counts_CK * np.log2(shares_CK)).sum()) / 8 * (len(base) / len(base_S))


def _sample_tiles(by_element: NDArray[T], stride: int) -> NDArray[T]:
    """Copy every `stride`th whole tile."""
    whole = len(by_element) // TILE * TILE
    return by_element[:whole].reshape(-1, TILE)[::stride].flatten()


def _are_far_apart(contexts: Contexts, bands: Bands) -> bool:
    """Whether half of the tensor's deltas are not small beside the block's largest weights."""
    bias = (1 << (14 - contexts.mantissa_bits)) - 1
    return bands.cuts[2] * _FAR_FACTOR >= 2.0 ** (int(contexts.lows[0]) - bias)


def _are_supported(base: Bits16, expert: Bits16, mantissa_bits: int) -> bool:
    """Whether `float_value` reads both as they are: fp16 must be finite."""
    return mantissa_bits != F16_MANTISSA_BITS or (are_finite(base, mantissa_bits) and are_finite(expert, mantissa_bits))


def _contiguous(array: Bits16, name: str) -> Bits16:
    """Return the array, or a copy in `scratch`, in the one layout that kernels are compiled for."""
    flags = array.flags
    if flags.aligned and flags.writeable and flags.c_contiguous:
        return array
    copied = scratch(name, len(array), np.uint16)
    copied[:] = array
    return copied


def _choose_tables(base: Bits16, expert: Bits16, base_contexts: BaseContexts, bands: Bands) -> _WidthTables:
    """Choose the widths of residuals from a sample of the block."""
    counts = np.zeros(N_SAMPLE_COUNTS, np.uint32)
    stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
    contexts = base_contexts.contexts
    count_sample(
        base,
        expert,
        contexts.mantissa_bits,
        base_contexts.by_element,
        int(contexts.lows[0]),
        bands.bits,
        stride,
        counts,
    )
    cell_bits, widths = np.empty(_N_LOOKED_UP, np.uint8), np.empty(_N_LOOKED_UP, np.uint8)
    choose_widths(counts, base_contexts.contexts.count, cell_bits, widths)
    return _WidthTables(cell_bits, widths)


def _encode_elements(
    base: Bits16, expert: Bits16, base_contexts: BaseContexts, bands: Bands, tables: _WidthTables
) -> _EncodedElements | None:
    n = len(base)
    codes = scratch("encode-codes", len(base_contexts.by_element), np.uint8)
    residual_widths = scratch("encode-widths", n, np.uint8)
    residuals, exceptions = scratch("encode-residuals", n, np.uint16), scratch("encode-exceptions", n, np.uint32)
    codes[n:] = 0
    sums, errors = np.zeros(SUMS_SHAPE), np.zeros(ERROR_SUMS)
    n_exceptions = encode_tiles(
        base, expert, base_contexts.contexts.mantissa_bits, base_contexts.by_element,
        int(base_contexts.contexts.lows[0]), bands.bits, bands.limit,
        tables.cell_bits, tables.widths, codes, residuals, residual_widths, exceptions, sums.reshape(-1), errors,
    )  # fmt: skip
    if n_exceptions < 0:
        return None
    sums_CKP = sums.sum(axis=0)
    cell_error = float((errors[0] + errors[1]) + (errors[2] + errors[3]))
    counts_CK = sums_CKP[..., 2].astype(np.int64)
    return _EncodedElements(
        codes,
        residuals,
        residual_widths,
        exceptions[:n_exceptions],
        cell_error,
        counts_CK,
        sums_CKP[..., 0],
        sums_CKP[..., 1],
    )


def _residual_piece(
    expert: Bits16, elements: _EncodedElements, packed: Bytes, stream: int, tables: _WidthTables
) -> NDArray[np.uint8]:
    first, last = STREAM_CODES[stream]
    codes_W = elements.codes[elements.exceptions]
    positions = elements.exceptions[(codes_W >= first) & (codes_W <= last)]
    widths = np.empty(0, np.uint8)
    if last < FIRST_CELL_CODE:
        widths = tables.widths[:N_WIDTHS].reshape(-1, WIDTHS_PER_CLASS)[:, first - 1 : last].reshape(-1)
    return residual_piece(packed, widths, Exceptions(positions, expert[positions]), len(expert))


def _counts(elements: _EncodedElements) -> tuple[int, int, int]:
    counts_K = elements.counts_CK.sum(axis=0)
    first, second, third = (int(counts_K[code : code + 2].sum()) for code in (1, 3, 5))
    return first, first + second, first + second + third


def _errors(elements: _EncodedElements) -> tuple[float, ...]:
    squares_K = elements.squares_CK.sum(axis=0)
    spread_CK = elements.squares_CK - elements.sums_CK**2 / np.maximum(elements.counts_CK, 1)
    spread_K = np.maximum(spread_CK, 0).sum(axis=0)
    head, body, rest = (slice(first, last + 1) for first, last in STREAM_CODES)
    unread = float(squares_K[body].sum() + squares_K[rest].sum())
    rough_head, rough_body = float(spread_K[head].sum()), float(spread_K[body].sum())
    return (
        float(squares_K.sum()),
        rough_head + unread,
        unread,
        rough_head + rough_body + elements.cell_error,
        elements.cell_error,
    )
