"""Round results to the output's dtype, to nearest or stochastically, and measure how much of their change survives.

Stochastic rounding takes the upper or the lower neighbour with the probability of the distance, so that the mean over
seeds is the float32 value. The random bits of element `i` depend on (key, i) alone: 16 for each element, so that a
probability is exact for BF16 and normal F16, and off by less than 2^-16 of a step for FP8 and subnormal F16.

What nearest rounding does not change is not changed: values that the dtype holds, zeros with their signs, infinities.
NaN becomes the one of `encode_tile`. From the largest finite number of the dtype on there is no neighbour to choose
from, so values are rounded to nearest there. F32 and F64 outputs hold every result.
"""

from __future__ import annotations

import numpy as np

from mergepipe.core.blocks import GRAIN_ELEMENTS
from mergepipe.kernels.codec import (
    CODE_BF16,
    CODE_E4M3,
    CODE_F16,
    CODE_F32,
    TILE_ELEMENTS,
    decode_tile,
    encode_tile,
    itemsize_of,
)
from mergepipe.kernels.compiled import Bits16, Bits32, Bytes, Doubles, Floats, exported, kernel
from mergepipe.kernels.numerics import fold

TO_NEAREST = np.uint64(0)
"""The key of results that are rounded to nearest."""

_TILES_OF_GRAIN = GRAIN_ELEMENTS // TILE_ELEMENTS


@kernel
def _fill_random_words(key: np.uint64, first_word: int, n: int, words: Bits32) -> None:
    """Write `n` words of random bits, 16 for each of two elements; those of elements 2^33 apart are equal.

    Source: the mixing function `lowbias32` of C. Wellons' "hash prospector" (public domain), with a key in each step.
    A loop for each step, which stores its results, keeps the arithmetic in 32 bits: whole vectors are used.
    """
    low = np.uint64(0xFFFFFFFF)
    first_key = np.uint32(np.uint64(key) & low)
    second_key = np.uint32(np.uint64(key) >> np.uint64(32))
    start = np.uint32(np.uint64(first_word) & low)
    for i in range(n):
        words[i] = (start + np.uint32(i)) ^ first_key
    for i in range(n):
        words[i] = (words[i] ^ (words[i] >> np.uint32(16))) * np.uint32(0x7FEB352D)
    for i in range(n):
        words[i] = (words[i] ^ (words[i] >> np.uint32(15)) ^ second_key) * np.uint32(0x846CA68B)
    for i in range(n):
        words[i] = words[i] ^ (words[i] >> np.uint32(16))


@kernel
def encode_stochastic(values: Floats, element: int, key: np.uint64, raw: Bytes, code: int) -> None:
    """Encode a tile to the start of `raw` as `encode_tile`, rounding stochastically.

    `element` is the index of the first one in its tensor.
    """
    n = len(values)
    if code <= CODE_F32:
        encode_tile(values, n, raw, 0, code)
        return
    words = np.empty(TILE_ELEMENTS // 2 + 1, np.uint32)
    first_word = element // 2
    _fill_random_words(key, first_word, (element + n + 1) // 2 - first_word, words)
    lead = element - 2 * first_word
    random = words.view(np.uint16)[lead : lead + n]
    if code == CODE_BF16:
        _encode_bf16(values, n, random, raw[: 2 * n].view(np.uint16))
    else:
        rounded = np.empty(TILE_ELEMENTS, np.float32)
        _round_rare(values, n, random, code, rounded)
        encode_tile(rounded, n, raw, 0, code)


@kernel
def _encode_bf16(tile: Floats, n: int, random: Bits16, out: Bits16) -> None:
    # What is from the largest finite number on is rounded to nearest; a tie goes to infinity, whose mantissa is even.
    bits = tile.view(np.uint32)
    added = np.empty(TILE_ELEMENTS, np.uint32)
    for i in range(n):
        is_largest = (bits[i] & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F7F0000)
        added[i] = np.uint32(0x8000) if is_largest else random[i]
    for i in range(n):
        u = bits[i]
        rounded = (u + added[i]) >> np.uint32(16)
        is_nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@kernel
def _round_rare(tile: Floats, n: int, random: Bits16, code: int, out: Floats) -> None:
    """Write numbers that F16, E4M3 or E5M2 hold, and unchanged what is from their largest number on.

    Normal results: random bits are added to those of the mantissa that are rounded off. Smaller ones are multiples of
    the smallest subnormal, `unit`: what is between two of them is compared with a random share.
    """
    lost = 13
    least = np.uint32(0x38800000)
    largest = np.uint32(0x477FE000)
    unit = 2.0**-24
    if code == CODE_E4M3:
        lost = 20
        least = np.uint32(0x3C800000)
        largest = np.uint32(0x43E00000)
        unit = 2.0**-9
    elif code != CODE_F16:
        lost = 21
        largest = np.uint32(0x47600000)
        unit = 2.0**-16
    per_unit = np.float32(1.0 / unit)
    of_unit = np.float32(unit)
    dropped = np.uint32(max(16 - lost, 0))
    widened = np.uint32(max(lost - 16, 0))
    half = np.uint32((1 << lost) >> 17)  # of the resolution of the random bits, where that is above one
    mask = np.uint32(0xFFFFFFFF - ((1 << lost) - 1))
    bits = tile.view(np.uint32)
    out_bits = out.view(np.uint32)
    for i in range(n):
        scaled = abs(tile[i]) * per_unit
        whole = np.floor(scaled)
        between = (scaled - whole) * np.float32(65536.0)
        is_up = between > np.float32(random[i]) + np.float32(0.5)
        out[i] = (whole + np.float32(is_up)) * of_unit
    for i in range(n):
        u = bits[i]
        magnitude = np.uint32(u & np.uint32(0x7FFFFFFF))
        sign = np.uint32(u & np.uint32(0x80000000))
        added = np.uint32(np.uint32(np.uint32(np.uint32(random[i]) >> dropped) << widened) + half)
        normal = np.uint32(np.uint32(magnitude + added) & mask)
        rounded = np.uint32(sign | (out_bits[i] if magnitude < least else normal))
        out_bits[i] = rounded if magnitude < largest else u


@kernel
def is_measured(element: int) -> bool:
    """Whether the tile that an element is in is one of those that are measured: one of eight, anywhere in its grain."""
    grain = element // GRAIN_ELEMENTS
    tile = element // TILE_ELEMENTS
    chosen = np.uint32(np.uint32(grain) * np.uint32(0x9E3779B1)) >> np.uint32(29)
    return tile % _TILES_OF_GRAIN == int(chosen) or tile == 0


@kernel
def measure(values: Floats, base: Floats, raw: Bytes, code: int, sums_2: Doubles) -> None:
    """Add to `sums_2` what rounding keeps of a tile, which is at the start of `raw` as it was written.

    That is the product of the change that was written and the one that was meant, and the square of the latter; changes
    are differences from `base`. A tile with numbers that are not finite is left out. The order of additions depends on
    the number of elements alone.
    """
    n = len(values)
    written = np.empty(TILE_ELEMENTS, np.float32)
    decode_tile(raw, 0, code, n, written)
    products = np.empty(TILE_ELEMENTS, np.float64)
    squares = np.empty(TILE_ELEMENTS, np.float64)
    for i in range(n):
        meant = np.float64(values[i]) - np.float64(base[i])
        products[i] = (np.float64(written[i]) - np.float64(base[i])) * meant
        squares[i] = meant * meant
    product = fold(products, n)
    square = fold(squares, n)
    if product - product == 0.0 and square - square == 0.0:
        sums_2[0] += product
        sums_2[1] += square


@kernel
def encode_by(values: Floats, element: int, key: np.uint64, raw: Bytes, code: int) -> None:
    """Encode a tile to the start of `raw`, rounded stochastically by a key, or to nearest by `TO_NEAREST`."""
    if key == TO_NEAREST:
        encode_tile(values, len(values), raw, 0, code)
    else:
        encode_stochastic(values, element, key, raw, code)


@exported("raw")
def encode_all_by(values: Floats, element: int, key: np.uint64, raw: Bytes, code: int) -> None:
    """Encode any number of elements to the start of `raw`, as `encode_by` does for one tile."""
    for start in range(0, len(values), TILE_ELEMENTS):
        tile = values[start : start + TILE_ELEMENTS]
        encode_by(tile, element + start, key, raw[start * itemsize_of(code) :], code)
