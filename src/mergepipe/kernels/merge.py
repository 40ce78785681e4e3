"""Merge elementwise in cache-sized tiles: decode, take deltas, sparsify, combine, round once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.core.blocks import ALL_TIES, GRAIN_ELEMENTS, TIE_RUN, RawBlock
from mergepipe.kernels.codec import CODE_F32, IS_DELTA, decode_tile, itemsize_of
from mergepipe.kernels.codec import TILE_ELEMENTS as _TILE
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Doubles, Floats, exported, kernel
from mergepipe.kernels.numerics import GROUP_ELEMENTS, fill_random_words
from mergepipe.kernels.rounding import encode_by, is_measured, measure

KEEP_ALL, KEEP_LARGE, KEEP_RANDOM, KEEP_BAND, KEEP_NEAR, KEEP_VARIED, KEEP_MARKED = 0, 1, 2, 3, 4, 5, 6
_COPIED = (KEEP_LARGE, KEEP_MARKED, KEEP_BAND)  # what is kept of these is written to another array
NEAREST = np.float32(1e-6)

_PIECE = 512
# Orders of variances that float32 does not hold: shifted bits of float64, from those of 2^-382 and of 2^120 on.
_SUBNORMAL_BELOW, _SUBNORMAL_SHIFT = 2.0**-126, 37
_SUBNORMAL_START = (1023 - 382) << (52 - _SUBNORMAL_SHIFT)
_CROWDED_FROM, _CROWDED_SHIFT = 2.0**120, 34
_CROWDED_START = ((1023 + 120) << (52 - _CROWDED_SHIFT)) - ((127 + 120) << 23)
MARK_ELEMENTS, MARK_BYTES = 128, 16  # one bit each
_LANES = 16


@exported("delta")
def take_delta(model: Floats, base: Floats, n: int, delta: Floats) -> None:
    """`delta[:n] = model - base`, exactly zero where the two are equal (infinities included)."""
    for i in range(n):
        difference = model[i] - base[i]
        delta[i] = np.float32(0.0) if model[i] == base[i] else difference


@kernel
def decode_base(block: RawBlock, start: int, n: int, base: Floats) -> None:
    """Decode elements `start ... start + n` of the base."""
    offset = block.base_offset + start * itemsize_of(block.base_code)
    decode_tile(block.raw, offset, block.base_code, n, base)


@kernel
def decode_against(block: RawBlock, place: int, start: int, n: int, base: Floats, model: Floats, delta: Floats) -> None:
    """Write the delta of those elements of the model at `place` to the decoded base; stored deltas are copied."""
    offset, code = block.offsets_E[place], block.codes_E[place]
    if code & IS_DELTA:
        decode_tile(block.raw, offset + start * itemsize_of(code), code, n, delta)
    else:
        decode_tile(block.raw, offset + start * itemsize_of(code), code, n, model)
        take_delta(model, base, n, delta)


@kernel
def encode_result(block: RawBlock, start: int, n: int, values: Floats) -> None:
    """Encode the result of elements `start ... start + n`, and measure what rounding keeps where the block wants it."""
    element = block.first_element + start
    tile = values[:n]
    raw = block.out[block.out_offset + start * itemsize_of(block.out_code) :]
    if len(block.sums_G2) > 0 and block.out_code > CODE_F32 and is_measured(element):
        _encode_measured(block, start, tile, raw)
    else:
        encode_by(tile, element, block.rounding_key, raw, block.out_code)


@kernel
def _encode_measured(block: RawBlock, start: int, tile: Floats, raw: Bytes) -> None:
    """Encode and measure; the base is decoded first, as the result may lie where it is."""
    base = np.empty(_TILE, np.float32)
    decode_base(block, start, len(tile), base)
    element = block.first_element + start
    encode_by(tile, element, block.rounding_key, raw, block.out_code)
    measure(tile, base, raw, block.out_code, block.sums_G2[element // GRAIN_ELEMENTS - block.first_grain])


@kernel
def tie_hash(element: int, key: np.uint32) -> np.uint32:
    """Hash the index of an element under a key: the order of elements of equal magnitude.

    Its upper 26 bits are a hash of the index of a run of `TIE_RUN` elements, the others are the place in the run: a
    bijection of 32 bits, so that the first 2^32 elements of a tensor have different hashes; those that are 2^32 apart
    share one. Source: the multipliers of MurmurHash3's last step (Appleby).
    """
    run = np.uint32(element) // np.uint32(TIE_RUN)
    run = np.uint32((run ^ (run >> np.uint32(16))) * np.uint32(0x85EBCA6B)) & np.uint32(0x3FFFFFF)
    run = np.uint32((run ^ (run >> np.uint32(13)) ^ key) * np.uint32(0xC2B2AE35))
    return np.uint32(run * np.uint32(TIE_RUN) + np.uint32(element) % np.uint32(TIE_RUN))


@kernel
def early_in_run(first: int, key: np.uint32, last: np.uint32) -> int:
    """Return how many of the run of elements from `first` on have hashes of at most `last`: the first ones."""
    return min(max(int(last) - int(tie_hash(first, key)) + 1, 0), TIE_RUN)


@kernel
def _keep_large(values: Floats, n: int, first_element: int, cut_3: Bits32, kept: Floats) -> None:
    """Copy values, cleared below the cut: bits, key and last hash of `operators.statistics.Cut`.

    `kept` is another array: of what is selected in place LLVM stores single lanes, six times slower on AMD's AVX2.
    """
    bits, kept_bits = values.view(np.uint32), kept.view(np.uint32)
    threshold, key, last = cut_3[0], cut_3[1], cut_3[2]
    if last == np.uint32(ALL_TIES):
        for i in range(n):
            kept_bits[i] = bits[i] if bits[i] & np.uint32(0x7FFFFFFF) >= threshold else np.uint32(0)
        return
    for run in range(-(first_element % TIE_RUN), n, TIE_RUN):
        n_early = early_in_run(first_element + run, key, last)
        if run >= 0 and run + TIE_RUN <= n and n_early % TIE_RUN == 0:
            least = np.uint32(threshold + np.uint32(n_early == 0))
            x, y = bits[run : run + TIE_RUN], kept_bits[run : run + TIE_RUN]
            for i in range(TIE_RUN):
                y[i] = x[i] if x[i] & np.uint32(0x7FFFFFFF) >= least else np.uint32(0)
        else:
            for i in range(max(run, 0), min(run + TIE_RUN, n)):
                least = np.uint32(threshold + np.uint32(i >= run + n_early))
                kept_bits[i] = bits[i] if bits[i] & np.uint32(0x7FFFFFFF) >= least else np.uint32(0)


@kernel
def keep_band(values: Floats, n: int, first_element: int, lower_3: Bits32, upper_3: Bits32, kept: Floats) -> None:
    """Copy values to another array, cleared below the lower cut, and where they are not below the upper one."""
    bits, kept_bits = values.view(np.uint32), kept.view(np.uint32)
    lower, upper = lower_3[0], upper_3[0]
    if lower_3[2] == np.uint32(ALL_TIES) and upper_3[2] == np.uint32(ALL_TIES):
        for i in range(n):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            kept_bits[i] = bits[i] if magnitude >= lower and magnitude < upper else np.uint32(0)
        return
    for run in range(-(first_element % TIE_RUN), n, TIE_RUN):
        from_lower = run + early_in_run(first_element + run, lower_3[1], lower_3[2])
        from_upper = run + early_in_run(first_element + run, upper_3[1], upper_3[2])
        for i in range(max(run, 0), min(run + TIE_RUN, n)):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            least = np.uint32(lower + np.uint32(i >= from_lower))
            beyond = np.uint32(upper + np.uint32(i >= from_upper))
            kept_bits[i] = bits[i] if magnitude >= least and magnitude < beyond else np.uint32(0)


@exported("values", "marks")
def mark_nonzero(values: Floats, n: int, marks: Bytes) -> None:
    """Set one bit for each of `n` values that is not zero. Values past `n`, up to a multiple of 128, are cleared.

    Bit `k` of byte `j` of 16 stands for element `16 * k + j` of 128: whole vectors are marked at a time.
    """
    bits = values.view(np.uint32)
    for start in range(0, n, MARK_ELEMENTS):
        group, marked = marks[start // 8 : start // 8 + MARK_BYTES], bits[start : start + MARK_ELEMENTS]
        for i in range(n - start, MARK_ELEMENTS):
            marked[i] = np.uint32(0)
        for j in range(_LANES):
            byte = np.uint32(0)
            for k in range(8):
                byte |= np.uint32(marked[_LANES * k + j] != np.uint32(0)) << np.uint32(k)
            group[j] = np.uint8(byte)


@exported("kept")
def keep_marked(values: Floats, n: int, marks: Bytes, kept: Floats) -> None:
    """Copy `n` values, up to a multiple of 128, to another array; those without a bit of `mark_nonzero` are cleared."""
    bits, kept_bits = values.view(np.uint32), kept.view(np.uint32)
    for start in range(0, n, MARK_ELEMENTS):
        group = marks[start // 8 : start // 8 + MARK_BYTES]
        unmarked, marked = bits[start : start + MARK_ELEMENTS], kept_bits[start : start + MARK_ELEMENTS]
        for j in range(_LANES):
            byte = np.uint32(group[j])
            for k in range(8):
                i = _LANES * k + j
                marked[i] = unmarked[i] if byte & np.uint32(1 << k) else np.uint32(0)


@kernel
def _scale(delta: Floats, n: int, scale: np.float32) -> None:
    """Multiply by `scale`."""
    if scale != np.float32(1.0):
        for i in range(n):
            delta[i] *= scale


@kernel
def _keep_near(delta: Floats, n: int, reach: np.float32) -> None:
    """Shorten steps to at most `reach`; magnitudes below 1e-6 count as 1e-6."""
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(n):
        magnitude = abs(delta[i])
        magnitude = NEAREST if magnitude < NEAREST else magnitude
        factor = reach / magnitude
        factor = one if factor > one else (zero if factor < zero else factor)
        delta[i] *= factor


@kernel
def variance_tile(
    deltas_EN: Floats, n_deltas: int, n_experts: int, n: int, variances: Floats, moments_2N: Doubles
) -> None:
    """Compute the population variance of `n_experts` deltas: the first `n_deltas` rows, and zeros for the others.

    Very small and very large variances are written as other numbers of the same order; see `_in_float32`.
    `moments_2N` (float64, two rows of a tile) is overwritten.
    """
    if n_deltas == n_experts == 2:
        _variance_of_two(deltas_EN[0], deltas_EN[1], n, variances)
        return
    n_zeros = float(n_experts - n_deltas)
    mean, square = moments_2N[0], moments_2N[1]
    for start in range(0, n, _PIECE):  # float64 of a whole tile would not stay in the L1 cache
        m = min(_PIECE, n - start)
        mean[:m] = 0.0
        for e in range(n_deltas):
            delta = deltas_EN[e, start : start + m]
            for i in range(m):
                mean[i] += np.float64(delta[i])
        _divide(mean, m, n_experts)
        for i in range(m):
            square[i] = n_zeros * mean[i] * mean[i]
        for e in range(n_deltas):
            delta = deltas_EN[e, start : start + m]
            for i in range(m):
                deviation = np.float64(delta[i]) - mean[i]
                square[i] += deviation * deviation
        _divide(square, m, n_experts)
        piece = variances[start : start + m]
        for i in range(m):
            piece[i] = _in_float32(square[i])


@kernel
def _variance_of_two(first: Floats, second: Floats, n: int, variances: Floats) -> None:
    """Compute as `variance_tile` where no expert is absent, without storing what lies between."""
    for i in range(n):
        x, y = np.float64(first[i]), np.float64(second[i])
        mean = (x + y) * 0.5
        deviation_x, deviation_y = x - mean, y - mean
        variances[i] = _in_float32((deviation_x * deviation_x + deviation_y * deviation_y) * 0.5)


@kernel
def _in_float32(variance: float) -> np.float32:
    """Round to float32; below its normal numbers, and from 2^120 on, return numbers in the same order instead.

    Rounding would make zeros or infinities of the variances of deltas below 1e-22 or above 1e19, which are then equal.
    These keep 15 or 18 bits of their mantissas.
    """
    bits = np.float64(variance).view(np.int64)
    small = np.int32((bits >> _SUBNORMAL_SHIFT) - _SUBNORMAL_START).view(np.float32)
    large = np.int32((bits >> _CROWDED_SHIFT) - _CROWDED_START).view(np.float32)
    score = np.float32(variance)
    score = small if 0.0 < variance < _SUBNORMAL_BELOW else score
    return large if _CROWDED_FROM <= variance < np.inf else score


@kernel
def _divide(values: Doubles, n: int, divisor: int) -> None:
    """Divide in place."""
    if divisor & (divisor - 1) == 0:  # a power of two: multiplying is exact too
        factor = 1.0 / divisor
        for i in range(n):
            values[i] *= factor
    else:
        for i in range(n):
            values[i] /= divisor


@kernel
def keep_varied(
    deltas_EN: Floats,
    n_deltas: int,
    n_experts: int,
    n: int,
    first_element: int,
    cut_3: Bits32,
    variances: Floats,
    moments_2N: Doubles,
) -> None:
    """Clear the deltas of elements whose variance is below the cut; none if the cut is zero.

    The bits of `variances` are all set then where one reaches the cut, and none elsewhere.
    """
    if cut_3[0] == np.uint32(0):
        return
    variance_tile(deltas_EN, n_deltas, n_experts, n, variances, moments_2N)
    masks, kept = variances.view(np.uint32), moments_2N[0].view(np.float32)
    _keep_large(variances, n, first_element, cut_3, kept)
    for i in range(n):
        masks[i] = np.uint32(0) if kept[i] == np.float32(0.0) else np.uint32(0xFFFFFFFF)
    for e in range(n_deltas):
        bits = deltas_EN[e].view(np.uint32)
        for i in range(n):
            bits[i] &= masks[i]


@kernel
def _keep_random(
    delta: Floats, n: int, key: np.uint64, first_element: int, cut: np.uint64, scale: np.float32, words: Bits32
) -> None:
    """Clear the deltas whose random word is not below `cut`; scale the others."""
    first_group = first_element // GROUP_ELEMENTS
    last_group = (first_element + n - 1) // GROUP_ELEMENTS
    fill_random_words(key, first_group, last_group - first_group + 1, words)
    lead = first_element - first_group * GROUP_ELEMENTS
    element_words = words[lead : lead + n]
    for i in range(n):
        scaled = scale * delta[i]
        delta[i] = scaled if element_words[i] < cut else np.float32(0.0)


@kernel
def _add_scaled(delta: Floats, n: int, coefficient: np.float32, total: Floats) -> None:
    """Add `coefficient * delta` to `total`.

    For a zero delta that is -0, which leaves every total as it is: the result, including the sign of a zero, does not
    depend on whether elements were read.
    """
    for i in range(n):
        total[i] += np.float32(-0.0) if delta[i] == np.float32(0.0) else coefficient * delta[i]


@kernel
def _add_agreeing(delta: Floats, n: int, weight: np.float32, vote: Floats, numerator: Floats, divisor: Floats) -> None:
    """Add weighted deltas with the sign of the vote to `numerator`, and their weights to `divisor`."""
    zero = np.float32(0.0)
    for i in range(n):
        weighted = weight * delta[i]
        agrees = weighted > zero if vote[i] >= zero else weighted < zero
        numerator[i] += weighted if agrees else zero
        divisor[i] += weight if agrees else zero


@kernel
def _normalize_agreeing(vote: Floats, numerator: Floats, divisor: Floats, n: int, rule: Rule) -> None:
    """Divide the agreeing sum by the sum of its weights if the rule normalizes, and scale it."""
    zero, one = np.float32(0.0), np.float32(1.0)
    normalize, scale = rule.normalize, rule.delta_scale
    least_divisor = rule.least_divisor if rule.least_divisor > zero else np.float32(-np.inf)
    for i in range(n):
        denominator = max(divisor[i], least_divisor)
        denominator = one if (denominator == zero or not normalize) else denominator
        merged = scale * (numerator[i] / denominator)
        # A NaN vote (from a NaN, or infinities of both signs) makes the element NaN.
        numerator[i] = merged if vote[i] == vote[i] else vote[i]


class Rule(NamedTuple):
    """The arithmetic of `merge_block`: what is kept of the deltas, how it is combined. Arrays are by expert (E).

    `keep`: all elements, those whose magnitude reaches the cut `lower_E3` (and not `upper_E3`, for a band), those whose
    random word is below `limits_E`, those marked in the expert's row of `marks_MB`, or in the only one, or those whose
    variance over all experts reaches `lower_E3[0]`. Kept deltas are scaled by `scales_E`, except with KEEP_NEAR, where
    that is the largest step.
    """

    coefficients_E: Floats
    votes_E: Floats
    keep: int
    lower_E3: Bits32
    upper_E3: Bits32
    keys_E: Bits64
    limits_E: Bits64
    scales_E: Floats
    marks_MB: Bytes
    consensus: bool
    normalize: bool
    least_divisor: np.float32
    anchor_scale: np.float32
    delta_scale: np.float32


@exported("block.out", "block.sums_G2")
def merge_block(block: RawBlock, rule: Rule) -> None:
    """Merge consecutive elements of one tensor.

    Without `consensus`: `anchor_scale * M_0 + sum_e coefficients_E[e] * K(delta_e)`, where `K` keeps what `rule` says.
    With it: `anchor_scale * M_0 + delta_scale * D`, where `D` is the sum of the kept deltas times their coefficients
    that share the sign of `sum_e votes_E[e] * K(delta_e)`, divided by the sum of those coefficients (at least
    `least_divisor`) if `normalize`. Where elements are marked, the first one's index is a multiple of 128; the result
    must not overlap what is merged.
    """
    n_present = len(block.present_E)
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    keep, consensus, n_experts = rule.keep, rule.consensus, len(rule.coefficients_E)
    needs_all_deltas = consensus or keep == KEEP_VARIED
    deltas_EN = np.empty((n_present if needs_all_deltas else 1, _TILE), np.float32)
    numerator = np.empty(_TILE, np.float32)
    decoded, divisor = numerator, np.empty(_TILE, np.float32)
    words = np.empty(_TILE + 2 * GROUP_ELEMENTS, np.uint32)
    moments_2N = np.empty((2, _TILE if keep == KEEP_VARIED else 0), np.float64)
    for start in range(0, block.n_elements, _TILE):
        m, element = min(_TILE, block.n_elements - start), block.first_element + start
        decode_base(block, start, m, base)
        for i in range(m):
            total[i] = np.float32(0.0) if consensus else rule.anchor_scale * base[i]
        for place in range(n_present):
            e, delta = block.present_E[place], deltas_EN[place if needs_all_deltas else 0]
            decode_against(block, place, start, m, base, model, decoded if keep in _COPIED else delta)
            if keep == KEEP_LARGE:
                _keep_large(decoded, m, element, rule.lower_E3[e], delta)
                _scale(delta, m, rule.scales_E[e])
            elif keep == KEEP_MARKED:
                keep_marked(decoded, m, rule.marks_MB[min(e, len(rule.marks_MB) - 1), element // 8 :], delta)
                _scale(delta, m, rule.scales_E[e])
            elif keep == KEEP_RANDOM:
                _keep_random(delta, m, rule.keys_E[e], element, rule.limits_E[e], rule.scales_E[e], words)
            elif keep == KEEP_BAND:
                keep_band(decoded, m, element, rule.lower_E3[e], rule.upper_E3[e], delta)
                _scale(delta, m, rule.scales_E[e])
            elif keep == KEEP_NEAR:
                _keep_near(delta, m, rule.scales_E[e])
            if keep != KEEP_VARIED:
                _add_scaled(delta, m, rule.votes_E[e], total)
        if keep == KEEP_VARIED and n_present > 0:
            keep_varied(deltas_EN, n_present, n_experts, m, element, rule.lower_E3[0], model, moments_2N)
            for place in range(n_present):
                _add_scaled(deltas_EN[place], m, rule.votes_E[block.present_E[place]], total)
        if consensus:
            for i in range(m):
                numerator[i] = np.float32(0.0)
                divisor[i] = np.float32(0.0)
            for place in range(n_present):
                coefficient = rule.coefficients_E[block.present_E[place]]
                _add_agreeing(deltas_EN[place], m, coefficient, total, numerator, divisor)
            _normalize_agreeing(total, numerator, divisor, m, rule)
            for i in range(m):
                anchor = rule.anchor_scale * base[i]
                total[i] = anchor if numerator[i] == np.float32(0.0) else anchor + numerator[i]
        encode_result(block, start, m, total)


@exported("block.out", "block.sums_G2")
def scale_change(block: RawBlock, factor: float, stretch_elements: int, harmless: float) -> None:
    """Write the base plus the delta of the first expert present times a factor, which each stretch has of its own.

    It is `f / (1 + (f - 1) (r / harmless)^2)`, at least 1, where `f` is `factor` and `r` the length of the delta over
    that of the base. Scaled by `f`, a merge of a sample is the full one on average over draws, with a variance of
    `f - 1` times the square of the change: harmless where the change is short beside the weights, worse than the base
    where it is long.
    """
    base, model, delta = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    for first in range(0, block.n_elements, stretch_elements):
        stop = min(first + stretch_elements, block.n_elements)
        of_delta, of_base = 0.0, 0.0
        for start in range(first, stop, _TILE):
            m = min(_TILE, stop - start)
            decode_base(block, start, m, base)
            decode_against(block, 0, start, m, base, model, delta)
            for i in range(m):
                of_delta += np.float64(delta[i]) * np.float64(delta[i])
                of_base += np.float64(base[i]) * np.float64(base[i])
        scaled = 1.0
        if of_base > 0.0:
            excess = (factor - 1.0) * of_delta
            share = factor / (1.0 + excess / (harmless * harmless * of_base))
            scaled = share if share > scaled else scaled  # an undefined one is not
        for start in range(first, stop, _TILE):
            m = min(_TILE, stop - start)
            decode_base(block, start, m, base)
            decode_against(block, 0, start, m, base, model, delta)
            _add_scaled(delta, m, np.float32(scaled), base)
            encode_result(block, start, m, base)


@exported("block.out", "block.sums_G2")
def merge_rows(
    block: RawBlock, row_elements: int, coefficients_ER: Floats, anchor_scale_R: Floats, lower_ER: Bits32
) -> None:
    """Merge like `merge_block` without consensus, with coefficients, anchor scale and least magnitude of each row."""
    base = np.empty(_TILE, np.float32)
    model, decoded = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    cut_3 = np.full(3, ALL_TIES, np.uint32)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        row = element // row_elements
        m = min(_TILE, block.n_elements - start, (row + 1) * row_elements - element)
        decode_base(block, start, m, base)
        for i in range(m):
            total[i] = anchor_scale_R[row] * base[i]
        for place in range(len(block.present_E)):
            e = block.present_E[place]
            decode_against(block, place, start, m, base, model, decoded)
            cut_3[0] = lower_ER[e, row]
            _keep_large(decoded, m, element, cut_3, delta)
            _add_scaled(delta, m, coefficients_ER[e, row], total)
        encode_result(block, start, m, total)
        start += m


@exported("block.out", "block.sums_G2")
def merge_columns(block: RawBlock, coefficients_EP: Floats, anchor_scale_P: Floats) -> None:
    """Write `anchor_scale * M_0 + sum_e coefficients * delta_e`, with both factors by column.

    Element `i` is in column `i % columns`.
    """
    n_columns = len(anchor_scale_P)
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    start = 0
    while start < block.n_elements:
        column = (block.first_element + start) % n_columns
        m = min(_TILE, block.n_elements - start, n_columns - column)
        decode_base(block, start, m, base)
        for i in range(m):
            total[i] = anchor_scale_P[column + i] * base[i]
        for place in range(len(block.present_E)):
            coefficients_P = coefficients_EP[block.present_E[place]]
            decode_against(block, place, start, m, base, model, delta)
            for i in range(m):
                added = coefficients_P[column + i] * delta[i]
                total[i] += np.float32(-0.0) if delta[i] == np.float32(0.0) else added
        encode_result(block, start, m, total)
        start += m


# --- decode whole blocks to float32 arrays and encode them again, for merge rules that are not compiled ---


@exported("base_N", "deltas_EN")
def decode_arrays(block: RawBlock, base_N: Floats, deltas_EN: Floats) -> None:
    """Decode a block: the base into `base_N`, deltas into the rows of the experts present."""
    model = np.empty(_TILE, np.float32)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        base = base_N[start : start + m]
        decode_base(block, start, m, base)
        for place in range(len(block.present_E)):
            decode_against(block, place, start, m, base, model, deltas_EN[block.present_E[place], start : start + m])


@exported("block.out", "block.sums_G2")
def encode_array(block: RawBlock, values_N: Floats) -> None:
    """Encode a block's result."""
    for start in range(0, block.n_elements, _TILE):
        encode_result(block, start, min(_TILE, block.n_elements - start), values_N[start:])
