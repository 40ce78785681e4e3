"""Summarise the delta of a block in one pass: norm, extremes, magnitude histogram, sketch, inner products."""

from __future__ import annotations

import numpy as np

from mergepipe.core.blocks import GRAIN_ELEMENTS, RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, Floats, kernel
from mergepipe.kernels.merge import decode_against, decode_base
from mergepipe.kernels.reduce import COARSE_BINS, COARSE_SHIFT

LANES = 16
CELL_ELEMENTS = GRAIN_ELEMENTS
_TILE = TILE_ELEMENTS
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
    width = _QUARTER
    while width > 1:
        width //= 2
        for i in range(width):
            products[i] += products[i + width]
    return float(products[0])


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


@kernel
def sum_squares(block: RawBlock, cells_C: Doubles) -> None:
    """Add the squares of the base's elements, which start at a cell, to `cells_C` (float64, one entry per cell)."""
    values = np.empty(_TILE, np.float32)
    products = np.empty(_QUARTER, np.float64)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_base(block, start, m, values)
        values[m:] = np.float32(0.0)
        cells_C[start // CELL_ELEMENTS] += _fold_product(values, values, products)


@kernel
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
        cells_C2[start // CELL_ELEMENTS, 0] += _fold_product(delta, delta, products)
        cells_C2[start // CELL_ELEMENTS, 1] += _fold_product(base, delta, products)


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
def _octave_energies(counts_B: Counts, largest_bits: int, energies_O: Doubles) -> None:
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


@kernel
def summarize_block(
    block: RawBlock,
    place: int,
    counts_B: Counts,
    cells_C2: Doubles,
    sketch_S: Floats,
    energies_O: Doubles,
    extremes_3: Counts,
    fine_N: Bits32,
) -> None:
    """Summarise the delta of one block.

    Args:
        counts_B: int64, COARSE_BINS, all zero; set to the counts of upper magnitude bits.
        cells_C2: float64; delta^2 and base * delta are added by cell, exactly as by `sum_products`.
        sketch_S: float32 (16,); sums of signed deltas are added.
        energies_O: float64; set by `_octave_energies`.
        extremes_3: int64; set to the float32 bits of the largest magnitude, the number of nonzero deltas, and of those
            with nonzero lower 16 bits. An array, for a kernel that returns several numbers cannot run without numba.
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
    largest = 0
    changed = 0
    fine = 0
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_base(block, start, m, base)
        decode_against(block, place, start, m, base, model, delta)
        base[m:] = np.float32(0.0)
        delta[m:] = np.float32(0.0)
        cells_C2[start // CELL_ELEMENTS, 0] += _fold_product(delta, delta, products)
        cells_C2[start // CELL_ELEMENTS, 1] += _fold_product(base, delta, products)
        _fold_signed(bits, start, signed, sketch_S)
        tile_largest = np.uint32(0)
        tile_changed = np.uint32(0)
        for i in range(m):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            tile_largest = max(tile_largest, magnitude)
            tile_changed += np.uint32(magnitude != np.uint32(0))
        largest = max(largest, int(tile_largest))
        changed += int(tile_changed)
        for i in range(m):
            counts_B[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1
        fine = _append_fine(bits, m, is_fine, hits, fine_N, fine)
    _octave_energies(counts_B, largest, energies_O)
    extremes_3[0] = int(largest)
    extremes_3[1] = changed
    extremes_3[2] = fine
