"""Estimate how much each unit's weights changed since its last save, from samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import RecipeError
from mergepipe.tailor.saving.engine_view import EngineView, LocalShard, Ranks
from mergepipe.tailor.units import Unit

DEFAULT_SAMPLE_ELEMENTS = 4096
Samples: TypeAlias = dict[tuple[str, int], NDArray[np.float32]]


class ChangeTracker:
    """Keeps evenly spaced samples of the weights as last saved.

    Memory: `sample_elements` x 4 bytes for each parameter this rank holds a part of.
    """

    def __init__(self, sample_elements: int = DEFAULT_SAMPLE_ELEMENTS) -> None:
        if sample_elements < 1:
            raise RecipeError.of("train.sample", "sample_elements", f"{sample_elements} elements are no sample")
        self._sample_elements = sample_elements
        self._saved: Samples = {}

    def samples(self, view: EngineView, units: Iterable[Unit]) -> Samples:
        """Take samples of the current weights of `units`."""
        of_unit = view.units.parameters
        names = {name for unit in units for name in of_unit[unit]}
        shards = (shard for shard in view.weight_shards() if shard.parameter in names)
        return {_place(shard): shard.sample(self._sample_elements) for shard in shards}

    def remember(self, samples: Samples) -> None:
        """Record samples of weights as saved."""
        self._saved |= samples

    def changes(self, view: EngineView, ranks: Ranks) -> dict[Unit, float]:
        """Return `‖now - saved‖ / ‖saved‖` of every unit, the same on every rank; `inf` without recorded samples."""
        local = self._squares(view)
        every = ranks.gather(local)
        changes = {}
        for unit, names in view.units.parameters.items():
            parts = [squares[name] for squares in every for name in names if name in squares]
            moved, norm = sum(part[0] for part in parts), sum(part[1] for part in parts)
            changes[unit] = math.sqrt(moved / norm) if norm > 0 else (math.inf if moved > 0 else 0.0)
        return changes

    def _squares(self, view: EngineView) -> dict[str, tuple[float, float]]:
        """Compute per parameter the squared norms of the change and of the saved values, scaled to the whole shard."""
        squares: dict[str, tuple[float, float]] = {}
        for shard in view.weight_shards():
            saved = self._saved.get(_place(shard))
            if saved is None:
                squares[shard.parameter] = (math.inf, 1.0)
                continue
            now = shard.sample(self._sample_elements).astype(np.float64)
            scale = shard.span.n_elements / max(1, saved.size)
            moved, norm = float(np.sum((now - saved) ** 2)), float(np.sum(saved.astype(np.float64) ** 2))
            before = squares.get(shard.parameter, (0.0, 0.0))
            squares[shard.parameter] = (before[0] + scale * moved, before[1] + scale * norm)
        return squares


def _place(shard: LocalShard) -> tuple[str, int]:
    return shard.parameter, shard.span.start
