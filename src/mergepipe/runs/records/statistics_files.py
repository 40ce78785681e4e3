"""Statistics in files: exported, imported, and those beside models, which count for these models alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.statistics_file import (
    STATISTICS_NAME,
    PortableContent,
    PortablePair,
    StatisticsFile,
    parse_statistics,
    portable_content,
    write_statistics,
)
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.file_digests import content_digest, read_digests, with_digests
from mergepipe.errors import MergePipeError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.reports import ExportedStatistics, ImportedStatistics
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import STATISTICS_BYTES
from mergepipe.storage.location import Location


def read_statistics(store: Store, location: Location) -> StatisticsFile:
    """Read a file of statistics, charged as metadata.

    Raises:
        NotFoundError: there is none.
        CorruptError, UnsupportedError: as `parse_statistics`; `storage.too-large`.
        StorageError: it cannot be read.
    """
    return parse_statistics(store.read_small(location, STATISTICS_BYTES), location)


def import_statistics(catalog: Catalog, store: Store, locations: Sequence[Location]) -> ImportedStatistics:
    """Record the statistics of files for whichever models have these contents. All are read before.

    Raises:
        MergePipeError: as `read_statistics`, nothing was recorded; as `Catalog.take_in`, nothing of that file.
    """
    pinned = tuple(store.pin(location.absolute()) for location in locations)
    files = [read_statistics(store, location) for location in pinned]
    n_new = sum(catalog.take_in(file, location) for file, location in zip(files, pinned, strict=True))
    return ImportedStatistics(pinned, sum(len(file.pairs) for file in files), sum(file.n_rows for file in files), n_new)


def export_statistics(
    catalog: Catalog, store: Store, base: Checkpoint, experts: Sequence[Checkpoint], path: Path, threads: int
) -> ExportedStatistics:
    """Write all that is known of experts against their base to a file; files of unknown digest are read for it.

    Raises:
        MergePipeError: as `read_digests`, `Catalog.portable_pair` and `write_statistics`.
    """
    contents, rows = [], []
    for checkpoint in (base, *experts):
        checkpoint = catalog.with_known_digests(checkpoint)
        if content_digest(checkpoint) is None:
            checkpoint = with_digests(checkpoint, read_digests(store, checkpoint, threads))
        row = catalog.register_model(checkpoint)
        content = portable_content(checkpoint, row.content_id)
        if content is None:
            raise ValueError(f"{checkpoint.path} has no files to take digests of")
        contents.append(content)
        rows.append(row)
    pairs = {row.content_digest: catalog.portable_pair(row, rows[0]) for row in rows[1:]}
    file = StatisticsFile(tuple({content.digest: content for content in contents}.values()), tuple(pairs.values()))
    return ExportedStatistics(path, len(file.pairs), file.n_rows, write_statistics(file, path))


class StatisticsBeside:
    """Statistics in the `mergepipe.stats` files beside experts; each file is read once, and only where it is needed.

    Only rows of the content that the model beside the file has, against the content of its base, count: of other
    models such a file proves nothing. Digests that are not known are not taken. What is wrong with a file becomes one
    of `notices`, and the file is not used. Nothing of it is recorded.
    """

    def __init__(self, store: Store, notices: list[str]) -> None:
        self._store = store
        self._notices = notices
        self._files: dict[Location, StatisticsFile | None] = {}

    def statistics(self, expert: Checkpoint, base: Checkpoint) -> Mapping[str, TensorStatistics]:
        """Return the statistics of an expert by tensor, empty where no file binds to both contents."""
        pair = self._pair(expert, base)
        try:
            return {} if pair is None else pair.statistics(self._place(expert))
        except MergePipeError as error:
            self._refuse(self._place(expert), error)
            return {}

    def content_id(self, checkpoint: Checkpoint) -> str | None:
        """Return the sampled content id of a model, None where no file beside it tells it."""
        content = self._content(checkpoint)
        return None if content is None else content.content_id

    def _pair(self, expert: Checkpoint, base: Checkpoint) -> PortablePair | None:
        base_digest = content_digest(base)
        content = None if base_digest is None else self._content(expert)
        file = self._files.get(self._place(expert))
        if base_digest is None or content is None or file is None:
            return None
        return file.pair(content.digest, base_digest)

    def _content(self, checkpoint: Checkpoint) -> PortableContent | None:
        digest = content_digest(checkpoint)
        file = None if digest is None else self._file(self._place(checkpoint))
        return None if digest is None or file is None else file.content(digest)

    def _file(self, place: Location) -> StatisticsFile | None:
        if place not in self._files:
            self._files[place] = None
            try:
                if is_file(self._store, place):
                    self._files[place] = read_statistics(self._store, place)
            except MergePipeError as error:
                self._refuse(place, error)
        return self._files[place]

    def _refuse(self, place: Location, error: MergePipeError) -> None:
        self._files[place] = None
        self._notices.append(f"statistics beside a model are not used: {error}")

    @staticmethod
    def _place(checkpoint: Checkpoint) -> Location:
        return checkpoint.root / STATISTICS_NAME
