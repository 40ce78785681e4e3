"""Decode tiles of stored elements to float32, and encode them, on raw bytes.

A tile is at most `TILE_ELEMENTS` consecutive elements, so that it stays in the L1 cache between decode, arithmetic and
encode. `code` is `DType.kernel_code`. Offsets are bytes into a flat `uint8` buffer, at any alignment.

Encoding rounds to nearest, ties to even; every NaN becomes the quiet NaN of the target with a clear sign, so that
results do not depend on how a processor propagates payloads. Overflow becomes infinity. E4M3 has no infinity: overflow
and infinities become its largest number, 448 (docs/decisions/014-fp8-overflow.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG
from mergepipe.kernels.compiled import Bits32, Bytes, Floats, exported, kernel

TILE_ELEMENTS = 2048

CODE_F64, CODE_F32, CODE_F16, CODE_BF16, CODE_E4M3, CODE_E5M2 = 0, 1, 2, 3, 4, 5
IS_DELTA = DELTA_FLAG
_DTYPE_BITS = DELTA_FLAG - 1


@kernel
def itemsize_of(code: int) -> int:
    """The size of one element in bytes."""
    dtype = code & _DTYPE_BITS
    if dtype == CODE_F64:
        return 8
    if dtype == CODE_F32:
        return 4
    return 2 if dtype <= CODE_BF16 else 1


@exported("out")
def decode_tile(raw: Bytes, offset: int, code: int, n: int, out: Floats) -> None:
    """Decode `n` elements at byte `offset` of `raw` into `out[:n]` (float32)."""
    out_bits = out.view(np.uint32)
    code &= _DTYPE_BITS
    if code == CODE_BF16:
        halves = raw[offset : offset + 2 * n].view(np.uint16)
        for i in range(n):
            out_bits[i] = np.uint32(halves[i]) << np.uint32(16)
    elif code == CODE_F32:
        words = raw[offset : offset + 4 * n].view(np.uint32)
        for i in range(n):
            out_bits[i] = words[i]
    else:
        _decode_less_common(raw, offset, code, n, out)


@kernel
def _decode_less_common(raw: Bytes, offset: int, code: int, n: int, out: Floats) -> None:
    # Separate, so that `decode_tile` is small enough to be inlined.
    out_bits = out.view(np.uint32)
    if code == CODE_F16:
        halves = raw[offset : offset + 2 * n].view(np.uint16)
        _decode_f16(halves, n, out, out_bits)
    elif code == CODE_E4M3:
        _decode_e4m3(raw[offset : offset + n], n, out, out_bits)
    elif code == CODE_E5M2:
        _decode_e5m2(raw[offset : offset + n], n, out, out_bits)
    else:
        doubles = raw[offset : offset + 8 * n].view(np.float64)
        for i in range(n):
            out[i] = np.float32(doubles[i])


@kernel
def _decode_f16(halves: NDArray[np.uint16], n: int, out: Floats, out_bits: Bits32) -> None:
    # Shifted into place, the exponent is 112 too small for float32. Subnormals are converted as whole numbers: as
    # subnormals of float32 they would take a hundred cycles each. Inf and NaN are patched afterwards.
    bias, unit = np.uint32(112 << 23), np.float32(2.0**-24)
    for i in range(n):
        out_bits[i] = np.uint32(np.uint32(np.uint32(halves[i] & np.uint16(0x7FFF)) << np.uint32(13)) + bias)
    for i in range(n):
        half_value = np.int32(halves[i])
        subnormal = np.float32(np.float32(half_value & np.int32(0x03FF)) * unit)
        out[i] = subnormal if (half_value & np.int32(0x7C00)) == np.int32(0) else out[i]
    for i in range(n):
        half = np.uint32(halves[i])
        sign = (half & np.uint32(0x8000)) << np.uint32(16)
        special = np.uint32(0x7F800000) | ((half & np.uint32(0x03FF)) << np.uint32(13))
        is_special = (half & np.uint32(0x7C00)) == np.uint32(0x7C00)
        out_bits[i] = sign | (special if is_special else out_bits[i])


@kernel
def _decode_e4m3(stored: Bytes, n: int, out: Floats, out_bits: Bits32) -> None:
    # As _decode_f16, with an exponent that is 120 too small. All ones is the only NaN, and there is no infinity.
    bias, unit = np.uint32(120 << 23), np.float32(2.0**-9)
    for i in range(n):
        out_bits[i] = np.uint32(np.uint32(np.uint32(stored[i] & np.uint8(0x7F)) << np.uint32(20)) + bias)
    for i in range(n):
        byte_value = np.int32(stored[i])
        subnormal = np.float32(np.float32(byte_value & np.int32(0x07)) * unit)
        out[i] = subnormal if (byte_value & np.int32(0x78)) == np.int32(0) else out[i]
    for i in range(n):
        byte = np.uint32(stored[i])
        sign = (byte & np.uint32(0x80)) << np.uint32(24)
        is_nan = (byte & np.uint32(0x7F)) == np.uint32(0x7F)
        out_bits[i] = sign | (np.uint32(0x7FC00000) if is_nan else out_bits[i])


@kernel
def _decode_e5m2(stored: Bytes, n: int, out: Floats, out_bits: Bits32) -> None:
    # The upper byte of a float16.
    bias, unit = np.uint32(112 << 23), np.float32(2.0**-16)
    for i in range(n):
        out_bits[i] = np.uint32(np.uint32(np.uint32(stored[i] & np.uint8(0x7F)) << np.uint32(21)) + bias)
    for i in range(n):
        byte_value = np.int32(stored[i])
        subnormal = np.float32(np.float32(byte_value & np.int32(0x03)) * unit)
        out[i] = subnormal if (byte_value & np.int32(0x7C)) == np.int32(0) else out[i]
    for i in range(n):
        byte = np.uint32(stored[i])
        sign = (byte & np.uint32(0x80)) << np.uint32(24)
        special = np.uint32(0x7F800000) | ((byte & np.uint32(0x03)) << np.uint32(21))
        is_special = (byte & np.uint32(0x7C)) == np.uint32(0x7C)
        out_bits[i] = sign | (special if is_special else out_bits[i])


@exported("raw")
def encode_tile(tile: Floats, n: int, raw: Bytes, offset: int, code: int) -> None:
    """Encode `tile[:n]` (float32) at byte `offset` of `raw`."""
    bits = tile.view(np.uint32)
    if code == CODE_BF16:
        halves = raw[offset : offset + 2 * n].view(np.uint16)
        for i in range(n):
            u = bits[i]
            rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            halves[i] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)
    elif code == CODE_F32:
        words = raw[offset : offset + 4 * n].view(np.uint32)
        for i in range(n):
            u = bits[i]
            is_nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            words[i] = np.uint32(0x7FC00000) if is_nan else u
    else:
        _encode_less_common(tile, n, raw, offset, code)


@kernel
def _encode_less_common(tile: Floats, n: int, raw: Bytes, offset: int, code: int) -> None:
    bits = tile.view(np.uint32)
    if code == CODE_F16:
        halves = raw[offset : offset + 2 * n].view(np.uint16)
        _encode_f16(tile, bits, n, halves)
    elif code == CODE_E4M3:
        _encode_f8(tile, bits, n, raw[offset : offset + n], 20, np.float32(2.0**14))
    elif code == CODE_E5M2:
        _encode_f8(tile, bits, n, raw[offset : offset + n], 21, np.float32(2.0**7))
    else:
        doubles = raw[offset : offset + 8 * n].view(np.uint64)
        values = raw[offset : offset + 8 * n].view(np.float64)
        for i in range(n):
            values[i] = np.float64(tile[i])
        for i in range(n):
            is_nan = (bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            doubles[i] = np.uint64(0x7FF8000000000000) if is_nan else doubles[i]


@kernel
def _encode_f16(tile: Floats, bits: Bits32, n: int, halves: NDArray[np.uint16]) -> None:
    # Normal results: re-bias the exponent and round off 13 bits. Results below 2**-14: adding 0.5 puts the
    # value's float16 subnormal bits, rounded by the adder, into the low end of the mantissa of 0.5.
    raised = np.empty(TILE_ELEMENTS, np.float32)
    raised_bits = raised.view(np.uint32)
    for i in range(n):
        raised[i] = abs(tile[i]) + np.float32(0.5)
    for i in range(n):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        normal = (magnitude - np.uint32(0x38000000) + np.uint32(0x0FFF) + odd) >> np.uint32(13)
        small = raised_bits[i] - np.uint32(0x3F000000)
        rounded = small if magnitude < np.uint32(0x38800000) else normal
        # From 65520 on, the nearest float16 is infinity.
        rounded = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else rounded
        is_nan = magnitude > np.uint32(0x7F800000)
        halves[i] = np.uint16(np.uint32(0x7E00) if is_nan else (sign | rounded))


@kernel
def _encode_f8(tile: Floats, bits: Bits32, n: int, stored: Bytes, shift: int, lifter: np.float32) -> None:
    # As _encode_f16: `lifter` is the float32 whose unit in the last place is the smallest subnormal, `shift` the number
    # of mantissa bits rounded off. Magnitudes from `too_large` on are stored as `beyond`: from 464, halfway from 448 to
    # what would be the next number of E4M3, and from 61440, where the nearest E5M2 value is infinity.
    lost_bits = np.uint32(shift)
    is_e4m3 = shift == 20
    rebias = np.uint32(0x3C000000) if is_e4m3 else np.uint32(0x38000000)
    too_large = np.uint32(0x43E80000) if is_e4m3 else np.uint32(0x47700000)
    beyond = np.uint32(0x7E) if is_e4m3 else np.uint32(0x7C)
    nan = np.uint32(0x7F) if is_e4m3 else np.uint32(0x7E)
    below_half = (np.uint32(1) << (lost_bits - np.uint32(1))) - np.uint32(1)
    raised = np.empty(TILE_ELEMENTS + 1, np.float32)
    raised_bits = raised.view(np.uint32)
    raised[TILE_ELEMENTS] = lifter
    lifter_bits = raised_bits[TILE_ELEMENTS]
    for i in range(n):
        raised[i] = abs(tile[i]) + lifter
    for i in range(n):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        sign = (bits[i] >> np.uint32(24)) & np.uint32(0x80)
        odd = (magnitude >> lost_bits) & np.uint32(1)
        normal = (magnitude - rebias + below_half + odd) >> lost_bits
        small = raised_bits[i] - lifter_bits
        rounded = small if magnitude < rebias + np.uint32(0x00800000) else normal
        is_nan = magnitude > np.uint32(0x7F800000)
        rounded = beyond if magnitude >= too_large else rounded
        stored[i] = np.uint8(nan if is_nan else (sign | rounded))


@exported("out")
def decode_all(raw: Bytes, code: int, n: int, out: Floats) -> None:
    """Decode any number of elements from the start of `raw`, as `decode_tile` does for one tile."""
    start = 0
    while start < n:
        m = min(TILE_ELEMENTS, n - start)
        decode_tile(raw, start * itemsize_of(code), code, m, out[start : start + m])
        start += m


@exported("raw")
def encode_all(values: Floats, raw: Bytes, code: int) -> None:
    """Encode any number of elements to the start of `raw`, as `encode_tile` does for one tile."""
    start = 0
    while start < values.shape[0]:
        m = min(TILE_ELEMENTS, values.shape[0] - start)
        encode_tile(values[start : start + m], m, raw, start * itemsize_of(code), code)
        start += m
