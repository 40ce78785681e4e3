"""Order items for selection by policy: by norm, or at random."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Items

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")

Order = NDArray[np.int64]


def descending_order(rate_I: NDArray[np.float64]) -> Order:
    """Sort indices by falling rate, equal rates by index; faster than a stable sort."""
    order_I = np.argsort(-rate_I)
    sorted_I = rate_I[order_I]
    ties = sorted_I[1:] == sorted_I[:-1]
    if not ties.any():
        return order_I
    group_I = np.concatenate([[0], np.cumsum(~ties)])
    tied_I = np.concatenate([ties, [False]]) | np.concatenate([[False], ties])
    keys = np.sort(group_I[tied_I] * len(order_I) + order_I[tied_I])
    order_I[tied_I] = keys % len(order_I)
    return order_I


def norm_order(items: Items, is_unknown_I: NDArray[np.bool_]) -> Order:
    """Order items by falling score per byte; ties by expert, tensor, block.

    Of equal items of which nothing is known, those of all experts for one block or tensor come together, and those
    blocks and tensors in an order that spreads over the model.
    """
    if not is_unknown_I.any():
        return descending_order(items.rate_I)
    column_I = items.column_I.astype(np.uint64)
    place_I = np.where(is_unknown_I, mix(column_I + _GOLDEN), items.flat_I.astype(np.uint64))
    return np.lexsort((items.flat_I, place_I, -items.rate_I))


def random_order(items: Items, seed: int) -> Order:
    """Draw a permutation with `seed`, the same on every machine: items sorted by a hash of seed and index."""
    with np.errstate(over="ignore"):
        mixed = items.flat_I.astype(np.uint64) * _GOLDEN + mix(np.full(1, seed & (2**64 - 1), np.uint64) + _GOLDEN)
    return np.argsort(mix(mixed), kind="stable")


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection that mixes all bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def ascending_steps(items: Items, order_I: Order) -> Order:
    """Reorder the level steps of each block to ascend, within the positions that they occupy together."""
    n = items.n_single
    flat_S = items.flat_I[:n]
    if not (flat_S[1:] == flat_S[:-1]).any():
        return order_I
    place_I = np.empty(len(order_I), np.int64)
    place_I[order_I] = np.arange(len(order_I))
    place_I[:n] = place_I[:n][np.lexsort((place_I[:n], flat_S))]
    return np.argsort(place_I)


def layer_of(name: str) -> str:
    """Return the first number among the components of a tensor's name, empty if there is none."""
    match = _LAYER.search(name)
    return match.group(1) if match else ""
