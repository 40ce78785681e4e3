"""Take statistics of pairs out of the catalog for another machine, and take in those of another one."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from mergepipe.catalog import models, tensor_statistics
from mergepipe.catalog.contents import content_with_digest
from mergepipe.catalog.rows import ModelKind, ModelRow
from mergepipe.catalog.statistics_file import PortableContent, PortablePair, StatisticsFile, pack_row
from mergepipe.storage.location import Location

CONTENT_SCHEME: Final = "content"
"""The scheme of the place of a content that was taken in from a file, `content://DIGEST`: it lies nowhere else."""


def is_transferred(model: ModelRow) -> bool:
    """Whether a row describes a content from a statistics file, not a model at a location."""
    return model.path.scheme == CONTENT_SCHEME


def portable_pair(connection: sqlite3.Connection, expert: ModelRow, base: ModelRow) -> PortablePair:
    """Pack the sound rows of a pair of known digests.

    Raises:
        CorruptError: `catalog.corrupt-statistics`, naming the tensor.
        ValueError: a digest is unknown.
    """
    if expert.content_digest is None or base.content_digest is None:
        raise ValueError(f"a digest of {expert.path} or {base.path} is unknown")
    rows = tensor_statistics.rows_of(connection, expert, base)
    return PortablePair(
        expert.content_digest,
        base.content_digest,
        tuple(pack_row(row.tensor, row.unpacked(), expert.content_digest, base.content_digest) for row in rows),
    )


def take_in(connection: sqlite3.Connection, file: StatisticsFile, where: object) -> int:
    """Record contents and statistics of a file; return how many rows were new. Rows on record stay.

    Raises:
        CorruptError, UnsupportedError: as `PortablePair.statistics`.
    """
    rows = {content.digest: _registered(connection, content) for content in file.contents}
    written = 0
    for pair in file.pairs:
        expert, base = rows[pair.expert], rows[pair.base]
        on_record = tensor_statistics.tensors_of(connection, expert, base)
        new = {name: one for name, one in pair.statistics(where).items() if name not in on_record}
        written += tensor_statistics.put(connection, expert, base, new) if new else 0
    return written


def _registered(connection: sqlite3.Connection, content: PortableContent) -> ModelRow:
    """Register a content at a place of its own; what is known of equal contents here counts, not what the file says."""
    row = _row_of(content)
    present = models.find(connection, row.id)
    if present is not None:
        return present
    if content_with_digest(connection, content.digest) is not None:
        row = replace(row, content_id=None)
    return models.register(connection, row)


def _row_of(content: PortableContent) -> ModelRow:
    place = Location(CONTENT_SCHEME, content.digest, PurePosixPath())
    return ModelRow(
        id=models.row_id(str(place), content.fingerprints),
        path=place,
        kind=ModelKind.DIRECTORY,
        content_id=content.content_id,
        n_tensors=0,
        n_parameters=0,
        tensor_bytes=sum(file.size_bytes for file in content.files),
        dtypes=(),
        files=content.fingerprints,
        content_digest=content.digest,
    )
