"""What can be saved from a damaged catalog: whole models and the statistics whose checksums hold."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mergepipe.catalog import models
from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import os_trouble
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rows import Evidence, ModelRow
from mergepipe.catalog.tensor_statistics import PackedRow
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics

_BATCH = 256


@dataclass(slots=True)
class Salvage:
    """What was found, models and names by their primary keys."""

    models: dict[int, ModelRow] = field(default_factory=dict)
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    snapshot_paths: list[Path] = field(default_factory=list)


def salvage(damaged: Path, catalog: Catalog) -> tuple[int, tuple[Path, ...]]:
    """Copy what is sound in `damaged` into `catalog`; return the tensors saved and the snapshot paths read.

    Works on a copy: the damaged file stays as it is.

    Raises:
        StorageError: `catalog.no-space`, `catalog.permission`, `catalog.io`.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".salvage-", dir=damaged.parent) as place:
            copy = _copy_into(Path(place), damaged)
            with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                found = _indexes(connection)
                saved = sum(_store(catalog, found, batch) for batch in _batches(connection))
    except OSError as error:
        raise os_trouble(error, damaged) from error
    return saved, tuple(found.snapshot_paths)


def _copy_into(place: Path, damaged: Path) -> Path:
    copy = place / CATALOG_NAME
    for suffix in ("", "-wal"):
        source = damaged.with_name(damaged.name + suffix)
        if source.exists():
            shutil.copyfile(source, copy.with_name(copy.name + suffix))
    return copy


def _indexes(connection: sqlite3.Connection) -> Salvage:
    found = Salvage()
    columns = "id, path, kind, content_id, n_tensors, n_parameters, tensor_bytes, dtypes, files"
    for pk, *values in _readable(connection, "models", columns):
        with contextlib.suppress(CorruptError):
            row = models.from_columns(tuple(values))
            if models.has_its_id(row):
                found.models[_key(pk)] = row
    for pk, expert, base in _readable(connection, "pairs", "expert, base"):
        found.pairs[_key(pk)] = (_key(expert), _key(base))
    for pk, name in _readable(connection, "tensor_names", "name"):
        found.names[_key(pk)] = str(name)
    paths = (str(path) for _, path in _readable(connection, "snapshots", "path"))
    found.snapshot_paths = [Path(path) for path in paths if path.startswith("/") and "\0" not in path]
    return found


def _readable(connection: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[object, ...]]:
    """The rows before the first damage, then those after the last one."""
    seen: set[object] = set()
    for order in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            for row in connection.execute(f"SELECT pk, {columns} FROM {table} ORDER BY pk {order}"):
                if row[0] in seen:
                    break
                seen.add(row[0])
                yield row


def _key(value: object) -> int:
    """A primary key; in a damaged row something else can be in its place, which is no row's key."""
    return value if isinstance(value, int) else 0


def _batches(connection: sqlite3.Connection) -> Iterator[list[tuple[object, ...]]]:
    batch: list[tuple[object, ...]] = []
    for row in _readable(connection, "tensor_statistics", "pair, tensor, is_probe, packed"):
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _store(catalog: Catalog, found: Salvage, batch: list[tuple[object, ...]]) -> int:
    sound: defaultdict[tuple[int, int, Evidence], dict[str, TensorStatistics]] = defaultdict(dict)
    for _, pair, tensor, is_probe, packed in batch:
        expert, base = found.pairs.get(_key(pair), (0, 0))
        if expert not in found.models or base not in found.models or not isinstance(packed, bytes):
            continue
        evidence = Evidence.PROBE if is_probe else Evidence.EXACT
        name = found.names.get(_key(tensor), "")
        row = PackedRow(0, found.models[expert].id, found.models[base].id, name, evidence, packed)
        with contextlib.suppress(CorruptError, UnsupportedError):
            sound[expert, base, evidence][name] = row.unpacked()
    for (expert, base, evidence), statistics in sound.items():
        pair_rows = (catalog.restore(found.models[expert]), catalog.restore(found.models[base]))
        catalog.put_many(*pair_rows, statistics, evidence=evidence)
    return sum(len(statistics) for statistics in sound.values())
