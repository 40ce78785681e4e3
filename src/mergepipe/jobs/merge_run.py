"""One run of a merge: open the inputs, decide what is read, write the output to staging, publish it, report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mergepipe
from mergepipe.checkpoints.adapters import is_untrained
from mergepipe.checkpoints.content_id import WatchedContentIds
from mergepipe.checkpoints.contract import GGUF_SUFFIX, files_of
from mergepipe.checkpoints.open_files import check_unchanged
from mergepipe.core.blocks import BF16, F32
from mergepipe.core.linear_algebra import linear_algebra_build
from mergepipe.core.outcome import private_outputs, published_but
from mergepipe.core.rounding import RoundingMode
from mergepipe.core.units import plural
from mergepipe.engine.make_part import make_part
from mergepipe.engine.observer import Observer
from mergepipe.engine.output_parts import whole
from mergepipe.errors import UnsupportedError
from mergepipe.options import PathStyle
from mergepipe.planning.plan import NOTHING_READ, PLAN_FORMAT, Plan
from mergepipe.recipes.recipe import ModelInput
from mergepipe.recipes.references import reference_text
from mergepipe.recipes.tasks import Action
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import AppliedAdapter, MergeReport, Progress, SurvivingChange
from mergepipe.runs.budget import analysis_advice, coverage_of, verdict_of
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, Stage, open_inputs, with_known_digests, with_parameters
from mergepipe.runs.merge_settings import NO_IDS, MergeSettings
from mergepipe.runs.model_card import hub_id_of
from mergepipe.runs.progress import MergeProgress, run_key
from mergepipe.runs.small_files import PlannedFiles, chosen_files, plan_small_files, planned_sidecars, sidecar_contents
from mergepipe.runs.stored_plan import open_planned, plan_key, store_plan, stored_plan
from mergepipe.runs.work import (
    kept_shares,
    merge_work,
    output_of,
    requantisation_error,
    rounding_notices,
    spectral_cost,
    spectral_inputs,
    surviving_change,
    tensor_bytes_by_file,
    tensor_bytes_read,
)
from mergepipe.snapshots.manifest import (
    ADAPTER_ROLE,
    BASE_MODEL_IDS_KEY,
    LINEAR_ALGEBRA_KEY,
    MANIFEST_NAME,
    NOTICES_KEY,
    ROUNDING_KEY,
    SUMMARY_KEY,
    UNCHANGED,
    InputRecord,
    Manifest,
    OutputTensor,
    RealizedBytes,
    changed_by,
    record_folder,
    relative_reference,
    with_changed_paths,
)
from mergepipe.snapshots.shards import (
    BLOCKS_NAME,
    SINGLE_NAME,
    DurableProgress,
    TensorDigest,
    file_digest_of,
    index_files,
    table_of,
)
from mergepipe.snapshots.staging import Staging, check_free_space, check_target, needed_bytes, staging_directory
from mergepipe.storage import owned
from mergepipe.storage.contract import Digested, Store, traffic
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, write_all_durably, write_durably
from mergepipe.storage.ranges import peak_memory_bytes
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.checkpoints.gguf_files import GGUFTarget
    from mergepipe.jobs.plan import PlanRequest
    from mergepipe.runs.parts import MadeParts
    from mergepipe.runs.remote_output import RemoteOutput


BeforePublish = Callable[[Manifest, Path], None]
"""Looks at the finished manifest and the folder of all that is published; what it raises prevents publishing."""


def run_merge(recipe: Location | RecipeText, settings: MergeSettings) -> MergeReport:
    """Merge in full, and publish."""
    store = Stores(settings.engine.connections)
    link = CatalogLink(settings.home)
    with intermediate_writer(settings, store) as write_intermediate:
        inputs = open_inputs(recipe, store, settings.options, write_intermediate)
        return MergeRun(inputs, None, settings, store, link).publish()


def run_budgeted(
    recipe: Location | RecipeText,
    request: PlanRequest,
    settings: MergeSettings,
    before_publish: BeforePublish | None = None,
) -> MergeReport:
    """Plan and run at once; an unfinished merge of this very request is resumed with the plan it was begun with."""
    from mergepipe.jobs.plan import make_plan  # a full merge needs no planner

    store = Stores(settings.engine.connections)
    inputs = open_inputs(recipe, store, settings.options)
    settings = replace(settings, plan_key=plan_key(inputs, repr(request)))
    follows = settings.options.resume is not False
    plan = stored_plan(staging_directory(settings.out.absolute()), settings.plan_key) if follows else None
    link = CatalogLink(settings.home)
    if plan is None:
        plan = make_plan(store, inputs, request, link)
    return MergeRun(with_parameters(inputs, plan), plan, settings, store, link).publish(before_publish)


def run_plan(plan: Plan, settings: MergeSettings) -> MergeReport:
    """Run a stored plan against the inputs it was made for."""
    store = Stores(settings.engine.connections)
    link = CatalogLink(settings.home)
    inputs = with_parameters(open_planned(plan, store, link), plan)
    return MergeRun(inputs, plan, settings, store, link).publish()


@contextlib.contextmanager
def intermediate_writer(settings: MergeSettings, store: Store) -> Iterator[Stage]:
    """Give what writes intermediate merges that later documents need complete, next to the output, while it lasts."""
    staging = Staging(settings.out.parent / f"{settings.out.name}.intermediates", force=False)
    options = replace(settings.options, catalog=False, resume=False, force=False, base_model_ids=())
    settings = replace(settings, options=options, destination=None, on_progress=None, base_model_ids=NO_IDS)
    stack, written = contextlib.ExitStack(), list[Path]()

    def write(inputs: Inputs) -> Path:
        """Merge one intermediate into a private directory, which the first call creates, and return its path."""
        if not written:
            stack.enter_context(staging)
        written.append(staging.path / str(len(written) + 1))
        with private_outputs():
            MergeRun(inputs, None, replace(settings, out=written[-1]), store, CatalogLink(None)).publish()
        return written[-1]

    try:
        yield write
    finally:
        stack.close()


class MergeRun:
    """One merge of opened inputs, which reads what its plan says, or everything.

    Holds the planned small files until they are written.
    """

    def __init__(
        self, inputs: Inputs, plan: Plan | None, settings: MergeSettings, store: Store, link: CatalogLink
    ) -> None:
        settings.base_model_ids.check_names(inputs.source_models)
        self._inputs = inputs = with_known_digests(inputs, link)
        self._plan = plan
        self._settings = settings
        self._store = store
        self._link = link
        self._output = output = output_of(inputs, settings.options.shard_bytes, settings.file)
        self._seed = settings.options.seed if plan is None else plan.seed
        self._earlier_bytes = 0
        self._gguf: GGUFTarget | None = None
        self._rounding: SurvivingChange | None = None
        self._kept = kept_shares(inputs.plain or inputs) if plan is None else ()
        expert_bytes = inputs.resolution.expert_bytes if plan is None else plan.planned_bytes
        self._total_bytes = inputs.resolution.base_bytes + expert_bytes + output.total_bytes

    def publish(self, before_publish: BeforePublish | None = None, made: MadeParts | None = None) -> MergeReport:
        """Write the output, and publish it; of one that is `made` already, no tensor is read."""
        settings, link, force = self._settings, self._link, self._settings.options.force
        check_target(settings.out, [checkpoint.path for checkpoint in self._inputs.checkpoints], force=force)
        remote = self._remote_output(is_made=made is not None)
        weight_bytes = self._output.total_bytes if remote is None else remote.staged_bytes
        small_files = self._planned_files(0 if made else weight_bytes)
        if self._plan is not None:  # retries may use what is left of the budget
            is_remote = self._store.counts.requests > 0
            most_bytes = max(self._plan.planned_bytes, self._plan.budget_bytes * is_remote)
            self._store.ledger.expert_limit_bytes = most_bytes
        self._tick("merge")  # from here on the caller may hold signals back until the next report
        progress = made or MergeProgress(
            run_key(self._inputs, self._plan, self._output, self._seed),
            self._output, self._plan, self._store.ledger,
            resume=settings.options.resume, is_strict=settings.options.strict,
        )  # fmt: skip
        can_continue = partial(progress.can_continue, is_sent=None if remote is None else remote.has)
        with published_but(settings.place):
            with (
                Staging(settings.out, force=force, can_continue=can_continue) as staging,
                progress.recorded(staging),
                contextlib.nullcontext() if remote is None else remote.claimed(staging, progress),
            ):
                link.notices.extend(progress.notices)
                if made is None:
                    self._begin(staging, progress)
                digests, content_ids = self._make_tensors(staging.path, remote or progress, made)
                link.notices.extend(self._not_finite(digests))
                self._rounding = surviving_change(self._inputs, self._output.tasks, digests)
                link.notices.extend(rounding_notices(self._inputs, self._output.tasks, self._rounding))
                link.notices.extend(self._untrained())
                manifest = self._write_small_files(staging, small_files, digests, content_ids, progress)
                link.notices.extend(progress.excess_notices())
                if before_publish is not None:
                    progress.give_up()
                    before_publish(manifest, staging.path)
                if remote is None:
                    staging.publish()
                else:
                    remote.publish(manifest)
            if remote is None:
                folder = record_folder(settings.out).absolute()
                link.use(lambda catalog: catalog.record_snapshot(manifest, folder, created=datetime.now(UTC)))
            return self._report(manifest, progress)

    def _planned_files(self, weight_bytes: int) -> PlannedFiles:
        """Plan the small files, or the one of another format; there has to be room for them and the weights."""
        planned = PlannedFiles({}, (), ())
        if not self._settings.file:
            planned = plan_small_files(self._inputs, self._store, self._settings.options)
        elif self._settings.file.endswith(GGUF_SUFFIX):
            from mergepipe.checkpoints.gguf_files import GGUFTarget, stores_codes

            is_stochastic = self._inputs.recipe.rounding is RoundingMode.STOCHASTIC
            if is_stochastic and stores_codes(self._settings.file):
                message = "stores codes with scales, which are the nearest ones, and rounding: stochastic is asked for"
                hint = "leave it out, or name the file for BF16, F16 or F32"
                raise UnsupportedError.of("recipe.unsupported", self._settings.file, message, hint)
            shapes = {task.name: task.shape for task in self._output.tasks}
            self._gguf = GGUFTarget.of(self._settings.file, planned_sidecars(self._inputs, self._store), shapes)
            weight_bytes *= 2
        check_free_space(self._settings.out, needed_bytes(weight_bytes, planned.contents))
        return planned

    def _begin(self, staging: Staging, progress: MergeProgress) -> None:
        """Store the plan for a later resume; report resumed progress and slow steps."""
        if self._plan is not None and self._settings.plan_key and not staging.is_continued:
            store_plan(staging.directory, self._settings.plan_key, self._plan)
        if progress.done:
            self._earlier_bytes = self._store.ledger.total_bytes()
            self._tick("merge", (f"resuming at {progress.durable_share:.0%}",))
        if cost := spectral_cost(self._output.tasks):
            self._tick("merge", (cost,))

    def _remote_output(self, *, is_made: bool) -> RemoteOutput | None:
        """Return what publishes in a bucket or on the Hub, if the output goes there."""
        destination, force = self._settings.destination, self._settings.options.force
        if destination is None:
            return None
        from mergepipe.runs.remote_output import RemoteOutput

        return RemoteOutput(destination, self._output, self._inputs.checkpoints, is_made=is_made, force=force)

    def _make_tensors(
        self, directory: Path, durable: DurableProgress, made: MadeParts | None
    ) -> tuple[tuple[TensorDigest, ...], Mapping[int, str]]:
        """Write the weight files, reporting what is `durable`; return their digests, and the models' content ids.

        A merge in full learns the ids from what it reads; where that does not hold all samples there is none.
        """
        watched = WatchedContentIds(self._inputs.checkpoints if self._plan is None else ())
        observer = Observer(partial(self._tick, "merge"), watch=watched.watch)
        work = merge_work(self._inputs, self._output, self._plan, self._seed, self._store, self._link)
        if made is not None:
            digests = made.take(work, directory, observer).digests
        else:
            part, engine = whole(work.output), self._settings.engine
            digests = make_part(work, part, directory, self._store, engine, observer, durable).digests
        self._tick("publish")
        check_unchanged(self._store, [checkpoint for _, _, checkpoint in self._inputs.leaves()])
        return digests, {**watched.values(), **work.content_ids}

    def _not_finite(self, digests: Sequence[TensorDigest]) -> tuple[str, ...]:
        """Tell of infinities and NaN in the output, if there are any."""
        held = [(digest, task) for digest, task in zip(digests, self._output.tasks, strict=True) if digest.not_finite]
        if not held:
            return ()
        first, task = held[0]
        overflow = "" if task.dtype is BF16 or task.dtype is F32 else f", or results are beyond {task.dtype.name}"
        values = f"{first.not_finite} of {task.base.n_elements} values of '{first.name}'"
        where = f"{len(held)} of {plural(len(digests), 'tensor')}, first {values}"
        return (f"infinities or NaN in {where}: a model has them{overflow}",)

    def _untrained(self) -> Iterator[str]:
        """Warn about adapters that give their base back, since they were never trained."""
        for _, model, checkpoint in self._inputs.leaves():
            if is_untrained(self._store, checkpoint):
                yield f"'{model.text}' changes nothing: its lora_B (or lora_A) is zeros, as before training"

    def _write_small_files(
        self,
        staging: Staging,
        planned: PlannedFiles,
        digests: tuple[TensorDigest, ...],
        content_ids: Mapping[int, str],
        progress: MergeProgress,
    ) -> Manifest:
        """Write every file that holds no tensors, the manifest last; return the manifest, with absolute paths."""
        blocks = table_of(self._output.shards, digests).to_bytes()
        converted: tuple[Digested, ...] = ()
        if self._gguf is not None:
            path, weights = staging.path / self._settings.file, staging.path / SINGLE_NAME
            record = self._gguf.write(self._store, weights, path)
            converted = (replace(record, name=self._settings.beside + record.name),)
            owned.remove_file(weights)
            blocks = table_of((), ()).to_bytes()
        unfinished = replace(
            self._manifest(digests, content_ids, progress, Digested.of(BLOCKS_NAME, blocks)), left_out=planned.left_out
        )
        contents: dict[str, bytes] = {}
        if not self._settings.file:
            made = sidecar_contents(planned, self._inputs, self._store, unfinished, self._plan)
            contents = chosen_files(made, self._inputs, self._settings.options) | index_files(self._output.shards)
        sidecars = tuple(Digested.of(name, content) for name, content in sorted(contents.items()))
        manifest = replace(unfinished, sidecars=(*converted, *sidecars))
        stored = with_changed_paths(manifest, partial(self._reference, out=staging.out))
        small = {staging.record_path / name: content for name, content in {**contents, BLOCKS_NAME: blocks}.items()}
        for folder in {path.parent for path in small}:
            make_folders(folder)
        write_all_durably(small, self._store.ledger)
        write_durably(staging.record_path / MANIFEST_NAME, stored.to_json(), self._store.ledger)
        return manifest

    def _reference(self, path: str, out: Path) -> str:
        """Return the path of an input as the files of the snapshot at `out` write it."""
        if self._settings.options.paths == PathStyle.ABSOLUTE:
            return path
        return relative_reference(path, None if self._settings.destination else record_folder(out))

    def _tick(self, phase: str, notices: tuple[str, ...] = ()) -> None:
        """Report progress."""
        if self._settings.on_progress is not None:
            ledger, retries = self._store.ledger, self._store.counts.retries
            self._settings.on_progress(
                Progress(phase, ledger.total_bytes(), self._total_bytes, notices, self._earlier_bytes, retries)
            )

    def _manifest(
        self, digests: tuple[TensorDigest, ...], ids: Mapping[int, str], progress: MergeProgress, blocks: Digested
    ) -> Manifest:
        usage = self._store.ledger.usage()
        plan = None if self._plan is None else PLAN_FORMAT.content(self._plan)
        run = {
            "seconds": round(time.perf_counter() - self._settings.started, 3),
            "threads": self._settings.engine.threads,
            "memory_bytes": self._settings.engine.memory_bytes,
            **traffic(self._store, usage).facts(),
            **progress.facts(),
        }
        optional = {
            "tried_expert_bytes": self._settings.tried_expert_bytes or None,
            "kept_elements": ",".join(f"{one.kept_elements}/{one.elements}" for one in self._kept) or None,
            "requantisation_error": requantisation_error(self._inputs),
            ROUNDING_KEY: None if self._rounding is None else self._rounding.share,
            LINEAR_ALGEBRA_KEY: linear_algebra_build() if spectral_inputs(self._output.tasks) else None,
            NOTICES_KEY: "\n".join(map(str, self._inputs.notices)) or None,
            SUMMARY_KEY: self._inputs.summary or None,
            BASE_MODEL_IDS_KEY: " ".join(self._settings.base_model_ids.of_merge) or None,
        }
        return Manifest(
            version=mergepipe.__version__,
            operator=self._inputs.recipe.operator.name,
            recipe=self._inputs.recipe_text,
            seed=self._seed,
            inputs=self._input_records(ids, usage),
            files=() if self._gguf else self._file_records(digests),
            tensors=() if self._gguf else self._tensor_records(digests),
            dropped=(*self._inputs.resolution.dropped, *self._inputs.dropped_rows()),
            realized=self._realized(usage),
            plan_digest=None if plan is None else str(plan["digest"]),
            plan=plan,
            coverage=None if self._plan is None else coverage_of(self._plan),
            run=run | {name: fact for name, fact in optional.items() if fact is not None},
            blocks=blocks,
        )

    def _file_records(self, digests: Sequence[TensorDigest]) -> tuple[Digested, ...]:
        """Record every weight file."""
        roots = {digest.name: digest.root for digest in digests}
        return tuple(
            Digested(self._settings.beside + shard.name, shard.file_bytes, file_digest_of(shard, roots))
            for shard in self._output.shards
        )

    def _tensor_records(self, digests: Sequence[TensorDigest]) -> tuple[OutputTensor, ...]:
        """Record every output tensor, in output order."""
        beside = self._settings.beside
        file_of = {spec.name: beside + shard.name for shard in self._output.shards for spec in shard.tensors}
        actions = {task.name: (task.action.value, task.reason) for task in self._output.tasks}
        plain = self._inputs.plain.resolution.tasks if self._inputs.plain else ()
        actions |= {task.name: (task.action.value, task.reason) for task in plain}
        if self._inputs.folds_adapters:
            for name, adapters in self._inputs.changes.items():
                action = Action.MERGE if adapters else Action.COPY
                actions[name] = action.value, changed_by(adapters) if adapters else UNCHANGED
        return tuple(
            OutputTensor(
                task.name, task.dtype.name, task.shape, file_of[task.name], digest.root, *actions[task.name],
                digest.survival.share,
            )
            for task, digest in zip(self._output.tasks, digests, strict=True)
        )  # fmt: skip

    def _input_records(self, ids: Mapping[int, str], usage: Usage) -> tuple[InputRecord, ...]:
        content_ids = {id(self._inputs.checkpoints[index]): identity for index, identity in ids.items()}
        bytes_by_file = tensor_bytes_by_file(usage)
        return tuple(
            InputRecord(
                role=role,
                model=model.text,
                path=reference_text(model),
                files=checkpoint.file_ids,
                content_id=content_ids.get(id(checkpoint)) or None,
                read_bytes=0
                if model.repeat
                else tensor_bytes_read(checkpoint, bytes_by_file),  # its files have one count
                hub_id=self._hub_id(model),
            )
            for role, model, checkpoint in self._inputs.sources()
        )

    def _hub_id(self, model: ModelInput) -> str | None:
        """Return the stated id of a model on the Hub, else the one that its location tells; None if it has none."""
        stated = self._settings.base_model_ids.of_model(model)
        if stated is not None:
            return stated
        ids = [hub_id_of(place, self._store) for place in (model.path, model.adapter) if place is not None]
        return None if None in ids else "+".join(filter(None, ids))

    def _realized(self, usage: Usage) -> RealizedBytes:
        """Sum the bytes by purpose; those of adapters that are folded into the base are not the base's."""
        realized = RealizedBytes.of(usage)
        adapters = (checkpoint for role, _, checkpoint in self._inputs.sources() if role == ADAPTER_ROLE)
        paths = {str(path) for checkpoint in adapters for path in files_of(checkpoint.tensors.values())}
        adapter_bytes = sum(usage.by_file.get((path, Purpose.BASE), 0) for path in paths)
        return replace(realized, base=realized.base - adapter_bytes, expert=realized.expert + adapter_bytes)

    def _budget_notices(self) -> tuple[str, ...]:
        """Return the plan's warnings: experts of which nothing is read, and what would make the plan better."""
        if self._plan is None:
            return ()
        starved = (fallback for fallback in self._plan.fallbacks if fallback.decision == NOTHING_READ)
        notices = tuple(f"{fallback.where}: {fallback.decision}: {fallback.reason}" for fallback in starved)
        return (*notices, *analysis_advice(self._plan))

    def _report(self, manifest: Manifest, progress: MergeProgress) -> MergeReport:
        """Report what was done, up to now."""
        by_purpose = self._store.ledger.usage()
        usage = self._realized(by_purpose)
        resolution = (self._inputs.plain or self._inputs).resolution
        n_merged = resolution.n_merged
        n_copied = resolution.n_copied
        if self._inputs.folds_adapters:
            changes = self._inputs.changes
            n_merged = sum(bool(adapters) for adapters in changes.values())
            n_copied = len(changes) - n_merged
        return MergeReport(
            out=self._settings.place,
            sid=manifest.sid,
            summary=manifest.summary,
            operator=manifest.operator,
            merged_tensors=n_merged,
            copied_tensors=n_copied,
            dropped_tensors=resolution.n_dropped,
            base_bytes=usage.base,
            expert_bytes=usage.expert,
            analysis_bytes=usage.analysis,
            metadata_bytes=usage.metadata,
            output_bytes=usage.output,
            seconds=time.perf_counter() - self._settings.started,
            planned_bytes=None if self._plan is None else self._plan.planned_bytes,
            budget_bytes=None if self._plan is None else self._plan.budget_bytes,
            notices=(*self._link.notices, *self._store.notices, *self._budget_notices()),
            traffic=traffic(self._store, by_purpose),
            verdict=None if self._plan is None else verdict_of(self._plan),
            recipe_notices=self._inputs.notices,
            left_out=manifest.left_out,
            kept=self._kept,
            requantisation_error=requantisation_error(self._inputs),
            rounding=self._rounding,
            adapters=tuple(
                AppliedAdapter(model.text, *astuple(account))
                for _, model, checkpoint in self._inputs.sources()
                for account in checkpoint.adapters
            ),
            peak_rss_bytes=peak_memory_bytes(),
            earlier_expert_bytes=progress.earlier_expert_bytes,
        )
