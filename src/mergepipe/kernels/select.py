"""Compute scores and sums over all deltas of an element; merge by how many experts change it, by weights of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.core.blocks import RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS as _TILE
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, Floats, exported, kernel
from mergepipe.kernels.merge import encode_result, keep_band, keep_varied, mark_nonzero, variance_tile
from mergepipe.kernels.numerics import exp_tile, fold, log_tile
from mergepipe.kernels.products import atom_of, atom_stop, common_multiple, decode_frame, fold_product

# --- compute scores and sums over all deltas of an element: variance, energy, overlap, divergence, importance ---


SMOOTHING = 1e-8  # added to a softmax share before the logarithm
MOST_KEPT = 16384  # elements of a row whose exponentials are kept


@exported("scores_N")
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


@exported("sums_AK", "marks")
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


@exported("sums_AK")
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
                shared += 1 if not abs(delta[i]) <= epsilon and changes[i] > one else 0
            for i in range(m):
                alone += 1 if not abs(delta[i]) <= epsilon and changes[i] == one else 0
            sums_AK[atom, 2 * block.present_E[e]] += shared
            sums_AK[atom, 2 * block.present_E[e] + 1] += alone
        start += m


@kernel
def count_changes(deltas_EN: Floats, n_deltas: int, n: int, epsilon: np.float32, changes: Floats) -> None:
    """Count the deltas of each of `n` elements that are larger than `epsilon`, or NaN."""
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(n):
        changes[i] = zero
    for e in range(n_deltas):
        for i in range(n):
            changes[i] += zero if abs(deltas_EN[e, i]) <= epsilon else one


@exported("sums_AK")
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
            keep_band(frame_FN[p + 1], m, element, lower_E3[e], upper_E3[e], model)
            sums_AK[atom, 2 * e + 1] += fold_magnitudes(model, m, sums)
        start += m


@kernel
def fold_magnitudes(x: Floats, n: int, sums: Doubles) -> float:
    """Sum `|x[:n]|` in float64 by a binary tree."""
    for i in range(n):
        sums[i] = np.float64(abs(x[i]))
    return fold(sums, n)


@exported("totals_A2", "sums_A", "is_done_R")
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


@exported("scores_N")
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


@exported("block.out", "block.sums_G2")
def merge_overlapping(block: RawBlock, epsilon: np.float32, own_scales_E: Floats) -> None:
    """Write `M_0 +` the single delta larger than `epsilon` times its expert's scale, or the mean of several.

    A delta that is NaN is one of the larger ones.
    """
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
                total[i] += zero if abs(delta[i]) <= epsilon else share
        for i in range(m):
            merged = frame_FN[0, i] + total[i]
            total[i] = frame_FN[0, i] if changes[i] == zero else merged
        encode_result(block, start, m, total)


@exported("block.out", "block.sums_G2")
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
                model[i] = largest[i] if smaller else delta[i]
            largest, model = model, largest
        for i in range(m):
            merged = frame_FN[0, i] + scale * largest[i]
            largest[i] = frame_FN[0, i] if largest[i] == zero else merged
        encode_result(block, start, m, largest)


# --- merge by weights of each element: averages by importance, and of several changes the most important one ---
#
# The numbers beside the deltas are read as deltas are, so that both are rows of one frame.


OMITTED, WITHOUT_NUMBERS = -1, -2


class Weighed(NamedTuple):
    """The rows of each model's (K) delta and numbers among the experts present, and the factor of all its numbers.

    A row is `OMITTED` where what would be in it counts as zero. `WITHOUT_NUMBERS` each number is 1.
    """

    delta_K: Counts
    weight_K: Counts
    factor_K: Doubles


@kernel
def weights_tile(frame_FN: Floats, row: int, factor: float, n: int, weights: Doubles) -> None:
    """Write the weights of a model's elements; see `Weighed` for `row`."""
    for i in range(n):
        weights[i] = factor if row == WITHOUT_NUMBERS else 0.0
    if row >= 0:
        numbers = frame_FN[row + 1]
        for i in range(n):
            weights[i] = factor * np.float64(numbers[i])


@kernel
def add_weighted(frame_FN: Floats, row: int, weights: Doubles, n: int, sums_2N: Doubles) -> None:
    """Add a delta times its weights to the first row of sums, and the weights to the second."""
    for i in range(n):
        sums_2N[1, i] += weights[i]
    if row >= 0:
        delta = frame_FN[row + 1]
        for i in range(n):
            sums_2N[0, i] += weights[i] * np.float64(delta[i])


@exported("block.out", "block.sums_G2")
def merge_weighted(block: RawBlock, weighed: Weighed, normalizes: bool, scale: float) -> None:
    """Write `M_0 + scale` times the weighted sum of the deltas, over the sum of weights if it `normalizes`.

    An element whose weights sum to zero is then averaged by the factors alone.
    """
    frame_FN = np.empty((len(block.present_E) + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    merged = np.empty(_TILE, np.float32)
    weights = np.empty(_TILE, np.float64)
    sums_2N = np.empty((2, _TILE), np.float64)
    plain_2N = np.empty((2, _TILE), np.float64)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_frame(block, start, m, model, frame_FN)
        sums_2N[:, :m] = 0.0
        for k in range(weighed.delta_K.shape[0]):
            weights_tile(frame_FN, weighed.weight_K[k], weighed.factor_K[k], m, weights)
            add_weighted(frame_FN, weighed.delta_K[k], weights, m, sums_2N)
        lacking = False
        if normalizes:
            for i in range(m):
                lacking |= sums_2N[1, i] == 0.0
        if lacking:
            plain_2N[:, :m] = 0.0
            for k in range(weighed.delta_K.shape[0]):
                weights_tile(frame_FN, WITHOUT_NUMBERS, weighed.factor_K[k], m, weights)
                add_weighted(frame_FN, weighed.delta_K[k], weights, m, plain_2N)
            for i in range(m):
                if sums_2N[1, i] == 0.0:
                    sums_2N[0, i] = plain_2N[0, i]
                    sums_2N[1, i] = plain_2N[1, i] if plain_2N[1, i] != 0.0 else 1.0
        for i in range(m):
            divisor = sums_2N[1, i] if normalizes else 1.0
            change = np.float32(scale * sums_2N[0, i] / divisor)
            merged[i] = frame_FN[0, i] if change == np.float32(0.0) else frame_FN[0, i] + change
        encode_result(block, start, m, merged)


@kernel
def resolve_tile(
    frame_FN: Floats, weighed: Weighed, epsilon: np.float32, n: int, weights: Doubles, best: Doubles, resolved: Floats
) -> None:
    """Write of each element the delta above `epsilon`, or NaN, of largest weight, the first of equal ones; else 0."""
    for i in range(n):
        best[i] = -1.0
    for i in range(n):
        resolved[i] = np.float32(0.0)
    for k in range(weighed.delta_K.shape[0]):
        if weighed.delta_K[k] >= 0:
            delta = frame_FN[weighed.delta_K[k] + 1]
            weights_tile(frame_FN, weighed.weight_K[k], weighed.factor_K[k], n, weights)
            for i in range(n):
                wins = not abs(delta[i]) <= epsilon and weights[i] > best[i]
                best[i] = weights[i] if wins else best[i]
                resolved[i] = delta[i] if wins else resolved[i]


@exported("scores_N")
def resolved_scores(block: RawBlock, weighed: Weighed, epsilon: np.float32, scores_N: Floats) -> None:
    """Write the magnitudes of the resolved deltas."""
    frame_FN = np.empty((len(block.present_E) + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    weights, best = np.empty(_TILE, np.float64), np.empty(_TILE, np.float64)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_frame(block, start, m, model, frame_FN)
        scores = scores_N[start : start + m]
        resolve_tile(frame_FN, weighed, epsilon, m, weights, best, scores)
        for i in range(m):
            scores[i] = abs(scores[i])


@exported("sums_A2")
def add_resolved(
    block: RawBlock, weighed: Weighed, epsilon: np.float32, cuts_23: Bits32, row_elements: int, sums_A2: Doubles
) -> None:
    """Add the sum of magnitudes of the resolved deltas, and that of those between two cuts, by atom."""
    frame_FN = np.empty((len(block.present_E) + 1, _TILE), np.float32)
    model, resolved = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    weights, best = np.empty(_TILE, np.float64), np.empty(_TILE, np.float64)
    start = 0
    while start < block.n_elements:
        element = block.first_element + start
        m = min(_TILE, block.n_elements - start, atom_stop(element, row_elements) - element)
        atom = atom_of(element, row_elements, common_multiple(row_elements))
        decode_frame(block, start, m, model, frame_FN)
        resolve_tile(frame_FN, weighed, epsilon, m, weights, best, resolved)
        sums_A2[atom, 0] += fold_magnitudes(resolved, m, weights)
        keep_band(resolved, m, element, cuts_23[0], cuts_23[1], model)
        sums_A2[atom, 1] += fold_magnitudes(model, m, weights)
        start += m


@exported("block.out", "block.sums_G2")
def merge_resolved(block: RawBlock, weighed: Weighed, epsilon: np.float32, cuts_23: Bits32, scale: np.float32) -> None:
    """Write `M_0 + scale` times the resolved deltas between two cuts."""
    frame_FN = np.empty((len(block.present_E) + 1, _TILE), np.float32)
    model, resolved = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    weights, best = np.empty(_TILE, np.float64), np.empty(_TILE, np.float64)
    zero = np.float32(0.0)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_frame(block, start, m, model, frame_FN)
        resolve_tile(frame_FN, weighed, epsilon, m, weights, best, resolved)
        keep_band(resolved, m, block.first_element + start, cuts_23[0], cuts_23[1], model)
        for i in range(m):
            merged = frame_FN[0, i] + scale * model[i]
            resolved[i] = frame_FN[0, i] if model[i] == zero else merged
        encode_result(block, start, m, resolved)


@exported("block.out", "block.sums_G2")
def merge_agreed(block: RawBlock, factor_E: Floats, threshold_E: Floats, least: int, scale: np.float32) -> None:
    """Write `M_0 + scale` times the weighted sum of deltas where at least `least` experts are near enough to it.

    That is one whose |delta| is at least its threshold times the distance of its delta from the sum. A sum that is
    infinite or NaN, which no expert is near to, is written as it is.
    """
    n_present = len(block.present_E)
    frame_FN = np.empty((n_present + 1, _TILE), np.float32)
    model = np.empty(_TILE, np.float32)
    total, near = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_frame(block, start, m, model, frame_FN)
        for i in range(m):
            total[i], near[i] = zero, zero
        for e in range(n_present):
            delta = frame_FN[e + 1]
            for i in range(m):
                total[i] += factor_E[e] * delta[i]
        for e in range(n_present):
            delta = frame_FN[e + 1]
            for i in range(m):
                near[i] += one if abs(delta[i]) >= threshold_E[e] * abs(total[i] - delta[i]) else zero
        for i in range(m):
            merged = frame_FN[0, i] + scale * total[i]
            is_finite = total[i] - total[i] == zero
            is_agreed = near[i] >= least and total[i] != zero
            total[i] = merged if is_agreed or not is_finite else frame_FN[0, i]
        encode_result(block, start, m, total)
