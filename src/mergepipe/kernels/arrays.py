"""Decode whole blocks to float32 arrays and encode them again, for merge rules that are not compiled."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS, decode_tile, encode_tile, itemsize_of
from mergepipe.kernels.compiled import Bytes, Counts, Floats, kernel
from mergepipe.kernels.merge import decode_against

_TILE = TILE_ELEMENTS


@kernel
def decode_arrays(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    present_E: Counts,
    offsets_E: Counts,
    codes_E: Counts,
    skip: int,
    base_N: Floats,
    deltas_EN: Floats,
) -> None:
    """Decode the elements from `skip` on: the base into `base_N`, deltas into the rows of the experts present."""
    n = base_N.shape[0]
    model = np.empty(_TILE, np.float32)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        base = base_N[start : start + m]
        decode_tile(raw, base_offset + (skip + start) * itemsize_of(base_code), base_code, m, base)
        for place in range(present_E.shape[0]):
            delta = deltas_EN[present_E[place], start : start + m]
            decode_against(raw, offsets_E[place], codes_E[place], skip + start, m, base, model, delta)
        start += m


@kernel
def encode_array(values_N: Floats, out: Bytes, offset: int, code: int) -> None:
    """Encode all of `values_N` at byte `offset` of `out`."""
    n = values_N.shape[0]
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        encode_tile(values_N[start : start + m], m, out, offset + start * itemsize_of(code), code)
        start += m
