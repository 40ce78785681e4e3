"""Approximate a matrix by a product of two thin factors, of a fixed rank or as few as keep a share of its energy.

Legend: M rows, N columns, R rank, S columns of a sketch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

EXACT_SIDE = 768
"""Up to this shorter side LAPACK decomposes the whole matrix in about a second."""
EXACT_SHARE = 3
"""A sketch of more than one `EXACT_SHARE`-th of the shorter side is no cheaper than the whole decomposition."""
_OVERSAMPLING = 16
_POWER_ITERATIONS = 3
_FIRST_RANK = 32
_RESIDUAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Factors:
    """`up_MR @ down_RN` approximates a matrix; norms are Frobenius norms in float64, `error` that of the difference.

    The factors share the singular values evenly, so that their entries are of one size.
    """

    up_MR: Matrix
    down_RN: Matrix
    error: float
    norm: float

    @property
    def rank(self) -> int:
        return int(self.up_MR.shape[1])

    @property
    def relative_error(self) -> float:
        """The error relative to the matrix; 0 for a matrix of zeros."""
        return self.error / self.norm if self.norm else 0.0


def truncated_svd(matrix_MN: Matrix, rank: int | None, energy: float | None, seed: int) -> Factors:
    """Decompose a matrix, keeping `rank` singular values at most, and no more than `energy` of its square sum needs.

    Small matrices are decomposed whole (LAPACK, float32). Of large ones a random sketch is refined by power iterations
    and orthonormalised in float64; its error exceeds the least possible one by well under a percent. The error that is
    returned was measured on the factors as they are. Memory: the matrix, and at most twice the factors; three times
    the matrix where it is decomposed whole.

    Source: N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", 2011, algorithms 4.4 and 5.1.
    """
    if (rank is None and energy is None) or (rank is not None and rank < 1):
        raise ValueError("a rank above zero or an energy is needed")
    if energy is not None and not 0.0 < energy <= 1.0:
        raise ValueError("an energy is in (0, 1]")
    norm = _norm(matrix_MN)
    side = min(matrix_MN.shape)
    most = side if rank is None else min(rank, side)
    if not norm:
        return Factors(matrix_MN[:, :0], matrix_MN[:0], 0.0, 0.0)
    tried = most if energy is None else min(most, _FIRST_RANK)
    while True:
        if side <= EXACT_SIDE or (tried + _OVERSAMPLING) * EXACT_SHARE > side:
            left, values, right = _decomposed(matrix_MN)
            return _factors(matrix_MN, left, values, right, _kept(values, norm, most, energy), norm)
        left, values, right = _sketched(matrix_MN, tried, seed)
        n_kept = _kept(values, norm, tried, energy)
        if tried == most or (energy is not None and _energy(values[:n_kept]) >= energy * norm**2):
            return _factors(matrix_MN, left, values, right, n_kept, norm)
        tried = min(most, 2 * tried)


def _kept(values: NDArray[np.float64], norm: float, most: int, energy: float | None) -> int:
    """Count the values to keep: `most`, or as few as hold `energy` of the square sum."""
    if energy is None:
        return min(most, len(values))
    sums = np.cumsum(values**2)
    return min(most, len(values), int(np.searchsorted(sums, energy * norm**2)) + 1)


def _energy(values: NDArray[np.float64]) -> float:
    return float(np.sum(values**2))


def _decomposed(matrix_MN: Matrix) -> tuple[Matrix, NDArray[np.float64], Matrix]:
    left, values, right = np.linalg.svd(matrix_MN, full_matrices=False)
    return left, values.astype(np.float64), right


def _sketched(matrix_MN: Matrix, rank: int, seed: int) -> tuple[Matrix, NDArray[np.float64], Matrix]:
    """Decompose the part of the matrix that a random sketch of `rank` and some more columns spans."""
    n_columns = min(rank + _OVERSAMPLING, *matrix_MN.shape)
    sketch_NS = np.random.default_rng(seed).standard_normal((matrix_MN.shape[1], n_columns), np.float32)
    basis_MS = _orthonormal(matrix_MN @ sketch_NS)
    for _ in range(_POWER_ITERATIONS):
        basis_MS = _orthonormal(matrix_MN @ _orthonormal(matrix_MN.T @ basis_MS))
    small_SS, values, right = _decomposed(basis_MS.T @ matrix_MN)
    return basis_MS @ small_SS, values, right


def _orthonormal(columns_MS: Matrix) -> Matrix:
    return np.linalg.qr(columns_MS.astype(np.float64))[0].astype(np.float32)


def _factors(
    matrix_MN: Matrix, left: Matrix, values: NDArray[np.float64], right: Matrix, rank: int, norm: float
) -> Factors:
    roots_R = np.sqrt(values[:rank]).astype(np.float32)
    up_MR = np.ascontiguousarray(left[:, :rank] * roots_R)
    down_RN = np.ascontiguousarray(roots_R[:, None] * right[:rank])
    return Factors(up_MR, down_RN, _residual(matrix_MN, up_MR, down_RN), norm)


def _residual(matrix_MN: Matrix, up_MR: Matrix, down_RN: Matrix) -> float:
    """Measure the norm of the difference, some rows at a time."""
    total = 0.0
    for start in range(0, matrix_MN.shape[0], _RESIDUAL_ROWS):
        rows = slice(start, start + _RESIDUAL_ROWS)
        total += _norm(matrix_MN[rows] - up_MR[rows] @ down_RN) ** 2
    return float(np.sqrt(total))


def _norm(values: Matrix) -> float:
    """Return the Frobenius norm, summed in float64 some rows at a time."""
    total = 0.0
    for start in range(0, values.shape[0], _RESIDUAL_ROWS):
        rows = values[start : start + _RESIDUAL_ROWS].astype(np.float64)
        total += float(np.vdot(rows, rows))
    return float(np.sqrt(total))
