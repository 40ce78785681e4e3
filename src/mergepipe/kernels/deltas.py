"""Differences between two stored tensors: made, applied, and tried for whether they give the second one back."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS, decode_tile, encode_tile, itemsize_of
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, Floats, kernel

_SIGN = 0x80000000


@kernel
def _difference(base: Floats, expert: Floats, n: int, delta: Floats) -> None:
    """`expert - base`; where both are the same, a zero that gives back even -0 and infinities."""
    base_bits: Bits32 = base.view(np.uint32)
    expert_bits: Bits32 = expert.view(np.uint32)
    delta_bits: Bits32 = delta.view(np.uint32)
    for i in range(n):
        delta[i] = expert[i] - base[i]
    for i in range(n):
        zero = np.uint32(_SIGN) if base_bits[i] == np.uint32(_SIGN) else np.uint32(0)
        delta_bits[i] = zero if base_bits[i] == expert_bits[i] else delta_bits[i]


@kernel
def make_delta(base: Bytes, base_code: int, expert: Bytes, expert_code: int, out: Bytes, out_code: int) -> None:
    """Write `expert - base` (float32, one rounding) for all elements of `expert` into `out`."""
    b, e = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    d = np.empty(TILE_ELEMENTS, np.float32)
    total = len(expert) // itemsize_of(expert_code)
    for start in range(0, total, TILE_ELEMENTS):
        n = min(TILE_ELEMENTS, total - start)
        decode_tile(base, start * itemsize_of(base_code), base_code, n, b)
        decode_tile(expert, start * itemsize_of(expert_code), expert_code, n, e)
        _difference(b, e, n, d)
        encode_tile(d, n, out, start * itemsize_of(out_code), out_code)


@kernel
def add_delta(base: Bytes, base_code: int, delta: Bytes, delta_code: int, out: Bytes, out_code: int) -> None:
    """Write `base + delta` (float32, one rounding) for all elements of `delta` into `out`."""
    b, d = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    total = len(delta) // itemsize_of(delta_code)
    for start in range(0, total, TILE_ELEMENTS):
        n = min(TILE_ELEMENTS, total - start)
        decode_tile(base, start * itemsize_of(base_code), base_code, n, b)
        decode_tile(delta, start * itemsize_of(delta_code), delta_code, n, d)
        for i in range(n):
            b[i] = b[i] + d[i]
        encode_tile(b, n, out, start * itemsize_of(out_code), out_code)


@kernel
def compare(found: Bytes, wanted: Bytes, code: int, differing: Counts, worst: Doubles) -> None:
    """Add to `differing[0]` the elements whose bits differ; raise `worst[0]` to the largest finite distance."""
    size = itemsize_of(code)
    f, w = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    total = len(wanted) // size
    for start in range(0, total, TILE_ELEMENTS):
        n = min(TILE_ELEMENTS, total - start)
        different = np.uint8(0)
        for byte in range(start * size, (start + n) * size):
            different |= found[byte] ^ wanted[byte]
        if different == 0:  # as it nearly always is
            continue
        decode_tile(found, start * size, code, n, f)
        decode_tile(wanted, start * size, code, n, w)
        for i in range(n):
            same = True
            for byte in range((start + i) * size, (start + i + 1) * size):
                same = same and found[byte] == wanted[byte]
            differing[0] += 0 if same else 1
            distance = abs(np.float64(f[i]) - np.float64(w[i]))
            if distance > worst[0] and distance < np.inf:
                worst[0] = distance
