"""Run one merge: write the output of opened inputs to staging, resume earlier work, publish a snapshot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import mergepipe
from mergepipe.checkpoints.open_files import check_unchanged
from mergepipe.core.outcome import private_outputs, published_but
from mergepipe.engine.make_part import make_part
from mergepipe.engine.work import EngineOptions, MergeWork, Observer, OutputPlan, PartResult, plan_output, whole
from mergepipe.planning.plan import NOTHING_READ, PLAN_FORMAT, Plan
from mergepipe.recipes.fields import USUAL, Strictness
from mergepipe.recipes.recipe import ModelInput
from mergepipe.recipes.references import reference_text
from mergepipe.reports import AppliedAdapter, MergeReport, Progress, ProgressCallback
from mergepipe.runs.budget.verdict import analysis_advice, coverage_of, verdict_of
from mergepipe.runs.inputs.opened import Inputs, with_known_digests
from mergepipe.runs.output_place import (
    BucketTarget,
    FolderPublication,
    Publication,
    most_staged_bytes,
)
from mergepipe.runs.progress import MergeProgress, Resume, run_key
from mergepipe.runs.publication.hub_ids import BaseModelIds, hub_id_of
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.records.manifest import (
    file_records,
    kept_facts,
    kept_shares,
    realized,
    tensor_bytes_read,
    tensor_records,
    traffic_facts,
)
from mergepipe.runs.sidecars import (
    EVERY_SMALL_FILE,
    PlannedFiles,
    SmallFileChoice,
    plan_small_files,
    sidecar_contents,
)
from mergepipe.runs.stored_plan import store_plan
from mergepipe.runs.work import merge_work
from mergepipe.snapshots.block_digests import BLOCKS_NAME
from mergepipe.snapshots.manifest import (
    BASE_MODEL_IDS_KEY,
    MANIFEST_NAME,
    NOTICES_KEY,
    InputRecord,
    Manifest,
)
from mergepipe.snapshots.object_upload import check_apart
from mergepipe.snapshots.recorded_paths import relative_reference, with_changed_paths
from mergepipe.snapshots.shards import INDEX_NAME, DurableProgress, TensorDigest, index_json, table_of
from mergepipe.snapshots.staging import Staging, check_free_space, check_target
from mergepipe.storage.buffers import peak_memory_bytes
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import Digested
from mergepipe.storage.ledger import Usage
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, write_all_durably, write_durably
from mergepipe.storage.traffic import request_counts, store_notices, traffic

SIDECAR_MARGIN_BYTES = 16 << 20
NO_IDS = BaseModelIds()


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """Settings of one merge run. `home` is the catalog's directory; None runs without a catalog.

    `strictness` says whether what has no effect in a recipe is refused, and what an interrupted run leaves to be read
    beyond the budget. With a `plan_key` the plan is kept beside the unfinished output, see `stored_plan`. With a
    `destination` in a bucket the output goes there, and is staged on this machine. With `absolute_paths` the snapshot's
    files name inputs by their absolute paths. `base_model_ids` are ids on the Hub that the user states.
    `tried_expert_bytes` were read under budgets of which the result was not good enough.
    """

    engine: EngineOptions
    seed: int
    force: bool
    shard_bytes: int
    home: Path | None
    resume: Resume = Resume.AUTO
    allow_dropped: tuple[str, ...] = ()
    small_files: SmallFileChoice = EVERY_SMALL_FILE
    strictness: Strictness = USUAL
    plan_key: str = ""
    destination: Location | None = None
    absolute_paths: bool = False
    base_model_ids: BaseModelIds = NO_IDS
    tried_expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MadeOutput:
    """An output whose shards are made already: what takes them over, and the account of what was read for them."""

    take: Callable[[MergeWork, Path, Observer], PartResult]
    progress: MergeProgress


class IntermediateWriter:
    """Writes intermediate merges that later documents need complete, beside the output; removes them on exit."""

    def __init__(self, out: Path, settings: MergeSettings, store: Store) -> None:
        self._staging = Staging(out.with_name(f"{out.name}.intermediates"), force=False)
        self._settings = replace(
            settings, home=None, resume=Resume.NEVER, force=False, destination=None,
        )  # fmt: skip
        self._store = store
        self._stack = contextlib.ExitStack()
        self._n_written = 0

    def __enter__(self) -> IntermediateWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, inputs: Inputs) -> Path:
        """Merge one intermediate into a private directory, which the first call creates, and return its path."""
        if not self._n_written:
            self._stack.enter_context(self._staging)
        self._n_written += 1
        place = self._staging.path / str(self._n_written)
        with closing(CatalogLink(None)) as link, private_outputs():
            publish_merge(inputs, None, place, self._settings, self._store, link, time.perf_counter(), None)
        return place


def publish_merge(
    inputs: Inputs,
    plan: Plan | None,
    out: Path,
    settings: MergeSettings,
    store: Store,
    link: CatalogLink,
    started: float,
    on_progress: ProgressCallback | None,
    before_publish: Callable[[Manifest, Path], None] | None = None,
    made: MadeOutput | None = None,
) -> MergeReport:
    """Merge opened inputs, reading what `plan` says or everything, and publish the result at `out`.

    With a destination in the settings it is published there, and `out` is where it is staged. An exception that
    `before_publish` raises for the finished manifest and the folder that it describes prevents publishing. Of an output
    that is `made` already, no tensor is read.
    """
    inputs = with_known_digests(inputs, link)
    output = plan_output(inputs.resolution.tasks, settings.shard_bytes)
    check_target(out, [checkpoint.path for checkpoint in inputs.checkpoints], force=settings.force)
    bucket = _bucket_target(settings.destination, inputs, is_made=made is not None)
    weight_bytes = output.total_bytes if bucket is None else most_staged_bytes(output)
    weight_bytes = 0 if made else weight_bytes
    planned = plan_small_files(inputs, store, settings.small_files)
    sidecar_bytes = sum(map(len, planned.contents.values())) + SIDECAR_MARGIN_BYTES
    check_free_space(out, weight_bytes + sidecar_bytes)
    run = _Run(inputs, plan, output, planned, store, link, settings, started, on_progress)
    run.tick("merge")  # from here on the caller may hold signals back until the next report
    seed = settings.seed if plan is None else plan.seed
    key = run_key(inputs, plan, output, seed)
    is_strict = settings.strictness.strict
    progress = made.progress if made else MergeProgress(
        key, output, plan, store.ledger, settings.resume, is_strict=is_strict
    )  # fmt: skip
    with published_but(settings.destination or out):
        with (
            Staging(out, force=settings.force, can_continue=_continuation(bucket, progress)) as staging,
            progress.recorded(staging),
            _publication(bucket, staging, progress, output) as publication,
        ):
            link.notices.extend(progress.notices)
            if plan is not None and settings.plan_key and not staging.is_continued:
                store_plan(staging.directory, settings.plan_key, plan)
            if progress.done:
                run.resume_at(progress.durable_share)
            manifest = run.fill(staging, progress, publication.durable, made)
            link.notices.extend(progress.excess_notices())
            if before_publish is not None:
                before_publish(manifest, staging.path)
            publication.publish(manifest)
        if bucket is None:
            link.use(lambda catalog: catalog.record_snapshot(manifest, out.absolute(), created=datetime.now(UTC)))
        return replace(
            run.report(settings.destination or out, manifest),
            earlier_expert_bytes=progress.earlier_expert_bytes,
        )


def _bucket_target(destination: Location | None, inputs: Inputs, *, is_made: bool) -> BucketTarget | None:
    """Return what publishes in a bucket, if the output goes to one."""
    if destination is None:
        return None
    check_apart(destination, [checkpoint.root for checkpoint in inputs.checkpoints])
    return BucketTarget(destination, is_made=is_made)


def _continuation(bucket: BucketTarget | None, progress: MergeProgress) -> Callable[[Path], bool]:
    """Return what decides whether an interrupted run is resumed."""
    if bucket is None:
        return progress.can_continue
    return lambda directory: bucket.can_continue(directory, progress)


def _publication(
    bucket: BucketTarget | None, staging: Staging, progress: MergeProgress, output: OutputPlan
) -> contextlib.AbstractContextManager[Publication]:
    if bucket is None:
        return contextlib.nullcontext(FolderPublication(staging, progress))
    return bucket.publication(staging, progress, output)


class _Run:
    """Writes one snapshot into a staging directory. Holds its planned small files until they are written."""

    def __init__(
        self,
        inputs: Inputs,
        plan: Plan | None,
        output: OutputPlan,
        planned: PlannedFiles,
        store: Store,
        link: CatalogLink,
        settings: MergeSettings,
        started: float,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._inputs = inputs
        self._plan = plan
        self._output = output
        self._planned = planned
        self._store = store
        self._link = link
        self._settings = settings
        self._started = started
        self._on_progress = on_progress
        self._earlier_bytes = 0
        self._kept = kept_shares(inputs) if plan is None else ()
        expert_bytes = inputs.resolution.expert_bytes if plan is None else plan.planned_bytes
        self._total_bytes = inputs.resolution.base_bytes + expert_bytes + output.total_bytes
        if plan is not None:
            is_remote = request_counts(store).requests > 0  # then retries may use what the plan leaves of the budget
            store.ledger.expert_limit_bytes = max(plan.planned_bytes, plan.budget_bytes * is_remote)

    def fill(
        self,
        staging: Staging,
        progress: MergeProgress,
        durable: DurableProgress,
        made: MadeOutput | None,
    ) -> Manifest:
        """Write all files of the snapshot, reporting what is `durable`; return its manifest, with absolute paths."""
        checkpoints = tuple(checkpoint for _, _, checkpoint in self._inputs.leaves())
        observer = Observer(lambda _: self.tick("merge"))
        work = merge_work(
            self._inputs, self._output, self._plan, self._settings.seed, self._store, self._link
        )  # fmt: skip
        if made is not None:
            digests = made.take(work, staging.path, observer).digests
        else:
            part, engine = whole(work.output), self._settings.engine
            digests = make_part(work, part, staging.path, self._store, engine, observer, durable).digests
        self.tick("publish")
        check_unchanged(self._store, checkpoints)
        return self._write_small_files(staging, digests, work.content_ids, progress)

    def _write_small_files(
        self,
        staging: Staging,
        digests: tuple[TensorDigest, ...],
        ids: Mapping[int, str],
        progress: MergeProgress,
    ) -> Manifest:
        """Write every file that holds no tensors, the manifest last; return the manifest."""
        blocks = table_of(self._output.shards, digests).to_bytes()
        reference = partial(self._reference, out=staging.out)
        unfinished = self._manifest(digests, ids, progress, Digested.of(BLOCKS_NAME, blocks))
        small_files = self._settings.small_files.of(
            sidecar_contents(self._planned, self._inputs, self._store, unfinished, self._plan), self._inputs
        )
        contents = dict(small_files)
        if len(self._output.shards) > 1:
            contents[INDEX_NAME] = index_json(self._output.shards)
        sidecars = tuple(Digested.of(name, content) for name, content in sorted(contents.items()))
        manifest = replace(unfinished, sidecars=sidecars)
        stored = with_changed_paths(manifest, reference)
        small = {staging.path / name: content for name, content in {**contents, BLOCKS_NAME: blocks}.items()}
        for folder in {path.parent for path in small}:
            make_folders(folder)
        write_all_durably(small, self._store.ledger)
        write_durably(staging.path / MANIFEST_NAME, stored.to_json(), self._store.ledger)
        return manifest

    def _reference(self, path: str, out: Path) -> str:
        """Return the path of an input as the files of the snapshot at `out` write it."""
        if self._settings.absolute_paths:
            return path
        return relative_reference(path, None if self._settings.destination else out)

    def resume_at(self, durable_share: float) -> None:
        """Report that an interrupted run is resumed: what it read and wrote is in the ledger by now."""
        self._earlier_bytes = self._store.ledger.total_bytes()
        self.tick("merge", (f"resuming at {durable_share:.0%}",))

    def tick(self, phase: str, notices: tuple[str, ...] = ()) -> None:
        """Report progress."""
        if self._on_progress is not None:
            done_bytes = self._store.ledger.total_bytes()
            retries = request_counts(self._store).retries
            self._on_progress(Progress(phase, done_bytes, self._total_bytes, notices, self._earlier_bytes, retries))

    def _manifest(
        self,
        digests: tuple[TensorDigest, ...],
        ids: Mapping[int, str],
        progress: MergeProgress,
        blocks: Digested,
    ) -> Manifest:
        usage = self._store.ledger.usage()
        plan = None if self._plan is None else PLAN_FORMAT.content(self._plan)
        return Manifest(
            version=mergepipe.__version__,
            operator=self._inputs.recipe.operator.name,
            recipe=self._inputs.recipe_text,
            seed=self._settings.seed if self._plan is None else self._plan.seed,
            inputs=self._input_records(ids, usage),
            files=file_records(self._output, digests),
            tensors=tensor_records(self._output, digests),
            dropped=(*self._inputs.resolution.dropped, *self._inputs.dropped_rows()),
            realized=realized(usage),
            plan_digest=None if plan is None else str(plan["digest"]),
            plan=plan,
            coverage=None if self._plan is None else coverage_of(self._plan),
            run={
                "seconds": round(time.perf_counter() - self._started, 3),
                "threads": self._settings.engine.threads,
                "memory_bytes": self._settings.engine.memory_bytes,
                **traffic_facts(traffic(self._store, usage)),
                **progress.facts(),
                **({"tried_expert_bytes": tried_bytes} if (tried_bytes := self._settings.tried_expert_bytes) else {}),
                **kept_facts(self._kept),
                **self._recipe_facts(),
            },
            blocks=blocks,
            left_out=self._planned.left_out,
        )

    def _recipe_facts(self) -> dict[str, str]:
        """Return for the manifest what has no effect in the recipe, a line each, and what was stated beside it."""
        notices = self._inputs.notices
        facts = {NOTICES_KEY: "\n".join(map(str, notices))} if notices else {}
        stated = self._settings.base_model_ids.of_merge
        return {**facts, BASE_MODEL_IDS_KEY: " ".join(stated)} if stated else facts

    def _input_records(self, ids: Mapping[int, str], usage: Usage) -> tuple[InputRecord, ...]:
        content_ids = {id(self._inputs.checkpoints[index]): identity for index, identity in ids.items()}
        return tuple(
            InputRecord(
                role=role,
                model=model.text,
                path=reference_text(model),
                files=checkpoint.files,
                content_id=content_ids.get(id(checkpoint)) or None,
                read_bytes=0 if model.repeat else tensor_bytes_read(checkpoint, usage),  # its files have one count
                hub_id=self._hub_id(model),
            )
            for role, model, checkpoint in self._inputs.leaves()
        )

    def _hub_id(self, model: ModelInput) -> str | None:
        """Return the stated id of a model on the Hub, else the one that its location tells; None if it has none."""
        stated = self._settings.base_model_ids.of_model(model)
        if stated is not None:
            return stated
        ids = [hub_id_of(place, self._store) for place in (model.path, model.adapter) if place is not None]
        return None if None in ids else "+".join(filter(None, ids))

    def _budget_notices(self) -> tuple[str, ...]:
        """Return the plan's warnings: experts of which nothing is read, and what would make the plan better."""
        if self._plan is None:
            return ()
        starved = (fallback for fallback in self._plan.fallbacks if fallback.decision == NOTHING_READ)
        notices = tuple(f"{fallback.where}: {fallback.decision}: {fallback.reason}" for fallback in starved)
        return (*notices, *analysis_advice(self._plan))

    def report(self, out: Path | Location, manifest: Manifest) -> MergeReport:
        """Report what was done, up to now."""
        by_purpose = self._store.ledger.usage()
        usage = realized(by_purpose)
        resolution = self._inputs.resolution
        return MergeReport(
            out=out,
            sid=manifest.sid,
            operator=manifest.operator,
            merged_tensors=resolution.n_merged,
            copied_tensors=resolution.n_copied,
            dropped_tensors=resolution.n_dropped,
            base_bytes=usage.base,
            expert_bytes=usage.expert,
            analysis_bytes=usage.analysis,
            metadata_bytes=usage.metadata,
            output_bytes=usage.output,
            seconds=time.perf_counter() - self._started,
            planned_bytes=None if self._plan is None else self._plan.planned_bytes,
            budget_bytes=None if self._plan is None else self._plan.budget_bytes,
            notices=(*self._link.notices, *store_notices(self._store), *self._budget_notices()),
            traffic=traffic(self._store, by_purpose),
            verdict=None if self._plan is None else verdict_of(self._plan),
            recipe_notices=self._inputs.notices,
            left_out=manifest.left_out,
            kept=self._kept,
            adapters=tuple(
                AppliedAdapter(model.text, account.n_modules, account.n_applied, account.n_saved, account.left_over)
                for _, model, checkpoint in self._inputs.leaves()
                for account in checkpoint.adapters
            ),
            peak_rss_bytes=peak_memory_bytes(),
        )
