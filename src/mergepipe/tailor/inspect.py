"""Inspect training checkpoints: each one's units, bytes and steps, and whether several fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mergepipe.core.blocks import element_count
from mergepipe.core.strict_json import JsonValue
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint, differences
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.selection import Unit


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit of one checkpoint. `bytes_by_kind` counts the elements that are there; `adam_steps` are the distinct
    values of the step counters that serve its parameters, `shared_step` whether other units share one of them."""

    unit: str
    n_parameters: int
    n_elements: int
    bytes_by_kind: Mapping[str, int]
    adam_steps: tuple[float, ...]
    shared_step: bool


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint. `missing` is what a complete one would hold."""

    path: Location
    format: str
    framework: str
    stage: int | None
    world_size: int
    step: int
    n_layers: int
    units: tuple[UnitReport, ...]
    tied: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(sum(unit.bytes_by_kind.values()) for unit in self.units)


@dataclass(frozen=True, slots=True)
class InspectReport:
    """Several checkpoints. Parts of them can be put together when `reasons` is empty; otherwise it says why not."""

    checkpoints: tuple[CheckpointReport, ...]
    reasons: tuple[str, ...]

    @property
    def is_comparable(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, JsonValue]:
        """The report as JSON values."""
        return {
            "checkpoints": [_checkpoint_json(c) for c in self.checkpoints],
            "comparable": self.is_comparable,
            "reasons": list(self.reasons),
        }


def inspect_checkpoints(store: Store, paths: Sequence[Location]) -> InspectReport:
    """Open every path and report; reads structure and step counters only."""
    return report_on([open_training_checkpoint(store, path) for path in paths])


def report_on(checkpoints: Sequence[TrainingCheckpoint]) -> InspectReport:
    """Report on opened checkpoints; the first is what the others are compared with."""
    reasons = tuple(reason for other in checkpoints[1:] for reason in differences(checkpoints[0], other))
    return InspectReport(tuple(_report(c) for c in checkpoints), reasons)


def _report(checkpoint: TrainingCheckpoint) -> CheckpointReport:
    return CheckpointReport(
        path=checkpoint.path,
        format=checkpoint.format,
        framework=checkpoint.framework.value,
        stage=checkpoint.stage,
        world_size=checkpoint.world_size,
        step=checkpoint.step,
        n_layers=checkpoint.units.n_layers,
        units=tuple(_unit_report(checkpoint, unit, names) for unit, names in checkpoint.units.parameters.items()),
        tied=checkpoint.units.tied,
        missing=checkpoint.missing,
    )


def _unit_report(checkpoint: TrainingCheckpoint, unit: Unit, names: tuple[str, ...]) -> UnitReport:
    by_kind = dict.fromkeys(checkpoint.kinds, 0)
    for name in names:
        for kind in checkpoint.kinds:
            state = checkpoint.states.get((name, kind))
            by_kind[kind] += state.nbytes if state is not None else 0
    parameters = set(names)
    steps = [step for step in checkpoint.steps if not parameters.isdisjoint(step.parameters)]
    return UnitReport(
        unit=str(unit),
        n_parameters=len(names),
        n_elements=sum(element_count(checkpoint.parameters[name]) for name in names),
        bytes_by_kind=MappingProxyType(by_kind),
        adam_steps=tuple(sorted({step.value for step in steps})),
        shared_step=any(not parameters.issuperset(step.parameters) for step in steps),
    )


def _checkpoint_json(report: CheckpointReport) -> dict[str, JsonValue]:
    return {
        "path": str(report.path),
        "format": report.format,
        "framework": report.framework,
        "stage": report.stage,
        "world_size": report.world_size,
        "step": report.step,
        "layers": report.n_layers,
        "bytes": report.total_bytes,
        "units": [_unit_json(unit) for unit in report.units],
        "tied": dict(report.tied),
        "missing": list(report.missing),
    }


def _unit_json(unit: UnitReport) -> dict[str, JsonValue]:
    return {
        "unit": unit.unit,
        "parameters": unit.n_parameters,
        "elements": unit.n_elements,
        "bytes": dict(unit.bytes_by_kind),
        "adam_steps": list(unit.adam_steps),
        "shared_step": unit.shared_step,
    }
