"""Copy whole models and statistics with valid checksums from a damaged catalog."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path

from mergepipe.catalog import models
from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import catalog_os_error
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rows import Evidence, ModelRow
from mergepipe.catalog.statistics_transfer import is_transferred
from mergepipe.catalog.tensor_statistics import PackedRow
from mergepipe.core.values import dataclass
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics

_BATCH = 256


@dataclass(slots=True)
class Salvage:
    """Sound index rows of the damaged catalog; contents and names by their primary keys.

    Of a content its id and one of its models are used; what it is known by elsewhere is not, for no checksum proves it.
    Where it has no other model, that of an import tells its digest, which is part of the row's id.
    """

    contents: dict[int, tuple[str, ModelRow]] = field(default_factory=dict)
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    snapshot_paths: list[Path] = field(default_factory=list)

    def add(self, key: int, content: str, model: ModelRow) -> None:
        """Note a model of a content."""
        if is_transferred(model):
            self.contents.setdefault(key, (content, replace(model, content_digest=model.path.root)))
        elif key not in self.contents or is_transferred(self.contents[key][1]):
            self.contents[key] = (content, model)


def salvage(damaged: Path, catalog: Catalog) -> tuple[int, tuple[Path, ...]]:
    """Copy the sound rows of `damaged` to `catalog`; return the number of tensors and the snapshot paths read.

    Works on a copy: the damaged file is not modified.

    Raises:
        StorageError: `catalog.no-space`, `catalog.permission`, `catalog.io`.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".salvage-", dir=damaged.parent) as folder:
            copy = _copy_into(Path(folder), damaged)
            with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                sound_rows = _indexes(connection)
                saved = sum(_store(catalog, sound_rows, batch) for batch in _batches(connection))
    except OSError as error:
        raise catalog_os_error(error, damaged) from error
    return saved, tuple(sound_rows.snapshot_paths)


def _copy_into(folder: Path, damaged: Path) -> Path:
    copy = folder / CATALOG_NAME
    for suffix in ("", "-wal"):
        source = damaged.with_name(damaged.name + suffix)
        if source.exists():
            shutil.copyfile(source, copy.with_name(copy.name + suffix))
    return copy


def _indexes(connection: sqlite3.Connection) -> Salvage:
    sound_rows = Salvage()
    columns = "id, content, path, kind, n_tensors, n_parameters, tensor_bytes, dtypes, files"
    ids = {_key(pk): str(content) for pk, content in _readable(connection, "contents", "id")}
    for _, model, content, path, kind, *rest in _readable(connection, "models", columns):
        with contextlib.suppress(CorruptError):
            row = models.from_columns((model, path, kind, None, *rest, None))
            if models.has_its_id(row) and _key(content) in ids:
                sound_rows.add(_key(content), ids[_key(content)], row)
    for pk, expert, base in _readable(connection, "pairs", "expert, base"):
        sound_rows.pairs[_key(pk)] = (_key(expert), _key(base))
    for pk, name in _readable(connection, "tensor_names", "name"):
        sound_rows.names[_key(pk)] = str(name)
    paths = (str(path) for _, path in _readable(connection, "snapshots", "path"))
    sound_rows.snapshot_paths = [Path(path) for path in paths if path.startswith("/") and "\0" not in path]
    return sound_rows


def _readable(connection: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[object, ...]]:
    """Yield the rows before the first damage, then those after the last."""
    seen: set[object] = set()
    for order in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            for row in connection.execute(f"SELECT pk, {columns} FROM {table} ORDER BY pk {order}"):
                if row[0] in seen:
                    break
                seen.add(row[0])
                yield row


def _key(value: object) -> int:
    """A primary key; 0, which no row has, for a value of another type in a damaged row."""
    return value if isinstance(value, int) else 0


def _batches(connection: sqlite3.Connection) -> Iterator[list[tuple[object, ...]]]:
    batch: list[tuple[object, ...]] = []
    for row in _readable(connection, "tensor_statistics", "pair, tensor, is_probe, packed"):
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _store(catalog: Catalog, sound_rows: Salvage, batch: list[tuple[object, ...]]) -> int:
    statistics_by_pair: defaultdict[tuple[int, int, Evidence], dict[str, TensorStatistics]] = defaultdict(dict)
    for _, pair, tensor, is_probe, packed in batch:
        expert, base = sound_rows.pairs.get(_key(pair), (0, 0))
        if expert not in sound_rows.contents or base not in sound_rows.contents or not isinstance(packed, bytes):
            continue
        evidence = Evidence.PROBE if is_probe else Evidence.EXACT
        name = sound_rows.names.get(_key(tensor), "")
        row = PackedRow(0, sound_rows.contents[expert][0], sound_rows.contents[base][0], name, evidence, packed)
        with contextlib.suppress(CorruptError, UnsupportedError):
            statistics_by_pair[expert, base, evidence][name] = row.unpacked()
    for (expert, base, evidence), statistics in statistics_by_pair.items():
        expert_row, base_row = (catalog.restore(sound_rows.contents[content][1]) for content in (expert, base))
        catalog.put_many(expert_row, base_row, statistics, evidence=evidence)
    return sum(len(statistics) for statistics in statistics_by_pair.values())
