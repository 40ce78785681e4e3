"""Packs experts while a merge or an analysis reads them, so that they are read from disk once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, TensorEntry
from mergepipe.checkpoints.open_files import allow_open_files, open_files
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.pack.blocks import BandChooser, Member, Sight
from mergepipe.deltastore.pack.builder import FILES_OF_BUILDER, PackJob, StoreBuilder, building
from mergepipe.deltastore.pack.encode_pass import EXPERTS_AT_ONCE, pack_all
from mergepipe.deltastore.pack.job import is_packed, job_of, reason_against
from mergepipe.engine.passes import Tap
from mergepipe.engine.segment_layout import Piece
from mergepipe.errors import OutputError
from mergepipe.options import threads_asked
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.reports import NotPacked, PackedExpert
from mergepipe.runs.pack_request import Along, Candidate, NothingPacked
from mergepipe.runs.packed_facts import packed_facts
from mergepipe.snapshots.staging import check_free_space
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.local import LocalStore


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Which experts are packed on the way, and why others are not; decided before anything is read.

    `routes` say, by task, which of its experts is whose tensor: place among the experts, job, number of the tensor.
    Tensors that no task reads are read by packing itself.
    """

    jobs: tuple[PackJob, ...]
    refused: tuple[NotPacked, ...]
    routes: Mapping[str, tuple[tuple[int, int, int], ...]]

    @property
    def outs(self) -> tuple[Path, ...]:
        """Where the stores go."""
        return tuple(job.out for job in self.jobs)

    def begun(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[Along]:
        """Pack while the context lasts."""
        return _packing_along(self, threads, on_tick) if self.jobs else NothingPacked().begun(threads, on_tick)


def plan_along(base: Checkpoint, candidates: Iterable[Candidate], tasks: Sequence[MergeTask], out: Path) -> PackingPlan:
    """Decide who is packed into `out` while `tasks` are run, each of which reads all of its tensors.

    Raises:
        UnsupportedError, CorruptError, NotFoundError: an expert's directory cannot be packed, as in `packing.job_of`.
    """
    streams = _streams(base, tasks)
    store = LocalStore()
    jobs: dict[Path, PackJob] = {}
    refused: list[NotPacked] = []
    for each in candidates:
        found = each.reason or _reason_against(base, each.checkpoint)
        job = None
        if not found:
            job, found = _job(store, base, each.checkpoint, out)
        if job is not None:
            found = _taken(jobs, job)
        if found:
            refused.append(NotPacked(each.text, found))
        elif job is not None:
            jobs[job.out] = job
    chosen = tuple(jobs.values())
    return PackingPlan(chosen, tuple(refused), _routes(chosen, streams))


def _reason_against(base: Checkpoint, expert: Checkpoint) -> str:
    if expert.kind is CheckpointKind.ADAPTER:
        return "it is an adapter"
    if expert.encoded is not None:
        return "it is a delta store already"
    if base.kind is not CheckpointKind.FULL or not _is_stored(base):
        return "the base is not stored as plain weights"
    if not _is_stored(expert):
        return "it is not stored as plain weights in the base's layout"
    return reason_against(expert)


def _is_stored(checkpoint: Checkpoint) -> bool:
    return all(isinstance(tensor, TensorEntry) for tensor in checkpoint.tensors.values())


def _job(store: LocalStore, base: Checkpoint, expert: Checkpoint, out: Path) -> tuple[PackJob | None, str]:
    """The job, or why its place is taken."""
    try:
        job = job_of(store, base, expert, out)
        return (None, f"it was packed before: {job.out}") if is_packed(store, job, threads_asked(None)) else (job, "")
    except OutputError as error:
        return None, str(error)


def _taken(jobs: Mapping[Path, PackJob], job: PackJob) -> str:
    other = jobs.get(job.out)
    if other is None:
        return ""
    if other.expert.path.resolve() == job.expert.path.resolve():
        return "it is named twice, and packed once"
    return f"{other.expert.path} has the same name"


Streams = Mapping[int, tuple[MergeTask, int]]
"""By the identity of an expert's tensor the task that reads it, and its place among the task's experts."""


def _streams(base: Checkpoint, tasks: Sequence[MergeTask]) -> Streams:
    found: dict[int, tuple[MergeTask, int]] = {}
    for task in tasks:
        for e, source in enumerate(task.experts):
            own = base.tensors.get(source.name)
            if isinstance(source, TensorEntry) and task.base is own:
                found.setdefault(id(source), (task, e))
    return found


def _routes(jobs: Sequence[PackJob], streams: Streams) -> dict[str, tuple[tuple[int, int, int], ...]]:
    routes: dict[str, list[tuple[int, int, int]]] = {}
    for j, job in enumerate(jobs):
        for number, place in enumerate(job.places):
            if place.entry.n_elements and id(place.entry) in streams:
                task, e = streams[id(place.entry)]
                routes.setdefault(task.name, []).append((e, j, number))
    return {name: tuple(found) for name, found in routes.items()}


@contextlib.contextmanager
def _packing_along(plan: PackingPlan, threads: int, on_tick: Callable[[], None]) -> Iterator[PackingAlong]:
    """Builders for the experts of a plan while the context lasts; nothing of them stays but what was published.

    Memory: 16 MiB an expert, less where there are more than eight, and that of `pack_all` before anything else is read.

    Raises:
        StorageError: no room for the largest of them as it is, or the operating system refused.
        ConflictError: another process is making one of the stores.
    """
    store = LocalStore()  # a ledger of its own: what packing reads and writes is no part of the merge's account
    check_free_space(plan.jobs[0].out, max(job.expert.tensor_bytes for job in plan.jobs))
    inputs = set[Path]().union(*(job.weight_files for job in plan.jobs))
    allow_open_files(2 * len(inputs) + len(plan.jobs) * FILES_OF_BUILDER)  # the engine opens them as well
    with contextlib.ExitStack() as stack:
        builders = tuple(
            stack.enter_context(building(job, store, resumes=False, sharing=len(plan.jobs))) for job in plan.jobs
        )
        checkpoints = [each for job in plan.jobs for each in (job.base, job.expert)]
        files = stack.enter_context(open_files(store, inputs, checkpoints))
        streamed = {id(plan.jobs[j].places[number]) for route in plan.routes.values() for _, j, number in route}
        for first in range(0, len(builders), EXPERTS_AT_ONCE):
            some = builders[first : first + EXPERTS_AT_ONCE]
            pack_all(some, files, threads, lambda _: on_tick(), lambda place: id(place) not in streamed)
        yield PackingAlong(plan, builders, files)


class PackingAlong:
    """Takes the bytes of experts as the engine has read them, and builds their stores."""

    def __init__(self, plan: PackingPlan, builders: Sequence[StoreBuilder], files: Mapping[Path, RangeFile]) -> None:
        self._plan = plan
        self._builders = builders
        self._bands = BandChooser(files)
        self._started = time.perf_counter()

    @property
    def tap(self) -> Tap:
        """Shows the engine's bytes to the builders."""
        return Tap(frozenset(self._plan.routes), BLOCK_ELEMENTS, self._look)

    def _look(self, task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        if not piece.run.present:
            return  # a sum of this tensor that was kept a moment ago, being rounded
        span = piece.run.span
        offsets = dict(zip(piece.run.present, piece.expert_offsets, strict=True))
        base = buffer[piece.base_offset : piece.base_offset + span.n_elements * task.base.dtype.itemsize]
        beside: list[Member] = []
        alone: list[Member] = []
        for e, j, number in self._plan.routes[task.name]:
            place = self._plan.jobs[j].places[number]
            content = buffer[offsets[e] : offsets[e] + span.n_elements * place.entry.dtype.itemsize]
            (alone if place.base is None else beside).append(Member(self._builders[j], number, content))
        sights = [Sight(span, None, None, (member,)) for member in alone]
        if beside:
            sights.append(Sight(span, beside[0].place.base, base, tuple(beside)))
        for sight in sights:
            self._bands.choose(sight)
            for block in sight.blocks:
                sight.encode(block)

    def finish(self) -> None:
        """Complete the stores, before anything is published.

        Raises:
            StorageError, ConflictError: as `StoreBuilder.finish`.
        """
        for builder in self._builders:
            builder.finish()

    def publish(self) -> tuple[PackedExpert, ...]:
        """Make the stores visible, once what they were packed on the way of is.

        Raises:
            ConflictError, StorageError: as `Staging.publish`; those before it are visible.
        """
        for builder in self._builders:
            builder.publish()
        seconds = time.perf_counter() - self._started
        total = sum(job.expert.tensor_bytes for job in self._plan.jobs)
        facts = [packed_facts(LocalStore(), job, is_new=True) for job in self._plan.jobs]
        return tuple(replace(each, seconds=seconds * each.tensor_bytes / max(total, 1)) for each in facts)
