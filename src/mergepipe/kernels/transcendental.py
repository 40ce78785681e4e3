"""Compute exponentials and logarithms in float64 with basic arithmetic only, identically on every machine.

Library functions differ between platforms in the last bit, and do not vectorise. Both are within two units in the last
place.
"""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compilation.compiled import Doubles, kernel

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # 32 bits: times a small integer it is exact
_LN2_LOW = 1.9082149292705877e-10
_LEAST, _MOST = -760.0, 720.0  # beyond these the result is 0 or infinite
_ROUNDER = 6755399441055744.0  # 1.5 * 2^52: added to a small number it leaves the nearest integer in the low bits
_ROUNDER_BITS = 0x4338000000000000
_ONE_BITS = 0x3FF0000000000000
_HALF_ROOT_BITS = 0x3FE6A09E667F3BCD  # sqrt(1/2)
_MANTISSA_BITS = 52


@kernel
def exp_tile(values: Doubles, n: int, scratch: Doubles) -> None:
    """Replace `values[:n]` by their exponentials. `scratch` (float64, two rows of a tile) is overwritten.

    Source: `exp x = 2^k exp r` with `|r| <= ln 2 / 2`, and Taylor's series of 14 terms.
    """
    lower, upper = scratch[0], scratch[1]
    lower_bits, upper_bits = lower.view(np.int64), upper.view(np.int64)
    for i in range(n):
        x = values[i]
        x = _LEAST if x < _LEAST else x
        x = _MOST if x > _MOST else x
        lower[i] = x * _LOG2_E + _ROUNDER
        exponents = lower[i] - _ROUNDER
        r = (x - exponents * _LN2_HIGH) - exponents * _LN2_LOW
        p = 1.0 / 6227020800.0
        p = p * r + 1.0 / 479001600.0
        p = p * r + 1.0 / 39916800.0
        p = p * r + 1.0 / 3628800.0
        p = p * r + 1.0 / 362880.0
        p = p * r + 1.0 / 40320.0
        p = p * r + 1.0 / 5040.0
        p = p * r + 1.0 / 720.0
        p = p * r + 1.0 / 120.0
        p = p * r + 1.0 / 24.0
        p = p * r + 1.0 / 6.0
        p = p * r + 0.5
        values[i] = p * r * r + r + 1.0
    for i in range(n):  # two factors, as 2^k itself can overflow
        k = lower_bits[i] - _ROUNDER_BITS
        half = k >> 1
        lower_bits[i] = (half << _MANTISSA_BITS) + _ONE_BITS
        upper_bits[i] = ((k - half) << _MANTISSA_BITS) + _ONE_BITS
    for i in range(n):
        values[i] = values[i] * lower[i] * upper[i]


@kernel
def log_tile(values: Doubles, n: int, scratch: Doubles) -> None:
    """Replace `values[:n]` by their logarithms: normal positive numbers, infinity, NaN.

    `scratch` (float64, two rows of a tile) is overwritten.

    Source: `log x = k ln 2 + 2 artanh s`, `s = (m - 1) / (m + 1)` with `m = x / 2^k` in `[sqrt(1/2), sqrt 2)`, and
    Taylor's series of 11 terms.
    """
    exponents, mantissas = scratch[0], scratch[1]
    bits, mantissa_bits, exponent_bits = values.view(np.int64), mantissas.view(np.int64), exponents.view(np.int64)
    for i in range(n):
        k = (bits[i] - _HALF_ROOT_BITS) >> _MANTISSA_BITS
        mantissa_bits[i] = bits[i] - (k << _MANTISSA_BITS)
        exponent_bits[i] = k + _ROUNDER_BITS
    for i in range(n):
        k = exponents[i] - _ROUNDER
        f = mantissas[i] - 1.0
        s = f / (mantissas[i] + 1.0)
        z = s * s
        p = 1.0 / 21.0
        p = p * z + 1.0 / 19.0
        p = p * z + 1.0 / 17.0
        p = p * z + 1.0 / 15.0
        p = p * z + 1.0 / 13.0
        p = p * z + 1.0 / 11.0
        p = p * z + 1.0 / 9.0
        p = p * z + 1.0 / 7.0
        p = p * z + 1.0 / 5.0
        p = p * z + 1.0 / 3.0
        # 2 artanh s = f - s f + 2 s^3 p, since f = s (2 + f)
        small = f - s * (f - 2.0 * z * p)
        value = k * _LN2_HIGH + (small + k * _LN2_LOW)
        values[i] = value if values[i] < np.inf else values[i]
