"""Analyze experts: one streaming pass over base and experts, which makes one file of statistics for each expert."""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.statistics_file import (
    StatisticsFile,
    make_statistics_folder,
    portable_content,
    statistics_path,
    write_statistics,
)
from mergepipe.checkpoints.content_id import CHUNK_BYTES, content_id, read_digests, with_digests
from mergepipe.checkpoints.contract import Checkpoint, Source, TensorEntry, files_of
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.flags import public_call, several
from mergepipe.engine import analysis
from mergepipe.engine.jobs import Tap
from mergepipe.engine.observer import Observer
from mergepipe.engine.segments import Piece
from mergepipe.engine.work import AnalysisWork, EngineOptions
from mergepipe.errors import NotFoundError
from mergepipe.jobs.evaluate import write_text_importance
from mergepipe.jobs.explain import overlaps_of
from mergepipe.operators.statistics import COMMON_DENSITIES, TensorStatistics
from mergepipe.options import AnalyzeOptions, block_elements_of, engine_options, home_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.references import locate_reference
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.reports import AnalyzedExpert, AnalyzeReport, Progress, ProgressCallback
from mergepipe.runs.inputs import open_model, open_path
from mergepipe.runs.known_statistics import KnownStatistics
from mergepipe.storage.contract import is_folder
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import output_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import WaitingRoom, read_exact
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.core.flags import Options


@dataclass(frozen=True, slots=True)
class _Subject:
    """One expert: its tensors that can be compared with the base, those that cannot, and whether it is analyzed."""

    checkpoint: Checkpoint
    comparable: tuple[str, ...]
    incomparable: tuple[str, ...]
    on_record: StatisticsFile | None
    is_wanted: bool


@public_call(AnalyzeOptions)
def analyze(
    base: str | Path,
    experts: Sequence[str | Path],
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> AnalyzeReport:
    """Read experts once against their base, and keep for each a file of what plans are made from.

    The files lie in the home folder and are named by the contents of expert and base: a copy of one in the home folder
    of another machine, or next to the model as `mergepipe.stats`, serves there. What is on record is not read again.

    Args:
        options: `AnalyzeOptions`: what is measured, threads, memory, the home folder.
    """
    started, settings = time.perf_counter(), AnalyzeOptions.of(options, fields)
    engine, home = engine_options(settings), home_of(settings.home)
    experts = several(experts)
    store = Stores(engine.connections)
    base_path = locate_model(store, base)
    models = [locate_reference(store, expert) for expert in experts]
    if settings.text is not None and settings.importance_out is not None:
        text = Location.of(settings.text)
        out = output_place(settings.importance_out).local_path
        if not is_folder(store, Location.local(out.absolute().parent)):  # before the gradient is computed
            raise NotFoundError.of("storage.not-found", out.parent, "no such directory", "make it, or choose another")
        write_text_importance(base_path.local_path, experts, text, out, engine.threads)
    block_elements = block_elements_of(settings.block_elements)
    densities = tuple(sorted({*COMMON_DENSITIES, *settings.densities}))
    opened_base = open_path(store, base_path)
    opened = [open_model(store, model, opened_base) for model in models]
    notices: list[str] = []
    total = 0

    def report_progress() -> None:
        if on_progress is not None:
            on_progress(Progress("analyze", store.ledger.total_bytes(), total))

    catalog = Catalog(home, store)
    opened_base = catalog.with_known_digests(opened_base)
    known = KnownStatistics(store, home, notices, beside=False)
    subjects = [
        _subject(known.file(expert, opened_base), opened_base, expert, block_elements, densities)
        for expert in map(catalog.with_known_digests, opened)
    ]
    wanted = [subject for subject in subjects if subject.is_wanted]
    if wanted:
        make_statistics_folder(home)
    tasks = _tasks(opened_base, wanted)
    total = store.ledger.total_bytes() + sum(
        task.base.nbytes + sum(entry.nbytes for entry in task.experts) for task in tasks
    )
    report_progress()
    work = AnalysisWork(tasks, block_elements, _densities(densities, wanted))
    analyzed = _analyze(store, opened_base, wanted, work, engine, report_progress)
    for file, *checkpoints in analyzed:
        write_statistics(home, file)
        for checkpoint in checkpoints:
            catalog.record_digests(checkpoint)
    files = iter(analyzed)
    on_record = [next(files)[0] if subject.is_wanted else subject.on_record for subject in subjects]
    names = []
    for model in models:
        adapter = "" if model.adapter is None else f"+{model.adapter.model_name}"
        names.append(f"{model.path.model_name}{adapter}")
    if len(set(names)) < len(names):
        names = [model.text for model in models]
    usage = store.ledger.usage()
    return AnalyzeReport(
        base=base_path,
        experts=tuple(
            AnalyzedExpert(
                model.text,
                len(subject.comparable) if subject.is_wanted else 0,
                len(subject.comparable),
                subject.incomparable,
                None if file is None else statistics_path(home, file.expert.digest, file.base.digest),
            )
            for model, subject, file in zip(models, subjects, on_record, strict=True)
        ),
        home=home,
        base_bytes=usage[Purpose.BASE],
        expert_bytes=usage[Purpose.EXPERT],
        analysis_bytes=usage[Purpose.ANALYSIS],
        seconds=time.perf_counter() - started,
        notices=tuple(notices),
        overlaps=overlaps_of({name: file.tensors for name, file in zip(names, on_record, strict=True) if file}),
    )


def _analyze(
    store: Stores,
    base: Checkpoint,
    wanted: Sequence[_Subject],
    work: AnalysisWork,
    engine: EngineOptions,
    report_progress: Callable[[], None],
) -> list[tuple[StatisticsFile, Checkpoint, Checkpoint]]:
    """Read what the tasks need, once, and the files whose digests did not pass by.

    Returns the statistics of each expert, it, and the base; both with their digests.
    """
    if not work.tasks:
        return []
    checkpoints = (base, *(subject.checkpoint for subject in wanted))
    gathered: list[dict[str, TensorStatistics]] = [{} for _ in checkpoints]

    def gather(task: MergeTask, e: int, statistics: TensorStatistics) -> None:
        gathered[task.expert_models[e]][task.base.name] = statistics

    tensors = (tensor for checkpoint in checkpoints for tensor in checkpoint.tensors.values())
    with open_files(store, files_of(tensors), checkpoints) as files:
        ids = [content_id(checkpoint, files) for checkpoint in checkpoints]
        passing = _passing_digests(checkpoints, work.tasks, files, engine.memory_bytes)
        tap = Tap(frozenset(task.name for task in work.tasks), passing.look)
        analysis.run_analysis(work, files, store, engine, Observer(report_progress, gather, tap))
        digests = passing.finish()
        checkpoints = tuple(with_digests(checkpoint, digests) for checkpoint in checkpoints)
        check_unchanged(store, checkpoints)
    digested = [
        with_digests(checkpoint, read_digests(store, checkpoint, engine.threads, report_progress))
        for checkpoint in checkpoints
    ]
    contents = [portable_content(checkpoint, identity) for checkpoint, identity in zip(digested, ids, strict=True)]
    return [
        (
            StatisticsFile(contents[model], contents[0], work.block_elements, work.densities, gathered[model]),
            digested[model],
            digested[0],
        )
        for model in range(1, len(digested))
    ]


def _subject(
    on_record: StatisticsFile | None,
    base: Checkpoint,
    expert: Checkpoint,
    block_elements: int,
    densities: Sequence[float],
) -> _Subject:
    floating = {name: entry for name, entry in base.tensors.items() if entry.dtype.kind is DTypeKind.FLOAT}
    forms = {name: (entry.shape, entry.dtype.kind) for name, entry in expert.tensors.items()}
    comparable = tuple(
        name
        for name, entry in floating.items()
        if entry.n_elements and forms.get(name) == (entry.shape, DTypeKind.FLOAT)
    )
    named = frozenset(comparable)
    incomparable = tuple(name for name in floating if name not in named)
    is_covered = on_record is not None and on_record.covers(comparable, block_elements, densities)
    return _Subject(expert, comparable, incomparable, on_record, bool(comparable) and not is_covered)


def _densities(wanted: Iterable[float], subjects: Iterable[_Subject]) -> tuple[float, ...]:
    """Return the densities that are asked for, and those that files to be replaced have the cuts of."""
    replaced = [subject.on_record.densities for subject in subjects if subject.on_record is not None]
    return tuple(sorted({*wanted, *(density for densities in replaced for density in densities)}))


def _tasks(base: Checkpoint, subjects: Sequence[_Subject]) -> tuple[MergeTask, ...]:
    """Build one task for each tensor, of all experts that it is analyzed for; a base's model is 0."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for model, subject in enumerate(subjects, 1):
        for name in subject.comparable:
            wanted[name].append(model)
    tasks = []
    for name, entry in base.tensors.items():
        models = tuple(wanted[name])
        if models:
            experts = tuple(subjects[model - 1].checkpoint.tensors[name] for model in models)
            parameters = TensorParameters({}, {}, ({},) * len(experts))
            tasks.append(
                MergeTask(
                    name, Action.MERGE, entry.shape, entry.dtype, entry, experts, parameters, expert_models=models
                )
            )
    return tuple(tasks)


# --- digests of what an analysis reads ---


def _passing_digests(
    checkpoints: Sequence[Checkpoint],
    tasks: Sequence[MergeTask],
    files: Mapping[Location, RangeFile],
    memory_bytes: int,
) -> PassingDigests:
    """Return what takes the digests of checkpoints' files from what an analysis of `tasks` reads of them.

    Only files of plain tensors, all but an eighth of whose bytes the tasks read, take part. Memory: an eighth of
    `memory_bytes`, at most 256 MiB.
    """
    sources = [source for task in tasks for source in (task.base, *task.experts)]
    shown = [source for source in sources if isinstance(source, TensorEntry)]
    read: dict[Location, set[tuple[int, int]]] = defaultdict(set)
    for entry in shown:
        read[entry.file].add((entry.offset, entry.nbytes))
    unknown = [file.location for checkpoint in checkpoints for file in checkpoint.files if file.id.sha256 is None]
    wanted = {
        path: files[path]
        for path in unknown
        if path in files
        and sum(nbytes for _, nbytes in read[path]) >= files[path].size_bytes * (1 - MOST_READ_AGAIN_FRACTION)
    }
    return PassingDigests(wanted, shown, min(WAITING_BYTES, memory_bytes // 8))


# --- SHA-256 digests of files taken from bytes that are read anyway, in about the order in which they lie there ---


WAITING_BYTES = 256 << 20
MOST_READ_AGAIN_FRACTION = 1 / 8


class PassingDigests:
    """The digests of some files, of which `shown` tensors are to pass by; all else is read here, as analysis.

    Memory: `waiting_bytes` of bytes that pass by before their turn. What finds no room is read again at the end; a file
    of which that is more than an eighth gets no digest. Safe to use from many threads.
    """

    def __init__(self, files: Mapping[Location, RangeFile], shown: Iterable[TensorEntry], waiting_bytes: int) -> None:
        ranges: dict[Location, set[tuple[int, int]]] = {path: set() for path in files}
        for entry in shown:
            if entry.nbytes and entry.file in ranges:
                ranges[entry.file].add((entry.offset, entry.offset + entry.nbytes))
        room = WaitingRoom(waiting_bytes)
        self._digests = {path: _PassingDigest(files[path], sorted(ranges[path]), room) for path in files}

    def look(self, task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        """Look at what an analysis has read of a task."""
        sources: list[tuple[Source, int]] = [(task.base, piece.base_offset)]
        sources += [(task.experts[e], at) for e, at in zip(piece.run.present, piece.expert_offsets, strict=True)]
        span = piece.run.span
        for source, at in sources:
            if isinstance(source, TensorEntry):
                size = source.dtype.itemsize
                self.show(source, span.start * size, buffer[at : at + span.n_elements * size])

    def show(self, entry: TensorEntry, first: int, content: NDArray[np.uint8]) -> None:
        """Look at stored bytes of a tensor from its byte `first` on; they are copied where they have to wait."""
        digest = self._digests.get(entry.file)
        if digest is not None and len(content):
            digest.show(entry.offset + first, content)

    def finish(self) -> dict[Location, str]:
        """Return the digests of the files that passed by, by path."""
        finished = {path: digest.finish() for path, digest in self._digests.items()}
        return {path: digest for path, digest in finished.items() if digest is not None}


class _PassingDigest:
    """The digest of one file; `shown` are the byte ranges that pass by, sorted."""

    def __init__(self, file: RangeFile, shown: list[tuple[int, int]], room: WaitingRoom) -> None:
        self._file = file
        self._shown = shown
        self._room = room
        self._hasher = hashlib.sha256()
        self._position = 0
        self._waiting: dict[int, NDArray[np.uint8]] = {}
        self._is_busy = False
        self._lock = threading.Lock()

    def show(self, offset: int, content: NDArray[np.uint8]) -> None:
        with self._lock:
            is_next = offset == self._position and not self._is_busy
            waits = not is_next and offset >= self._position and offset not in self._waiting
            if waits and self._room.take(len(content)):
                self._waiting[offset] = content.copy()  # which lets other threads run, and `tobytes` does not
            if self._is_busy:
                return  # who is busy sees what waits before it stops
            self._is_busy = True
        if is_next:
            self._update(content.data)
        self._go_on()

    def _gap_end(self) -> int:
        """Return the start of the next range that was read; the position itself inside of one."""
        number = bisect_right(self._shown, self._position, key=lambda piece: piece[0])
        if number and self._position < self._shown[number - 1][1]:
            return self._position
        return self._shown[number][0] if number < len(self._shown) else self._file.size_bytes

    def _go_on(self) -> None:
        """Hash what waits and what does not pass by, as far as there is no hole."""
        while True:
            with self._lock:
                content = self._waiting.pop(self._position, None)
                gap_end = self._gap_end()
                if content is None and gap_end == self._position:
                    self._is_busy = False
                    return
            if content is None:
                self._read(min(gap_end, self._position + CHUNK_BYTES))
            else:
                self._room.take(-len(content))
                self._update(content.data)

    def _update(self, content: memoryview) -> None:
        self._hasher.update(content)
        with self._lock:
            self._position += len(content)

    def _read(self, stop: int) -> None:
        self._update(read_exact(self._file, self._position, stop, Purpose.ANALYSIS).data)

    def finish(self) -> str | None:
        """Return the digest, once all has passed by; None where too much would have to be read again."""
        self._is_busy = True
        self._go_on()
        remaining_bytes = self._file.size_bytes - self._position - sum(map(len, self._waiting.values()))
        if remaining_bytes > self._file.size_bytes * MOST_READ_AGAIN_FRACTION:
            return None
        while self._position < self._file.size_bytes:
            content = self._waiting.pop(self._position, None)
            if content is not None:
                self._update(content.data)
            else:
                until = min((start for start in self._waiting if start > self._position), default=self._file.size_bytes)
                self._read(min(until, self._position + CHUNK_BYTES))
        return self._hasher.hexdigest()
