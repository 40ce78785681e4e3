"""Merge by how many experts change an element: a single change is scaled, several are averaged."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS, encode_tile, itemsize_of
from mergepipe.kernels.compilation.compiled import Bytes, Counts, Floats, kernel
from mergepipe.kernels.gram import decode_frame
from mergepipe.kernels.select import count_changes

_TILE = TILE_ELEMENTS


@kernel
def merge_overlapping(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offsets_E: Counts,
    codes_E: Counts,
    epsilon: np.float32,
    own_scales_E: Floats,
    out: Bytes,
    out_offset: int,
    out_code: int,
    n: int,
) -> None:
    """Write `M_0 +` the single delta larger than `epsilon` times its expert's scale, or the mean of several."""
    n_present = offsets_E.shape[0]
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    changes = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_frame(raw, base_offset, base_code, offsets_E, codes_E, start, m, model, frame_FN)
        count_changes(frame_FN[1:], n_present, m, epsilon, changes)
        for i in range(m):
            total[i] = zero
        for e in range(n_present):
            delta, expert_scale = frame_FN[e + 1], own_scales_E[e]
            for i in range(m):
                shared = delta[i] / changes[i]
                share = shared if changes[i] > one else expert_scale * delta[i]
                total[i] += share if abs(delta[i]) > epsilon else zero
        for i in range(m):
            merged = frame_FN[0, i] + total[i]
            total[i] = frame_FN[0, i] if changes[i] == zero else merged
        encode_tile(total, m, out, out_offset + start * itemsize_of(out_code), out_code)
        start += m
