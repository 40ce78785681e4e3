"""Drop deltas at random by rank: the larger an element is within its row, the more likely it survives.

Exact ranks are computed only where they decide. A histogram of a row's magnitudes bounds the rank, and with it the
survival probability, of each element; most random words lie outside these bounds. The ranks of the few undecided
elements are counted one by one. Equal elements share the mean of their ranks, as if chance had ordered them; so ranks
are counted in halves.
"""

from __future__ import annotations

import numpy as np

from mergepipe.core.blocks import RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS as _TILE
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Doubles, Floats, exported, kernel
from mergepipe.kernels.merge import MARK_ELEMENTS, decode_against, decode_base, mark_nonzero
from mergepipe.kernels.numerics import GROUP_ELEMENTS, fill_random_words
from mergepipe.kernels.products import atom_of, atom_stop, common_multiple
from mergepipe.kernels.select import fold_magnitudes

_WORD_SPAN = 4294967296.0
_MAGNITUDE = 0x7FFFFFFF
_BATCH_ELEMENTS = 4096  # rows this short share one call of the generator
_LOW_HALF = 0xFFFFFFFF
_OCTAVES = 8  # below a row's largest magnitude with bins of their own; smaller magnitudes share one
_FINEST_SHIFT = 8
_PADDING = 80  # of work rows: a distance of 4096 bytes makes loads wait for stores
_MAX_COUNTED = 256  # rows with more undecided elements are sorted
_DIGIT_BITS = 11
_STEP_ELEMENTS = 16384  # decoded at once


@exported("out_N")
def decode_deltas(block: RawBlock, place: int, start: int, out_N: Floats) -> None:
    """Write the deltas of the expert at `place` from `start` on to all of `out_N`."""
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    for done in range(0, len(out_N), _TILE):
        m = min(_TILE, len(out_N) - done)
        decode_base(block, start + done, m, base)
        decode_against(block, place, start + done, m, base, model, out_N[done : done + m])


@exported("values_N")
def drop_ranked(
    values_N: Floats, first_element: int, row_elements: int, key: np.uint64, lowest: float, spread: float
) -> None:
    """Clear the elements of whole rows that do not survive.

    The element of rank `r` (from 0, by magnitude; equal ones have their mean rank) of `L` survives with probability
    `lowest + spread * r / (L - 1)`; in a row of one with `lowest + spread / 2`. At most 1, and more than 0.
    """
    _drop_in_rows(values_N, first_element, row_elements, key, _last_words(row_elements, lowest, spread))


@kernel
def _drop_in_rows(values_N: Floats, first_element: int, row_elements: int, key: np.uint64, last_H: Bits32) -> None:
    """Clear like `drop_ranked`, given the last word with which each half rank survives."""
    n = values_N.shape[0]
    bits_N = values_N.view(np.uint32)
    batch = row_elements * max(1, _BATCH_ELEMENTS // row_elements)
    words = np.empty(batch + 2 * GROUP_ELEMENTS, np.uint32)
    scratch = np.empty((2, row_elements + _PADDING), np.uint32)
    bounds_N = np.empty(row_elements, np.uint64)
    undecided = np.empty((row_elements + 7) // 8 * 8, np.uint8)
    shift = _bin_shift(row_elements)
    counts_B4 = np.empty((2 * _OCTAVES << (23 - shift), 4), np.uint32)
    bounds_B = np.empty(2 * _OCTAVES << (23 - shift), np.uint64)
    for start in range(0, n, batch):
        stop = min(n, start + batch)
        first_group = (first_element + start) // GROUP_ELEMENTS
        last_group = (first_element + stop - 1) // GROUP_ELEMENTS
        fill_random_words(key, first_group, last_group - first_group + 1, words)
        lead = first_element - first_group * GROUP_ELEMENTS
        for row in range(start, stop, row_elements):
            row_words = words[lead + row : lead + row + row_elements]
            bits = bits_N[row : row + row_elements]
            _drop_in_row(bits, row_words, last_H, shift, scratch, counts_B4, bounds_B, bounds_N, undecided)


@kernel
def _last_words(row_elements: int, lowest: float, spread: float) -> Bits32:
    """Compute by half rank, from 0, the largest random word with which an element survives."""
    highest = 2 * (row_elements - 1)
    last_H = np.empty(highest + 1, np.uint32)
    for half in range(highest + 1):
        share = np.float64(half) / np.float64(highest) if highest else 0.5
        last_H[half] = np.uint32(np.int64(np.ceil((lowest + spread * share) * _WORD_SPAN)) - 1)
    return last_H


@kernel
def _bin_shift(row_elements: int) -> int:
    """Choose half to a quarter as many bins as the row has elements."""
    shift = 29
    while shift > _FINEST_SHIFT and row_elements > 0:
        row_elements //= 2
        shift -= 1
    return min(shift, 23)


@kernel
def _drop_in_row(
    bits: Bits32,
    words: Bits32,
    last_H: Bits32,
    shift: int,
    scratch: Bits32,
    counts_B4: Bits32,
    bounds_B: Bits64,
    bounds_N: Bits64,
    undecided: Bytes,
) -> None:
    """Clear the elements of one row that do not survive."""
    magnitudes, bins = scratch[0], scratch[1]
    n = bits.shape[0]
    largest = np.uint32(0)
    for i in range(n):
        magnitudes[i] = bits[i] & np.uint32(_MAGNITUDE)
        largest = max(largest, magnitudes[i])
    if largest == np.uint32(0):
        return
    _count_bins(magnitudes, n, largest, shift, bins, counts_B4)
    _bound_last_words(last_H, counts_B4, bounds_B)
    for i in range(n):  # separate from the loops below, which vectorise
        bounds_N[i] = bounds_B[bins[i]]
    for i in range(n):
        low, high = np.uint32(bounds_N[i] & np.uint64(_LOW_HALF)), np.uint32(bounds_N[i] >> np.uint64(32))
        is_undecided = words[i] > low and words[i] <= high
        undecided[i] = np.uint8(is_undecided and magnitudes[i] != np.uint32(0))
    for i in range(n):
        bits[i] = bits[i] if words[i] <= np.uint32(bounds_N[i] >> np.uint64(32)) else np.uint32(0)
    for i in range(n, undecided.shape[0]):
        undecided[i] = np.uint8(0)
    if _decide_by_rank(bits, words, last_H, magnitudes, undecided) > _MAX_COUNTED:
        _drop_by_sorting(bits, words, last_H, magnitudes)


@kernel
def _count_bins(magnitudes: Bits32, n: int, largest: np.uint32, shift: int, bins: Bits32, counts_B4: Bits32) -> None:
    """Write the bin of each element, and count bins by quarter of the row.

    Odd bins, and bin 0, may hold different magnitudes; the elements of the others are equal: deltas of 16-bit formats
    have few significant bits. Each quarter has counts of its own, as an element waits for the one before in its bin.
    """
    below, n_bins = np.uint32((1 << shift) - 1), counts_B4.shape[0]
    top = 2 * (np.int64(largest) >> shift) + 1
    lowest_bin = np.uint32(max(0, top - (n_bins - 1)))
    for i in range(n):
        is_mixed = np.uint32((magnitudes[i] & below) != np.uint32(0))
        bins[i] = max(np.uint32(2) * (magnitudes[i] >> np.uint32(shift)) + is_mixed, lowest_bin) - lowest_bin
    counts_B4[:] = np.uint32(0)
    quarter = n // 4
    bins1, bins2, bins3 = bins[quarter:], bins[2 * quarter :], bins[3 * quarter :]
    for i in range(quarter):
        counts_B4[bins[i], 0] += np.uint32(1)
        counts_B4[bins1[i], 1] += np.uint32(1)
        counts_B4[bins2[i], 2] += np.uint32(1)
        counts_B4[bins3[i], 3] += np.uint32(1)
    for i in range(4 * quarter, n):
        counts_B4[bins[i], 3] += np.uint32(1)


@kernel
def _bound_last_words(last_H: Bits32, counts_B4: Bits32, bounds_B: Bits64) -> None:
    """Compute by bin the last words of its lowest rank (lower half) and of its highest one (upper half)."""
    first = 0
    for b in range(bounds_B.shape[0]):
        count = int(counts_B4[b, 0] + counts_B4[b, 1] + counts_B4[b, 2] + counts_B4[b, 3])
        low, high = 2 * first, 2 * (first + count - 1)
        if b > 0 and b % 2 == 0:  # all are equal
            low = high = 2 * first + count - 1
        if count:
            bounds_B[b] = np.uint64(last_H[high]) << np.uint64(32) | np.uint64(last_H[low])
        first += count


@kernel
def _decide_by_rank(bits: Bits32, words: Bits32, last_H: Bits32, magnitudes: Bits32, undecided: Bytes) -> int:
    """Decide undecided elements by their exact rank; return how many there were, stopping at too many."""
    eights = undecided.view(np.uint64)
    counted = 0
    for w in range(eights.shape[0]):
        if eights[w] != np.uint64(0) and counted <= _MAX_COUNTED:
            for i in range(8 * w, 8 * w + 8):
                if undecided[i]:
                    counted += 1
                    if words[i] > last_H[_half_rank_of(magnitudes, bits.shape[0], magnitudes[i])]:
                        bits[i] = np.uint32(0)
    return counted


@kernel
def _half_rank_of(magnitudes: Bits32, n: int, magnitude: np.uint32) -> int:
    """Count twice the mean rank of the elements of a magnitude."""
    smaller, up_to = np.uint32(0), np.uint32(0)  # as wide as a magnitude: more lanes in a vector
    for i in range(n):
        smaller = np.uint32(smaller + np.uint32(magnitudes[i] < magnitude))
        up_to = np.uint32(up_to + np.uint32(magnitudes[i] <= magnitude))
    return int(smaller) + int(up_to) - 1


@kernel
def _drop_by_sorting(bits: Bits32, words: Bits32, last_H: Bits32, magnitudes: Bits32) -> None:
    """Decide all elements of a row by sorting it."""
    n = bits.shape[0]
    order_N = np.empty(n, np.uint64)
    for i in range(n):
        order_N[i] = np.uint64(magnitudes[i]) << np.uint64(32) | np.uint64(i)
    _sort_by_magnitude(order_N)
    first = 0
    while first < n:
        stop = first + 1
        while stop < n and order_N[stop] >> np.uint64(32) == order_N[first] >> np.uint64(32):
            stop += 1
        for rank in range(first, stop):
            position = order_N[rank] & np.uint64(0xFFFFFFFF)
            if words[position] > last_H[first + stop - 1]:
                bits[position] = np.uint32(0)
        first = stop


@kernel
def _sort_by_magnitude(order_N: Bits64) -> None:
    """Sort by the upper 32 bits, of which the first is 0, in three stable passes; input is in order of position."""
    n = order_N.shape[0]
    source_N, target_N = order_N, np.empty(n, np.uint64)
    counts: Counts = np.empty(1 << _DIGIT_BITS, np.int64)
    mask = np.uint64((1 << _DIGIT_BITS) - 1)
    for digit in range(3):
        shift = np.uint64(32 + digit * _DIGIT_BITS)
        counts[:] = 0
        for i in range(n):
            counts[(source_N[i] >> shift) & mask] += 1
        total = 0
        for c in range(counts.shape[0]):
            count = counts[c]
            counts[c] = total
            total += count
        for i in range(n):
            c = (source_N[i] >> shift) & mask
            target_N[counts[c]] = source_N[i]
            counts[c] += 1
        source_N, target_N = target_N, source_N
    for i in range(n):
        order_N[i] = source_N[i]


@exported("sums_AK", "marks")
def add_survivors(
    block: RawBlock,
    place: int,
    row_elements: int,
    key: np.uint64,
    lowest: float,
    spread: float,
    sums_AK: Doubles,
    marks: Bytes,
) -> None:
    """Add by atom the sum of the |delta| of whole rows, and of those that survive `drop_ranked`, which are marked.

    The sums of expert `e` are columns `2 * e` and `2 * e + 1`.
    Nothing is marked without `marks`, those of the whole tensor: then rows are multiples of 128 elements.
    """
    step = row_elements * max(1, _STEP_ELEMENTS // row_elements)
    values_N = np.empty(step + MARK_ELEMENTS, np.float32)
    last_H = _last_words(row_elements, lowest, spread)
    column = 2 * block.present_E[place]
    for start in range(0, block.n_elements, step):
        m, element = min(step, block.n_elements - start), block.first_element + start
        values = values_N[:m]
        decode_deltas(block, place, start, values)
        _add_magnitudes(values, element, row_elements, sums_AK[:, column])
        if lowest + spread <= 0.0:
            values[:] = np.float32(0.0)
        elif lowest < 1.0:
            _drop_in_rows(values, element, row_elements, key, last_H)
        _add_magnitudes(values, element, row_elements, sums_AK[:, column + 1])
        if marks.shape[0]:
            mark_nonzero(values_N, m, marks[element // 8 :])


@kernel
def _add_magnitudes(values_N: Floats, first_element: int, row_elements: int, sums_A: Doubles) -> None:
    """Add the sums of `|values|` by atom."""
    n, common = values_N.shape[0], common_multiple(row_elements)
    products = np.empty(_TILE, np.float64)
    start = 0
    while start < n:
        element = first_element + start
        m = min(_TILE, n - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        sums_A[atom] += fold_magnitudes(values_N[start : start + m], m, products)
        start += m
