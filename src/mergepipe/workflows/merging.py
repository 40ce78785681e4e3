"""One merge from the recipe's path to the published snapshot: opens inputs, runs the engine, records, publishes."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import mergepipe
from mergepipe.budget import Purpose, Usage
from mergepipe.canonical import digest_of
from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence
from mergepipe.engine.access import PlannedAccess
from mergepipe.engine.execute import EngineOptions, MergeWork, OutputPlan, execute_merge, plan_output
from mergepipe.manifest import (
    MANIFEST_NAME,
    DroppedRecord,
    FileRecord,
    InputRecord,
    Manifest,
    OutputFileRecord,
    OutputTensor,
    RealizedBytes,
)
from mergepipe.operators.registry import operator_named
from mergepipe.plan import Plan
from mergepipe.publish import Staging, check_free_space, check_target
from mergepipe.readers.base import Checkpoint
from mergepipe.readers.hf import open_checkpoint
from mergepipe.recipe.load import load_recipe
from mergepipe.recipe.model import Recipe
from mergepipe.recipe.resolve import Action, Resolution, resolve
from mergepipe.reports import CheckReport, MergeReport, ModelUse, Progress, ProgressCallback
from mergepipe.statistics import TensorStatistics
from mergepipe.storage.base import RangeFile
from mergepipe.storage.local import LocalStore
from mergepipe.storage.output import write_durably
from mergepipe.workflows.coverage import coverage_of
from mergepipe.workflows.inputs import check_unchanged, open_files
from mergepipe.workflows.recording import CatalogLink, StatisticsRecorder, known_content_id
from mergepipe.workflows.sidecars import sidecar_contents
from mergepipe.writer import INDEX_NAME, TensorDigest, index_json

SIDECAR_MARGIN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Inputs:
    """A recipe with its opened checkpoints, paired."""

    recipe: Recipe
    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    resolution: Resolution

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The base, then the experts in recipe order."""
        return (self.base, *self.experts)


def open_inputs(path: Path, store: LocalStore) -> Inputs:
    """Load a recipe, open what it names, pair the tensors."""
    recipe = load_recipe(path)
    base = open_checkpoint(store, recipe.anchor().path)
    experts = tuple(open_checkpoint(store, model.path) for model in recipe.experts())
    return Inputs(recipe, base, experts, resolve(recipe, base, experts))


def check_report(inputs: Inputs, output: OutputPlan) -> CheckReport:
    """What a merge of these inputs would do."""
    recipe, resolution = inputs.recipe, inputs.resolution
    merged = [task for task in resolution.tasks if task.action is Action.MERGE]
    models = [ModelUse("base", recipe.anchor().text, len(resolution.tasks), resolution.base_bytes)]
    for index, model in enumerate(recipe.experts()):
        used = sum(task.experts[index].nbytes for task in merged)
        models.append(ModelUse("expert", model.text, len(merged), used))
    return CheckReport(
        recipe=str(recipe.path),
        operator=recipe.operator.name,
        models=tuple(models),
        merged_tensors=resolution.n_merged,
        copied=tuple((task.name, task.reason) for task in resolution.tasks if task.action is Action.COPY),
        dropped=resolution.dropped,
        base_bytes=resolution.base_bytes,
        expert_bytes=resolution.expert_bytes,
        output_bytes=resolution.output_bytes,
        disk_bytes=output.total_bytes + _sidecar_bytes(inputs.base),
        shards=len(output.shards),
    )


def _sidecar_bytes(base: Checkpoint) -> int:
    store = LocalStore()
    return sum(store.size_bytes(base.root / name) for name in base.sidecars)


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """How to run and where to remember; `home` is the catalog's, None for a run that uses and leaves no catalog.

    `gathers` lets a merge in full work out the statistics of ANALYZE from what it reads anyway.
    """

    engine: EngineOptions
    seed: int
    force: bool
    shard_bytes: int
    home: Path | None
    gathers: bool = False


def run_merge(
    recipe: Path, out: Path, settings: MergeSettings, *, started: float, on_progress: ProgressCallback | None
) -> MergeReport:
    """Merge and publish; see `session.merge`. `started` is the `perf_counter` reading that time is taken from."""
    store = LocalStore()
    inputs = open_inputs(recipe, store)
    with closing(CatalogLink(settings.home)) as link:
        return publish_merge(inputs, None, out, settings, store, link, started, on_progress)


def publish_merge(
    inputs: Inputs,
    plan: Plan | None,
    out: Path,
    settings: MergeSettings,
    store: LocalStore,
    link: CatalogLink,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Merge opened inputs, reading what `plan` says or everything, and publish the result at `out`."""
    output = plan_output(inputs.resolution.tasks, settings.shard_bytes)
    check_target(out, [checkpoint.path for checkpoint in inputs.checkpoints], force=settings.force)
    check_free_space(out, output.total_bytes + _sidecar_bytes(inputs.base) + SIDECAR_MARGIN_BYTES)
    run = _Run(inputs, plan, output, store, link, settings, started, on_progress)
    run.tick("merge")  # from here on the caller may hold signals back until the next report
    with Staging(out, force=settings.force) as staging:
        manifest = run.fill(staging.path)
        staging.publish()
    link.use(lambda catalog: catalog.adopt_snapshot(out.absolute(), created=datetime.now(UTC)))
    return run.report(out, manifest)


class _Run:
    """Fills a staging directory with a snapshot."""

    def __init__(
        self,
        inputs: Inputs,
        plan: Plan | None,
        output: OutputPlan,
        store: LocalStore,
        link: CatalogLink,
        settings: MergeSettings,
        started: float,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._inputs = inputs
        self._plan = plan
        self._output = output
        self._store = store
        self._link = link
        self._settings = settings
        self._started = started
        self._on_progress = on_progress
        self._operator = operator_named(inputs.recipe.operator.name)
        expert_bytes = inputs.resolution.expert_bytes if plan is None else plan.planned_bytes
        self._total_bytes = inputs.resolution.base_bytes + expert_bytes + output.total_bytes
        if plan is not None:
            store.ledger.expert_limit_bytes = plan.planned_bytes

    def fill(self, directory: Path) -> Manifest:
        """Write everything but the name; return the manifest that was written."""
        recorder = self._recorder()
        with self._open_files() as files:
            ids = self._content_ids(files)
            work = MergeWork(
                self._output.tasks,
                self._operator,
                self._settings.seed if self._plan is None else self._plan.seed,
                ids,
                access=self._access(),
                renormalize=self._plan is not None and self._plan.on_omit == "renormalize",
                on_statistics=recorder.take if recorder else None,
                statistics_of=recorder.expected if recorder else frozenset(),
                statistics_E=self._known_statistics(),
            )
            digests = execute_merge(
                work, self._output, directory, files, self._settings.engine, self._store.ledger,
                lambda: self.tick("merge"),
            )  # fmt: skip
        self.tick("publish")
        check_unchanged(self._inputs.checkpoints)
        if recorder:
            recorder.flush()
        manifest = self._manifest(digests, ids)
        self._write_small_files(directory, manifest)
        return manifest

    def _write_small_files(self, directory: Path, manifest: Manifest) -> None:
        if len(self._output.shards) > 1:
            write_durably(directory / INDEX_NAME, index_json(self._output.shards), self._store.ledger)
        contents = sidecar_contents(self._inputs.recipe, self._inputs.base, self._store, manifest)
        for name, content in (*contents.items(), (MANIFEST_NAME, manifest.to_json())):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content, self._store.ledger)

    def _access(self) -> PlannedAccess | None:
        if self._plan is None:
            return None
        return PlannedAccess({tensor.name: tensor for tensor in self._plan.tensors}, self._plan.block_elements)

    def _content_ids(self, files: Mapping[Path, RangeFile]) -> tuple[str, ...]:
        """What randomness is keyed by; an expert that a plan leaves out is not looked at."""
        if not self._operator.is_random:
            return ()
        if self._plan is None:
            return tuple(known_content_id(self._link, expert, files) for expert in self._inputs.experts)
        planned = [model for model in self._plan.models if model.role == "expert"]
        taking_part = {
            e for tensor in self._plan.tensors for e, each in enumerate(tensor.access) if each.blocks or each.shared
        }
        return tuple(
            model.content_id or (known_content_id(self._link, expert, files) if e in taking_part else "")
            for e, (model, expert) in enumerate(zip(planned, self._inputs.experts, strict=True))
        )

    def _known_statistics(self) -> tuple[Mapping[str, TensorStatistics], ...]:
        """Exact statistics of each expert, for a merge in full; a plan holds what it needs."""
        if self._plan is not None:
            return ()
        return self._link.use(self._statistics) or ()

    def _statistics(self, catalog: Catalog) -> tuple[Mapping[str, TensorStatistics], ...]:
        base_row = catalog.model_for(self._inputs.base)
        rows = [catalog.model_for(expert) for expert in self._inputs.experts]
        return tuple(catalog.statistics(row, base_row) if row and base_row else {} for row in rows)

    def _recorder(self) -> StatisticsRecorder | None:
        """Takes the statistics that a merge in full yields on the way, if the catalog lacks any."""
        if self._plan is not None or not self._inputs.experts or not self._settings.gathers:
            return None
        return self._link.use(self._make_recorder)

    def _make_recorder(self, catalog: Catalog) -> StatisticsRecorder | None:
        base_row = catalog.register_model(self._inputs.base)
        rows = [catalog.register_model(expert) for expert in self._inputs.experts]
        tasks = {task.name: task for task in self._output.tasks if task.experts and task.base.n_elements}
        missing: set[str] = set()
        for row in rows:  # what was analysed stays, on whatever grid that was asked for
            evidence = catalog.evidence(row, base_row)
            missing.update(name for name in tasks if evidence.get(name) is not Evidence.EXACT)
        recorder = StatisticsRecorder(self._link, base_row, Evidence.EXACT)
        for name in missing:
            recorder.expect(tasks[name], rows)
        return recorder if missing else None

    def _open_files(self) -> AbstractContextManager[Mapping[Path, RangeFile]]:
        tasks = self._output.tasks
        paths = {entry.file for task in tasks for entry in (task.base, *task.experts)}
        if self._operator.is_random:  # content ids sample dropped tensors too
            paths |= {entry.file for expert in self._inputs.experts for entry in expert.tensors.values()}
        return open_files(self._store, paths)

    def tick(self, phase: str) -> None:
        """Report progress."""
        if self._on_progress is not None:
            self._on_progress(Progress(phase, self._store.ledger.total_bytes(), self._total_bytes))

    def _manifest(self, digests: tuple[TensorDigest, ...], ids: tuple[str, ...]) -> Manifest:
        usage = self._store.ledger.usage()
        return Manifest(
            version=mergepipe.__version__,
            operator=self._inputs.recipe.operator.name,
            recipe=self._inputs.recipe.source_text,
            seed=self._settings.seed if self._plan is None else self._plan.seed,
            inputs=self._input_records(ids, usage),
            files=_file_records(self._output, digests),
            tensors=_tensor_records(self._output, digests),
            dropped=tuple(DroppedRecord(d.model, d.tensor, d.reason) for d in self._inputs.resolution.dropped),
            realized=_realized(usage),
            plan_digest=None if self._plan is None else self._plan.digest,
            plan=None if self._plan is None else self._plan.content(),
            coverage=None if self._plan is None else coverage_of(self._plan),
            run={
                "seconds": round(time.perf_counter() - self._started, 3),
                "threads": self._settings.engine.threads,
                "memory_bytes": self._settings.engine.memory_bytes,
            },
        )

    def _input_records(self, ids: tuple[str, ...], usage: Usage) -> tuple[InputRecord, ...]:
        recipe = self._inputs.recipe
        models = (recipe.anchor(), *recipe.experts())
        roles = ("base", *("expert" for _ in recipe.experts()))
        known = (None, *(ids or (None,) * len(self._inputs.experts)))
        return tuple(
            InputRecord(
                role=role,
                model=model.text,
                path=str(model.path),
                files=tuple(
                    FileRecord(file.name, file.size_bytes, file.mtime_ns, file.header_digest)
                    for file in checkpoint.files
                ),
                content_id=identity,
                read_bytes=_tensor_bytes_read(checkpoint, usage),
            )
            for role, model, checkpoint, identity in zip(roles, models, self._inputs.checkpoints, known, strict=True)
        )

    def _budget_notices(self) -> tuple[str, ...]:
        """What the plan says of the budget as a whole: that it reads nothing, or leaves some unspent."""
        fallbacks = () if self._plan is None else self._plan.fallbacks
        return tuple(f"{each.decision}: {each.reason}" for each in fallbacks if each.where == "budget")

    def report(self, out: Path, manifest: Manifest) -> MergeReport:
        """What was done, up to now."""
        usage = _realized(self._store.ledger.usage())
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
            notices=(*self._link.notices, *self._budget_notices()),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _realized(usage: Usage) -> RealizedBytes:
    return RealizedBytes(
        base=usage[Purpose.BASE],
        expert=usage[Purpose.EXPERT],
        analysis=usage[Purpose.ANALYSIS],
        metadata=usage[Purpose.METADATA],
        output=usage[Purpose.OUTPUT],
    )


def _tensor_bytes_read(checkpoint: Checkpoint, usage: Usage) -> int:
    files = {str(entry.file) for entry in checkpoint.tensors.values()}
    return sum(n for (file, purpose), n in usage.by_file.items() if file in files and purpose is not Purpose.METADATA)


def _tensor_records(output: OutputPlan, digests: tuple[TensorDigest, ...]) -> tuple[OutputTensor, ...]:
    shard_of = {spec.name: shard.name for shard in output.shards for spec in shard.tensors}
    return tuple(
        OutputTensor(
            task.name, task.dtype.name, task.shape, shard_of[task.name], digest.root, task.action.value, task.reason
        )
        for task, digest in zip(output.tasks, digests, strict=True)
    )


def _file_records(output: OutputPlan, digests: tuple[TensorDigest, ...]) -> tuple[OutputFileRecord, ...]:
    root_of = {digest.name: digest.root for digest in digests}
    return tuple(
        OutputFileRecord(
            shard.name,
            shard.file_bytes,
            digest_of([[s.name, s.dtype.name, list(s.shape), root_of[s.name]] for s in shard.tensors]),
        )
        for shard in output.shards
    )
