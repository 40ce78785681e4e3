"""Report the contents of checkpoints, and how far two are apart: units, bytes, steps, and changes by unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import Span, element_count
from mergepipe.core.display import Displayed, Table, shown, told
from mergepipe.core.strict_json import JsonValue
from mergepipe.core.units import format_bytes
from mergepipe.errors import mismatched
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    FP32,
    WEIGHT,
    StateReader,
    StoredState,
    TrainingCheckpoint,
    differences,
)
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import values_of
from mergepipe.tailor.formats import open_training_checkpoint

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
    """Open every path and report, compared with the first; reads structure and step counters only."""
    checkpoints = [open_training_checkpoint(store, path) for path in paths]
    reasons = tuple(reason for other in checkpoints[1:] for reason in differences(checkpoints[0], other))
    return InspectReport(tuple(map(_report, checkpoints)), not reasons, reasons)


def _report(checkpoint: TrainingCheckpoint) -> CheckpointReport:
    units = []
    for unit, names in checkpoint.units.parameters.items():
        by_kind, parameters = dict.fromkeys(checkpoint.kinds, 0), set(names)
        for state in (checkpoint.states.get((name, kind)) for name in names for kind in by_kind):
            if state is not None:
                by_kind[state.kind] += state.nbytes
        steps = [step for step in checkpoint.steps if not parameters.isdisjoint(step.parameters)]
        units.append(UnitReport(
            unit=str(unit),
            parameters=len(names),
            elements=sum(element_count(checkpoint.parameters[name]) for name in names),
            bytes=MappingProxyType(by_kind),
            adam_steps=tuple(sorted({step.value for step in steps})),
            shared_step=any(not parameters.issuperset(step.parameters) for step in steps),
        ))  # fmt: skip
    return CheckpointReport(
        path=str(checkpoint.path),
        format=checkpoint.format,
        framework=checkpoint.framework.value,
        stage=checkpoint.stage,
        world_size=checkpoint.world_size,
        step=checkpoint.step,
        layers=checkpoint.units.n_layers,
        bytes=sum(sum(unit.bytes.values()) for unit in units),
        units=tuple(units),
        tied=checkpoint.units.tied,
        missing=checkpoint.missing,
    )


BLOCK_ELEMENTS = 1 << 20  # read from each side at a time: memory is a small multiple of it


@dataclass(frozen=True, slots=True)
class Change:
    """Squared norms of one kind of state: of the first checkpoint, and of the difference."""

    before: float
    difference: float

    @property
    def relative(self) -> float:
        """`‖B - A‖ / ‖A‖`; infinite where A is zero and B is not."""
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.before) if self.before else math.inf

    def __str__(self) -> str:
        return f"{self.relative:.3g}" if math.isfinite(self.relative) else "from zero"


@dataclass(frozen=True, slots=True)
class UnitChange(Displayed):
    """One unit's changes by kind; `weights` are the masters where there are any."""

    unit: str = shown("unit")
    weights: Change | None = shown("weights")
    exp_avg: Change | None = shown("exp_avg")
    exp_avg_sq: Change | None = shown("exp_avg_sq")

    def to_json(self) -> dict[str, JsonValue]:
        """Return the change as JSON values."""
        changes = {"weights": self.weights, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {"unit": self.unit, **{kind: _json_number(change) for kind, change in changes.items()}}


@dataclass(frozen=True, slots=True, repr=False)
class DiffReport(Displayed):
    """Two checkpoints compared."""

    first: TrainingCheckpoint = shown("from", lambda report: f"{report.first.path} (step {report.first.step})")
    second: TrainingCheckpoint = shown("to", lambda report: f"{report.second.path} (step {report.second.step})")
    units: tuple[UnitChange, ...] = shown()

    def to_json(self) -> dict[str, JsonValue]:
        """Return the change as JSON values."""
        return {
            "first": {"path": str(self.first.path), "step": self.first.step},
            "second": {"path": str(self.second.path), "step": self.second.step},
            "units": [unit.to_json() for unit in self.units],
        }


def _json_number(change: Change | None) -> float | None:
    return change.relative if change is not None and math.isfinite(change.relative) else None


def diff_checkpoints(
    store: Store, first: TrainingCheckpoint, second: TrainingCheckpoint, on_bytes: Callable[[int], None]
) -> DiffReport:
    """Compare every parameter both have; they may differ in stage, world size and format.

    Every byte is read once. Memory: a few arrays of `BLOCK_ELEMENTS`.
    """
    both = [n for n in first.units.names if n in second.parameters]
    reshaped = [name for name in both if first.parameters[name] != second.parameters[name]]
    if reshaped or not both:
        message = f"different shapes of {reshaped[0]}" if reshaped else "no parameter in common"
        raise mismatched(f"{first.path} and {second.path}", message)
    common = set(both)
    with StateReader(store) as reader:

        def values(state: StoredState, span: Span) -> NDArray[np.float64]:
            return values_of(reader.read(state, span), state.dtype, state.parameter).astype(np.float64)

        def change(names: Sequence[str], kind: str) -> Change | None:
            """Measure the change of one kind over all parameters that both checkpoints have completely."""
            before = difference = 0.0
            pairs = [(first.states.get((name, kind)), second.states.get((name, kind))) for name in names]
            whole = [(a, b) for a, b in pairs if a is not None and b is not None and not a.gaps and not b.gaps]
            for a, b in ((unpacked(store, a), unpacked(store, b)) for a, b in whole):
                for start in range(0, a.n_elements, BLOCK_ELEMENTS):
                    span = Span(start, min(start + BLOCK_ELEMENTS, a.n_elements))
                    x, delta = values(a, span), values(b, span)
                    delta -= x
                    before += float(np.dot(x, x))
                    difference += float(np.dot(delta, delta))
                    on_bytes(span.n_elements * (a.dtype.itemsize + b.dtype.itemsize))
            return Change(before, difference) if whole else None

        units = []
        for unit, all_names in first.units.parameters.items():
            names = [name for name in all_names if name in common]
            weights = change(names, FP32) or change(names, WEIGHT)
            units.append(UnitChange(str(unit), weights, change(names, EXP_AVG), change(names, EXP_AVG_SQ)))
    return DiffReport(first, second, tuple(units))
