"""Derive a composition from a log of partial saves: each unit from its newest save at or before a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mergepipe.core.escaping import yaml_document
from mergepipe.errors import NotFoundError
from mergepipe.storage.contract import FileKind, Store, is_file
from mergepipe.storage.limits import SAVE_LOG_BYTES
from mergepipe.storage.location import Location
from mergepipe.tailor.formats.partial import MANIFEST_NAME
from mergepipe.tailor.formats.registry import TRAINING_FORMATS
from mergepipe.tailor.saving.save_log import SaveLog, SaveRecord, read_log
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, Unit, UnitKind, layer

_PARTIAL_PREFIX = "partial-"
_FULL_NAMES = ("checkpoint-{}", "full-{}", "global_step{}", "step-{}")


@dataclass(frozen=True, slots=True)
class UnitSource:
    """The source of one unit: `folder`, saved at `step`."""

    unit: Unit
    folder: Location
    step: int


@dataclass(frozen=True, slots=True)
class LoggedComposition:
    """Every unit's source, in the model's order.

    `step` is that of the newest save used. `default` is the newest full checkpoint (where the log has none: the
    source of most units), which gives the structure; `state_from` is the newest save that scheduler, random states
    and step can be taken from: training resumes at its step. `notes` say in words what to know.
    """

    step: int
    default: Location
    state_from: Location
    sources: tuple[UnitSource, ...]
    notes: tuple[str, ...] = ()

    def to_yaml(self, recipe_folder: Location | None = None) -> str:
        """The recipe in its short form; sources in the order of their steps.

        Paths are relative to `recipe_folder`, where the recipe will lie; None leaves them as they are.
        """

        def written(path: Location) -> str:
            return str(path) if recipe_folder is None else path.relative_text(recipe_folder)

        older_saves = sorted(
            (s for s in self.sources if s.folder != self.default), key=lambda s: (s.step, str(s.folder))
        )
        take = [
            {"from": written(folder), "units": list(unit_selectors(s.unit for s in of_folder))}
            for folder, of_folder in groupby(older_saves, key=lambda s: s.folder)
        ]
        document: dict[str, object] = {"default": written(self.default)}
        document |= {"take": take} if take else {}
        document["state_from"] = written(self.state_from)
        return yaml_document(document, width=120)


def unit_selectors(units: Iterable[Unit]) -> tuple[str, ...]:
    """Format units as recipe selectors: layers in one selector with ranges, the others one each.

    Law: `parse_selector` of each, applied to a model with these units, selects exactly them.
    """
    ordered = sorted(units)
    layers = [unit.index for unit in ordered if unit.kind is UnitKind.LAYER]
    selectors = [f"layers {','.join(_ranges(layers))}"] if layers else []
    for unit in ordered:
        if unit.kind is UnitKind.OTHER:
            selectors.append("other:" + "".join(f"[{c}]" if c in "*?[" else c for c in unit.name))
        elif unit.kind is not UnitKind.LAYER:
            selectors.append(str(unit))
    return tuple(selectors)


def _ranges(indices: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        layers = [index for _, index in run]
        yield str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def compose_from_log(
    text: str,
    run: Location,
    at: int,
    *,
    folders: Collection[str] | None = None,
    units: Iterable[Unit] | None = None,
    stateless: Collection[str] = (),
) -> LoggedComposition:
    """Compose the state of the run at step `at` from its log: each unit from its newest save at or before.

    `folders` are the names of the directories in `run`; None takes what the log says on trust, and `checkpoint-STEP`
    for the paper's form, which names none. `units` are the model's; None takes what the log says of them. `stateless`
    are folders that training cannot resume from, whatever their step. Pure.
    """
    given_units = None if units is None else tuple(units)
    log = read_log(
        text, "log", None if given_units is None else sum(unit.kind is UnitKind.LAYER for unit in given_units)
    )
    records = [record for record in log.records if record.step <= at]
    if not records:
        first = f"; the first is at step {log.records[0].step}" if log.records else ""
        raise NotFoundError.of("save.not-found", run, f"the log has no save at or before step {at}{first}")
    model = given_units if given_units is not None else _model_units(log)
    newest = {unit: record for record in records for unit in record.units}
    _check_units(run, newest, model, at)
    base = _base(run, records, newest, frozenset(model))
    folders_by_step = {r.step: run / _folder(run, r, folders) for r in (base, *newest.values())}
    sources = tuple(UnitSource(u, folders_by_step[newest[u].step], newest[u].step) for u in sorted(model))
    usable = [r for r in records if r.step in folders_by_step and folders_by_step[r.step].name not in stateless]
    state = usable[-1] if usable else base
    return LoggedComposition(
        step=max(source.step for source in sources),
        default=folders_by_step[base.step],
        state_from=folders_by_step[state.step],
        sources=sources,
        notes=tuple(_notes(log, at, state.step, max(source.step for source in sources))),
    )


def _model_units(log: SaveLog) -> tuple[Unit, ...]:
    """List all units of the model, from MergePipe's own log lines, else from the paper's numbering."""
    listed = next((record.model_units for record in log.records if record.model_units), ())
    if listed:
        return listed
    seen = {unit for record in log.records for unit in record.units}
    last = max((unit.index for unit in seen if unit.kind is UnitKind.LAYER), default=-1)
    return (EMBED, *(layer(index) for index in range(last + 1)), NORM, LM_HEAD)


def _check_units(run: Location, newest: Collection[Unit], model: Collection[Unit], at: int) -> None:
    alien = sorted(set(newest) - set(model))
    if alien:
        raise NotFoundError.of("save.not-found", run, f"the log has {alien[0]}, which the model lacks")
    uncovered = sorted(set(model) - set(newest))
    if uncovered:
        raise NotFoundError.of(
            "save.not-found", run,
            f"never saved at or before step {at}: {', '.join(unit_selectors(uncovered))}",
            "ask for a later step; a head tied to the embeddings is no unit: then name the model's units",
        )  # fmt: skip


def _base(
    run: Location, records: Sequence[SaveRecord], newest: dict[Unit, SaveRecord], model: frozenset[Unit]
) -> SaveRecord:
    """Choose the newest full save; without one, in the paper's log form, the save that most units come from."""
    full = [r for r in records if r.is_full or (r.is_full is None and model <= set(r.units))]
    if full:
        return full[-1]
    if any(record.is_full is not None for record in records):
        raise NotFoundError.of(
            "save.not-found", run, f"no full save before the partial one at step {records[0].step}",
            "a composite needs one full checkpoint to stand on",
        )  # fmt: skip
    counts = [sum(source is record for source in newest.values()) for record in records]
    return max(zip(counts, records, strict=True), key=lambda pair: (pair[0], pair[1].step))[1]


def _folder(run: Location, record: SaveRecord, folders: Collection[str] | None) -> str:
    if folders is None:
        return record.folder or _FULL_NAMES[0].format(record.step)
    wanted = [record.folder] if record.folder else [*(n.format(record.step) for n in _FULL_NAMES), *_partials(record)]
    present = [name for name in wanted if name in folders]
    if not present:
        raise NotFoundError.of(
            "save.not-found", run, f"the save of step {record.step} is not there: no {' or '.join(wanted[:2])}"
        )
    return present[0]


def partial_name(step: int, repeat: int = 0) -> str:
    """Return the directory name of a partial save; `repeat` counts repeated saves of one step."""
    return f"{_PARTIAL_PREFIX}{step}" + (f"-r{repeat}" if repeat else "")


def _partials(record: SaveRecord) -> list[str]:
    return [partial_name(record.step, repeat) for repeat in range(99, -1, -1)]


def _notes(log: SaveLog, at: int, state_step: int, newest_step: int) -> Iterator[str]:
    if state_step != newest_step:
        yield (
            f"units are as new as step {newest_step}; step, scheduler and random state are those of step {state_step}, "
            "the newest save that training can resume from"
        )
    dropped = [step for step in log.dropped_steps if step <= at]
    if dropped:
        yield f"saves at steps {', '.join(map(str, dropped))} belong to a branch that training went back from"
    if log.cut_line:
        yield f"line {log.cut_line} of the log was cut short by a crash"


def composition_from_log_file(
    store: Store, log: Location, run: Location, at: int, *, units: Iterable[Unit] | None = None
) -> LoggedComposition:
    """Compose from a log file and the directories that exist in the run."""
    text = store.read_small(log, SAVE_LOG_BYTES).decode("utf-8", errors="surrogateescape")
    folders = frozenset(entry.name for entry in store.list(run) if entry.kind is FileKind.FOLDER)
    stateless = frozenset(name for name in folders if _is_stateless(store, run / name))
    return compose_from_log(text, run, at, folders=folders, units=units, stateless=stateless)


def _is_stateless(store: Store, folder: Location) -> bool:
    """Whether it is a partial save that holds tensors alone."""
    has_state = any(is_file(store, folder / kind.state_file) for kind in TRAINING_FORMATS)
    return is_file(store, folder / MANIFEST_NAME) and not has_state
