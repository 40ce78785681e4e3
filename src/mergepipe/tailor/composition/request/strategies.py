"""Write recipes for common compositions of full checkpoints: parity, filter, latest."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from mergepipe.core.escaping import yaml_document
from mergepipe.errors import MergePipeError, NotFoundError, RecipeError
from mergepipe.storage.contract import FileKind, Store, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.composition.request.save_log import unit_selectors
from mergepipe.tailor.composition.source_checkpoint import open_source_checkpoint
from mergepipe.tailor.formats.weights_only import step_of_name
from mergepipe.tailor.saving.unit_choice import Filter, PaperFilter, PaperParity, Parity, Schedule, scheduled_units


class Strategy(StrEnum):
    """The strategy that assigns units to checkpoints."""

    PARITY = "parity"
    FILTER = "filter"
    PAPER_PARITY = "paper-parity"
    PAPER_FILTER = "paper-filter"
    LATEST = "latest"  # everything from the newest

    def schedule(self, ends: int) -> tuple[Schedule, int] | None:
        """Return the schedule of partial saves of that name, and the number of the save that the newest stands for.

        Two full checkpoints stand for the last two saves that differ: what the newest of these would not have saved
        comes from the one before.
        """
        schedules: dict[Strategy, tuple[Schedule, int]] = {
            Strategy.PARITY: (Parity(), 1),
            Strategy.FILTER: (Filter(ends, 2), 1),
            Strategy.PAPER_PARITY: (PaperParity(), 1),
            Strategy.PAPER_FILTER: (PaperFilter(ends), 2 * PaperFilter().every - 1),
        }
        return schedules.get(self)


def find_checkpoints(store: Store, run: Location, at: int | None) -> list[TrainingCheckpoint]:
    """Open the newest two complete checkpoints of `run` saved at or before step `at` (any step if None), newest first.

    Checkpoints are directories whose names end in their step, as `checkpoint-400` or `global_step400`; what cannot be
    read as one (a save that was cut short) is passed over.

    Raises:
        NotFoundError: there is none.
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
        raise NotFoundError.of("tailor.run", run, f"holds no complete checkpoint{before}", "give the run's directory")
    return checkpoints


def strategy_recipe(strategy: Strategy, checkpoints: Sequence[TrainingCheckpoint], ends: int, folder: Location) -> str:
    """Write the recipe (YAML, short form) of a strategy over the newest checkpoint and the one before it.

    `ends` is how many layers at either end the filters take from the newest. Paths are relative to `folder`.

    Raises:
        RecipeError: the strategy needs two checkpoints and there is one.
    """
    newest = checkpoints[0]
    schedule = strategy.schedule(ends)
    if schedule is None:
        return _recipe(newest.path, None, [], folder)
    if len(checkpoints) < 2:
        raise RecipeError.of(
            "tailor.strategy", strategy.value, f"needs two checkpoints, only {newest.path} is there", "use latest"
        )
    units = tuple(newest.units.parameters)
    saved = scheduled_units(schedule[0], units, schedule[1])
    older = unit_selectors(unit for unit in units if unit not in saved)
    return _recipe(newest.path, checkpoints[1].path, list(older), folder)


def _recipe(newest: Location, older: Location | None, units: list[str], folder: Location) -> str:
    content: dict[str, object] = {"default": _relative(newest, folder)}
    if older is not None and units:
        content["take"] = [{"from": _relative(older, folder), "units": units}]
    return yaml_document(content, width=110)


def _relative(path: Location, folder: Location) -> str:
    return path.relative_text(folder)
