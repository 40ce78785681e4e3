"""Compose a checkpoint from a recipe: open, plan, copy, read back, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from blake3 import blake3

import mergepipe
from mergepipe.checkpoints.directory import SIDECAR_NAMES
from mergepipe.checkpoints.packed import UnpackedView
from mergepipe.errors import ConflictError, NotFoundError
from mergepipe.options import ComposeOptions, TailorOptions
from mergepipe.recipes.references import real_location, text_with_relative_paths
from mergepipe.snapshots.composite import (
    AverageRecord,
    ComposedCheckpoint,
    CompositeInput,
    CompositeManifest,
    SelfCheck,
    Thoroughness,
)
from mergepipe.snapshots.manifest import MANIFEST_NAME, file_without_paths
from mergepipe.snapshots.staging import Staging, check_free_space, check_target
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import Digested, FileId
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.limits import sidecar_limit
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, write_durably
from mergepipe.storage.stores import Stores
from mergepipe.tailor.assignment import Assignment, assign
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.composition_plan import CompositionPlan, plan_composition
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal
from mergepipe.tailor.copy_writer import Copier
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.inspect import check_same_run
from mergepipe.tailor.recipe import CompositionRecipe, load_composition
from mergepipe.tailor.self_check import check_composite
from mergepipe.tailor.sources import open_source_checkpoint
from mergepipe.tailor.universal_plan import plan_universal

OnProgress = Callable[[str, int, int], None]
_MARGIN_BYTES = 16 << 20
_HEAD_BYTES = 4096
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CompositionReport:
    """The result of a composition or, with `manifest` None, of its plan."""

    plan: CompositionPlan
    manifest: CompositeManifest | None
    out: Path | None
    seconds: float
    average: AverageRecord | None = None


@dataclass(frozen=True, slots=True)
class OpenedRecipe:
    """A recipe with its sources, by their locations."""

    recipe: CompositionRecipe
    sources: Mapping[Location, TrainingCheckpoint]


def open_recipe(store: Store, path: Location, state_from: Location | None) -> OpenedRecipe:
    """Load a recipe and open every checkpoint it names."""
    recipe = load_composition(path, store)
    if state_from is not None:
        recipe = replace(recipe, state_from=_as_named(store, recipe, store.pin(state_from.normal())))
    return OpenedRecipe(recipe, {source: open_source_checkpoint(store, source) for source in recipe.sources})


def _as_named(store: Store, recipe: CompositionRecipe, path: Location) -> Location:
    """The recipe's spelling of a place, if it names it."""
    place = real_location(store, path)
    return next((source for source in recipe.sources if real_location(store, source) == place), path)


def plan_recipe(store: Store, opened: OpenedRecipe, options: ComposeOptions) -> CompositionPlan:
    """Plan the composition of a recipe."""
    check_same_run(store, tuple(opened.sources.values()))
    assignment = assign(opened.recipe, opened.sources)
    if options.export is not None:
        return plan_universal(store, assignment)
    return plan_composition(store, assignment)


def _state_place(options: ComposeOptions) -> Location | None:
    return None if options.state_from is None else Location.of(options.state_from).normal()


def check_recipe(path: Location, options: ComposeOptions) -> CompositionReport:
    """Report what a composition would do; reads structure and step counters only."""
    started = time.perf_counter()
    store = UnpackedView(Stores())
    opened = open_recipe(store, path, _state_place(options))
    return CompositionReport(plan_recipe(store, opened, options), None, None, time.perf_counter() - started)


def compose(path: Location, out: Path, options: ComposeOptions, on_progress: OnProgress) -> CompositionReport:
    """Compose and publish; see `tailor.api.compose`."""
    started = time.perf_counter()
    store = UnpackedView(Stores())
    opened = open_recipe(store, path, _state_place(options))
    check_target(out, [source.path for source in opened.sources.values()], force=options.force)
    plan = plan_recipe(store, opened, options)

    def check(directory: Path, advance: Callable[[], None]) -> SelfCheck:
        made = open_training_checkpoint(store, Location.local(directory), Location.local(out))
        return check_composite(store, made, plan.assignment, plan.steps, Thoroughness(options.self_check), advance)

    recipe, folder = opened.recipe.text, opened.recipe.path.parent
    text = text_with_relative_paths(recipe, folder.local_path) if folder.is_local else recipe
    return publish(store, Job(text, plan, out, check), options, on_progress, started)


@dataclass(frozen=True, slots=True)
class Job:
    """A directory to write; `check` compares it, when it is finished, with its sources, and calls back now and then."""

    recipe: str
    plan: CompositionPlan
    out: Path
    check: Callable[[Path, Callable[[], None]], SelfCheck]
    average: AverageRecord | None = None


def publish(
    store: UnpackedView, job: Job, options: TailorOptions, on_progress: OnProgress, started: float
) -> CompositionReport:
    """Write the planned files, compare them with their sources and publish them, complete or not at all."""
    check_free_space(job.out, job.plan.output_bytes + _MARGIN_BYTES)
    run = _Run(store, job, options, on_progress, started)
    with Staging(job.out, force=options.force) as staging:
        manifest = run.fill(staging.path)
        staging.publish()
    return CompositionReport(job.plan, manifest, job.out, time.perf_counter() - started, job.average)


class _Run:
    """Fills a staging directory with a composite."""

    def __init__(
        self, store: UnpackedView, job: Job, options: TailorOptions, on_progress: OnProgress, started: float
    ) -> None:
        self._store = store
        self._job = job
        self._plan = job.plan
        self._options = options
        self._on_progress = on_progress
        self._started = started
        self._done = 0
        self._versions: dict[Location, tuple[int, str] | None] = {}

    def fill(self, directory: Path) -> CompositeManifest:
        """Write all files of the composite; return the manifest that was written."""
        self._on_progress("compose", 0, self._plan.output_bytes)
        inputs = self._inputs()
        copier = Copier(self._store, self._options.memory_bytes, self._advance)
        plans = [_without_paths(self._store, plan) for plan in self._plan.files]
        written = copier.write_all([(plan, _place(plan, directory)) for plan in plans])
        checked = self._job.check(directory, lambda: self._on_progress("check", self._done, self._plan.output_bytes))
        self._check_unchanged(inputs)
        manifest = self._manifest(inputs, written, checked)
        stored = manifest.without_paths(self._job.out)
        write_durably(directory / MANIFEST_NAME, stored.to_json(), self._store.ledger)
        return manifest

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress("compose", self._done, self._plan.output_bytes)

    def _inputs(self) -> tuple[CompositeInput, ...]:
        """Record every source with the current state of the files read, packed ones with all that they are on."""
        files = {path for plan in self._plan.files for path in plan.source_files}
        stored = {path: file for file in files for path in self._store.stored_files(file)}
        assignment = self._plan.assignment
        by_source: dict[int, list[FileId]] = {}
        for path in sorted(stored):
            index = _owner(path, stored[path], assignment)
            base = assignment.sources[index].path
            self._versions[path] = self._version(path)
            by_source.setdefault(index, []).append(_identify(self._store, base, path))
        return tuple(
            CompositeInput(str(source.path), source.step, "skeleton" if index == assignment.skeleton_index else "part",
                           tuple(by_source.get(index, [])), 0)
            for index, source in enumerate(assignment.sources)
        )  # fmt: skip

    def _version(self, path: Location) -> tuple[int, str] | None:
        """Return the version of a source file, to notice that it changed; None where it is gone."""
        status = self._store.stat(path)
        return None if status is None else (status.size_bytes, status.version)

    def _check_unchanged(self, inputs: tuple[CompositeInput, ...]) -> None:
        for source in inputs:
            for file in source.files:
                path = Location.parse(source.path) / file.name
                if self._version(path) != self._versions[path]:
                    raise ConflictError.of("input.changed", path, "changed while it was being composed", "run again")

    def _manifest(
        self, inputs: tuple[CompositeInput, ...], written: tuple[Digested, ...], checked: SelfCheck
    ) -> CompositeManifest:
        usage = self._store.ledger.usage()
        moved = {path: n for (path, purpose), n in usage.by_file.items() if purpose in (Purpose.BASE, Purpose.EXPERT)}
        skeleton, state = self._plan.assignment.skeleton, self._plan.assignment.state
        return CompositeManifest(
            version=mergepipe.__version__,
            recipe=self._job.recipe,
            checkpoint=ComposedCheckpoint(
                format=skeleton.format,
                framework=skeleton.framework.value,
                stage=skeleton.stage,
                world_size=skeleton.world_size,
                step=state.step,
                state_from=str(state.path),
            ),
            inputs=tuple(
                replace(
                    checkpoint,
                    read_bytes=sum(
                        moved.get(str(Location.parse(checkpoint.path) / file.name), 0) for file in checkpoint.files
                    ),
                )
                for checkpoint in inputs
            ),
            units=self._plan.staleness,
            files=written,
            self_check=checked,
            realized={str(purpose): usage[purpose] for purpose in Purpose},
            run={"seconds": round(time.perf_counter() - self._started, 3)},
            average=self._job.average,
        )


def _identify(store: Store, base: Location, path: Location) -> FileId:
    """Identify a source file, by its version and a digest of its first 4 KiB and its last 64 KiB.

    In torch.save archives these hold the checksum of every tensor. `base` is the checkpoint its name is relative to.
    """
    status = store.stat(path)
    if status is None:
        raise NotFoundError.of("storage.not-found", path, "no such file", "check the path")
    digest = blake3(store.read_metadata(path, 0, _HEAD_BYTES))
    if status.size_bytes > _HEAD_BYTES:
        digest.update(store.read_metadata(path, max(_HEAD_BYTES, status.size_bytes - _TAIL_BYTES), _TAIL_BYTES))
    name = path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)
    return FileId(name, status.size_bytes, status.version, digest.hexdigest(16))


def _without_paths(store: Store, plan: FilePlan) -> FilePlan:
    """Plan a small file of a model without paths of this machine; what the trainer follows (`*_state.json`) stays."""
    if PurePosixPath(plan.name).name not in SIDECAR_NAMES:
        return plan
    match plan.segments:
        case (Literal(raw),):
            pass
        case (CopyRange(file=file, offset=0, nbytes=nbytes),) if nbytes == store.size_bytes(file):
            raw = store.read_small(file, sidecar_limit(plan.name))
        case _:
            return plan
    cleaned = file_without_paths(plan.name, raw)
    return plan if cleaned == raw else FilePlan(plan.name, (Literal(cleaned),))


def _place(plan: FilePlan, directory: Path) -> Path:
    path = directory / plan.name
    make_folders(path.parent)
    return path


def _owner(path: Location, needed_by: Location, assignment: Assignment) -> int:
    """Find the source that a file belongs to: the deepest directory around it, or around the file that needs it."""
    for place in (path, needed_by):
        around = [(len(s.path.path.parts), i) for i, s in enumerate(assignment.sources) if place.is_relative_to(s.path)]
        if around:
            return max(around)[1]
    return assignment.skeleton_index
