"""Tell how much the deltas of experts have in common, by layer, from statistics alone: no tensor is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.statistics import N_SKETCH, TensorStatistics
from mergepipe.planning.selection import layer_of
from mergepipe.reports import Overlap


def overlaps_of(experts: Mapping[str, Mapping[str, TensorStatistics]]) -> tuple[Overlap, ...]:
    """Estimate the overlap of each two experts in each layer, from each one's statistics by tensor.

    Tensors that both have statistics of count, on one grid of blocks. Layers come in numeric order, tensors outside
    of layers last. Memory: 160 bytes for each block of a layer.
    """
    overlaps = []
    for first, second in combinations(experts, 2):
        one, other = experts[first], experts[second]
        by_layer: dict[str, list[str]] = defaultdict(list)
        for name in one:
            if name in other and one[name].grid == other[name].grid:
                by_layer[layer_of(name)].append(name)
        for layer, names in sorted(by_layer.items(), key=lambda item: (not item[0], int(item[0] or 0))):
            grids = [one[name].grid for name in names]
            sizes_B = np.array([grid.span(b).n_elements for grid in grids for b in range(grid.n_blocks)])
            one_B, other_B = (np.concatenate([expert[name].blocks_B for name in names]) for expert in (one, other))
            overlaps.append(_overlap((first, second, layer), one_B, other_B, sizes_B))
    return tuple(overlaps)


def _overlap(
    names: tuple[str, str, str], one_B: NDArray[np.void], other_B: NDArray[np.void], sizes_B: NDArray[np.int64]
) -> Overlap:
    norm_2B = np.stack([one_B["norm"], other_B["norm"]]).astype(np.float64)
    norm_2B[:, ~np.isfinite(norm_2B).all(axis=0)] = 0.0  # an undefined delta has no direction
    scaled_2BS = np.stack([one_B["sketch"], other_B["sketch"]]).astype(np.float64) * norm_2B[:, :, np.newaxis]
    gram_22 = np.tensordot(scaled_2BS, scaled_2BS, axes=((1, 2), (1, 2)))
    scale = sqrt(gram_22[0, 0] * gram_22[1, 1])
    cosine = float(np.clip(gram_22[0, 1] / scale, -1.0, 1.0)) if scale else 0.0
    weight_B = norm_2B[0] * norm_2B[1]
    sampled = N_SKETCH * weight_B.sum() ** 2 / np.square(weight_B).sum() if weight_B.any() else np.inf
    changed_2B = np.stack([one_B["changed"], other_B["changed"]]).astype(np.float64)
    is_same_B = (one_B["hash"] == other_B["hash"]).all(axis=1)
    most_B = changed_2B.min(axis=0)
    both_B = np.where(is_same_B, most_B, changed_2B[0] * changed_2B[1] / np.maximum(sizes_B, 1))
    least_B = np.where(is_same_B, most_B, np.maximum(changed_2B.sum(axis=0) - sizes_B, 0.0))
    return Overlap(
        first=names[0],
        second=names[1],
        layer=names[2],
        norms=(float(np.linalg.norm(norm_2B[0])), float(np.linalg.norm(norm_2B[1]))),
        cosine=cosine,
        cosine_error=(1 - cosine**2) / sqrt(sampled),
        changed=(int(changed_2B[0].sum()), int(changed_2B[1].sum())),
        both=float(both_B.sum()),
        both_least=int(least_B.sum()),
        both_most=int(most_B.sum()),
    )
