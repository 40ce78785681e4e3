"""Look at checkpoints and write none: what they hold, how far two are apart, and recipes over those of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DTypeKind, Span, element_count
from mergepipe.core.display import Displayed, Table, shown, told, yaml_document
from mergepipe.core.strict_json import JsonValue
from mergepipe.core.units import format_bytes
from mergepipe.errors import MergePipeError, NotFoundError, StorageError, invalid_option, mismatched
from mergepipe.reports import ByteProgress, ProgressCallback
from mergepipe.snapshots.manifest import is_composite
from mergepipe.storage.contract import SAVE_LOG_BYTES, FileKind, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    FP32,
    WEIGHT,
    AdamStep,
    StateReader,
    StoredState,
    TrainingCheckpoint,
    differences,
)
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import values_of
from mergepipe.tailor.formats import TRAINING_FORMATS, open_source_checkpoint, open_training_checkpoint, refuse_unlisted
from mergepipe.tailor.formats.contract import step_of_name
from mergepipe.tailor.formats.partial import MANIFEST_NAME
from mergepipe.tailor.saving.save_log import read_log
from mergepipe.tailor.saving.unit_choice import SCHEDULES, Schedule
from mergepipe.tailor.selection import Unit, unit_selectors
from mergepipe.tailor.unmerged_adapter import find_adapter

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
    """One checkpoint. `missing` is what a complete one would hold; `adapter` says which of PEFT it holds, if any."""

    path: str = shown("checkpoint")
    format: str = shown("format", lambda r: r.format if r.stage is None else f"{r.format} stage {r.stage}")
    framework: str = shown("framework", "{framework}, {world_size:rank}")
    stage: int | None
    world_size: int
    step: int = shown("step")
    layers: int
    bytes: int = shown("size")
    units: tuple[UnitReport, ...]
    adapter: str = shown("adapter")
    tied: Mapping[str, str] = shown("tied", lambda r: [f"{alias} to {owner}" for alias, owner in r.tied.items()])
    missing: tuple[str, ...] = shown("missing", lambda r: r.missing[:_MOST_MISSING], once=True)

    @property
    @told()
    def unit_table(self) -> Table:
        """The units, and the bytes of each kind of state."""
        kinds = list(dict.fromkeys(kind for unit in self.units for kind in unit.bytes))
        rows = []
        for unit in self.units:
            sizes = [format_bytes(unit.bytes.get(kind, 0)) for kind in kinds]
            steps = ", ".join(f"{step:g}" for step in unit.adam_steps) or "-"
            if unit.shared_step:
                steps += " (shared)"
            rows.append((unit.unit, str(unit.parameters), *sizes, steps))
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
    reasons = [reason for other in checkpoints[1:] for reason in differences(checkpoints[0], other)]
    if len(checkpoints) > 1 and all(checkpoint.missing for checkpoint in checkpoints):
        reasons.append("none of them is complete: a composition needs one that is")
    return InspectReport(tuple(map(_report, checkpoints)), not reasons, tuple(reasons))


def _report(checkpoint: TrainingCheckpoint) -> CheckpointReport:
    units = []
    kinds = checkpoint.kinds
    serving: dict[str, list[AdamStep]] = defaultdict(list)  # by parameter
    for step in checkpoint.steps:
        for name in step.parameters:
            serving[name].append(step)
    for unit, names in checkpoint.units.parameters.items():
        by_kind, parameters = dict.fromkeys(kinds, 0), set(names)
        for state in (checkpoint.states.get((name, kind)) for name in names for kind in by_kind):
            if state is not None:
                by_kind[state.kind] += state.nbytes
        steps = {id(step): step for name in names for step in serving[name]}.values()
        units.append(UnitReport(
            unit=str(unit),
            parameters=len(names),
            elements=sum(element_count(checkpoint.parameters[name]) for name in names),
            bytes=MappingProxyType(by_kind),
            adam_steps=tuple(sorted({step.value for step in steps})),
            shared_step=any(not parameters.issuperset(step.parameters) for step in steps),
        ))  # fmt: skip
    adapter = find_adapter(checkpoint)
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
        adapter="" if adapter is None else adapter.text,
        tied=checkpoint.units.tied,
        missing=checkpoint.missing,
    )


BLOCK_ELEMENTS = 1 << 20  # read from each side at a time: memory is a small multiple of it


def _change_text(change: float) -> str:
    return "from zero" if change == math.inf else f"{change:.3g}"


@dataclass(frozen=True, slots=True)
class UnitChange(Displayed):
    """One unit's changes `‖B - A‖ / ‖A‖` by kind, infinite where A is zero and B is not; None where one lacks it.

    `weights` are the masters where there are any.
    """

    unit: str = shown("unit")
    weights: float | None = shown("weights", lambda row: _change_text(row.weights))
    exp_avg: float | None = shown("exp_avg", lambda row: _change_text(row.exp_avg))
    exp_avg_sq: float | None = shown("exp_avg_sq", lambda row: _change_text(row.exp_avg_sq))

    def to_json(self) -> dict[str, JsonValue]:
        """Return the change as JSON values; null where it is not finite, too."""
        changes = {"weights": self.weights, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        finite = {kind: change if math.isfinite(change or 0.0) else None for kind, change in changes.items()}
        return {"unit": self.unit, **finite}


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


StatePairs = list[tuple[StoredState, StoredState]]


def diff_checkpoints(
    store: Store, first: TrainingCheckpoint, second: TrainingCheckpoint, on_progress: ProgressCallback | None = None
) -> DiffReport:
    """Compare every parameter both have; they may differ in stage, world size and format.

    Every byte is read once. Memory: a few arrays of `BLOCK_ELEMENTS`.
    """
    both = [name for name in first.units.names if name in second.parameters]
    reshaped = [name for name in both if first.parameters[name] != second.parameters[name]]
    if reshaped or not both:
        message = f"different shapes of {reshaped[0]}" if reshaped else "no parameter in common"
        raise mismatched(f"{first.path} and {second.path}", message)

    pairs_of_units: dict[Unit, list[StatePairs]] = {}
    total_bytes = 0
    for unit, names in first.units.parameters.items():
        weights = _float_pairs(first, second, names, FP32) or _float_pairs(first, second, names, WEIGHT)
        moments = [_float_pairs(first, second, names, kind) for kind in (EXP_AVG, EXP_AVG_SQ)]
        pairs_of_units[unit] = [weights, *moments]
        for pairs in pairs_of_units[unit]:
            total_bytes += sum(a.n_elements * (a.dtype.itemsize + b.dtype.itemsize) for a, b in pairs)

    comparing = ByteProgress(on_progress, "compare", total_bytes)
    units = []
    with StateReader(store) as reader:
        for unit, compared in pairs_of_units.items():
            changes = [_relative_change(store, reader, pairs, comparing) for pairs in compared]
            units.append(UnitChange(str(unit), *changes))
    return DiffReport(first, second, tuple(units))


def _float_pairs(first: TrainingCheckpoint, second: TrainingCheckpoint, names: Sequence[str], kind: str) -> StatePairs:
    """Return the states of one kind that both checkpoints have completely, as floats."""
    pairs = [(first.states.get((name, kind)), second.states.get((name, kind))) for name in names]
    floats = [(a, b) for a, b in pairs if a and b and a.dtype.kind is b.dtype.kind is DTypeKind.FLOAT]
    return [(a, b) for a, b in floats if not a.gaps and not b.gaps]


def _relative_change(store: Store, reader: StateReader, pairs: StatePairs, comparing: ByteProgress) -> float | None:
    """Measure `|B - A| / |A|` over all pairs; None without one."""

    def values(state: StoredState, span: Span) -> NDArray[np.float64]:
        return values_of(reader.read(state, span), state.dtype, state.parameter).astype(np.float64)

    before = difference = 0.0
    for packed_a, packed_b in pairs:
        a = unpacked(store, packed_a)
        b = unpacked(store, packed_b)
        for start in range(0, a.n_elements, BLOCK_ELEMENTS):
            span = Span(start, min(start + BLOCK_ELEMENTS, a.n_elements))
            x = values(a, span)
            delta = values(b, span) - x
            before += float(np.dot(x, x))
            difference += float(np.dot(delta, delta))
            comparing.add(span.n_elements * (a.dtype.itemsize + b.dtype.itemsize))
    if not pairs or difference == 0:
        return 0.0 if pairs else None
    if not math.isfinite(difference):
        return math.nan
    return math.sqrt(difference / before) if before else math.inf


# --- write recipes over the checkpoints of a run: by a strategy, or as a log of partial saves implies ---


@dataclass(frozen=True, slots=True)
class LoggedComposition:
    """Every unit's source, a folder and its step, in the model's order.

    `step` is that of the newest save used. `default` is the newest full checkpoint, which gives the structure;
    `state_from` is the newest save that scheduler, random states and step can be taken from: training resumes at its
    step. `notes` say in words what to know.
    """

    step: int
    default: Location
    state_from: Location
    sources: Mapping[Unit, tuple[Location, int]]
    notes: tuple[str, ...] = ()

    def to_yaml(self, recipe_folder: Location) -> str:
        """The recipe in its short form; sources in the order of their steps, paths relative to `recipe_folder`."""
        units_of: dict[Location, list[Unit]] = {}
        for unit, (folder, _) in sorted(self.sources.items(), key=lambda item: (item[1][1], str(item[1][0]))):
            if folder != self.default:
                units_of.setdefault(folder, []).append(unit)
        taken = {folder: unit_selectors(units) for folder, units in units_of.items()}
        return _short_recipe(self.default, taken, recipe_folder, self.state_from)


def _short_recipe(
    default: Location, taken: Mapping[Location, Sequence[str]], folder: Location, state_from: Location | None = None
) -> str:
    """Write a recipe in its short form: units by the checkpoint they are taken from; paths are relative to `folder`."""
    document: dict[str, object] = {"default": default.relative_text(folder)}
    if taken:
        document["take"] = [{"from": path.relative_text(folder), "units": list(units)} for path, units in taken.items()]
    if state_from is not None:
        document["state_from"] = state_from.relative_text(folder)
    return yaml_document(document, width=120)


# --- by a strategy, over full checkpoints ---


LATEST = "latest"  # everything from the newest
STRATEGIES = (*SCHEDULES, LATEST)


def find_checkpoints(store: Store, run: Location, at: int | None) -> list[TrainingCheckpoint]:
    """Open the newest two complete checkpoints of `run` saved at or before step `at` (any step if None), newest first.

    Checkpoints are directories whose names end in their step, as `checkpoint-400` or `global_step400`; what cannot be
    read as one (a save that was cut short) is passed over, and composites made by tailor are.
    """
    refuse_unlisted(run)
    numbered = []
    for entry in store.list(run) if is_folder(store, run) else ():
        step = step_of_name(entry.name)
        if step is not None and entry.kind is FileKind.FOLDER and (at is None or step <= at):
            numbered.append((step, run / entry.name))
    checkpoints: list[TrainingCheckpoint] = []
    for _, path in sorted(numbered, reverse=True):
        if is_composite(store, path):
            continue
        try:
            opened = open_source_checkpoint(store, path)
        except StorageError:
            if not path.is_local:  # access, or the network: nothing is known of what is there
                raise
            continue
        except MergePipeError:
            continue
        if not opened.missing and (at is None or opened.step <= at):
            checkpoints.append(opened)
        if len(checkpoints) == 2:
            break
    if not checkpoints:
        before = f" at or before step {at}" if at is not None else ""
        message = f"holds no complete checkpoint{before}"
        raise NotFoundError.of("save.not-found", run, message, "give the run's directory")
    return checkpoints


def strategy_recipe(strategy: str, checkpoints: Sequence[TrainingCheckpoint], ends: int, folder: Location) -> str:
    """Write the recipe (YAML, short form) of a strategy over the newest checkpoint and the one before it.

    Two full checkpoints stand for the last two saves of the schedule of that name that differ: what the newest of
    these would not have saved comes from the one before. `ends` is how many layers at either end the filters take
    from the newest. Paths are relative to `folder`.
    """
    newest = checkpoints[0]
    if strategy == LATEST:
        return _short_recipe(newest.path, {}, folder)
    if len(checkpoints) < 2:
        raise invalid_option(strategy, f"needs two checkpoints, only {newest.path} is there", f"use {LATEST}")
    units = tuple(newest.units.parameters)
    schedule = Schedule(strategy, ends, 5 if strategy == "paper-filter" else 2)
    saved = schedule.units(units, 2 * schedule.every - 1 if strategy == "paper-filter" else 1)
    older = unit_selectors(unit for unit in units if unit not in saved)
    return _short_recipe(newest.path, {checkpoints[1].path: older} if older else {}, folder)


# --- from a log of partial saves ---


def compose_from_log(
    text: str, run: Location, at: int, *, folders: Collection[str] | None = None, stateless: Collection[str] = ()
) -> LoggedComposition:
    """Compose the state of the run at step `at` from its log: each unit from its newest save at or before.

    `folders` are the names of the directories in `run`; None takes what the log says on trust. `stateless` are folders
    that training cannot resume from, whatever their step. Pure.
    """
    log = read_log(text)
    records = [record for record in log.records if record.step <= at]
    if not records:
        first = f"; the first is at step {log.records[0].step}" if log.records else ""
        raise NotFoundError.of("save.not-found", run, f"the log has no save at or before step {at}{first}")
    model = next((record.model_units for record in log.records if record.model_units), ())
    newest = {unit: record for record in records for unit in record.units}
    alien, unsaved = sorted(set(newest) - set(model)), sorted(set(model) - set(newest))
    if alien:
        raise NotFoundError.of("save.not-found", run, f"the log has {alien[0]}, which the model lacks")
    if unsaved:
        message = f"never saved at or before step {at}: {', '.join(unit_selectors(unsaved))}"
        raise NotFoundError.of("save.not-found", run, message, "ask for a later step")
    base = next((record for record in reversed(records) if record.is_full), None)
    if base is None:
        message = f"no full save before the partial one at step {records[0].step}"
        raise NotFoundError.of("save.not-found", run, message, "a composite needs one full checkpoint as its basis")
    used = {record.step: str(record.folder) for record in (base, *newest.values())}
    gone = [step for step, name in used.items() if folders is not None and name not in folders]
    if gone:
        message = f"the save of step {gone[0]} is not there: no {used[gone[0]]}"
        raise NotFoundError.of("save.not-found", run, message)
    sources = {unit: (run / used[newest[unit].step], newest[unit].step) for unit in sorted(model)}
    state = max((step for step, name in used.items() if name not in stateless), default=base.step)
    newest_step = max(step for _, step in sources.values())
    notes = []
    if state != newest_step:
        notes.append(
            f"units are as new as step {newest_step}; step, scheduler and random state are those of step {state}, "
            "the newest save that training can resume from"
        )
    dropped = [step for step in log.dropped_steps if step <= at]
    if dropped:
        notes.append(f"saves at steps {', '.join(map(str, dropped))} belong to a branch that training abandoned")
    if log.cut_line:
        notes.append(f"line {log.cut_line} of the log was cut short by a crash")
    return LoggedComposition(newest_step, run / used[base.step], run / used[state], sources, tuple(notes))


def composition_from_log_file(store: Store, log: Location, run: Location, at: int) -> LoggedComposition:
    """Compose from a log file and the directories that exist in the run."""
    text = store.read_small(log, SAVE_LOG_BYTES).decode("utf-8", errors="surrogateescape")
    folders = frozenset(entry.name for entry in store.list(run) if entry.kind is FileKind.FOLDER)
    state_files = {kind.state_file for kind in TRAINING_FORMATS}

    def holds_tensors_alone(folder: str) -> bool:
        """Whether a folder is a partial save without a run's state."""
        if not is_file(store, run / folder / MANIFEST_NAME):
            return False
        return not any(is_file(store, run / folder / name) for name in state_files)

    stateless = frozenset(filter(holds_tensors_alone, folders))
    return compose_from_log(text, run, at, folders=folders, stateless=stateless)
