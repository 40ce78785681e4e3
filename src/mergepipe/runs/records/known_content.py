"""Recognise models by the digests of their files: what the catalog knows of equal ones elsewhere is theirs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import ModelRow
from mergepipe.catalog.statistics_transfer import is_transferred
from mergepipe.checkpoints.content_id import samples
from mergepipe.checkpoints.contract import Checkpoint, Source, TensorEntry, files_of
from mergepipe.checkpoints.file_digests import read_digests, with_digests
from mergepipe.checkpoints.open_files import open_files
from mergepipe.checkpoints.passing_digests import MOST_READ_AGAIN_FRACTION, WAITING_BYTES, PassingDigests
from mergepipe.engine.observer import Tap
from mergepipe.engine.pipeline.segment_layout import Piece
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.reports import IMPORTED_STATISTICS
from mergepipe.runs.records.catalog_link import CatalogLink, known_content_id
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class Recognised:
    """A base and experts, with the digests that are known of their files.

    `twins` names for each expert (by its place) the model elsewhere, or the import, whose content it proved to have.
    """

    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    twins: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Recogniser:
    """Compares models with those of known digest in the catalog that look the same.

    Files are read whole, and only where the statistics that this may bring are of an expert and a base that both look
    like known ones: that costs one pass at the speed of SHA-256, and saves an analysis.
    """

    catalog: Catalog
    link: CatalogLink
    store: Store
    threads: int
    on_read: Callable[[], None]

    def recognise(self, base: Checkpoint, experts: Sequence[Checkpoint]) -> Recognised:
        """Take the digests of files where that may bring statistics, and record them.

        Raises:
            MergePipeError: as `read_digests`, and as the catalog.
        """
        base_rows = self._candidates(base)
        twins: dict[int, str] = {}
        checked = list(experts)
        for index, expert in enumerate(experts):
            rows = self._candidates(expert)
            if len(base_rows) + len(rows) == 2:
                continue  # neither looks like another one
            recorded = self.catalog.tensors_on_record(rows[0], base_rows[0])
            pair = next(
                (pair for pair in _pairs(rows, base_rows) if self.catalog.tensors_on_record(*pair) - recorded), None
            )
            if pair is None:
                continue
            base = self._digested(base) if pair[1] is not base_rows[0] else base
            checked[index] = self._digested(expert) if pair[0] is not rows[0] else expert
            base_rows = self._candidates(base)
            content_digest = self.catalog.register_model(checked[index]).content_digest
            if pair[0] is not rows[0] and content_digest == pair[0].content_digest:
                twins[index] = IMPORTED_STATISTICS if is_transferred(pair[0]) else str(pair[0].path)
        return Recognised(base, tuple(checked), twins)

    def _candidates(self, checkpoint: Checkpoint) -> tuple[ModelRow, ...]:
        """Return the model's own row, and those of models that may be the same; none where its digest is known."""
        row = self.catalog.register_model(checkpoint)
        if row.content_digest is not None:
            return (row,)
        with open_files(self.store, _sampled_files(checkpoint), (checkpoint,)) as files:
            identity = known_content_id(self.link, checkpoint, files)
        return (row, *self.catalog.twins(checkpoint, identity))

    def _digested(self, checkpoint: Checkpoint) -> Checkpoint:
        digested = with_digests(checkpoint, read_digests(self.store, checkpoint, self.threads, self.on_read))
        self.catalog.register_model(digested)
        return digested


def _pairs(experts: Sequence[ModelRow], bases: Sequence[ModelRow]) -> Iterator[tuple[ModelRow, ModelRow]]:
    return ((expert, base) for expert in experts for base in bases if (expert, base) != (experts[0], bases[0]))


def _sampled_files(checkpoint: Checkpoint) -> set[Location]:
    return files_of(sample.tensor for sample in samples(checkpoint))


class DigestTap:
    """Takes the digests of checkpoints' files from what an analysis of `tasks` reads of them.

    Only files of plain tensors, all but an eighth of whose bytes the tasks read, take part. Memory: an eighth of
    `memory_bytes`, at most 256 MiB.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        tasks: Sequence[MergeTask],
        files: Mapping[Location, RangeFile],
        memory_bytes: int,
    ) -> None:
        self._checkpoints = checkpoints
        self._tensors = frozenset(task.name for task in tasks)
        sources = [source for task in tasks for source in (task.base, *task.experts)]
        shown = [source for source in sources if isinstance(source, TensorEntry)]
        wanted = {path: file for path, file in _unknown_files(checkpoints, files) if _passes_by(file, path, shown)}
        self._digests = PassingDigests(wanted, shown, min(WAITING_BYTES, memory_bytes // 8))

    @property
    def tap(self) -> Tap:
        """The tap that shows what the analysis reads."""
        return Tap(self._tensors, self._look)

    def _look(self, task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        sources: list[tuple[Source, int]] = [(task.base, piece.base_offset)]
        sources += [(task.experts[e], at) for e, at in zip(piece.run.present, piece.expert_offsets, strict=True)]
        span = piece.run.span
        for source, at in sources:
            if isinstance(source, TensorEntry):
                size = source.dtype.itemsize
                self._digests.show(source, span.start * size, buffer[at : at + span.n_elements * size])

    def finish(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints with the digests of their files."""
        digests = self._digests.finish()
        return tuple(_with_paths(checkpoint, digests) for checkpoint in self._checkpoints)


def _unknown_files(
    checkpoints: Sequence[Checkpoint], files: Mapping[Location, RangeFile]
) -> Iterator[tuple[Location, RangeFile]]:
    for checkpoint in checkpoints:
        for file in checkpoint.files:
            path = checkpoint.root / file.name
            if file.sha256 is None and path in files:
                yield path, files[path]


def _passes_by(file: RangeFile, path: Location, shown: Sequence[TensorEntry]) -> bool:
    read = {(entry.offset, entry.nbytes) for entry in shown if entry.file == path}
    return sum(nbytes for _, nbytes in read) >= file.size_bytes * (1 - MOST_READ_AGAIN_FRACTION)


def _with_paths(checkpoint: Checkpoint, digests: Mapping[Location, str]) -> Checkpoint:
    path_of = {file.name: checkpoint.root / file.name for file in checkpoint.files}
    return with_digests(checkpoint, {name: digests[path] for name, path in path_of.items() if path in digests})


def complete_digests(
    catalog: Catalog, store: Store, checkpoints: Sequence[Checkpoint], threads: int, limit_bytes: int
) -> None:
    """Record the digests of checkpoints; those with at most `limit_bytes` in files without one are read for it."""
    for checkpoint in checkpoints:
        undigested_sizes = [file.size_bytes for file in checkpoint.files if file.sha256 is None]
        if undigested_sizes and sum(undigested_sizes) <= limit_bytes:
            checkpoint = with_digests(checkpoint, read_digests(store, checkpoint, threads))
            limit_bytes -= sum(undigested_sizes)
        catalog.register_model(checkpoint)
