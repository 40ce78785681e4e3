"""Inspect training checkpoints: each one's units, bytes and steps, and whether several fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mergepipe.core.blocks import element_count
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MismatchError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.hf_trainer import TRAINER_STATE_NAME, read_config, read_json
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.selection import Unit

# --- tell whether checkpoints are of one run, by what the Trainer records beside them ---


_SHOWN_KEYS = ("model_type", "architectures")


def check_same_run(store: Store, checkpoints: Sequence[TrainingCheckpoint]) -> None:
    """Compare architectures and training histories, where they are recorded."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    histories = [(checkpoint.path, _history(store, checkpoint.path)) for checkpoint in ordered]
    described = [(checkpoint.path, read_config(store, checkpoint.path)) for checkpoint in ordered]
    for path, architecture in described:
        _compare_architectures(*described[-1], path, architecture)
    newest_path, newest = histories[-1]
    for path, history in histories[:-1]:
        other_step = next((step for step in sorted(history) if step in newest and history[step] != newest[step]), None)
        if other_step is not None:
            raise MismatchError.of(
                "checkpoint.mismatch", path,
                f"its log of step {other_step} is not that of {newest_path}: they are of two "
                "runs, or of two branches of one", "take checkpoints that follow one another",
            )  # fmt: skip


def _compare_architectures(
    newest: Location, wanted: dict[str, JsonValue], path: Location, architecture: dict[str, JsonValue]
) -> None:
    key = next((k for k in _SHOWN_KEYS if k in wanted and k in architecture and wanted[k] != architecture[k]), None)
    if key is not None:
        raise MismatchError.of(
            "checkpoint.mismatch", path, f"{key} is {architecture[key]}, that of {newest} is {wanted[key]}"
        )


def _history(store: Store, folder: Location) -> dict[int, list[JsonValue]]:
    """Losses that the Trainer has logged, by step."""
    if not is_file(store, folder / TRAINER_STATE_NAME):
        return {}
    logged = read_json(store, folder / TRAINER_STATE_NAME).get("log_history")
    losses: dict[int, list[JsonValue]] = {}
    for entry in logged if isinstance(logged, list) else []:
        match entry:
            case {"step": int(step), "loss": int() | float() as loss}:
                losses.setdefault(step, []).append(loss)
    return losses


# --- inspect training checkpoints: each one's units, bytes and steps, and whether several fit together ---


_MAX_NAMED = 3


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


def differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    """Yield why parts of `other` cannot stand in for parts of `first`; nothing when they can."""
    for what, a, b in (
        ("format", first.format, other.format),
        ("framework", first.framework.value, other.framework.value),
        ("ZeRO stage", first.stage, other.stage),
        ("world size", first.world_size, other.world_size),
    ):
        if a != b:
            yield f"{_pair(first, other)}: {what} {a} and {b}"
    yield from _parameter_differences(first, other)
    yield from _state_differences(first, other)
    if first.flat_groups != other.flat_groups and first.parameters == other.parameters:
        yield f"{_pair(first, other)}: parameters are grouped or ordered differently in the flat buffers"
    if first.units.tied != other.units.tied:
        yield f"{_pair(first, other)}: different tied parameters"


def _pair(first: TrainingCheckpoint, other: TrainingCheckpoint) -> str:
    return f"{first.path} and {other.path}"


def _parameter_differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    for a, b in ((first, other), (other, first)):
        absent = [name for name in a.parameters if name not in b.parameters]
        if absent:
            yield f"{b.path} lacks {_named(absent)}, which {a.path} has"
    both = [name for name in first.parameters if name in other.parameters]
    reshaped = [name for name in both if first.parameters[name] != other.parameters[name]]
    if reshaped:
        yield f"{_pair(first, other)}: different shapes of {_named(reshaped)}"


def _state_differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    kinds = set(first.kinds) ^ set(other.kinds)
    if kinds:
        yield f"{_pair(first, other)}: only one has {', '.join(sorted(kinds))}"
    recast = [
        f"{kind} of {name}"
        for (name, kind), state in first.states.items()
        if (name, kind) in other.states and other.states[(name, kind)].dtype != state.dtype
    ]
    if recast:
        yield f"{_pair(first, other)}: different dtypes of {_named(recast)}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


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
