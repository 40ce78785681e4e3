"""Encode a bf16 or fp16 block relative to a base of that dtype: bands of magnitude, and cells around the base.

Format: "BANDS" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.decode import BAND_PIECES
from mergepipe.deltastore.codec.entropy.contexts import Contexts
from mergepipe.deltastore.codec.entropy.rans import Bits16, padded_length
from mergepipe.deltastore.codec.levels import RECORDED_LEVELS, Piece
from mergepipe.deltastore.codec.scratch import copied_to_layout, scratch
from mergepipe.deltastore.codec.tiles.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    TILE,
    are_finite,
)
from mergepipe.deltastore.codec.tiles.encode_block import (
    COUNTS_SHAPE,
    N_LOOKED_UP,
    choose_tables,
    count_bits,
    encode_pieces,
    work_bytes,
)
from mergepipe.kernels.compilation.compiled import Bytes

T = TypeVar("T", bound=np.generic)

_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8
_ESTIMATE_STRIDE = 16
_FAR_FACTOR = 8.0


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
        base = copied_to_layout("encode-base", base)
        contexts = Contexts.of(base, mantissa_bits)
        by_element = scratch("encode-contexts", padded_length(len(base)), np.uint8)
        contexts.fill_rows(base, by_element)
        return cls(contexts, by_element)


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
    base, expert = copied_to_layout("encode-base", base), copied_to_layout("encode-expert", expert)
    if not _are_supported(base, expert, mantissa_bits):
        return None
    base_contexts = BaseContexts.of(base, mantissa_bits) if prepared is None else prepared
    work = scratch("encode-work", work_bytes(len(base)), np.uint8)
    ends, counts = np.empty(len(BAND_PIECES) + 1, np.int64), np.empty(3, np.int64)
    errors = np.empty(len(RECORDED_LEVELS))
    is_finite = encode_pieces(
        base, expert, mantissa_bits, base_contexts.by_element, base_contexts.contexts.lows, bands.bits,
        _sample_stride(base), work, ends, errors, counts,
    )  # fmt: skip
    if not is_finite:
        return None
    first, *stops = ends.tolist()
    stored = work[first : stops[-1]].copy()
    starts = [first, *stops[:-1]]
    pieces = {
        piece: stored[start - first : stop - first]
        for piece, start, stop in zip(BAND_PIECES, starts, stops, strict=True)
    }
    above_first, above_second, above_third = counts.tolist()
    return BandedBlock(pieces, tuple(errors.tolist()), (above_first, above_second, above_third))


def estimate_bands(base: Bits16, expert: Bits16, bands: Bands, base_contexts: BaseContexts) -> float | None:
    """Estimate the bytes of a block that `encode_bands` encodes, from a sample of its tiles; tables are not counted.

    None where cuts small beside the base's values promise few bytes, and where `encode_bands` may return None.
    """
    contexts = base_contexts.contexts
    if not _are_far_apart(contexts, bands):
        return None
    base, expert = copied_to_layout("encode-base", base), copied_to_layout("encode-expert", expert)
    if not _are_supported(base, expert, contexts.mantissa_bits):
        return None
    cell_bits, widths = np.empty(N_LOOKED_UP, np.uint8), np.empty(N_LOOKED_UP, np.uint8)
    choose_tables(
        base, expert, contexts.mantissa_bits, base_contexts.by_element, contexts.lows, bands.bits,
        _sample_stride(base), cell_bits, widths,
    )  # fmt: skip
    stride = _ESTIMATE_STRIDE if len(base) >= _SAMPLED_FROM else 1
    base_S, expert_S = _sample_tiles(base, stride), _sample_tiles(expert, stride)
    contexts_S = _sample_tiles(base_contexts.by_element[: len(base)], stride)
    work, counts_CK = scratch("encode-work", work_bytes(len(base_S)), np.uint8), np.empty(COUNTS_SHAPE, np.int64)
    residual_bits = count_bits(
        base_S, expert_S, contexts.mantissa_bits, contexts_S, contexts.lows, bands.bits, cell_bits, widths, work,
        counts_CK,
    )  # fmt: skip
    if residual_bits < 0:
        return None
    shares_CK = np.maximum(counts_CK, 1) / np.maximum(counts_CK.sum(axis=1, keepdims=True), 1)
    return float(residual_bits - (counts_CK * np.log2(shares_CK)).sum()) / 8 * (len(base) / len(base_S))


def _sample_stride(base: Bits16) -> int:
    """The distance, in tiles, of those that widths are chosen from."""
    return _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1


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
