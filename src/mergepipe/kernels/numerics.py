"""Random bits by counter, exponentials, logarithms and sums: identical on every machine."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compiled import Bits32, Doubles, exported, kernel

# --- generate random bits with Philox4x32-10, a counter-based generator ---
# those of element `i` depend on (key, i) only
#
# Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and the
# known-answer vectors in the tests are those of the paper's Random123 library.


# Elements are numbered in groups: element `e` owns word `(e % 64) // 16` of counter `16 * (e // 64) + e % 16`, so that
# sixteen counters at a time fill four whole vectors in element order.
GROUP_LANES = 16
GROUP_ELEMENTS = 4 * GROUP_LANES


@exported("out")
def fill_random_words(key: np.uint64, first_group: int, n_groups: int, out: Bits32) -> None:
    """Write the random words (uint32) of the `64 * n_groups` elements from group `first_group` on to `out`.

    `key` is 64 bits; the upper 64 bits of every counter are zero.
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    key0 = np.uint64(key) & low
    key1 = np.uint64(key) >> shift
    for g in range(n_groups):
        group = out[GROUP_ELEMENTS * g : GROUP_ELEMENTS * (g + 1)]
        first_counter = np.uint64(GROUP_LANES) * (np.uint64(first_group) + np.uint64(g))
        for lane in range(GROUP_LANES):
            counter = first_counter + np.uint64(lane)
            c0 = counter & low
            c1 = counter >> shift
            c2 = np.uint64(0)
            c3 = np.uint64(0)
            k0 = key0
            k1 = key1
            for _ in range(10):
                p0 = np.uint64(0xD2511F53) * c0
                p1 = np.uint64(0xCD9E8D57) * c2
                c0 = (p1 >> shift) ^ c1 ^ k0
                c1 = p1 & low
                c2 = (p0 >> shift) ^ c3 ^ k1
                c3 = p0 & low
                k0 = (k0 + np.uint64(0x9E3779B9)) & low
                k1 = (k1 + np.uint64(0xBB67AE85)) & low
            group[lane] = np.uint32(c0)
            group[lane + GROUP_LANES] = np.uint32(c1)
            group[lane + 2 * GROUP_LANES] = np.uint32(c2)
            group[lane + 3 * GROUP_LANES] = np.uint32(c3)


# --- compute exponentials and logarithms in float64 with basic arithmetic only, identically on every machine ---
#
# Library functions differ between platforms in the last bit, and do not vectorise. Both are within two units in the
# last place. A series is one chain of products and sums, so each loop follows the chains of four elements at a time.


_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # 32 bits: times a small integer it is exact
_LN2_LOW = 1.9082149292705877e-10
_LEAST, _MOST = -760.0, 720.0  # beyond these the result is 0 or infinite
_ROUNDER = 6755399441055744.0  # 1.5 * 2^52: added to a small number it leaves the nearest integer in the low bits
_ROUNDER_BITS = 0x4338000000000000
_ONE_BITS = 0x3FF0000000000000
_HALF_ROOT_BITS = 0x3FE6A09E667F3BCD  # sqrt(1/2)
_MANTISSA_BITS = 52
_EXP_FIRST = 1.0 / 6227020800.0  # 1 / 13!
_EXP_TERMS = (
    1.0 / 479001600.0,
    1.0 / 39916800.0,
    1.0 / 3628800.0,
    1.0 / 362880.0,
    1.0 / 40320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
)
_LOG_FIRST = 1.0 / 21.0
_LOG_TERMS = (1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0)


@exported("out")
def exp_tile(values: Doubles, n: int, out: Doubles) -> None:
    """Write the exponentials of `values[:n]` to `out`, another array.

    Source: `exp x = 2^k exp r` with `|r| <= ln 2 / 2`, and Taylor's series of 14 terms.
    """
    quarter = n // 4
    _exp_fours(values, quarter, quarter, out)
    for i in range(4 * quarter, n):
        _exp_fours(values[i:], 1, 0, out[i:])


@kernel
def _exp_fours(values: Doubles, n: int, step: int, out: Doubles) -> None:
    """Write the exponentials of four runs of `n` values that begin `step` apart."""
    values1, values2, values3 = values[step:], values[2 * step :], values[3 * step :]
    out1, out2, out3 = out[step:], out[2 * step :], out[3 * step :]
    for i in range(n):
        x0, x1, x2, x3 = _clamp(values[i]), _clamp(values1[i]), _clamp(values2[i]), _clamp(values3[i])
        t0, t1, t2, t3 = _rounded(x0), _rounded(x1), _rounded(x2), _rounded(x3)
        r0, r1, r2, r3 = _rest(x0, t0), _rest(x1, t1), _rest(x2, t2), _rest(x3, t3)
        p0 = p1 = p2 = p3 = _EXP_FIRST
        for term in _EXP_TERMS:
            p0, p1, p2, p3 = p0 * r0 + term, p1 * r1 + term, p2 * r2 + term, p3 * r3 + term
        out[i] = _raise(p0 * r0 * r0 + r0 + 1.0, t0)
        out1[i] = _raise(p1 * r1 * r1 + r1 + 1.0, t1)
        out2[i] = _raise(p2 * r2 * r2 + r2 + 1.0, t2)
        out3[i] = _raise(p3 * r3 * r3 + r3 + 1.0, t3)


@kernel
def _clamp(x: float) -> float:
    x = _LEAST if x < _LEAST else x
    return _MOST if x > _MOST else x


@kernel
def _rounded(x: float) -> float:
    """Return a number with the power of two nearest to `exp x` in its low bits."""
    return x * _LOG2_E + _ROUNDER


@kernel
def _rest(x: float, rounded: float) -> float:
    """Return what that power of two leaves of the exponent."""
    exponents = rounded - _ROUNDER
    return (x - exponents * _LN2_HIGH) - exponents * _LN2_LOW


@kernel
def _raise(p: float, rounded: float) -> float:
    """Multiply by that power of two, in two factors, as it can overflow itself."""
    k = np.float64(rounded).view(np.int64) - _ROUNDER_BITS
    half = k >> 1
    lower = np.int64((half << _MANTISSA_BITS) + _ONE_BITS).view(np.float64)
    upper = np.int64(((k - half) << _MANTISSA_BITS) + _ONE_BITS).view(np.float64)
    return p * lower * upper


@exported("out")
def log_tile(values: Doubles, n: int, out: Doubles) -> None:
    """Write the logarithms of `values[:n]`, which are normal positive numbers, infinity, NaN, to `out`, another array.

    Source: `log x = k ln 2 + 2 artanh s`, `s = (m - 1) / (m + 1)` with `m = x / 2^k` in `[sqrt(1/2), sqrt 2)`, and
    Taylor's series of 11 terms.
    """
    quarter = n // 4
    _log_fours(values, quarter, quarter, out)
    for i in range(4 * quarter, n):
        _log_fours(values[i:], 1, 0, out[i:])


@kernel
def _log_fours(values: Doubles, n: int, step: int, out: Doubles) -> None:
    """Write the logarithms of four runs of `n` values that begin `step` apart."""
    values1, values2, values3 = values[step:], values[2 * step :], values[3 * step :]
    out1, out2, out3 = out[step:], out[2 * step :], out[3 * step :]
    for i in range(n):
        f0, f1, f2, f3 = _fraction(values[i]), _fraction(values1[i]), _fraction(values2[i]), _fraction(values3[i])
        s0, s1, s2, s3 = f0 / (f0 + 2.0), f1 / (f1 + 2.0), f2 / (f2 + 2.0), f3 / (f3 + 2.0)
        z0, z1, z2, z3 = s0 * s0, s1 * s1, s2 * s2, s3 * s3
        p0 = p1 = p2 = p3 = _LOG_FIRST
        for term in _LOG_TERMS:
            p0, p1, p2, p3 = p0 * z0 + term, p1 * z1 + term, p2 * z2 + term, p3 * z3 + term
        out[i] = _logarithm(values[i], f0, s0, z0, p0)
        out1[i] = _logarithm(values1[i], f1, s1, z1, p1)
        out2[i] = _logarithm(values2[i], f2, s2, z2, p2)
        out3[i] = _logarithm(values3[i], f3, s3, z3, p3)


@kernel
def _exponent(x: float) -> int:
    """Return the power of two `k` with `x / 2^k` in `[sqrt(1/2), sqrt 2)`."""
    return int(np.float64(x).view(np.int64) - _HALF_ROOT_BITS) >> _MANTISSA_BITS


@kernel
def _fraction(x: float) -> float:
    """Return `x / 2^k - 1`."""
    return np.int64(np.float64(x).view(np.int64) - (_exponent(x) << _MANTISSA_BITS)).view(np.float64) - 1.0


@kernel
def _logarithm(x: float, f: float, s: float, z: float, p: float) -> float:
    """Return `k ln 2 + 2 artanh s`, or `x` if it is not finite."""
    k = np.int64(_exponent(x) + _ROUNDER_BITS).view(np.float64) - _ROUNDER
    small = f - s * (f - 2.0 * z * p)  # 2 artanh s = f - s f + 2 s^3 p, since f = s (2 + f)
    value = k * _LN2_HIGH + (small + k * _LN2_LOW)
    return value if x < np.inf else x


@kernel
def fold(values: Doubles, n: int) -> float:
    """Sum `values[:n]` (at most a tile) by a binary tree; the values are overwritten."""
    width = 1
    while width < n:
        width *= 2
    for i in range(n, width):
        values[i] = 0.0
    while width >= 8:  # three levels at once
        width //= 8
        second, third, fourth = values[width:], values[2 * width :], values[3 * width :]
        fifth, sixth, seventh, eighth = (
            values[4 * width :],
            values[5 * width :],
            values[6 * width :],
            values[7 * width :],
        )
        for i in range(width):
            even = (values[i] + fifth[i]) + (third[i] + seventh[i])
            values[i] = even + ((second[i] + sixth[i]) + (fourth[i] + eighth[i]))
    while width > 1:
        width //= 2
        for i in range(width):
            values[i] += values[i + width]
    return float(values[0])
