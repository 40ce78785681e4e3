"""Inspect training checkpoints: each one's units, bytes and steps, and whether several fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mergepipe.core.blocks import element_count
from mergepipe.core.display import Displayed, Table, shown, told
from mergepipe.core.units import format_bytes
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint, differences
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.selection import Unit

_MOST_MISSING = 10


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit of one checkpoint. `bytes` counts by kind of state the elements that are there; `adam_steps` are the
    distinct values of the step counters that serve its parameters, `shared_step` whether other units share one of
    them."""

    unit: str
    parameters: int
    elements: int
    bytes: Mapping[str, int]
    adam_steps: tuple[float, ...]
    shared_step: bool


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CheckpointReport(Displayed):
    """One checkpoint. `missing` is what a complete one would hold."""

    path: str = shown("checkpoint")
    format: str = shown("format", lambda r: r.format if r.stage is None else f"{r.format} stage {r.stage}")
    framework: str = shown("framework", "{framework}, {world_size:rank}")
    stage: int | None
    world_size: int
    step: int = shown("step")
    layers: int
    bytes: int = shown("size")
    units: tuple[UnitReport, ...]
    tied: Mapping[str, str] = shown("tied", lambda r: [f"{alias} to {owner}" for alias, owner in r.tied.items()])
    missing: tuple[str, ...] = shown("missing", lambda r: r.missing[:_MOST_MISSING], once=True)

    @property
    @told()
    def unit_table(self) -> Table:
        """The units, and the bytes of each kind of state."""
        kinds = list(dict.fromkeys(kind for unit in self.units for kind in unit.bytes))
        rows = (
            (
                unit.unit,
                str(unit.parameters),
                *(format_bytes(unit.bytes.get(kind, 0)) for kind in kinds),
                (", ".join(f"{step:g}" for step in unit.adam_steps) or "-") + " (shared)" * unit.shared_step,
            )
            for unit in self.units
        )
        return Table(("unit", "params", *kinds, "adam step"), tuple(rows))


@dataclass(frozen=True, slots=True, repr=False)
class InspectReport(Displayed):
    """Several checkpoints. Parts of them can be put together when `comparable`; otherwise `reasons` say why not."""

    checkpoints: tuple[CheckpointReport, ...] = shown()
    comparable: bool = shown(
        "composing", lambda r: "parts of these fit together" if r.comparable and len(r.checkpoints) > 1 else ""
    )
    reasons: tuple[str, ...] = shown("not composed")


def inspect_checkpoints(store: Store, paths: Sequence[Location]) -> InspectReport:
    """Open every path and report; reads structure and step counters only."""
    return report_on([open_training_checkpoint(store, path) for path in paths])


def report_on(checkpoints: Sequence[TrainingCheckpoint]) -> InspectReport:
    """Report on opened checkpoints; the first is what the others are compared with."""
    reasons = tuple(reason for other in checkpoints[1:] for reason in differences(checkpoints[0], other))
    return InspectReport(tuple(_report(c) for c in checkpoints), not reasons, reasons)


def _report(checkpoint: TrainingCheckpoint) -> CheckpointReport:
    units = tuple(_unit_report(checkpoint, unit, names) for unit, names in checkpoint.units.parameters.items())
    return CheckpointReport(
        path=str(checkpoint.path),
        format=checkpoint.format,
        framework=checkpoint.framework.value,
        stage=checkpoint.stage,
        world_size=checkpoint.world_size,
        step=checkpoint.step,
        layers=checkpoint.units.n_layers,
        bytes=sum(sum(unit.bytes.values()) for unit in units),
        units=units,
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
        parameters=len(names),
        elements=sum(element_count(checkpoint.parameters[name]) for name in names),
        bytes=MappingProxyType(by_kind),
        adam_steps=tuple(sorted({step.value for step in steps})),
        shared_step=any(not parameters.issuperset(step.parameters) for step in steps),
    )
