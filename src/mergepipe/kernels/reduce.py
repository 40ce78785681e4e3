"""Reduce deltas to a few numbers: counts of magnitudes in bins or above edges, and the summary of a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS, TIE_RUN, RawBlock, itemsize_of_code
from mergepipe.kernels.codec import IS_DELTA, decode_tile, itemsize_of
from mergepipe.kernels.codec import TILE_ELEMENTS as _TILE
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, Floats, exported, kernel
from mergepipe.kernels.merge import decode_against, decode_base, take_delta, tie_hash
from mergepipe.kernels.numerics import fold

COARSE_SHIFT = 16
COARSE_BINS = 1 << 15
FINE_BINS = 1 << 16

_MOVED = 32
CHUNK = 256


class DeltaStretches(NamedTuple):
    """Stretches of one expert's tensor in one buffer, which a kernel looks at in one call; see `RawBlock`.

    `stretches_S5` (int64) are first element, number of elements, byte offsets in `raw` of the base and of the expert,
    and the expert's kernel code.
    """

    raw: Bytes
    base_code: int
    stretches_S5: Counts

    def check_bounds(self) -> None:
        """Refuse stretches whose elements are not all in the buffer: compiled code does not look."""
        for _, n_elements, base_offset, offset, code in self.stretches_S5.tolist():
            stops = [offset + n_elements * itemsize_of_code(code)]
            if not code & IS_DELTA:
                stops.append(base_offset + n_elements * itemsize_of_code(self.base_code))
            if min(n_elements, base_offset, offset) < 0 or max(stops) > len(self.raw):
                place = f"{n_elements} elements of code {code} at {offset}, those of the base at {base_offset}"
                raise ValueError(f"{place}, of a buffer of {len(self.raw)} bytes")

    @classmethod
    def by_expert(cls, blocks: Sequence[RawBlock]) -> dict[int, DeltaStretches]:
        """Return the stretches of each expert that is present in some of a tensor's blocks, which lie in one buffer."""
        stretches: dict[int, list[tuple[int, ...]]] = {}
        for block in blocks:
            experts = zip(block.present_E.tolist(), block.offsets_E.tolist(), block.codes_E.tolist(), strict=True)
            for e, offset, code in experts:
                stretch = block.first_element, block.n_elements, block.base_offset, offset, code
                stretches.setdefault(e, []).append(stretch)
        return {e: cls(blocks[0].raw, blocks[0].base_code, np.array(of, np.int64)) for e, of in stretches.items()}

    @property
    def n_elements(self) -> int:
        return int(self.stretches_S5[:, 1].sum())

    def runs(self, n_runs: int, run_elements: int) -> DeltaStretches:
        """Return about so many runs of at most so many elements, spread evenly; all of what is not longer."""
        stop_S, total = self.stretches_S5[:, 1].cumsum(), self.n_elements
        if total <= n_runs * run_elements:
            return self
        first_R = np.arange(0, total, total // n_runs)
        of_R = np.searchsorted(stop_S, first_R, side="right")
        runs_R5 = self.stretches_S5[of_R]
        skip_R = first_R - stop_S[of_R] + runs_R5[:, 1]
        runs_R5[:, 0] += skip_R
        runs_R5[:, 1] = np.minimum(runs_R5[:, 1] - skip_R, run_elements)
        runs_R5[:, 2] += skip_R * itemsize_of_code(self.base_code)
        runs_R5[:, 3] += skip_R * [itemsize_of_code(code) for code in runs_R5[:, 4].tolist()]
        return self._replace(stretches_S5=runs_R5)


@kernel
def _decode_stretch(deltas: DeltaStretches, s: int, start: int, n: int, tiles_3N: NDArray[np.float32]) -> None:
    """Decode base, model and, in the last row, the delta of elements `start ... start + n` of a stretch.

    Where deltas are stored, it alone.
    """
    base, model, delta = tiles_3N[0], tiles_3N[1], tiles_3N[2]
    base_offset, offset, code = deltas.stretches_S5[s, 2], deltas.stretches_S5[s, 3], deltas.stretches_S5[s, 4]
    offset += start * itemsize_of(code)
    if code & IS_DELTA:
        decode_tile(deltas.raw, offset, code, n, delta)
    else:
        base_offset += start * itemsize_of(deltas.base_code)
        decode_tile(deltas.raw, base_offset, deltas.base_code, n, base)
        decode_tile(deltas.raw, offset, code, n, model)
        take_delta(model, base, n, delta)


@exported("counts")
def count_magnitudes(deltas: DeltaStretches, counts: Counts) -> None:
    """Add to `counts` (int64, COARSE_BINS) the number of deltas by their upper 15 magnitude bits.

    The bit pattern of a non-negative float32 orders as its value does, so a histogram of bits is one of values.
    """
    tiles_3N = np.empty((3, _TILE), np.float32)
    bits = tiles_3N[2].view(np.uint32)
    for s in range(deltas.stretches_S5.shape[0]):
        n = deltas.stretches_S5[s, 1]
        for start in range(0, n, _TILE):
            m = min(_TILE, n - start)
            _decode_stretch(deltas, s, start, m, tiles_3N)
            for i in range(m):
                counts[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1


@exported()
def count_nonzero(values_N: Floats) -> int:
    """Count the values that are not zero; undefined ones are not."""
    count = np.int32(0)  # narrow lanes, so that more of them are in a vector
    for i in range(values_N.shape[0]):
        count = np.int32(count + np.int32(values_N[i] != np.float32(0.0)))
    return int(count)


@exported("scores_N", "counts_W")
def collect_between(scores_N: Floats, edges_W: Bits32, counts_W: Counts) -> int:
    """Move the scores between the first and second edge, the third and fourth, and so on, to the start of `scores_N`.

    Edges and scores are float32 bit patterns, edges rise. Add to `counts_W[w]` the number of scores that reach edge
    `w`; return that of the scores moved. The others are overwritten.
    """
    bits_N = scores_N.view(np.uint32)
    magnitudes = np.empty(_TILE, np.uint32)
    is_inside = np.zeros(_TILE, np.uint8)
    words, places = is_inside.view(np.uint64), np.empty(_TILE // 8 + 1, np.int64)
    n_inside = 0
    for start in range(0, len(bits_N), _TILE):
        m = min(_TILE, len(bits_N) - start)
        bits = bits_N[start : start + m]
        for i in range(m):
            magnitudes[i] = bits[i] & np.uint32(0x7FFFFFFF)
        is_inside[:] = np.uint8(0)
        for w in range(0, edges_W.shape[0], 2):
            low, high = edges_W[w], edges_W[w + 1]
            span = np.uint32(high - low)
            reach_low, reach_high = np.uint32(0), np.uint32(0)
            for i in range(m):
                reach_low = np.uint32(reach_low + np.uint32(magnitudes[i] >= low))
                reach_high = np.uint32(reach_high + np.uint32(magnitudes[i] >= high))
            for i in range(m):
                is_inside[i] |= np.uint8(np.uint32(magnitudes[i] - low) < span)
            counts_W[w] += np.int64(reach_low)
            counts_W[w + 1] += np.int64(reach_high)
        n_places = 0  # without branches, which would be guessed wrong too often
        for w in range((m + 7) // 8):
            places[n_places] = 8 * w
            n_places += int(words[w] != np.uint64(0))
        for p in range(n_places):
            for i in range(places[p], places[p] + 8):
                bits_N[n_inside] = magnitudes[i]
                n_inside += int(is_inside[i])
    return n_inside


@exported("hashes_RN", "counts_R2")
def collect_ties(deltas: DeltaStretches, ties_R4: Bits32, hashes_RN: Bits32, counts_R2: Counts) -> None:
    """Look at the hashes of the elements of at most 32 magnitudes: bits, key, and a first and last hash of each.

    Add to `counts_R2[r, 0]` the number of hashes below the first, to `counts_R2[r, 1]` that of those from the first to
    the last, and write these to `hashes_RN[r]`, as far as there is room.
    """
    tiles_3N = np.empty((3, _TILE), np.float32)
    bits = tiles_3N[2].view(np.uint32)
    most_runs = _TILE // TIE_RUN + 1
    magnitudes = np.empty(most_runs * TIE_RUN, np.uint32)  # whole runs: zeros are around the tile
    places = np.empty(TIE_RUN + 1, np.int64)
    hashes_U, wanted_U = np.empty(most_runs, np.uint32), np.empty(most_runs + 1, np.int64)
    for s in range(deltas.stretches_S5.shape[0]):
        first_element, n_elements = deltas.stretches_S5[s, 0], deltas.stretches_S5[s, 1]
        for start in range(0, n_elements, _TILE):
            m, element = min(_TILE, n_elements - start), first_element + start
            _decode_stretch(deltas, s, start, m, tiles_3N)
            lead = element % TIE_RUN
            magnitudes[:] = np.uint32(0)
            for i in range(m):
                magnitudes[lead + i] = bits[i] & np.uint32(0x7FFFFFFF)
            n_runs = (lead + m + TIE_RUN - 1) // TIE_RUN
            for r in range(ties_R4.shape[0]):
                tied, key, first, last = ties_R4[r, 0], ties_R4[r, 1], ties_R4[r, 2], ties_R4[r, 3]
                for u in range(n_runs):
                    hashes_U[u] = tie_hash(element - lead + u * TIE_RUN, key)
                n_wanted = 0  # without branches, which would be guessed wrong too often
                for u in range(n_runs):
                    wanted_U[n_wanted] = u
                    n_wanted += int(hashes_U[u] <= last)
                before = np.uint32(first - first % np.uint32(TIE_RUN))  # runs below are below the first hash as a whole
                n_below = np.int64(0)
                for w in range(n_wanted):
                    u, n_tied = wanted_U[w], np.uint32(0)
                    run_magnitudes = magnitudes[u * TIE_RUN : (u + 1) * TIE_RUN]
                    for i in range(TIE_RUN):
                        n_tied = np.uint32(n_tied + np.uint32(run_magnitudes[i] == tied))
                    if hashes_U[u] < before:
                        n_below += np.int64(n_tied)
                    elif n_tied:
                        n = np.int64(0)
                        for i in range(TIE_RUN):
                            places[n] = i
                            n += np.int64(run_magnitudes[i] == tied)
                        for p in range(n):
                            h = np.uint32(hashes_U[u] + np.uint32(places[p]))
                            if h < first:
                                n_below += 1
                            elif h <= last:
                                if counts_R2[r, 1] < hashes_RN.shape[1]:
                                    hashes_RN[r, counts_R2[r, 1]] = h
                                counts_R2[r, 1] += 1
                counts_R2[r, 0] += n_below


class Watched(NamedTuple):
    """What is counted of the magnitudes of a tensor: from edges on, and finely in some bins, a row each.

    `from_edge_W[w]` are the elements whose upper 15 bits are at least `edges_W[w]`. `bin_R` are the upper bits of the
    rows, rising, and `row_B` the rows of the bins from the first of them on, -1 where there is none. `counts_RB[r, b]`
    are the elements of row `r` with lower 16 bits `b > 0`, `totals_R[r]` are all of the row. Deltas of 16-bit formats
    have few significant bits, so most of a bin has `b == 0`: that count is omitted, as it is the bin's total minus the
    others. What is left is seldom: its counts lie in the chunks of a row that `filled_RC` marks, the
    others are undefined.
    """

    edges_W: NDArray[np.uint16]
    from_edge_W: Counts
    bin_R: Bits32
    row_B: NDArray[np.int16]
    counts_RB: NDArray[np.int32]
    filled_RC: Bytes
    totals_R: Counts

    @classmethod
    def of(cls, bins: Iterable[int], edges: Iterable[int]) -> Watched:
        """Return rows and edges at some bins, of which nothing was counted yet."""
        bin_R, edges_W = np.array(sorted(bins), np.uint32), np.array(sorted(edges), np.uint16)
        row_B = np.full(int(bin_R[-1] - bin_R[0]) + 1 if len(bin_R) else 0, -1, np.int16)
        row_B[bin_R - bin_R[:1]] = np.arange(len(bin_R))
        counts_RB, totals_R = np.empty((len(bin_R), FINE_BINS), np.int32), np.zeros(len(bin_R), np.int64)
        filled_RC = np.zeros((len(bin_R), FINE_BINS // CHUNK), np.uint8)
        return cls(edges_W, np.zeros(len(edges_W), np.int64), bin_R, row_B, counts_RB, filled_RC, totals_R)

    def rows_of(self, bins: range) -> range | None:
        """Return the rows of neighbouring bins; None if one is not watched."""
        first = int(np.searchsorted(self.bin_R, bins.start))
        rows = range(first, first + len(bins))
        return rows if self.bin_R[rows.start : rows.stop].tolist() == list(bins) else None


@exported("watched.from_edge_W", "watched.counts_RB", "watched.filled_RC", "watched.totals_R")
def count_watched(deltas: DeltaStretches, watched: Watched) -> None:
    """Add what is watched of the magnitudes of deltas."""
    edges_W, from_edge_W, bin_R, row_B, counts_RB, filled_RC, totals_R = watched
    tiles_3N = np.empty((3, _TILE), np.float32)
    bits = tiles_3N[2].view(np.uint32)
    upper = np.empty(_TILE, np.uint16)
    hits = np.zeros(_TILE, np.uint8)
    words = hits.view(np.uint64)
    lowest = np.uint32(bin_R[0] << np.uint32(COARSE_SHIFT)) if len(bin_R) else np.uint32(0)
    span = np.uint32(((bin_R[-1] + np.uint32(1)) << np.uint32(COARSE_SHIFT)) - lowest) if len(bin_R) else np.uint32(0)
    for s in range(deltas.stretches_S5.shape[0]):
        n_elements = deltas.stretches_S5[s, 1]
        for start in range(0, n_elements, _TILE):
            m = min(_TILE, n_elements - start)
            _decode_stretch(deltas, s, start, m, tiles_3N)
            for i in range(m):
                upper[i] = np.uint16((bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT))
            for w in range(edges_W.shape[0]):
                edge = edges_W[w]
                count = np.uint16(0)  # of a tile: narrow lanes, so that more of them are in a vector
                for i in range(m):
                    count = np.uint16(count + np.uint16(upper[i] >= edge))
                from_edge_W[w] += np.int64(count)
            for r in range(bin_R.shape[0]):
                wanted = np.uint16(bin_R[r])
                count = np.uint16(0)
                for i in range(m):
                    count = np.uint16(count + np.uint16(upper[i] == wanted))
                totals_R[r] += np.int64(count)
            hits[m:] = np.uint8(0)
            for i in range(m):
                is_between = np.uint32((bits[i] & np.uint32(0x7FFFFFFF)) - lowest) < span
                hits[i] = np.uint8(is_between and (bits[i] & np.uint32(0xFFFF)) != np.uint32(0))
            for w in range((m + 7) // 8):
                if words[w] != np.uint64(0):
                    for i in range(8 * w, 8 * w + 8):
                        if hits[i] and row_B[upper[i] - bin_R[0]] >= 0:
                            row, lower = row_B[upper[i] - bin_R[0]], bits[i] & np.uint32(0xFFFF)
                            chunk = lower // np.uint32(CHUNK)
                            if not filled_RC[row, chunk]:
                                counts_RB[row, chunk * np.uint32(CHUNK) : (chunk + np.uint32(1)) * np.uint32(CHUNK)] = 0
                                filled_RC[row, chunk] = np.uint8(1)
                            counts_RB[row, lower] += 1


@exported("counts_B", "total_B")
def move_counts(counts_B: NDArray[np.int32], total_B: Counts) -> None:
    """Add a histogram to another and clear it. Most bins are empty: they are only read."""
    _move_counts(counts_B, total_B)


@kernel
def _move_counts(counts_B: NDArray[np.int32], total_B: NDArray[np.signedinteger]) -> None:
    for first in range(0, counts_B.shape[0], _MOVED):
        counts = counts_B[first : first + _MOVED]
        filled = np.int64(0)
        for b in range(counts.shape[0]):
            filled |= counts[b]
        if filled != 0:
            for b in range(counts.shape[0]):
                total_B[first + b] += counts[b]
                counts[b] = 0


@exported()
def find_rank(counts_B: Counts, rank: int) -> tuple[int, int]:
    """Find the bin of the `rank`-th largest element (1-based), and how many elements are in the bins above it.

    Elements that are not counted are in bin 0, whatever it has.
    """
    above, chunk = 0, (counts_B.shape[0] - 1) // CHUNK
    while chunk > 0:
        total = 0
        for b in range(chunk * CHUNK, min(counts_B.shape[0], (chunk + 1) * CHUNK)):
            total += counts_B[b]
        if above + total >= rank:
            break
        above, chunk = above + total, chunk - 1
    for b in range(min(counts_B.shape[0], (chunk + 1) * CHUNK) - 1, 0, -1):
        if above + counts_B[b] >= rank:
            return b, above
        above += counts_B[b]
    return 0, above


# --- summarise the delta of a block in one pass: norm, extremes, magnitude histogram, sketch, inner products ---

LANES = 16
_QUARTER = _TILE // 4


@kernel
def _fold_product(x: Floats, y: Floats, products: Doubles) -> float:
    """Sum products of one tile by a binary tree: vectorises, in the same order of additions on every machine.

    The first two levels are added at once, so that `products` stays in the fastest cache: a quarter of a tile.
    """
    for i in range(_QUARTER):
        first = np.float64(x[i]) * np.float64(y[i])
        second = np.float64(x[i + _QUARTER]) * np.float64(y[i + _QUARTER])
        third = np.float64(x[i + 2 * _QUARTER]) * np.float64(y[i + 2 * _QUARTER])
        fourth = np.float64(x[i + 3 * _QUARTER]) * np.float64(y[i + 3 * _QUARTER])
        products[i] = (first + third) + (second + fourth)
    return fold(products, _QUARTER)


@kernel
def _fold_signed(delta_bits: Bits32, first: int, signed: Floats, sketch_S: Floats) -> None:
    """Add a tile to the sketch: element i goes to component i modulo 16 with a sign that is a fixed hash of i."""
    signed_bits = signed.view(np.uint32)
    for i in range(_TILE):
        h = np.uint32(first + i) * np.uint32(0x9E3779B1)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x85EBCA77)
        signed_bits[i] = delta_bits[i] ^ (h & np.uint32(0x80000000))
    width = _TILE
    while width > LANES:
        width //= 2
        for i in range(width):
            signed[i] += signed[i + width]
    for j in range(LANES):
        sketch_S[j] += signed[j]


@exported("cells_C")
def sum_squares(block: RawBlock, cells_C: Doubles) -> None:
    """Add the squares of the base's elements, which start at a cell, to `cells_C` (float64, one entry per cell)."""
    values = np.empty(_TILE, np.float32)
    products = np.empty(_QUARTER, np.float64)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_base(block, start, m, values)
        values[m:] = np.float32(0.0)
        cells_C[start // GRAIN_ELEMENTS] += _fold_product(values, values, products)


@exported("cells_C2")
def sum_products(block: RawBlock, place: int, cells_C2: Doubles) -> None:
    """Add delta^2 and base * delta of a block, which starts at a cell, to `cells_C2` (float64)."""
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    products = np.empty(_QUARTER, np.float64)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_base(block, start, m, base)
        decode_against(block, place, start, m, base, model, delta)
        base[m:] = np.float32(0.0)
        delta[m:] = np.float32(0.0)
        cells_C2[start // GRAIN_ELEMENTS, 0] += _fold_product(delta, delta, products)
        cells_C2[start // GRAIN_ELEMENTS, 1] += _fold_product(base, delta, products)


@kernel
def _append_fine(bits: Bits32, n: int, is_fine: Bytes, hits: Counts, fine_N: Bits32, n_fine: int) -> int:
    """Append the magnitudes of a tile's first `n` elements with nonzero lower 16 bits; return the number in all.

    They are few and anywhere: nothing branches on an element. `is_fine` and `hits` are work arrays.
    """
    is_fine[n:] = np.uint8(0)
    for i in range(n):
        is_fine[i] = np.uint8((bits[i] & np.uint32(0xFFFF)) != np.uint32(0))
    words = is_fine.view(np.uint64)
    n_hits = 0
    for w in range(words.shape[0]):
        hits[n_hits] = w
        n_hits += int(np.int64(words[w] != np.uint64(0)))
    for h in range(n_hits):
        first = 8 * hits[h]
        for i in range(first, first + 8):
            fine_N[n_fine] = bits[i] & np.uint32(0x7FFFFFFF)
            n_fine += int(np.int64(is_fine[i]))
    return n_fine


@kernel
def _octave_energies(counts_B: NDArray[np.int32], largest_bits: int, energies_O: Doubles) -> None:
    """Estimate the energy by octave of magnitude below the largest, from counts of upper magnitude bits.

    A bin belongs to the octave of its lower edge, where deltas of 16-bit formats lie, with the energy of its middle.
    """
    energies_O[:] = 0.0
    octaves = energies_O.shape[0]
    top_bin = int(largest_bits) >> COARSE_SHIFT
    holder = np.empty(3, np.uint32)
    floats = holder.view(np.float32)
    holder[0] = np.uint32(largest_bits)
    largest = float(floats[0])
    for b in range(max(1, top_bin - 128 * (octaves + 8)), min(top_bin + 1, COARSE_BINS)):
        if counts_B[b]:
            holder[1] = np.uint32(b) << np.uint32(COARSE_SHIFT)
            holder[2] = holder[1] | np.uint32(0x8000)
            edge = float(floats[1])
            middle = float(floats[2])
            octave = int(np.floor(np.log2(largest / edge)))
            octave = min(max(octave, 0), octaves - 1)
            energies_O[octave] += float(counts_B[b]) * middle * middle


@exported("counts_2B", "cells_C2", "sketch_S", "energies_O", "extremes_3", "fine_N")
def summarize_block(
    block: RawBlock,
    place: int,
    counts_2B: NDArray[np.int32],
    cells_C2: Doubles,
    sketch_S: Floats,
    energies_O: Doubles,
    extremes_3: Counts,
    fine_N: Bits32,
) -> None:
    """Summarise the delta of one block.

    Args:
        counts_2B: int32, COARSE_BINS, all zero; the first row is set to the counts of upper magnitude bits. Halves of
            a tile are counted in rows of their own: equal neighbours, as zeros are, would wait for each other.
        cells_C2: float64; delta^2 and base * delta are added by cell, exactly as by `sum_products`.
        sketch_S: float32 (16,); sums of signed deltas are added.
        energies_O: float64; set by `_octave_energies`.
        extremes_3: int64; set to the float32 bits of the largest magnitude, the number of nonzero deltas, and of those
            with nonzero lower 16 bits. An array, as returning several numbers of a call takes longer.
        fine_N: uint32 (n + 1,); the magnitudes with nonzero lower 16 bits are written to its start.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    signed = np.empty(_TILE, np.float32)
    products = np.empty(_QUARTER, np.float64)
    is_fine = np.empty(_TILE, np.uint8)
    hits = np.empty(_TILE // 8, np.int64)
    bits = delta.view(np.uint32)
    early, late = bits[: _TILE // 2], bits[_TILE // 2 :]
    counts_B, more_B = counts_2B[0], counts_2B[1]
    largest, changed, fine = 0, 0, 0
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_base(block, start, m, base)
        decode_against(block, place, start, m, base, model, delta)
        base[m:] = np.float32(0.0)
        delta[m:] = np.float32(0.0)
        cells_C2[start // GRAIN_ELEMENTS, 0] += _fold_product(delta, delta, products)
        cells_C2[start // GRAIN_ELEMENTS, 1] += _fold_product(base, delta, products)
        _fold_signed(bits, start, signed, sketch_S)
        tile_largest = np.uint32(0)
        tile_changed = np.uint32(0)
        for i in range(m):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            tile_largest = max(tile_largest, magnitude)
            tile_changed += np.uint32(magnitude != np.uint32(0))
        largest = max(largest, int(tile_largest))
        changed += int(tile_changed)
        for i in range(_TILE // 2):
            counts_B[(early[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1
            more_B[(late[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1
        counts_B[0] -= _TILE - m
        fine = _append_fine(bits, m, is_fine, hits, fine_N, fine)
    _move_counts(more_B, counts_B)
    _octave_energies(counts_B, largest, energies_O)
    extremes_3[0] = int(largest)
    extremes_3[1] = changed
    extremes_3[2] = fine
