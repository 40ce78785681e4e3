"""Compute inner products of a base and its deltas with each other, by row or by column."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.atoms import atom_of, atom_stop
from mergepipe.kernels.codec import TILE_ELEMENTS, decode_tile, itemsize_of
from mergepipe.kernels.compilation.compiled import Bytes, Counts, Doubles, Floats, kernel
from mergepipe.kernels.merge import decode_against

_TILE = TILE_ELEMENTS


@kernel
def decode_frame(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offsets_E: Counts,
    codes_E: Counts,
    start: int,
    n: int,
    model: Floats,
    frame_FN: Floats,
) -> None:
    """Decode `n` elements from `start` on into `frame_FN`: row 0 the base, then the deltas of the experts present."""
    base = frame_FN[0]
    decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, n, base)
    for e in range(offsets_E.shape[0]):
        decode_against(raw, offsets_E[e], codes_E[e], start, n, base, model, frame_FN[e + 1])


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


@kernel
def fold_product(x: Floats, y: Floats, n: int, products: Doubles) -> float:
    """Sum `x[:n] * y[:n]` in float64 by a binary tree: the same order of additions on every machine."""
    for i in range(n):
        products[i] = np.float64(x[i]) * np.float64(y[i])
    return fold(products, n)


@kernel
def add_row_grams(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    present_E: Counts,
    offsets_E: Counts,
    codes_E: Counts,
    first_element: int,
    n: int,
    row_elements: int,
    common: int,
    gram_AFF: Doubles,
) -> None:
    """Add the inner products (upper triangle; base 0, expert `e` at `e + 1`) of `n` elements by atom."""
    n_present = offsets_E.shape[0]
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    products = np.empty(_TILE, np.float64)
    start = 0
    while start < n:
        element = first_element + start
        m = min(_TILE, n - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        decode_frame(raw, base_offset, base_code, offsets_E, codes_E, start, m, model, frame_FN)
        for i in range(n_present + 1):
            row = 0 if i == 0 else present_E[i - 1] + 1
            for j in range(i, n_present + 1):
                column = 0 if j == 0 else present_E[j - 1] + 1
                gram_AFF[atom, row, column] += fold_product(frame_FN[i], frame_FN[j], m, products)
        start += m


@kernel
def add_column_grams(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    present_E: Counts,
    offsets_E: Counts,
    codes_E: Counts,
    first_element: int,
    n: int,
    n_columns: int,
    cell_elements: int,
    gram_CFFP: Doubles,
) -> None:
    """Add the products of `n` elements by cell (C) and column (P), in element order."""
    n_present = offsets_E.shape[0]
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    start = 0
    while start < n:
        element = first_element + start
        column = element % n_columns
        # A tile has each column at most once, so that its sums are independent.
        m = min(_TILE, n - start, n_columns - column)
        cell = element // cell_elements
        decode_frame(raw, base_offset, base_code, offsets_E, codes_E, start, m, model, frame_FN)
        for i in range(n_present + 1):
            row = 0 if i == 0 else present_E[i - 1] + 1
            for j in range(i, n_present + 1):
                sums = gram_CFFP[cell, row, 0 if j == 0 else present_E[j - 1] + 1, column : column + m]
                for k in range(m):
                    sums[k] += np.float64(frame_FN[i, k]) * np.float64(frame_FN[j, k])
        start += m
