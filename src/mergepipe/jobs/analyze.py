"""ANALYZE: one streaming pass over a base and its experts that fills the catalog, resumable tensor by tensor."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence, ModelRow
from mergepipe.checkpoints.contract import Checkpoint, Readable, files_of
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.core.blocks import DTypeKind
from mergepipe.engine.execute import AnalysisWork, EngineOptions, execute_analysis
from mergepipe.recipes.resolve.tasks import Action, MergeTask, TensorParameters
from mergepipe.reports import AnalyzedExpert, AnalyzeReport, Progress, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink, StatisticsRecorder, known_content_id
from mergepipe.runs.inputs import open_path
from mergepipe.runs.pack_request import Candidate, along_plan, refusals
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore


@dataclass(frozen=True, slots=True)
class AnalysisOptions:
    """What to gather: the block grid, the densities whose exact cuts are wanted, or the share of a probe (0: all).

    Experts are packed into `pack` on the way.
    """

    block_elements: int
    densities: tuple[float, ...]
    probe_fraction: float = 0.0
    pack: Path | None = None


@dataclass(frozen=True, slots=True)
class _Subject:
    """One expert with what of it can be compared with the base, and what is still unknown."""

    checkpoint: Checkpoint
    row: ModelRow
    comparable: tuple[str, ...]
    incomparable: tuple[str, ...]
    missing: tuple[str, ...]


def run_analysis(
    base: Path,
    experts: Sequence[Path],
    home: Path,
    options: AnalysisOptions,
    engine: EngineOptions,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> AnalyzeReport:
    """Analyse and record; see `api.analyze`. `started` is the `perf_counter` reading that time is taken from."""
    store = LocalStore()
    base_checkpoint = open_path(store, base)
    checkpoints = [open_path(store, path, base_checkpoint) for path in experts]
    with closing(CatalogLink(home, required=True)) as link, Catalog.open(home) as catalog:
        base_row = catalog.register_model(base_checkpoint)
        subjects = [_subject(catalog, base_checkpoint, base_row, each, options) for each in checkpoints]
        evidence = Evidence.PROBE if options.probe_fraction else Evidence.EXACT
        recorder = StatisticsRecorder(link, base_row, evidence)
        tasks = _tasks(base_checkpoint, subjects, recorder, apart=options.probe_fraction > 0)
        total = sum(task.base.nbytes + sum(entry.nbytes for entry in task.experts) for task in tasks)
        candidates = [Candidate(str(path), each) for path, each in zip(experts, checkpoints, strict=True)]
        along = along_plan(base_checkpoint, candidates, tasks, options.pack)

        def tell(notices: tuple[str, ...] = ()) -> None:
            if on_progress is not None:
                on_progress(Progress("analyze", store.ledger.total_bytes(), total, notices))

        tell(refusals(along))
        everything = (tensor for each in (base_checkpoint, *checkpoints) for tensor in each.tensors.values())
        opening = open_files(store, files_of(everything), (base_checkpoint, *checkpoints))
        with along.begun(engine.threads, tell) as packing, opening as files:
            for checkpoint in (base_checkpoint, *checkpoints):
                known_content_id(link, checkpoint, files)
            if tasks:
                work = AnalysisWork(
                    tasks, options.block_elements, options.densities, recorder.take, options.probe_fraction,
                    packing.tap,
                )  # fmt: skip
                execute_analysis(work, files, engine, tell)
            check_unchanged(store, (base_checkpoint, *checkpoints))
            packing.finish()
            recorder.flush()
            packed = packing.publish()
    usage = store.ledger.usage()
    return AnalyzeReport(
        base=base,
        experts=tuple(
            AnalyzedExpert(str(path), len(subject.missing), len(subject.comparable), subject.incomparable)
            for path, subject in zip(experts, subjects, strict=True)
        ),
        home=home,
        base_bytes=usage[Purpose.BASE],
        expert_bytes=usage[Purpose.EXPERT],
        analysis_bytes=usage[Purpose.ANALYSIS],
        seconds=time.perf_counter() - started,
        is_probe=options.probe_fraction > 0,
        packed=packed,
        not_packed=along.refused,
    )


def _subject(
    catalog: Catalog, base: Checkpoint, base_row: ModelRow, checkpoint: Checkpoint, options: AnalysisOptions
) -> _Subject:
    comparable = tuple(
        name for name, entry in base.tensors.items() if _can_compare(entry, checkpoint.tensors.get(name))
    )
    row = catalog.register_model(checkpoint)
    if options.probe_fraction:
        known = catalog.evidence(row, base_row)
        missing = tuple(name for name in comparable if name not in known)
    else:
        missing = catalog.missing_statistics(row, base_row, comparable, options.block_elements, options.densities)
    others = tuple(
        name for name, entry in base.tensors.items() if entry.dtype.kind is DTypeKind.FLOAT and name not in comparable
    )
    return _Subject(checkpoint, row, comparable, others, missing)


def _can_compare(base: Readable, expert: Readable | None) -> bool:
    return (
        expert is not None
        and base.shape == expert.shape
        and base.dtype.kind is expert.dtype.kind is DTypeKind.FLOAT
        and base.n_elements > 0
    )


def _tasks(
    base: Checkpoint, subjects: Sequence[_Subject], recorder: StatisticsRecorder, *, apart: bool
) -> tuple[MergeTask, ...]:
    """One task per tensor with the experts that need it, or one per expert: a probe samples each one's own pages."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for index, subject in enumerate(subjects):
        for name in subject.missing:
            wanted[name].append(index)
    tasks = []
    rows = [subject.row for subject in subjects]
    for name, entry in base.tensors.items():
        indices = wanted.get(name, [])
        groups = [[index] for index in indices] if apart else [indices] if indices else []
        for group in groups:
            entries = tuple(subjects[i].checkpoint.tensors[name] for i in group)
            parameters = TensorParameters({}, {}, ({},) * len(entries))
            models = tuple(i + 1 for i in group)
            task = MergeTask(
                name, Action.MERGE, entry.shape, entry.dtype, entry, entries, parameters, expert_models=models
            )
            recorder.expect(task, [rows[i] for i in group])
            tasks.append(task)
    return tuple(tasks)
