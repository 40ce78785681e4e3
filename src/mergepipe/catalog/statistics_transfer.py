"""Take statistics of pairs out of the catalog for another machine, and take in those of another one."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from mergepipe.catalog import models, tensor_statistics
from mergepipe.catalog.contents import content_with_digest
from mergepipe.catalog.rows import Evidence, ModelKind, ModelRow
from mergepipe.catalog.statistics_file import PortableContent, PortablePair, StatisticsFile, pack_row
from mergepipe.operators.statistics import TensorStatistics
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
    rows = tensor_statistics.rows_of(connection, expert, base, Evidence)
    return PortablePair(
        expert.content_digest,
        base.content_digest,
        tuple(
            pack_row(row.tensor, row.evidence, row.unpacked(), expert.content_digest, base.content_digest)
            for row in rows
        ),
    )


def take_in(connection: sqlite3.Connection, file: StatisticsFile, where: object) -> int:
    """Record contents and statistics of a file; return how many rows were new. Rows on record stay, but for probes.

    Raises:
        CorruptError, UnsupportedError: as `PortablePair.statistics`.
    """
    rows = {content.digest: _registered(connection, content) for content in file.contents}
    written = 0
    for pair in file.pairs:
        of_evidence: dict[Evidence, dict[str, TensorStatistics]] = {evidence: {} for evidence in Evidence}
        for tensor, (evidence, statistics) in pair.statistics(where).items():
            of_evidence[evidence][tensor] = statistics
        written += _add(connection, rows[pair.expert], rows[pair.base], of_evidence)
    return written


def _add(
    connection: sqlite3.Connection,
    expert: ModelRow,
    base: ModelRow,
    of_evidence: Mapping[Evidence, Mapping[str, TensorStatistics]],
) -> int:
    on_record = tensor_statistics.evidence_of(connection, expert, base)
    written = 0
    for evidence, statistics in of_evidence.items():
        better = {
            tensor: of_tensor
            for tensor, of_tensor in statistics.items()
            if on_record.get(tensor) not in (evidence, Evidence.EXACT)
        }
        written += tensor_statistics.put(connection, expert, base, better, evidence) if better else 0
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
