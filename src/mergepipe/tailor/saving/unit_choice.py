"""Choose the units of a partial save: strategies, how much each unit changed by samples, and the log of saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import LimitError, did_you_mean, invalid_option
from mergepipe.tailor.checkpoint import EXP_AVG_SQ
from mergepipe.tailor.saving.frameworks import EngineView, LocalShard, Ranks
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, Unit, UnitKind

# --- estimate how much each unit's weights changed since its last save, from samples ---


DEFAULT_SAMPLE_ELEMENTS = 4096
Samples: TypeAlias = dict[tuple[str, int], NDArray[np.float32]]


Measure: TypeAlias = Callable[
    [NDArray[np.float64], NDArray[np.float64], NDArray[np.float32] | None], tuple[float, float]
]


def _relative(change: NDArray[np.float64], saved: NDArray[np.float64], _: object) -> tuple[float, float]:
    """Squared norms of the change and of what was saved."""
    return float(np.sum(change**2)), float(np.sum(saved**2))


def _important(
    change: NDArray[np.float64], saved: NDArray[np.float64], squares: NDArray[np.float32] | None
) -> tuple[float, float]:
    """The change weighed by the optimizer's second moments, and the number of elements: importance a byte."""
    weighed = change**2 if squares is None else squares * change**2
    return float(np.sum(weighed)), float(saved.size)


LATEST_CHANGED = "latest-changed"
MEASURES: Mapping[str, Measure] = MappingProxyType({LATEST_CHANGED: _relative, "important": _important})
"""Measures of the strategies with a budget: two sums over a unit's elements, which are ranked by their quotient."""


class ChangeTracker:
    """Keeps evenly spaced samples of the weights as last saved.

    Memory: `sample_elements` x 4 bytes for each parameter this rank holds a part of.
    """

    def __init__(self, sample_elements: int = DEFAULT_SAMPLE_ELEMENTS) -> None:
        if sample_elements < 1:
            raise invalid_option("sample_elements", f"{sample_elements} elements are not a sample")
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

    def changes(self, view: EngineView, ranks: Ranks, measure: str = LATEST_CHANGED) -> dict[Unit, float]:
        """Return every unit's change by a measure, the same on every rank; `inf` without recorded samples."""
        local = self._sums(view, MEASURES[measure])
        every = ranks.gather(local)
        changes = {}
        for unit, names in view.units.parameters.items():
            parts = [sums[name] for sums in every for name in names if name in sums]
            moved, whole = sum(part[0] for part in parts), sum(part[1] for part in parts)
            changes[unit] = math.sqrt(moved / whole) if whole > 0 else (math.inf if moved > 0 else 0.0)
        return changes

    def _sums(self, view: EngineView, measure: Measure) -> dict[str, tuple[float, float]]:
        """Compute per parameter the two sums of a measure, scaled from the samples to the whole shard."""
        moments = {_place(shard): shard for shard in view.shards if shard.kind == EXP_AVG_SQ}
        sums: dict[str, tuple[float, float]] = {}
        for shard in view.weight_shards():
            saved = self._saved.get(_place(shard))
            if saved is None:
                sums[shard.parameter] = (math.inf, 1.0)
                continue
            change = shard.sample(self._sample_elements).astype(np.float64) - saved
            squares = moments[_place(shard)].sample(self._sample_elements) if _place(shard) in moments else None
            scale = shard.span.n_elements / max(1, saved.size)
            moved, whole = measure(change, saved.astype(np.float64), squares)
            before = sums.get(shard.parameter, (0.0, 0.0))
            sums[shard.parameter] = (before[0] + scale * moved, before[1] + scale * whole)
        return sums


def _place(shard: LocalShard) -> tuple[str, int]:
    return shard.parameter, shard.span.start


# --- choose the units of a partial save: a table of schedules, and by how much units changed ---


def _ends(units: tuple[Unit, ...], count: int) -> set[Unit]:
    """The first and the last `count` layers."""
    layers = [unit for unit in units if unit.kind is UnitKind.LAYER]
    return set(layers[:count] + layers[max(0, len(layers) - count) :])


def _parity_of(unit: Unit, units: tuple[Unit, ...]) -> int:
    """Return the parity of the unit's layer number; final norm and head count as odd."""
    if unit.kind is UnitKind.OTHER:
        return units.index(unit) % 2
    return unit.index % 2 if unit.kind is UnitKind.LAYER else int(unit in (NORM, LM_HEAD))


def _parity(units: tuple[Unit, ...], turn: int, _edge_layers: int, _every: int) -> set[Unit]:
    """Half of the model each time: even layers and embeddings, then odd layers, final norm and head."""
    return {unit for unit in units if _parity_of(unit, units) == turn % 2}


def _filter(units: tuple[Unit, ...], turn: int, edge_layers: int, every: int) -> set[Unit]:
    """The first and the last layers each time; every other unit each `every`-th time, in turns of about one size."""
    always = _ends(units, edge_layers)
    return always | set([unit for unit in units if unit not in always][turn % every :: every])


def _paper_parity(units: tuple[Unit, ...], turn: int, _edge_layers: int, _every: int) -> set[Unit]:
    """Half of the model each time, as in LLMTailor: odd layers, embeddings and final norm, then even and head."""
    odd = {u for u in units if u in (EMBED, NORM) or (u != LM_HEAD and _parity_of(u, units))}
    return odd if turn % 2 == 0 else set(units) - odd


def _paper_filter(units: tuple[Unit, ...], turn: int, edge_layers: int, every: int) -> set[Unit]:
    """The first and last layers each time and, every `every`-th time, one half of all else, the halves in turn.

    LLMTailor's schedule is that of 2 layers and every fifth time; a unit is then up to ten saves old.
    """
    always = _ends(units, edge_layers)
    others = [unit for unit in units if unit not in always]
    return always | set(others[turn // every % 2 :: 2] if turn % every == every - 1 else ())


SCHEDULES: Mapping[str, Callable[[tuple[Unit, ...], int, int, int], set[Unit]]] = MappingProxyType({
    "parity": _parity, "filter": _filter, "paper-parity": _paper_parity, "paper-filter": _paper_filter,
})  # fmt: skip
"""Schedules by name: the units that are saved at a turn, by `edge_layers` and `every`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A strategy by its name in `SCHEDULES`: which units are saved follows from the number of saves before.

    `parity` and `paper-parity` save half of the model each time. `filter` saves the first and the last `edge_layers`
    layers each time, every other unit each `every`-th time; `paper-filter` saves a half of all else then.
    """

    name: str
    edge_layers: int = 2
    every: int = 5

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise invalid_option("schedule", f"'{self.name}' is not known", did_you_mean(self.name, list(SCHEDULES)))
        if self.edge_layers < 0 or self.every < 1:
            message = f"edge_layers is {self.edge_layers}, every is {self.every}"
            raise invalid_option(self.name, message, "edge_layers counts layers from 0, every counts saves from 1")

    def __str__(self) -> str:
        return self.name

    def units(self, units: tuple[Unit, ...], turn: int) -> set[Unit]:
        """Return the units of save number `turn`: what saving and recipes mean by the schedule's name."""
        return SCHEDULES[self.name](units, turn, self.edge_layers, self.every)


@dataclass(frozen=True, slots=True)
class LatestChanged:
    """The units whose weights changed most since they were last saved, in `budget_bytes`.

    By `measure` the change counts relative to the weights' norm (`latest-changed`) or, element by element, times the
    optimizer's second moment (`important`), the usual estimate of what a change of the weight costs in loss.
    """

    budget_bytes: int
    measure: str = LATEST_CHANGED

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            hint = did_you_mean(self.measure, list(MEASURES))
            raise invalid_option("measure", f"'{self.measure}' is not known", hint)
        if self.budget_bytes < 1:
            raise invalid_option(self.measure, f"a budget of {self.budget_bytes} bytes")

    def __str__(self) -> str:
        return self.measure


Strategy: TypeAlias = Schedule | LatestChanged


_NOTHING: Mapping[Unit, int] = MappingProxyType({})


def choose_units(
    strategy: Strategy,
    units: tuple[Unit, ...],
    n_partial: int,
    changes: Mapping[Unit, float] = _NOTHING,
    last_saved: Mapping[Unit, int] = _NOTHING,
    unit_bytes: Mapping[Unit, int] = _NOTHING,
) -> tuple[Unit, ...]:
    """Return the units to save of all `units`, in the model's order, after `n_partial` partial saves.

    `changes` (`inf` where unknown), `last_saved` (steps) and `unit_bytes` are needed by `LatestChanged` only.

    Law: the parities have saved every unit after 2 saves, `filter` after `every`, `paper-filter` after twice that;
    `LatestChanged` always saves what changed most, and never more bytes than its budget.
    """
    if isinstance(strategy, Schedule):
        chosen = strategy.units(units, n_partial)
        return tuple(unit for unit in units if unit in chosen)
    largest = max(unit_bytes, key=lambda unit: unit_bytes[unit])
    if unit_bytes[largest] > strategy.budget_bytes:
        message = f"needs {unit_bytes[largest]} bytes, each save may take {strategy.budget_bytes}"
        hint = "raise the budget, or save whole checkpoints less often"
        raise LimitError.of("budget.too-small", str(largest), message, hint)
    taken: set[Unit] = set()
    remaining_bytes = strategy.budget_bytes
    # by falling change, older first among equals, while they fit
    for unit in sorted(unit_bytes, key=lambda unit: (-changes[unit], last_saved.get(unit, -1), unit)):
        if changes[unit] > 0 and unit_bytes[unit] <= remaining_bytes:
            taken.add(unit)
            remaining_bytes -= unit_bytes[unit]
    return tuple(unit for unit in units if unit in taken)
