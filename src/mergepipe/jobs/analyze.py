"""Analyze experts: one streaming pass over base and experts that fills the catalog, resumable by tensor."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import ModelRow
from mergepipe.checkpoints.contract import Checkpoint, Readable, files_of
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.checkpoints.passing_digests import MOST_READ_AGAIN_FRACTION
from mergepipe.core.blocks import DTypeKind
from mergepipe.engine import analysis
from mergepipe.engine.observer import Observer
from mergepipe.engine.work import AnalysisWork, EngineOptions
from mergepipe.recipes.resolve.tasks import Action, MergeTask, TensorParameters
from mergepipe.reports import AnalyzedExpert, AnalyzeReport, ImportedStatistics, Progress, ProgressCallback
from mergepipe.runs.inputs.opened import open_path
from mergepipe.runs.records.catalog_link import CatalogLink, StatisticsRecorder, known_content_id
from mergepipe.runs.records.known_content import DigestTap, Recogniser, complete_digests
from mergepipe.runs.records.statistics_files import export_statistics, import_statistics
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """The statistics to gather of `experts` against `base`, and the catalog's home, where they are kept.

    `densities` are those whose exact cuts are wanted. The statistics of files are taken in before (`import_from`); in
    the end those of the experts are written to one (`export_to`).
    """

    base: Location
    experts: tuple[Location, ...]
    home: Path
    block_elements: int
    densities: tuple[float, ...]
    import_from: tuple[Location, ...] = ()
    export_to: Path | None = None


@dataclass(frozen=True, slots=True)
class _Subject:
    """One expert: its tensors that can be compared with the base, and those without statistics."""

    checkpoint: Checkpoint
    row: ModelRow
    comparable: tuple[str, ...]
    incomparable: tuple[str, ...]
    missing: tuple[str, ...]


def run_analysis(
    request: AnalysisRequest, engine: EngineOptions, *, started: float, on_progress: ProgressCallback | None
) -> AnalyzeReport:
    """Analyse and record; see `api.analyze`. `started` is the `perf_counter` reading that time is taken from."""
    store = Stores(settings=engine.remote)
    base_checkpoint = open_path(store, request.base)
    checkpoints = [open_path(store, path, base_checkpoint) for path in request.experts]
    with closing(CatalogLink(request.home, required=True)) as link, Catalog.open(request.home, store=store) as catalog:

        def report_progress(notices: tuple[str, ...] = ()) -> None:
            if on_progress is not None:
                on_progress(Progress("analyze", store.ledger.total_bytes(), total, notices))

        total = 0
        imported = import_statistics(catalog, store, request.import_from) if request.import_from else None
        recogniser = Recogniser(catalog, link, store, engine.threads, report_progress)
        recognised = recogniser.recognise(
            catalog.with_known_digests(base_checkpoint),
            [catalog.with_known_digests(c) for c in checkpoints],
        )
        base_checkpoint, checkpoints = recognised.base, list(recognised.experts)
        base_row = catalog.register_model(base_checkpoint)
        subjects = [_subject(catalog, base_checkpoint, base_row, checkpoint, request) for checkpoint in checkpoints]
        recorder = StatisticsRecorder(link, base_row)
        tasks = _tasks(base_checkpoint, subjects, recorder)
        total = store.ledger.total_bytes() + sum(
            task.base.nbytes + sum(entry.nbytes for entry in task.experts) for task in tasks
        )

        report_progress()
        inputs = (base_checkpoint, *checkpoints)
        tensors = (tensor for checkpoint in inputs for tensor in checkpoint.tensors.values())
        with open_files(store, files_of(tensors), inputs) as files:
            for checkpoint in inputs:
                known_content_id(link, checkpoint, files)
            digests = DigestTap((base_checkpoint, *checkpoints), tasks, files, engine.memory_bytes)
            if tasks:
                tap = digests.tap
                work = AnalysisWork(tasks, request.block_elements, request.densities)
                observer = Observer(lambda _: report_progress(), recorder.take, tap)
                analysis.run_analysis(work, files, store, engine, observer)
            digested = digests.finish()
            check_unchanged(store, digested)
            recorder.flush()
        if tasks:
            usage = store.ledger.usage()
            read_bytes = usage[Purpose.BASE] + usage[Purpose.EXPERT]
            complete_digests(catalog, store, digested, engine.threads, int(read_bytes * MOST_READ_AGAIN_FRACTION))
        exported = None
        if request.export_to is not None:
            base, *experts = digested
            exported = export_statistics(catalog, store, base, experts, request.export_to, engine.threads)
    usage = store.ledger.usage()
    return AnalyzeReport(
        base=request.base,
        experts=tuple(
            AnalyzedExpert(
                str(path),
                len(subject.missing),
                len(subject.comparable),
                subject.incomparable,
                recognised.twins.get(index),
            )
            for index, (path, subject) in enumerate(zip(request.experts, subjects, strict=True))
        ),
        home=request.home,
        base_bytes=usage[Purpose.BASE],
        expert_bytes=usage[Purpose.EXPERT],
        analysis_bytes=usage[Purpose.ANALYSIS],
        seconds=time.perf_counter() - started,
        imported=imported,
        exported=exported,
    )


def import_files(locations: Sequence[Location], home: Path) -> ImportedStatistics:
    """Take in the statistics of files; see `api.import_statistics`."""
    store = Stores()
    with Catalog.open(home, store=store) as catalog:
        return import_statistics(catalog, store, locations)


def _subject(
    catalog: Catalog, base: Checkpoint, base_row: ModelRow, checkpoint: Checkpoint, request: AnalysisRequest
) -> _Subject:
    comparable = tuple(
        name for name, entry in base.tensors.items() if _can_compare(entry, checkpoint.tensors.get(name))
    )
    row = catalog.register_model(checkpoint)
    missing = catalog.missing_statistics(row, base_row, comparable, request.block_elements, request.densities)
    incomparable = tuple(
        name for name, entry in base.tensors.items() if entry.dtype.kind is DTypeKind.FLOAT and name not in comparable
    )
    return _Subject(checkpoint, row, comparable, incomparable, missing)


def _can_compare(base: Readable, expert: Readable | None) -> bool:
    return (
        expert is not None
        and base.shape == expert.shape
        and base.dtype.kind is expert.dtype.kind is DTypeKind.FLOAT
        and base.n_elements > 0
    )


def _tasks(base: Checkpoint, subjects: Sequence[_Subject], recorder: StatisticsRecorder) -> tuple[MergeTask, ...]:
    """Build one task per tensor for all experts that need it."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for index, subject in enumerate(subjects):
        for name in subject.missing:
            wanted[name].append(index)
    tasks = []
    rows = [subject.row for subject in subjects]
    for name, entry in base.tensors.items():
        indices = wanted.get(name, [])
        if not indices:
            continue
        entries = tuple(subjects[i].checkpoint.tensors[name] for i in indices)
        parameters = TensorParameters({}, {}, ({},) * len(entries))
        models = tuple(i + 1 for i in indices)
        task = MergeTask(name, Action.MERGE, entry.shape, entry.dtype, entry, entries, parameters, expert_models=models)
        recorder.expect(task, [rows[i] for i in indices])
        tasks.append(task)
    return tuple(tasks)
