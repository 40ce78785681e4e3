"""Write recipes over the checkpoints of a run: by a strategy, or as a log of partial saves implies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mergepipe.core.display import yaml_document
from mergepipe.errors import MergePipeError, NotFoundError, invalid_option
from mergepipe.storage.contract import SAVE_LOG_BYTES, FileKind, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats import TRAINING_FORMATS, open_source_checkpoint
from mergepipe.tailor.formats.contract import step_of_name
from mergepipe.tailor.formats.partial import MANIFEST_NAME
from mergepipe.tailor.saving.unit_choice import SCHEDULES, Schedule, read_log
from mergepipe.tailor.selection import Unit, unit_selectors


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
        taken = {
            folder: unit_selectors(unit for unit, (source, _) in self.sources.items() if source == folder)
            for folder, _ in sorted(set(self.sources.values()), key=lambda source: (source[1], str(source[0])))
            if folder != self.default
        }
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
    read as one (a save that was cut short) is passed over.
    """
    numbered = []
    for entry in store.list(run) if is_folder(store, run) else ():
        step = step_of_name(entry.name)
        if step is not None and entry.kind is FileKind.FOLDER and (at is None or step <= at):
            numbered.append((step, run / entry.name))
    checkpoints: list[TrainingCheckpoint] = []
    for _, path in sorted(numbered, reverse=True):
        try:
            opened = open_source_checkpoint(store, path)
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
        raise NotFoundError.of("save.not-found", run, message, "a composite needs one full checkpoint to stand on")
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
        notes.append(f"saves at steps {', '.join(map(str, dropped))} belong to a branch that training went back from")
    if log.cut_line:
        notes.append(f"line {log.cut_line} of the log was cut short by a crash")
    return LoggedComposition(newest_step, run / used[base.step], run / used[state], sources, tuple(notes))


def composition_from_log_file(store: Store, log: Location, run: Location, at: int) -> LoggedComposition:
    """Compose from a log file and the directories that exist in the run."""
    text = store.read_small(log, SAVE_LOG_BYTES).decode("utf-8", errors="surrogateescape")
    folders = frozenset(entry.name for entry in store.list(run) if entry.kind is FileKind.FOLDER)
    state_files = {kind.state_file for kind in TRAINING_FORMATS}
    stateless = frozenset(  # partial saves that hold tensors alone
        name
        for name in folders
        if is_file(store, run / name / MANIFEST_NAME) and not any(is_file(store, run / name / f) for f in state_files)
    )
    return compose_from_log(text, run, at, folders=folders, stateless=stateless)
