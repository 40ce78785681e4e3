"""Compute scores and sums over all deltas of an element, and merge by how many experts change it."""

from __future__ import annotations

import numpy as np

from mergepipe.core.blocks import RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compiled import Bits32, Bytes, Doubles, Floats, kernel
from mergepipe.kernels.merge import encode_result, keep_band, keep_varied, mark_nonzero, variance_tile
from mergepipe.kernels.numerics import exp_tile, log_tile
from mergepipe.kernels.products import atom_of, atom_stop, common_multiple, decode_frame, fold, fold_product

# --- compute scores and sums over all deltas of an element: variance, energy, overlap, divergence, importance ---


SMOOTHING = 1e-8  # added to a softmax share before the logarithm
MOST_KEPT = 16384  # elements of a row whose exponentials are kept
_TILE = TILE_ELEMENTS


@kernel
def variance_scores(block: RawBlock, n_experts: int, scores_N: Floats) -> None:
    """Write the variance of the deltas over `n_experts` experts; absent ones count as zero."""
    n_present, n = len(block.present_E), block.n_elements
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    moments_2N = np.empty((2, _TILE), np.float64)
    for start in range(0, n, _TILE):
        m = min(_TILE, n - start)
        decode_frame(block, start, m, model, frame_FN)
        variance_tile(frame_FN[1:], n_present, n_experts, m, scores_N[start : start + m], moments_2N)


@kernel
def add_selected_energies(
    block: RawBlock, n_experts: int, cut_3: Bits32, row_elements: int, sums_AK: Doubles, marks: Bytes
) -> None:
    """Add each expert's delta^2 over the elements whose variance reaches a cut (all if the cut is 0), by atom.

    With `marks`, those of the whole tensor, and a cut, these elements are marked; atoms begin at multiples of 128.
    """
    n_present, common = len(block.present_E), common_multiple(row_elements)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    products = np.empty(_TILE, np.float64)
    moments_2N = np.empty((2, _TILE), np.float64)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        m = min(_TILE, block.n_elements - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        decode_frame(block, start, m, model, frame_FN)
        keep_varied(frame_FN[1:], n_present, n_experts, m, element, cut_3, model, moments_2N)
        if marks.shape[0] and n_present:
            mark_nonzero(model, m, marks[element // 8 :])
        for e in range(n_present):
            sums_AK[atom, block.present_E[e]] += fold_product(frame_FN[e + 1], frame_FN[e + 1], m, products)
        start += m


@kernel
def add_overlaps(block: RawBlock, epsilon: np.float32, row_elements: int, sums_AK: Doubles) -> None:
    """Add for each expert the number of elements it changes with others (even entries) and alone (odd entries)."""
    n_present, common = len(block.present_E), common_multiple(row_elements)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    changes = np.empty(_TILE, np.float32)
    one = np.float32(1.0)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        m = min(_TILE, block.n_elements - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        decode_frame(block, start, m, model, frame_FN)
        count_changes(frame_FN[1:], n_present, m, epsilon, changes)
        for e in range(n_present):
            delta = frame_FN[e + 1]
            shared = 0
            alone = 0
            for i in range(m):
                shared += 1 if abs(delta[i]) > epsilon and changes[i] > one else 0
            for i in range(m):
                alone += 1 if abs(delta[i]) > epsilon and changes[i] == one else 0
            sums_AK[atom, 2 * block.present_E[e]] += shared
            sums_AK[atom, 2 * block.present_E[e] + 1] += alone
        start += m


@kernel
def count_changes(deltas_EN: Floats, n_deltas: int, n: int, epsilon: np.float32, changes: Floats) -> None:
    """Count the deltas of each of `n` elements that are larger than `epsilon`."""
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(n):
        changes[i] = zero
    for e in range(n_deltas):
        for i in range(n):
            changes[i] += one if abs(deltas_EN[e, i]) > epsilon else zero


@kernel
def add_kept_magnitudes(
    block: RawBlock, lower_E3: Bits32, upper_E3: Bits32, row_elements: int, sums_AK: Doubles
) -> None:
    """Add for each expert the sum of |delta| (even entries), and that inside its band (odd entries)."""
    n_present, common = len(block.present_E), common_multiple(row_elements)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    sums = np.empty(_TILE, np.float64)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        m = min(_TILE, block.n_elements - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common)
        decode_frame(block, start, m, model, frame_FN)
        for p in range(n_present):
            e = block.present_E[p]
            sums_AK[atom, 2 * e] += fold_magnitudes(frame_FN[p + 1], m, sums)
            keep_band(frame_FN[p + 1], m, element, lower_E3[e], upper_E3[e])
            sums_AK[atom, 2 * e + 1] += fold_magnitudes(frame_FN[p + 1], m, sums)
        start += m


@kernel
def fold_magnitudes(x: Floats, n: int, sums: Doubles) -> float:
    """Sum `|x[:n]|` in float64 by a binary tree."""
    for i in range(n):
        sums[i] = np.float64(abs(x[i]))
    return fold(sums, n)


@kernel
def add_divergences(
    block: RawBlock, row_elements: int, totals_R2: Doubles, totals_A2: Doubles, sums_A: Doubles, is_done_R: Bytes
) -> None:
    """Add terms of the divergence between the softmax of model and base, by atom.

    Without `totals_R2` (no rows): exp(base) and exp(model) to `totals_A2`, and for rows that lie inside the block,
    which are marked in `is_done_R`, also `p log(p / q)` to `sums_A`, where `p` and `q` are the smoothed softmax shares
    of model and base. With these totals by row: the same for the rows that are not marked.
    """
    n_present, common = len(block.present_E), common_multiple(row_elements)
    n, first_element = block.n_elements, block.first_element
    frame_FN = np.zeros((2, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    has_totals = totals_R2.shape[0] > 0
    kept = row_elements if row_elements <= MOST_KEPT and not has_totals else _TILE
    powers_2N = np.empty((2, max(kept, _TILE)), np.float64)
    base, other = powers_2N[0], powers_2N[1]
    exponents = np.empty(_TILE, np.float64)
    folded = np.empty(_TILE, np.float64)
    start = 0
    while start < n:
        row = (first_element + start) // row_elements
        stop = min(n, (row + 1) * row_elements - first_element)
        if has_totals and is_done_R[row]:
            start = stop
            continue
        row_start = start
        first_atom = atom_of(first_element + start, row_elements, common)
        at_once = kept == row_elements and stop - start == row_elements
        while start < stop:
            element = first_element + start
            m = min(_TILE, stop - start, atom_stop(element, row_elements) - element)
            atom = atom_of(element, row_elements, common)
            at = start - row_start if at_once else 0
            decode_frame(block, start, m, model, frame_FN)
            for i in range(m):
                exponents[i] = np.float64(frame_FN[0, i])
            of_base, of_model = base[at : at + m], other[at : at + m]
            exp_tile(exponents, m, of_base)
            for i in range(m):
                exponents[i] = np.float64(frame_FN[0, i]) + (np.float64(frame_FN[1, i]) if n_present else 0.0)
            exp_tile(exponents, m, of_model)
            if has_totals:
                sums_A[atom] += _divergence(of_model, of_base, m, totals_R2[row, 1], totals_R2[row, 0], folded)
            else:
                for i in range(m):
                    folded[i] = of_base[i]
                totals_A2[atom, 0] += fold(folded, m)
                for i in range(m):
                    folded[i] = of_model[i]
                totals_A2[atom, 1] += fold(folded, m)
            start += m
        last_atom = atom_of(first_element + stop - 1, row_elements, common)
        if at_once and last_atom - first_atom <= 1:  # more are joined in another order
            total_base, total_other = totals_A2[first_atom, 0], totals_A2[first_atom, 1]
            if last_atom > first_atom:
                total_base += totals_A2[last_atom, 0]
                total_other += totals_A2[last_atom, 1]
            at = 0
            while at < row_elements:
                element = first_element + row_start + at
                m = min(_TILE, row_elements - at, atom_stop(element, row_elements) - element)
                p, q = other[at : at + m], base[at : at + m]
                atom = atom_of(element, row_elements, common)
                sums_A[atom] += _divergence(p, q, m, total_other, total_base, folded)
                at += m
            is_done_R[row] = np.uint8(1)


@kernel
def _divergence(p: Doubles, q: Doubles, n: int, total_p: float, total_q: float, folded: Doubles) -> float:
    """Sum `p log(p / q)` of smoothed shares; `p`, `q` and the work array are overwritten."""
    for i in range(n):
        p[i] = p[i] / total_p + SMOOTHING
    for i in range(n):
        q[i] = p[i] / (q[i] / total_q + SMOOTHING)
    log_tile(q, n, folded)
    for i in range(n):
        folded[i] *= p[i]
    return fold(folded, n)


@kernel
def importance_scores(block: RawBlock, row_elements: int, weight_R: Floats, scores_N: Floats) -> None:
    """Write `|delta|` times its row's weight; zero without a delta."""
    frame_FN = np.zeros((2, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    n = block.n_elements
    for start in range(0, n, _TILE):
        m = min(_TILE, n - start)
        decode_frame(block, start, m, model, frame_FN)
        done = 0
        while done < m:
            element = block.first_element + start + done
            row = element // row_elements
            length = min(m - done, (row + 1) * row_elements - element)
            deltas, scores = frame_FN[1, done : done + length], scores_N[start + done : start + done + length]
            for i in range(length):
                scores[i] = abs(deltas[i]) * weight_R[row]
            done += length


# --- merge by how many experts change an element: a single change is scaled, several are averaged ---


@kernel
def merge_overlapping(block: RawBlock, epsilon: np.float32, own_scales_E: Floats) -> None:
    """Write `M_0 +` the single delta larger than `epsilon` times its expert's scale, or the mean of several."""
    n_present, n = len(block.present_E), block.n_elements
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    changes = np.empty(_TILE, np.float32)
    total = np.empty(_TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for start in range(0, n, _TILE):
        m = min(_TILE, n - start)
        decode_frame(block, start, m, model, frame_FN)
        count_changes(frame_FN[1:], n_present, m, epsilon, changes)
        for i in range(m):
            total[i] = zero
        for e in range(n_present):
            delta, expert_scale = frame_FN[e + 1], own_scales_E[block.present_E[e]]
            for i in range(m):
                shared = delta[i] / changes[i]
                share = shared if changes[i] > one else expert_scale * delta[i]
                total[i] += share if abs(delta[i]) > epsilon else zero
        for i in range(m):
            merged = frame_FN[0, i] + total[i]
            total[i] = frame_FN[0, i] if changes[i] == zero else merged
        encode_result(block, start, m, total)


@kernel
def merge_largest(block: RawBlock, scale: np.float32) -> None:
    """Write `M_0 + scale` times the delta of largest magnitude, the first of equal ones; NaN counts as the largest."""
    n_present, n = len(block.present_E), block.n_elements
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    largest = np.empty(_TILE, np.float32)
    zero = np.float32(0.0)
    for start in range(0, n, _TILE):
        m = min(_TILE, n - start)
        decode_frame(block, start, m, model, frame_FN)
        for i in range(m):
            largest[i] = zero
        for e in range(n_present):
            delta = frame_FN[e + 1]
            for i in range(m):
                smaller = abs(delta[i]) <= abs(largest[i]) or largest[i] != largest[i]
                largest[i] = largest[i] if smaller else delta[i]
        for i in range(m):
            merged = frame_FN[0, i] + scale * largest[i]
            largest[i] = frame_FN[0, i] if largest[i] == zero else merged
        encode_result(block, start, m, largest)
