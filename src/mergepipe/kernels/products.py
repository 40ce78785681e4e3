"""Compute inner products of a base and its deltas, and products of thin matrices."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS as _GRAIN
from mergepipe.core.blocks import RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS as _TILE
from mergepipe.kernels.codec import decode_tile, itemsize_of
from mergepipe.kernels.compiled import Bytes, Doubles, Floats, exported, kernel
from mergepipe.kernels.merge import decode_against, decode_base
from mergepipe.kernels.numerics import fold
from mergepipe.kernels.rounding import encode_by, is_measured, measure

# --- divide a tensor into atoms, the intersections of rows and grains, so that sums by row do not depend on block ---
#
# Reads are cut at multiples of `GRAIN_ELEMENTS` or at row starts, so each atom is summed by one thread into its own
# entry; the sum of a row is that of its atoms in order.


@exported()
def atom_of(element: int, row_elements: int, common: int) -> int:
    """The number of the atom of an element; `common` is the least common multiple of rows and grains."""
    return element // row_elements + element // _GRAIN - element // common


@kernel
def atom_stop(element: int, row_elements: int) -> int:
    """The first element after the atom of an element."""
    return min((element // row_elements + 1) * row_elements, (element // _GRAIN + 1) * _GRAIN)


@exported()
def common_multiple(row_elements: int) -> int:
    """The argument `common` of `atom_of`."""
    return row_elements // math.gcd(row_elements, _GRAIN) * _GRAIN


def count_atoms(n_elements: int, row_elements: int) -> int:
    """The number of atoms of a tensor."""
    return int(atom_of(n_elements - 1, row_elements, common_multiple(row_elements))) + 1 if n_elements else 0


def join_atoms(atoms_A: NDArray[np.float64], n_elements: int, row_elements: int) -> NDArray[np.float64]:
    """Add up sums by atom to sums by row (first axis); an empty tensor has one row of zeros."""
    if not n_elements:
        return np.zeros((1, *atoms_A.shape[1:]))
    starts_R = np.arange(0, n_elements, row_elements)
    common = common_multiple(row_elements)
    first_R = starts_R // row_elements + starts_R // _GRAIN - starts_R // common
    return np.asarray(np.add.reduceat(atoms_A, first_R, axis=0))


# --- compute inner products of a base and its deltas with each other, by row or by column ---


@kernel
def decode_frame(block: RawBlock, start: int, n: int, model: Floats, frame_FN: Floats) -> None:
    """Decode `n` elements from `start` on into `frame_FN`: row 0 the base, then the deltas of the experts present."""
    decode_base(block, start, n, frame_FN[0])
    for place in range(len(block.present_E)):
        decode_against(block, place, start, n, frame_FN[0], model, frame_FN[place + 1])


@kernel
def fold_product(x: Floats, y: Floats, n: int, products: Doubles) -> float:
    """Sum `x[:n] * y[:n]` in float64 by a binary tree: the same order of additions on every machine."""
    for i in range(n):
        products[i] = np.float64(x[i]) * np.float64(y[i])
    return fold(products, n)


@exported("gram_AFF")
def add_row_grams(block: RawBlock, row_elements: int, gram_AFF: Doubles) -> None:
    """Add the inner products (upper triangle; base 0, expert `e` at `e + 1`) of a block by atom."""
    n_present, common = len(block.present_E), common_multiple(row_elements)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    products = np.empty(_TILE, np.float64)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        m = min(_TILE, block.n_elements - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        decode_frame(block, start, m, model, frame_FN)
        for i in range(n_present + 1):
            row = 0 if i == 0 else block.present_E[i - 1] + 1
            for j in range(i, n_present + 1):
                column = 0 if j == 0 else block.present_E[j - 1] + 1
                gram_AFF[atom, row, column] += fold_product(frame_FN[i], frame_FN[j], m, products)
        start += m


@exported("gram_CFFP")
def add_column_grams(block: RawBlock, n_columns: int, cell_elements: int, gram_CFFP: Doubles) -> None:
    """Add the products of a block by cell (C) and column (P), in element order."""
    n_present = len(block.present_E)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        column = element % n_columns
        # A tile has each column at most once, so that its sums are independent.
        m = min(_TILE, block.n_elements - start, n_columns - column)
        cell = element // cell_elements
        decode_frame(block, start, m, model, frame_FN)
        for i in range(n_present + 1):
            row = 0 if i == 0 else block.present_E[i - 1] + 1
            for j in range(i, n_present + 1):
                sums = gram_CFFP[cell, row, 0 if j == 0 else block.present_E[j - 1] + 1, column : column + m]
                for k in range(m):
                    sums[k] += np.float64(frame_FN[i, k]) * np.float64(frame_FN[j, k])
        start += m


# --- multiply two thin matrices, for any range of the flattened product ---


TILE_COLUMNS = 512  # a tile of results and sixteen of the right factor fit into the L1 cache


@exported("out", "sums_G2")
def add_low_rank(
    left_RK: Floats,
    right_KC: Floats,
    scale: float,
    first: int,
    weights: Bytes,
    code: int,
    out: Bytes,
    out_code: int,
    element: int,
    rounding_key: np.uint64,
    sums_G2: Doubles,
) -> None:
    """Write weights plus `scale * (left_RK @ right_KC)`, flattened, from element `first` on, rounded to `out_code`.

    Each element is summed in float32 in the order of K, scaled, and added: the result does not depend on how elements
    are grouped into calls. `weights` holds as many elements of the dtype `code` as `out` those of `out_code`, at most
    R * C - `first`; `scale` is rounded to float32. In the tensor they are the elements from `element` on, by which
    they are rounded; what that keeps is added to `sums_G2`, of the tensor's grains from that one's on, if it has rows.
    """
    n_columns, n = right_KC.shape[1], len(weights) // itemsize_of(code)
    factor = np.float32(scale)
    product, tile = np.empty(TILE_COLUMNS, np.float32), np.empty(TILE_COLUMNS, np.float32)
    base = np.empty(TILE_COLUMNS, np.float32)
    done = 0
    while done < n:
        row, column = divmod(first + done, n_columns)
        count = min(n_columns - column, n - done, TILE_COLUMNS)
        _row_tile(left_RK[row], right_KC, column, factor, product[:count])
        decode_tile(weights, done * itemsize_of(code), code, count, base)
        for j in range(count):
            tile[j] = product[j] + base[j]
        made = out[done * itemsize_of(out_code) :]
        place = element + done
        encode_by(tile[:count], place, rounding_key, made, out_code)
        if len(sums_G2) > 0 and is_measured(place):
            measure(tile[:count], base, made, out_code, sums_G2[place // _GRAIN - element // _GRAIN])
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
