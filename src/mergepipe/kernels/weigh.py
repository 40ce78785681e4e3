"""Merge by weights of each element: averages by importance, and of several changes the most important one.

The numbers beside the deltas are read as deltas are, so that both are rows of one frame.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.core.blocks import RawBlock
from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compiled import Bits32, Counts, Doubles, Floats, kernel
from mergepipe.kernels.merge import encode_result, keep_band
from mergepipe.kernels.products import atom_of, atom_stop, common_multiple, decode_frame
from mergepipe.kernels.select import fold_magnitudes

OMITTED, WITHOUT_NUMBERS = -1, -2
_TILE = TILE_ELEMENTS


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


@kernel
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
    frame_FN: Floats,
    weighed: Weighed,
    epsilon: np.float32,
    n: int,
    weights: Doubles,
    best: Doubles,
    resolved: Floats,
) -> None:
    """Write of each element the delta above `epsilon` whose weight is largest, the first of equal ones; else 0."""
    for i in range(n):
        best[i] = -1.0
    for i in range(n):
        resolved[i] = np.float32(0.0)
    for k in range(weighed.delta_K.shape[0]):
        if weighed.delta_K[k] >= 0:
            delta = frame_FN[weighed.delta_K[k] + 1]
            weights_tile(frame_FN, weighed.weight_K[k], weighed.factor_K[k], n, weights)
            for i in range(n):
                wins = abs(delta[i]) > epsilon and weights[i] > best[i]
                best[i] = weights[i] if wins else best[i]
                resolved[i] = delta[i] if wins else resolved[i]


@kernel
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


@kernel
def add_resolved(
    block: RawBlock,
    weighed: Weighed,
    epsilon: np.float32,
    cuts_23: Bits32,
    row_elements: int,
    sums_A2: Doubles,
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
        keep_band(resolved, m, element, cuts_23[0], cuts_23[1])
        sums_A2[atom, 1] += fold_magnitudes(resolved, m, weights)
        start += m


@kernel
def merge_resolved(
    block: RawBlock,
    weighed: Weighed,
    epsilon: np.float32,
    cuts_23: Bits32,
    scale: np.float32,
) -> None:
    """Write `M_0 + scale` times the resolved deltas between two cuts."""
    frame_FN = np.empty((len(block.present_E) + 1, _TILE), np.float32)
    model, resolved = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    weights, best = np.empty(_TILE, np.float64), np.empty(_TILE, np.float64)
    zero = np.float32(0.0)
    for start in range(0, block.n_elements, _TILE):
        m = min(_TILE, block.n_elements - start)
        decode_frame(block, start, m, model, frame_FN)
        resolve_tile(frame_FN, weighed, epsilon, m, weights, best, resolved)
        keep_band(resolved, m, block.first_element + start, cuts_23[0], cuts_23[1])
        for i in range(m):
            merged = frame_FN[0, i] + scale * resolved[i]
            resolved[i] = frame_FN[0, i] if resolved[i] == zero else merged
        encode_result(block, start, m, resolved)


@kernel
def merge_agreed(block: RawBlock, factor_E: Floats, threshold_E: Floats, least: int, scale: np.float32) -> None:
    """Write `M_0 + scale` times the weighted sum of deltas where at least `least` experts are near enough to it.

    That is one whose |delta| is at least its threshold times the distance of its delta from the sum.
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
            total[i] = merged if near[i] >= least and total[i] != zero else frame_FN[0, i]
        encode_result(block, start, m, total)
