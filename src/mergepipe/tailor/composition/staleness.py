"""Compute each unit's staleness, and choose the value of each step counter. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mergepipe.core.strict_json import JsonValue
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, TrainingCheckpoint
from mergepipe.tailor.composition.request.assignment import Assignment
from mergepipe.tailor.formats.pickle_node import PicklePath
from mergepipe.tailor.units import Unit, UnitKind, layer


class StepPolicy(StrEnum):
    """The rule that chose a step counter."""

    EXACT = "exact"  # the counter's parameters come from one source: that source's value
    NEWEST = "newest"  # one counter serves parameters of several sources: the largest of their values


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The value chosen for one step counter of the skeleton."""

    counter: AdamStep
    value: float
    policy: StepPolicy


@dataclass(frozen=True, slots=True)
class UnitStaleness:
    """One unit: its sources as (path, step, age), and the step counters it resumes with.

    `origin` is the unit that it is in its sources, where that is another: a layer in another place.
    Ages are in steps behind the one training resumes at; a negative one is of a part that is newer.
    """

    unit: str
    n_parameters: int
    sources: tuple[tuple[Location, int, int], ...]
    adam_steps: tuple[float, ...]
    step_policies: tuple[StepPolicy, ...]
    origin: str = ""

    def to_json(self) -> dict[str, JsonValue]:
        """Return the staleness as JSON values."""
        return {
            "unit": self.unit,
            "parameters": self.n_parameters,
            **({"origin": self.origin} if self.origin else {}),
            "sources": [{"path": str(path), "step": step, "age": age} for path, step, age in self.sources],
            "adam_steps": list(self.adam_steps),
            "step_policies": [policy.value for policy in self.step_policies],
        }


def choose_steps(assignment: Assignment, groups: Sequence[Sequence[str]] | None = None) -> tuple[StepChoice, ...]:
    """Choose the value of every step counter: of the result's, or of one for each of `groups`.

    Law: where all of a counter's parameters come from one source, its value is that source's.
    """
    counters = [_counters(source) for source in assignment.sources]
    wanted = assignment.skeleton.steps if groups is None else _regrouped(assignment.skeleton.steps, groups)
    return tuple(_choose(assignment, counters, counter) for counter in wanted)


def _regrouped(steps: Sequence[AdamStep], groups: Sequence[Sequence[str]]) -> Iterator[AdamStep]:
    """Build one counter for each group that any counter serves."""
    by_name = {name: step for step in steps for name in step.parameters}
    for names in groups:
        served = [by_name[name] for name in names if name in by_name]
        if served:
            newest = max(served, key=lambda step: step.value)
            entries = dict.fromkeys(entry for step in served for entry in step.entries)
            yield replace(newest, parameters=tuple(names), cells=(), entries=tuple(entries))


def _counters(source: TrainingCheckpoint) -> dict[str, float]:
    return {name: step.value for step in source.steps for name in step.parameters}


def _choose(assignment: Assignment, counters: list[dict[str, float]], counter: AdamStep) -> StepChoice:
    used = {assignment.source_of[name] for name in counter.parameters if name in assignment.source_of}
    candidates = [
        counters[assignment.source_of[name]].get(assignment.origin(name), counter.value)
        for name in counter.parameters
        if name in assignment.source_of
    ]
    value = max(candidates, default=counter.value)
    return StepChoice(counter, value, StepPolicy.EXACT if len(used) <= 1 else StepPolicy.NEWEST)


def pickled_counters(steps: Sequence[StepChoice], file: Location) -> dict[PicklePath, object]:
    """Return the chosen values of the counters that are part of a file's pickle, by their places there."""
    return {path: int(choice.value) for choice in steps for counted, path in choice.counter.entries if counted == file}


def staleness_of(assignment: Assignment, steps: tuple[StepChoice, ...]) -> tuple[UnitStaleness, ...]:
    """Report every unit, in the model's order."""
    by_name = {name: choice for choice in steps for name in choice.counter.parameters}
    return tuple(_units(assignment, by_name))


def _units(assignment: Assignment, by_name: Mapping[str, StepChoice]) -> Iterator[UnitStaleness]:
    newest = assignment.state.step
    for unit, indices in assignment.unit_sources():
        names = assignment.skeleton.units.parameters[unit]
        choices = [by_name[name] for name in names if name in by_name]
        opened = [assignment.sources[index] for index in indices]
        yield UnitStaleness(
            unit=str(unit),
            n_parameters=len(names),
            sources=tuple((source.path, source.step, newest - source.step) for source in opened),
            adam_steps=tuple(sorted({choice.value for choice in choices})),
            step_policies=tuple(sorted({choice.policy for choice in choices})),
            origin=_origin(assignment, unit),
        )


def _origin(assignment: Assignment, unit: Unit) -> str:
    """The layer that a layer is in its source, where that is another."""
    if assignment.layers is None or unit.kind is not UnitKind.LAYER or assignment.layers[unit.index] == unit.index:
        return ""
    return str(layer(assignment.layers[unit.index]))
