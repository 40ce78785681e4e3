"""Choose the units of a partial save: strategies as frozen values, one pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from mergepipe.errors import LimitError, RecipeError
from mergepipe.tailor.units import EMBED, LM_HEAD, NORM, Unit, UnitKind


@dataclass(frozen=True, slots=True)
class Parity:
    """Half of the model each time: even layers and embeddings, then odd layers, final norm and head."""

    def __str__(self) -> str:
        return "parity"


@dataclass(frozen=True, slots=True)
class Filter:
    """The first and the last `edge_layers` layers each time, every other unit each `every`-th time.

    The others take turns, so that saves are of about the same size; none is older than `every` saves.
    """

    edge_layers: int
    every: int

    def __post_init__(self) -> None:
        if self.edge_layers < 0 or self.every < 1:
            raise RecipeError.of(
                "train.filter", "filter", f"edge_layers is {self.edge_layers}, every is {self.every}",
                "edge_layers counts layers from 0, every counts saves from 1",
            )  # fmt: skip

    def __str__(self) -> str:
        return "filter"


@dataclass(frozen=True, slots=True)
class PaperParity:
    """Half of the model each time, as in LLMTailor: odd layers, embeddings and final norm, then even and head."""

    def __str__(self) -> str:
        return "paper-parity"


@dataclass(frozen=True, slots=True)
class PaperFilter:
    """The first and last two layers each time and, every fifth time, one half of all else: LLMTailor's schedule.

    The halves alternate, so that a unit is up to ten saves old.
    """

    edge_layers: int = 2
    every: int = 5

    def __post_init__(self) -> None:
        Filter(self.edge_layers, self.every)

    def __str__(self) -> str:
        return "paper-filter"


@dataclass(frozen=True, slots=True)
class LatestChanged:
    """The units whose weights changed most since they were last saved, relative to their norm, in `budget_bytes`."""

    budget_bytes: int

    def __post_init__(self) -> None:
        if self.budget_bytes < 1:
            raise RecipeError.of("train.budget", "latest-changed", f"a budget of {self.budget_bytes} bytes")

    def __str__(self) -> str:
        return "latest-changed"


Schedule: TypeAlias = Parity | Filter | PaperParity | PaperFilter
Strategy: TypeAlias = Schedule | LatestChanged


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a choice: units, past saves, changes and sizes.

    `units` are the model's; `n_partial` counts the partial saves before this one. `changes` (relative, `inf` where
    unknown), `last_saved` (step) and `unit_bytes` are needed by `LatestChanged` only.
    """

    units: tuple[Unit, ...]
    n_partial: int
    changes: Mapping[Unit, float] = field(default_factory=lambda: MappingProxyType({}))
    last_saved: Mapping[Unit, int] = field(default_factory=lambda: MappingProxyType({}))
    unit_bytes: Mapping[Unit, int] = field(default_factory=lambda: MappingProxyType({}))


def choose_units(strategy: Strategy, situation: Situation) -> tuple[Unit, ...]:
    """Return the units to save, in the model's order.

    Law: `Parity` and `PaperParity` have saved every unit after 2 saves, `Filter` after `every`, `PaperFilter` after
    twice that; `LatestChanged` always saves what changed most, and never more bytes than its budget.

    Raises:
        LimitError: a unit is larger than the budget, so that it could never be saved.
    """
    if isinstance(strategy, LatestChanged):
        chosen = _most_changed(strategy, situation)
    else:
        chosen = scheduled_units(strategy, situation.units, situation.n_partial)
    return tuple(unit for unit in situation.units if unit in chosen)


def scheduled_units(schedule: Schedule, units: tuple[Unit, ...], turn: int) -> set[Unit]:
    """Return the units of save number `turn`: what saving and recipes mean by the schedule's name."""
    if isinstance(schedule, Parity):
        return {unit for unit in units if _turn(unit, units) % 2 == turn % 2}
    if isinstance(schedule, PaperParity):
        odd_half = {u for u in units if u in (EMBED, NORM) or (u not in (LM_HEAD,) and _turn(u, units) % 2)}
        return odd_half if turn % 2 == 0 else set(units) - odd_half
    always = _ends(units, schedule.edge_layers)
    others = [unit for unit in units if unit not in always]
    if isinstance(schedule, Filter):
        return always | set(others[turn % schedule.every :: schedule.every])
    is_due = turn % schedule.every == schedule.every - 1
    return always | set(others[turn // schedule.every % 2 :: 2] if is_due else ())


def _ends(units: tuple[Unit, ...], count: int) -> set[Unit]:
    """The first and the last `count` layers."""
    layers = [unit for unit in units if unit.kind is UnitKind.LAYER]
    return set(layers[:count] + layers[max(0, len(layers) - count) :])


def _turn(unit: Unit, units: tuple[Unit, ...]) -> int:
    """Return the unit's parity: that of its layer number; final norm and head count as odd."""
    if unit.kind is UnitKind.LAYER:
        return unit.index
    if unit.kind is UnitKind.OTHER:
        return units.index(unit)
    return 1 if unit in (NORM, LM_HEAD) else 0


def _most_changed(strategy: LatestChanged, situation: Situation) -> set[Unit]:
    """Take changed units by falling change, older first among equals, while they fit the budget."""
    largest = max(situation.units, key=lambda unit: situation.unit_bytes[unit])
    if situation.unit_bytes[largest] > strategy.budget_bytes:
        raise LimitError.of(
            "train.budget", str(largest),
            f"needs {situation.unit_bytes[largest]} bytes, each save may take {strategy.budget_bytes}",
            "raise the budget, or save whole checkpoints less often",
        )  # fmt: skip

    def rank(unit: Unit) -> tuple[float, int, Unit]:
        return -situation.changes[unit], situation.last_saved.get(unit, -1), unit

    chosen: set[Unit] = set()
    remaining_bytes = strategy.budget_bytes
    for unit in sorted(situation.units, key=rank):
        if situation.changes[unit] > 0 and situation.unit_bytes[unit] <= remaining_bytes:
            chosen.add(unit)
            remaining_bytes -= situation.unit_bytes[unit]
    return chosen
