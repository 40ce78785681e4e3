"""Make snapshots, and what was made from them, again without a model: by their records, parents first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.snapshots import SnapshotRow, containing, is_named
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.display import yaml_document
from mergepipe.core.flags import public_call, several
from mergepipe.core.units import first_names
from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, Problem, RecipeError, unsupported
from mergepipe.jobs.merge_run import MergeRun, intermediate_writer
from mergepipe.jobs.plan import PlanRequest, make_plan
from mergepipe.jobs.replay import open_recorded, shard_bytes_of
from mergepipe.jobs.snapshots import content_id_at, find_snapshot, read_manifest_value, with_inputs_found
from mergepipe.options import MergeOptions, OutputOptions, PlanOptions, RunOptions, home_of
from mergepipe.planning.budget import ByteBudget, Policy
from mergepipe.planning.plan import READS_ALL, Plan
from mergepipe.recipes.yaml_source import Value, parse_documents
from mergepipe.reports import NotRemade, ProgressCallback, RemadeSnapshot, WithoutReport
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, with_parameters
from mergepipe.runs.merge_settings import merge_settings
from mergepipe.runs.model_card import BaseModelIds
from mergepipe.runs.stored_plan import changed_files, plan_of
from mergepipe.runs.work import output_of
from mergepipe.snapshots.manifest import BASE_ROLE, MANIFEST_NAME, InputRecord, Manifest
from mergepipe.snapshots.staging import check_target
from mergepipe.storage.contract import BESIDE
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import folder_place
from mergepipe.storage.stores import Stores

_MODEL_KEYS = ("model", "source_model")
_PLACE_KEYS = ("path", "model")
_SHORT_SID = 12


@public_call(OutputOptions)
def without(
    expert: str | Path,
    snapshots: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    dry_run: bool = False,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> WithoutReport:
    """Make snapshots again without a model, with all that was made from them, into folders in `out`, parents first.

    Each keeps its recipe, seed and budget, but for the entries of the model; snapshots that it was made from and that
    hold the model are made again before it. What cannot be made again is listed with the reason, and so is all that
    was made from it. The snapshots themselves stay as they are.

    Args:
        expert: the model, named as `list_snapshots` takes it.
        snapshots: see `verify`; the catalog must know them.
        dry_run: only say what would be read and written.
        options: `OutputOptions`: threads, memory and the catalog, and `force`.
    """
    made = OutputOptions.of(options, fields)
    folder = folder_place(out, hint="name a folder: each snapshot gets one in it").local_path
    rows = Catalog(home_of(made.home)).snapshots()
    name = str(expert)
    if name.startswith("hf://") and "@" in name:  # a merge records the commit that a branch was at
        name = str(Stores().pin(Location.of(name)))
    left_out = _Expert(name, content_id_at(expert))
    held = _held(rows, left_out, several(snapshots), home_of(made.home))
    work = _Work(made, folder, on_progress)
    for row in held:
        work.consider(row, left_out)
    if not dry_run:
        for job in work.jobs:
            if not (job.out / MANIFEST_NAME).exists():
                check_target(job.out, [], force=made.force)
        for number in range(len(work.jobs)):
            work.make(number)
    remade = tuple(job.report for job in work.jobs)
    return WithoutReport(expert=str(expert), remade=remade, not_remade=tuple(work.refused), is_dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class _Expert:
    """The model to leave out, and the content id of what is at that place."""

    name: str
    content_id: str | None


def _held(
    rows: Sequence[SnapshotRow], expert: _Expert, snapshots: Sequence[str | Path], home: Path
) -> tuple[SnapshotRow, ...]:
    """Return the snapshots to make again, parents first.

    They hold the model, and are requested, made from one that is, or what such a one was made from.
    """
    holding = {row.sid: row for row in reversed(containing(rows, expert.name, expert.content_id))}
    requested = set()
    for snapshot in snapshots:
        place = find_snapshot(snapshot, home)
        sid = read_manifest_value(Stores(), place).sid
        named = next((row for row in rows if row.sid == sid and Location.local(row.path) == place.absolute()), None)
        if named is not None and sid in holding:
            holding[sid] = named  # of several copies the one that was named: outputs are called after it
        if sid not in holding:
            hint = f"`mergepipe ls --with {expert.name}` lists those that do"
            raise NotFoundError.of("snapshot.not-found", snapshot, f"holds nothing of '{expert.name}'", hint)
        requested.add(sid)
    parents: dict[str, set[str]] = {sid: set() for sid in holding}
    children: dict[str, set[str]] = {sid: set() for sid in holding}
    for sid, row in holding.items():
        for source in row.inputs:
            if source.sid in holding:
                parents[sid].add(source.sid)
                children[source.sid].add(sid)
    wanted = _closure(_closure(requested, children), parents)
    ordered: dict[str, SnapshotRow] = {}
    pending = [sid for sid in holding if sid in wanted]
    while pending:
        ready = [sid for sid in pending if not (parents[sid] & wanted) - ordered.keys()]
        if not ready:
            message = "snapshots were replaced by ones made from them"
            raise unsupported(", ".join(pending), message, "make them again one by one, by merge")
        for sid in ready:
            ordered[sid] = holding[sid]
            pending.remove(sid)
    return tuple(ordered.values())


def _closure(start: set[str], neighbours: Mapping[str, set[str]]) -> set[str]:
    """Return all that is reached from some snapshots."""
    reached = set(start)
    pending = list(start)
    while pending:
        new = neighbours[pending.pop()] - reached
        reached |= new
        pending += new
    return reached


@dataclass(frozen=True, slots=True)
class _Job:
    """One snapshot to make again at `out`; `inputs_made` are the jobs before it whose outputs it is made from."""

    manifest: Manifest
    place: Location
    out: Path
    inputs_made: Mapping[str, int]
    report: RemadeSnapshot


class _Work:
    """Snapshots that can be made again, parents first, and those that cannot, with the reason."""

    def __init__(self, options: OutputOptions, folder: Path, on_progress: ProgressCallback | None) -> None:
        self.jobs: list[_Job] = []
        self.refused: list[NotRemade] = []
        self._options = options
        self._folder = folder
        self._on_progress = on_progress

    def consider(self, row: SnapshotRow, expert: _Expert) -> None:
        """Plan to make a snapshot again, or note why that cannot be; inputs of before stand for those to be made."""
        store = Stores()
        try:
            job = self._job(store, row, expert)
            inputs = open_recorded(replace(job.manifest, plan=None), store)
            _check_inputs(job, inputs)
            plan = plan_of(job.manifest, "the manifest's plan")
            if plan is not None and plan.adjustments:
                raise _cannot("--min-density", "its budget lowered densities, and how far it might is not recorded")
        except MergePipeError as error:
            problem = error.problems[0]
            self.refused.append(NotRemade(row.sid, row.path, f"{problem.where}: {problem.message}".removeprefix(": ")))
            return
        expert_bytes = inputs.resolution.expert_bytes
        report = replace(
            job.report,
            base_bytes=inputs.resolution.base_bytes,
            expert_bytes=expert_bytes if plan is None else min(plan.budget_bytes, expert_bytes),
            output_bytes=output_of(inputs, None).total_bytes,
        )
        self.jobs.append(replace(job, report=report))

    def _job(self, store: Stores, row: SnapshotRow, expert: _Expert) -> _Job:
        place = Location.local(row.path)
        manifest = with_inputs_found(read_manifest_value(store, place), store, home_of(self._options.home))
        if manifest.sid != row.sid:
            raise NotFoundError.of("snapshot.not-found", row.path, "another snapshot is there now")
        if any(file.name.startswith(BESIDE) for file in (*manifest.files, *manifest.sidecars)):
            raise unsupported(row.path, "is one file, not a folder")
        made: dict[str, int] = {}
        left_out: set[str] = set()
        for source, record in zip(row.inputs, manifest.inputs, strict=True):
            number = next((n for n, job in enumerate(self.jobs) if job.report.sid == source.sid), None)
            parent = next((one for one in self.refused if one.sid == source.sid), None)
            if parent is not None:
                raise NotFoundError.of("snapshot.not-found", record.model, "cannot be made again itself")
            if number is not None:
                made[record.model] = number
            elif is_named(source, expert.name, expert.content_id):
                left_out.add(record.model)
        names = {job.out.name for job in self.jobs}
        name = row.path.name if row.path.name not in names else f"{row.path.name}-{row.sid[:_SHORT_SID]}"
        report = RemadeSnapshot(row.sid, row.path, self._folder / name)
        return _Job(_left_out(manifest, left_out), place, self._folder / name, made, report)

    def make(self, number: int) -> None:
        """Make one snapshot again, after those that it is made from; one that an earlier call made is taken."""
        job = self.jobs[number]
        manifest = job.manifest
        for model, parent in job.inputs_made.items():
            manifest = _moved(manifest, model, self.jobs[parent].out.absolute())
        if (job.out / MANIFEST_NAME).exists():
            there = read_manifest_value(Stores(), Location.local(job.out))
            if (there.recipe, there.seed) == (manifest.recipe, manifest.seed):
                self.jobs[number] = replace(job, report=replace(job.report, new_sid=there.sid))
                return
        settings = merge_settings(self._options.common(MergeOptions), job.out, self._on_progress)
        options = replace(settings.options, seed=manifest.seed, shard_bytes=shard_bytes_of(manifest, job.place))
        settings = replace(settings, options=options, base_model_ids=BaseModelIds.recorded(manifest))
        store = Stores(settings.engine.connections)
        link = CatalogLink(settings.home)
        plan = plan_of(manifest, "the manifest's plan")
        with intermediate_writer(settings, store) as write_intermediate:
            inputs = open_recorded(replace(manifest, plan=None), store, write_intermediate)
            if plan is not None:
                plan = make_plan(store, inputs, _request(plan), link)
                inputs = with_parameters(inputs, plan)
            report = MergeRun(inputs, plan, settings, store, link).publish()
        self.jobs[number] = replace(job, report=replace(job.report, new_sid=report.sid))


def _check_inputs(job: _Job, inputs: Inputs) -> None:
    """Refuse inputs that were written to since: by their versions, unless their content ids are the recorded ones.

    Raises:
        ConflictError: `input.changed`.
    """
    changed = []
    for record, (_, _, checkpoint) in zip(job.manifest.inputs, inputs.leaves(), strict=True):
        files = changed_files(record.files, checkpoint.file_ids, by_version=True)
        if files and record.model not in job.inputs_made:
            is_same = record.content_id is not None and content_id_at(record.path) == record.content_id
            if not is_same:
                message = f"was written to since the snapshot was made ({first_names(files)})"
                changed.append(Problem("input.changed", record.path, message, "restore the input unchanged"))
    if changed:
        raise ConflictError(*changed)


def _request(plan: Plan) -> PlanRequest:
    """Ask for a plan of the same budget, chosen in the same way."""
    reads_all = plan.policy == READS_ALL
    importance = None if plan.importance is None else plan.importance.path
    options = PlanOptions(
        where_omitted=plan.on_omit, block_elements=plan.block_elements, seed=plan.seed, importance=importance
    )
    policy = Policy.NORM if reads_all else Policy(plan.policy)
    return PlanRequest(ByteBudget(plan.budget_bytes), policy, options, reads_all)


def _left_out(manifest: Manifest, models: set[str]) -> Manifest:
    """Return the record of the snapshot without some models: its recipe without their entries, and its inputs."""
    if not models:
        return manifest
    records = tuple(record for record in manifest.inputs if record.model not in models)
    if all(record.role == BASE_ROLE for record in records):
        raise _cannot("the recipe", "nothing but the base would be left")
    documents = parse_documents(Location.local(Path.cwd() / "recipe"), manifest.recipe)
    roots = [_pruned(source.root, models, "the recipe") for source in documents]
    for root in roots:
        for text in _texts(root):
            if text in models:
                raise _cannot(text, "is its base, or is named by more than its entries, as a tokenizer's source is")
    return replace(manifest, recipe=_as_text(roots), inputs=records)


def _cannot(where: str, message: str) -> MergePipeError:
    return RecipeError.of("recipe.conflict", where, message)


def _pruned(value: Value, models: set[str], key: str) -> Value:
    """Return a recipe's value without the entries of some models; a list of entries must keep one."""
    if isinstance(value, dict):
        return {name: _pruned(item, models, str(name)) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    kept = [_pruned(item, models, key) for item in value if _model_of(item) not in models]
    if value and not kept:
        raise _cannot(key, "no entry would be left")
    return kept


def _model_of(entry: Value) -> str:
    """Return the model that an entry of a recipe names; empty if it names none."""
    if not isinstance(entry, dict):
        return ""
    model = next((entry[key] for key in _MODEL_KEYS if key in entry), "")
    if isinstance(model, dict):
        model = next((model[key] for key in _PLACE_KEYS if key in model), "")
    return str(model)


def _texts(value: Value) -> Iterator[str]:
    """Yield all texts in a recipe's value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _moved(manifest: Manifest, model: str, path: Path) -> Manifest:
    """Return a record with one input at another path, with the files that lie there."""
    files = open_checkpoint(Stores(), Location.local(path)).file_ids

    def moved(record: InputRecord) -> InputRecord:
        return replace(record, model=str(path), path=str(path), files=files) if record.model == model else record

    documents = parse_documents(Location.local(Path.cwd() / "recipe"), manifest.recipe)
    text = _as_text([_renamed(source.root, model, str(path)) for source in documents])
    return replace(manifest, recipe=text, inputs=tuple(map(moved, manifest.inputs)))


def _renamed(value: Value, model: str, name: str) -> Value:
    """Return a recipe's value in which a model has another name."""
    if isinstance(value, dict):
        return {key: _renamed(item, model, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, model, name) for item in value]
    return name if value == model else value


def _as_text(documents: Sequence[Value]) -> str:
    """Write the documents of a recipe."""
    return "---\n".join(yaml_document(root, width=120) for root in documents)
