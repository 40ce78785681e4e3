"""Multiply two thin matrices, for any range of the flattened product."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compilation.compiled import Floats, kernel

TILE_COLUMNS = 1024  # a tile of results and four of the right factor fit into the L1 cache


@kernel
def low_rank_product(left_RK: Floats, right_KC: Floats, scale: float, first: int, out: Floats) -> None:
    """Write `scale * (left_RK @ right_KC)`, flattened, from element `first` on into all of `out` (float32).

    Each element is summed in float32 in the order of K and scaled last: the result does not depend on how elements
    are grouped into calls. `first + len(out)` is at most R * C; `scale` is rounded to float32.
    """
    n_columns = right_KC.shape[1]
    factor = np.float32(scale)
    done = 0
    while done < len(out):
        row, column = divmod(first + done, n_columns)
        count = min(n_columns - column, len(out) - done, TILE_COLUMNS)
        _row_tile(left_RK[row], right_KC, column, factor, out[done : done + count])
        done += count


@kernel
def _row_tile(left_K: Floats, right_KC: Floats, column: int, factor: np.float32, out: Floats) -> None:
    n, rank = len(out), len(left_K)
    for j in range(n):
        out[j] = np.float32(0.0)
    k = 0
    while k + 4 <= rank:
        a, b, c, d = left_K[k], left_K[k + 1], left_K[k + 2], left_K[k + 3]
        row_a = right_KC[k, column : column + n]
        row_b = right_KC[k + 1, column : column + n]
        row_c = right_KC[k + 2, column : column + n]
        row_d = right_KC[k + 3, column : column + n]
        for j in range(n):
            out[j] = (((out[j] + a * row_a[j]) + b * row_b[j]) + c * row_c[j]) + d * row_d[j]
        k += 4
    while k < rank:
        last = left_K[k]
        row = right_KC[k, column : column + n]
        for j in range(n):
            out[j] = out[j] + last * row[j]
        k += 1
    for j in range(n):
        out[j] = out[j] * factor
