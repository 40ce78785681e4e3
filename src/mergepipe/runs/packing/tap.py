"""Pack experts from the bytes that a merge or an analysis reads, so that each is read from disk once."""

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
from mergepipe.deltastore.pack.blocks import BandChooser, BlockGroup, Member
from mergepipe.deltastore.pack.builder import FILES_OF_BUILDER, PackJob, StoreBuilder, open_builder
from mergepipe.deltastore.pack.encode_pass import EXPERTS_AT_ONCE, pack_all
from mergepipe.deltastore.pack.job import is_packed, job_of, reason_against
from mergepipe.engine.observer import Tap
from mergepipe.engine.pipeline.segment_layout import Piece
from mergepipe.errors import OutputError
from mergepipe.options import threads_of
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.reports import NotPacked, PackedExpert
from mergepipe.runs.packing.facts import packed_facts
from mergepipe.runs.packing.request import ExpertPacker, NoPacks, PackCandidate
from mergepipe.snapshots.staging import check_free_space
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


@dataclass(frozen=True, slots=True)
class TapPackRequest:
    """The experts to pack during a run and the reasons against the others, decided before anything is read.

    `routes` maps a task to its packed experts: (index among the task's experts, index of the job, index of the tensor).
    Tensors that no task reads are read by the packer itself.
    """

    store: Store  # with a ledger of its own: what packing reads and writes is no part of the merge's account
    jobs: tuple[PackJob, ...]
    refused: tuple[NotPacked, ...]
    routes: Mapping[str, tuple[tuple[int, int, int], ...]]

    @property
    def outs(self) -> tuple[Path, ...]:
        """The directories of the stores."""
        return tuple(job.out for job in self.jobs)

    def open_packer(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[ExpertPacker]:
        """Open a packer for the duration of the context."""
        return _tap_packer(self, threads, on_tick) if self.jobs else NoPacks().open_packer(threads, on_tick)


def request_tap_packs(
    base: Checkpoint, candidates: Iterable[PackCandidate], tasks: Sequence[MergeTask], out: Path
) -> TapPackRequest:
    """Decide which experts are packed into `out` while `tasks` run, each of which reads all of its tensors.

    Raises:
        UnsupportedError, CorruptError, NotFoundError: an expert cannot be packed, see `deltastore.pack.job.job_of`.
    """
    streams = _streams(base, tasks)
    store = Stores()
    jobs: dict[Path, PackJob] = {}
    refused: list[NotPacked] = []
    for candidate in candidates:
        reason = candidate.reason or _reason_against(base, candidate.checkpoint)
        job = None
        if not reason:
            job, reason = _job(store, base, candidate.checkpoint, out)
        if job is not None:
            reason = _name_conflict(store, jobs, job)
        if reason:
            refused.append(NotPacked(candidate.text, reason))
        elif job is not None:
            jobs[job.out] = job
    chosen = tuple(jobs.values())
    return TapPackRequest(store, chosen, tuple(refused), _routes(chosen, streams))


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


def _job(store: Store, base: Checkpoint, expert: Checkpoint, out: Path) -> tuple[PackJob | None, str]:
    """Return the job, or the reason why its directory cannot be used."""
    try:
        job = job_of(store, base, expert, Location.local(out), out)
        return (None, f"it was packed before: {job.out}") if is_packed(store, job, threads_of(None)) else (job, "")
    except OutputError as error:
        return None, str(error)


def _name_conflict(store: Store, jobs: Mapping[Path, PackJob], job: PackJob) -> str:
    other = jobs.get(job.out)
    if other is None:
        return ""
    if store.real_path(other.expert.path) == store.real_path(job.expert.path):
        return "it is named twice, and packed once"
    return f"{other.expert.path} has the same name"


Streams = Mapping[int, tuple[MergeTask, int]]
"""Maps the `id` of an expert's tensor to the task that reads it and to its index among the task's experts."""


def _streams(base: Checkpoint, tasks: Sequence[MergeTask]) -> Streams:
    streams: dict[int, tuple[MergeTask, int]] = {}
    for task in tasks:
        for e, source in enumerate(task.experts):
            base_tensor = base.tensors.get(source.name)
            if isinstance(source, TensorEntry) and task.base is base_tensor:
                streams.setdefault(id(source), (task, e))
    return streams


def _routes(jobs: Sequence[PackJob], streams: Streams) -> dict[str, tuple[tuple[int, int, int], ...]]:
    routes: dict[str, list[tuple[int, int, int]]] = {}
    for j, job in enumerate(jobs):
        for number, place in enumerate(job.places):
            if place.entry.n_elements and id(place.entry) in streams:
                task, e = streams[id(place.entry)]
                routes.setdefault(task.name, []).append((e, j, number))
    return {name: tuple(entries) for name, entries in routes.items()}


@contextlib.contextmanager
def _tap_packer(plan: TapPackRequest, threads: int, on_tick: Callable[[], None]) -> Iterator[TapPacker]:
    """Open a store builder for each expert of the request; stores that were not published are removed on exit.

    Memory: 16 MiB an expert, less where there are more than eight, and that of `pack_all` before anything else is read.

    Raises:
        StorageError: no room for the largest of them as it is, or the operating system refused.
        ConflictError: another process is making one of the stores.
    """
    store = plan.store
    check_free_space(plan.jobs[0].out, max(job.expert.tensor_bytes for job in plan.jobs))
    inputs = set[Location]().union(*(job.weight_files for job in plan.jobs))
    allow_open_files(2 * len(inputs) + len(plan.jobs) * FILES_OF_BUILDER)  # the engine opens them as well
    with contextlib.ExitStack() as stack:
        builders = tuple(
            stack.enter_context(open_builder(job, store, resumes=False, sharing=len(plan.jobs))) for job in plan.jobs
        )
        checkpoints = [checkpoint for job in plan.jobs for checkpoint in (*job.bases, job.expert)]
        files = stack.enter_context(open_files(store, inputs, checkpoints))
        streamed = {id(plan.jobs[j].places[number]) for route in plan.routes.values() for _, j, number in route}
        for first in range(0, len(builders), EXPERTS_AT_ONCE):
            some = builders[first : first + EXPERTS_AT_ONCE]
            pack_all(some, files, threads, lambda _: on_tick(), lambda place: id(place) not in streamed)
        yield TapPacker(plan, builders, files)


class TapPacker:
    """Builds delta stores from the bytes of experts that the engine has read."""

    def __init__(
        self, plan: TapPackRequest, builders: Sequence[StoreBuilder], files: Mapping[Location, RangeFile]
    ) -> None:
        self._plan = plan
        self._builders = builders
        self._bands = BandChooser(files)
        self._started = time.perf_counter()

    @property
    def tap(self) -> Tap:
        """The tap that passes the engine's bytes to the builders."""
        return Tap(frozenset(self._plan.routes), BLOCK_ELEMENTS, self._look)

    def _look(self, task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        span = piece.run.span
        offsets = dict(zip(piece.run.present, piece.expert_offsets, strict=True))
        base = buffer[piece.base_offset : piece.base_offset + span.n_elements * task.base.dtype.itemsize]
        beside: list[Member] = []
        alone: list[Member] = []
        for e, j, number in self._plan.routes[task.name]:
            place = self._plan.jobs[j].places[number]
            content = buffer[offsets[e] : offsets[e] + span.n_elements * place.entry.dtype.itemsize]
            (alone if place.base is None else beside).append(Member(self._builders[j], number, content))
        block_groups = [BlockGroup(span, None, None, (member,)) for member in alone]
        if beside:
            block_groups.append(BlockGroup(span, beside[0].place.base, base, tuple(beside)))
        for blocks in block_groups:
            self._bands.choose(blocks)
            for block in blocks.blocks:
                blocks.encode(block)

    def finish(self) -> None:
        """Complete the stores, before anything is published.

        Raises:
            StorageError, ConflictError: as `StoreBuilder.finish`.
        """
        for builder in self._builders:
            builder.finish()

    def publish(self) -> tuple[PackedExpert, ...]:
        """Publish the stores, after the run that they were packed in has published.

        Raises:
            ConflictError, StorageError: as `Staging.publish`; stores before the failing one stay published.
        """
        facts = [packed_facts(builder.job, builder.read(), is_new=True) for builder in self._builders]
        for builder in self._builders:
            builder.publish()
        seconds = time.perf_counter() - self._started
        total = sum(job.expert.tensor_bytes for job in self._plan.jobs)
        return tuple(replace(expert, seconds=seconds * expert.tensor_bytes / max(total, 1)) for expert in facts)
