"""Divide a tensor into atoms, the intersections of rows and grains, so that sums by row do not depend on block cuts.

Reads are cut at multiples of `GRAIN_ELEMENTS` or at row starts, so each atom is summed by one thread into its own
entry; the sum of a row is that of its atoms in order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS
from mergepipe.kernels.compilation.compiled import kernel

_GRAIN = GRAIN_ELEMENTS


@kernel
def atom_of(element: int, row_elements: int, common: int) -> int:
    """The number of the atom of an element; `common` is the least common multiple of rows and grains."""
    return element // row_elements + element // _GRAIN - element // common


@kernel
def atom_stop(element: int, row_elements: int) -> int:
    """The first element after the atom of an element."""
    return min((element // row_elements + 1) * row_elements, (element // _GRAIN + 1) * _GRAIN)


def common_multiple(row_elements: int) -> int:
    """The argument `common` of `atom_of`."""
    return math.lcm(row_elements, _GRAIN)


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
