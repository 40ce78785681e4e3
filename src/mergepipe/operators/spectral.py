"""A spectral step after any rule: the singular values of a merged delta calibrated, or all made equal.

Legend: M rows, N columns, R singular values, K experts, S columns of a sketch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import F32, RawBlock
from mergepipe.operators.base import NUMBERS_OF, BlockFunction, OperatorInput
from mergepipe.operators.spec import SVC

Values = NDArray[np.float32]
Matrix = NDArray[np.float32]

EXACT_SIDE = 512
"""Up to this shorter side matrices are decomposed whole at once."""
NEGLIGIBLE = 1e-5
"""Singular values up to this share of the Frobenius norm stay as they are, and what a sketch may leave of it."""
_SKETCHES = (16, 4)  # a sketch has the shorter side divided by these many columns
_CHUNK = 1 << 16
_STRETCH = 1024  # rows or columns that are converted to float64 at a time
_EIGEN_FLOP = 40.0  # for each cube of the shorter side: about 10, at a quarter of the speed of products


def gather_deltas(block: RawBlock, function: BlockFunction, merged_N: Values, experts: Mapping[int, Values]) -> None:
    """Write the deltas of a block to their places in tensors: of `experts`, and of what a function makes of all.

    Memory: 256 KiB a model.
    """
    from mergepipe.kernels.merge import decode_arrays

    first, n = block.first_element, block.n_elements
    out_N = merged_N[first : first + n]
    function(block._replace(out=out_N.view(np.uint8), out_offset=0, out_code=F32.kernel_code))
    for skip in range(0, n, _CHUNK):
        part = block.part(skip, min(_CHUNK, n - skip))
        base_N = np.empty(part.n_elements, np.float32)
        deltas_EN = np.empty((int(block.present_E.max(initial=-1)) + 1, part.n_elements), np.float32)
        decode_arrays(part if experts else _alone(part), base_N, deltas_EN)
        out_N[skip : skip + part.n_elements] -= base_N
        for e in experts.keys() & set(part.present_E.tolist()):
            experts[e][first + skip : first + skip + part.n_elements] = deltas_EN[e]


def add_delta(delta_N: Values) -> BlockFunction:
    """`M_0 + delta` by a delta of the whole tensor, rounded once. Memory: 4 bytes for each element of a block."""

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.merge import decode_arrays, encode_array

        merged_N = np.empty(block.n_elements, np.float32)
        decode_arrays(_alone(block), merged_N, np.empty((0, 0), np.float32))
        merged_N += delta_N[block.first_element : block.first_element + block.n_elements]
        encode_array(block, merged_N)

    return merge


def _alone(block: RawBlock) -> RawBlock:
    """Return a block without its experts."""
    none_E = block.present_E[:0]
    return block._replace(present_E=none_E, offsets_E=none_E, codes_E=none_E)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found as it is written
def calibrate(merged_MN: Matrix, experts: Sequence[Matrix], alpha: float | None) -> None:
    """Replace a merged delta by one with other singular values, in place; the experts' deltas stay as they are.

    With `alpha` each singular value is divided by the mean over experts of `max(alpha, s)`, where `s = <a, a_i> /
    ||a_i||^2` compares `a = u^T D` of its left vector `u` with `a_i = u^T D_i`: by how much the sum inflates what the
    expert has there. Without `alpha` all of them become their mean over the shorter side.

    Values up to `NEGLIGIBLE` of the norm stay. A randomised sketch takes the place of the decomposition where what it
    leaves is below that, too: of LoRA experts, say. The result is within 1e-3 of that of an exact decomposition.
    Nothing is changed where something is not finite. Memory: four times the matrix, 40 bytes for each square of the
    shorter side. Last bits depend on the build of numpy's LAPACK and, unless `one_blas_thread`, on its threads.

    Source: Li et al. 2026 (SVC, arXiv 2602.05536) as their code has it; Marczak et al. 2025 (Iso-C, arXiv 2502.04959);
    Halko et al. 2011, algorithm 4.4. Deviation: Iso-C raises directions without energy to the mean, too.
    """
    norm = norm_of(merged_MN)
    if not norm or not np.isfinite(norm):
        return
    left_MR = _left_vectors(merged_MN, norm)
    merged_RN = left_MR.T @ merged_MN
    if alpha is None:
        values_R = np.sqrt(_squares(merged_RN))
        gain_R = values_R.sum() / min(merged_MN.shape) / values_R
    else:
        inflation_R = np.zeros(len(merged_RN))
        for expert_MN in experts:
            expert_RN = left_MR.T @ expert_MN
            square_R = _squares(expert_RN)
            mixed_R = np.einsum("rn,rn->r", merged_RN, expert_RN, dtype=np.float64)
            share_R = np.divide(mixed_R, square_R, out=np.zeros_like(mixed_R), where=square_R > 0)
            inflation_R += np.maximum(share_R, alpha)
        gain_R = len(experts) / inflation_R
    if np.isfinite(gain_R).all():
        merged_MN += left_MR @ ((gain_R - 1.0).astype(np.float32)[:, np.newaxis] * merged_RN)


def _left_vectors(matrix_MN: Matrix, norm: float) -> Matrix:
    """Return the left singular vectors of all values that are not negligible, from a sketch if it holds them."""
    side = min(matrix_MN.shape)
    for divisor in _SKETCHES if side > EXACT_SIDE else ():
        basis_MS = orthonormal(matrix_MN @ _normal(matrix_MN.shape[1], side // divisor))
        basis_MS = orthonormal(matrix_MN @ (matrix_MN.T @ basis_MS))
        small_SN = basis_MS.T @ matrix_MN
        if norm_of(matrix_MN - basis_MS @ small_SN) <= NEGLIGIBLE * norm:
            return basis_MS @ _decomposed(_gram(small_SN, by_rows=True), norm)[1].astype(np.float32)
    if matrix_MN.shape[0] <= matrix_MN.shape[1]:
        return _decomposed(_gram(matrix_MN, by_rows=True), norm)[1].astype(np.float32)
    values_R, right_NR = _decomposed(_gram(matrix_MN), norm)
    scaled_NR = right_NR / values_R
    left_MR: Matrix = np.concatenate([
        (matrix_MN[start : start + _STRETCH].astype(np.float64) @ scaled_NR).astype(np.float32)
        for start in range(0, len(matrix_MN), _STRETCH)
    ])  # fmt: skip
    return left_MR


def _decomposed(gram: NDArray[np.float64], norm: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the square roots of a matrix's eigenvalues that are not negligible, and their vectors, in columns."""
    values_R, vectors = np.linalg.eigh(gram)
    values_R = np.sqrt(np.maximum(values_R, 0.0))
    kept_R = values_R > NEGLIGIBLE * norm
    return values_R[kept_R], vectors[:, kept_R]


def _gram(matrix_MN: Matrix, *, by_rows: bool = False) -> NDArray[np.float64]:
    """Return the inner products of all columns, or rows, in float64."""
    tall = matrix_MN.T if by_rows else matrix_MN
    gram = np.zeros((tall.shape[1], tall.shape[1]))
    for start in range(0, len(tall), _STRETCH):
        stretch = tall[start : start + _STRETCH].astype(np.float64)
        gram += stretch.T @ stretch
    return gram


def norm_of(matrix_MN: Matrix) -> float:
    """Return the Frobenius norm, summed in float64."""
    return float(np.sqrt(_squares(matrix_MN).sum()))


def _squares(rows_RN: Matrix) -> NDArray[np.float64]:
    squares_R: NDArray[np.float64] = np.einsum("rn,rn->r", rows_RN, rows_RN, dtype=np.float64)
    return squares_R


def _normal(n_rows: int, n_columns: int) -> Matrix:
    return np.random.default_rng(0).standard_normal((n_rows, n_columns), np.float32)


def orthonormal(columns_MS: Matrix) -> Matrix:
    """Return orthonormal columns that span the same, worked out in float64."""
    return np.linalg.qr(columns_MS.astype(np.float64))[0].astype(np.float32)


def calibration_cost(inputs: OperatorInput) -> tuple[float, int]:
    """Return what `calibrate` takes at most: floating point operations, and bytes of memory with all deltas."""
    n_experts = sum(NUMBERS_OF not in p for p in inputs.experts) if inputs.globals.get(SVC) else 0
    n, side = float(inputs.n_elements), min(inputs.shape)
    flop = (6.0 + 2.0 * n_experts) * n * side + _EIGEN_FLOP * side**3
    return flop, int(4 * n) * (n_experts + 5) + 40 * side**2


def measured_flop_per_second() -> float:
    """Return how many operations a second this machine's products of float32 matrices take; measured in some 20 ms."""
    from time import perf_counter

    matrix = _normal(1024, 1024)
    matrix @ matrix
    started = perf_counter()
    matrix @ matrix
    return 2.0 * 1024**3 / (perf_counter() - started)
