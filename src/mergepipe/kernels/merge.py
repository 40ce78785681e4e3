"""The one elementwise merging loop: decode, take deltas, sparsify, combine, round once, in cache-sized tiles."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS, decode_tile, encode_tile, itemsize_of
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Floats, kernel
from mergepipe.kernels.philox import GROUP_ELEMENTS, fill_random_words

KEEP_ALL, KEEP_LARGE, KEEP_RANDOM = 0, 1, 2

_TILE = TILE_ELEMENTS


@kernel
def take_delta(model: Floats, base: Floats, n: int, delta: Floats) -> None:
    """`delta[:n] = model - base`, exactly zero where the two are equal (infinities included)."""
    for i in range(n):
        difference = model[i] - base[i]
        delta[i] = np.float32(0.0) if model[i] == base[i] else difference


@kernel
def decode_delta(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offset: int,
    code: int,
    start: int,
    n: int,
    base: Floats,
    model: Floats,
    delta: Floats,
) -> None:
    """Decode elements `start ... start + n` of a base and a model, and take their delta."""
    decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, n, base)
    decode_tile(raw, offset + start * itemsize_of(code), code, n, model)
    take_delta(model, base, n, delta)


@kernel
def _keep_large(delta: Floats, n: int, threshold_bits: np.uint32) -> None:
    bits = delta.view(np.uint32)
    for i in range(n):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        bits[i] = bits[i] if magnitude >= threshold_bits else np.uint32(0)


@kernel
def _keep_random(
    delta: Floats, n: int, key: np.uint64 | int, first_element: int, cut: np.uint64, scale: np.float32, words: Bits32
) -> None:
    first_group = first_element // GROUP_ELEMENTS
    last_group = (first_element + n - 1) // GROUP_ELEMENTS
    fill_random_words(key, first_group, last_group - first_group + 1, words)
    lead = first_element - first_group * GROUP_ELEMENTS
    own = words[lead : lead + n]
    for i in range(n):
        kept = scale * delta[i]
        delta[i] = kept if own[i] < cut else np.float32(0.0)


@kernel
def _add_scaled(delta: Floats, n: int, coefficient: np.float32, total: Floats) -> None:
    # An element without a delta is left alone, so that reading it or not is the same, down to the sign of a zero.
    for i in range(n):
        added = total[i] + coefficient * delta[i]
        total[i] = total[i] if delta[i] == np.float32(0.0) else added


@kernel
def _add_agreeing(delta: Floats, n: int, weight: np.float32, vote: Floats, numerator: Floats, divisor: Floats) -> None:
    zero = np.float32(0.0)
    for i in range(n):
        weighted = weight * delta[i]
        agrees = weighted > zero if vote[i] >= zero else weighted < zero
        numerator[i] += weighted if agrees else zero
        divisor[i] += weight if agrees else zero


@kernel
def _settle(vote: Floats, numerator: Floats, divisor: Floats, n: int, normalize: bool, scale: np.float32) -> None:
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(n):
        share = one if (divisor[i] == zero or not normalize) else divisor[i]
        merged = scale * (numerator[i] / share)
        # An undefined vote (a NaN, or infinities of both signs) makes the element undefined.
        numerator[i] = merged if vote[i] == vote[i] else vote[i]


@kernel
def merge_block(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offsets_E: Counts,
    codes_E: Counts,
    coefficients_E: Floats,
    keep: int,
    thresholds_E: Bits32,
    keys_E: Bits64,
    cuts_E: Bits64,
    scales_E: Floats,
    first_element: int,
    consensus: bool,
    normalize: bool,
    anchor_scale: np.float32,
    delta_scale: np.float32,
    out: Bytes,
    out_offset: int,
    out_code: int,
    n: int,
) -> None:
    """Merge `n` consecutive elements of one tensor.

    Without `consensus`: `anchor_scale * M_0 + sum_e coefficients_E[e] * K(delta_e)`, where `K` keeps all elements,
    those whose magnitude bits reach `thresholds_E[e]`, or those whose random word is below `cuts_E[e]`, scaled by
    `scales_E[e]`. With `consensus`: `anchor_scale * M_0 + delta_scale * D`, where `D` is the sum of the weighted kept
    deltas that share the sign of their total, divided by their weights' sum if `normalize`.

    Args:
        raw: uint8, the stored bytes of base and experts at `base_offset` and `offsets_E`.
        first_element: index of the first element in its tensor (the random generator counts from it).
        out: uint8, written at `out_offset`; may not overlap `raw`.
    """
    n_experts = offsets_E.shape[0]
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    rows = n_experts if consensus else 1
    deltas_EN = np.empty((rows, _TILE), np.float32)
    numerator = np.empty(_TILE, np.float32)
    divisor = np.empty(_TILE, np.float32)
    words = np.empty(_TILE + 2 * GROUP_ELEMENTS, np.uint32)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, m, base)
        for i in range(m):
            total[i] = np.float32(0.0) if consensus else anchor_scale * base[i]
        for e in range(n_experts):
            delta = deltas_EN[e if consensus else 0]
            decode_tile(raw, offsets_E[e] + start * itemsize_of(codes_E[e]), codes_E[e], m, model)
            take_delta(model, base, m, delta)
            if keep == KEEP_LARGE:
                _keep_large(delta, m, thresholds_E[e])
            elif keep == KEEP_RANDOM:
                _keep_random(delta, m, keys_E[e], first_element + start, cuts_E[e], scales_E[e], words)
            _add_scaled(delta, m, coefficients_E[e], total)
        if consensus:
            for i in range(m):
                numerator[i] = np.float32(0.0)
                divisor[i] = np.float32(0.0)
            for e in range(n_experts):
                _add_agreeing(deltas_EN[e], m, coefficients_E[e], total, numerator, divisor)
            _settle(total, numerator, divisor, m, normalize, delta_scale)
            for i in range(m):
                anchor = anchor_scale * base[i]
                total[i] = anchor if numerator[i] == np.float32(0.0) else anchor + numerator[i]
        encode_tile(total, m, out, out_offset + start * itemsize_of(out_code), out_code)
        start += m
