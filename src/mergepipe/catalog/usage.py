"""Count the rows and bytes of the catalog, by table and in total."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mergepipe.catalog.rows import CatalogStats, TableUsage
from mergepipe.catalog.schema import TABLES

_SIDE_FILES = ("", "-wal")


def catalog_stats(connection: sqlite3.Connection, path: Path) -> CatalogStats:
    """Count rows and bytes; `file_bytes` includes the WAL."""
    described, pairs = connection.execute(
        """
        SELECT coalesce(sum((SELECT max(m.tensor_bytes) FROM models AS m WHERE m.content = p.expert)), 0), count(*)
        FROM pairs AS p
        """
    ).fetchone()
    return CatalogStats(
        path=path,
        file_bytes=sum(_size_bytes(path.with_name(path.name + suffix)) for suffix in _SIDE_FILES),
        tables=tuple(_table_usage(connection, table) for table in TABLES),
        models=_count(connection, "models"),
        pairs=pairs,
        described_bytes=described,
        analysed_tensors=_count(connection, "tensor_statistics"),
        snapshots=_count(connection, "snapshots"),
    )


def _count(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _table_usage(connection: sqlite3.Connection, table: str) -> TableUsage:
    columns = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
    widths = " + ".join(f"coalesce(length(CAST({column} AS BLOB)), 0)" for column in columns)
    rows, payload = connection.execute(f"SELECT count(*), coalesce(sum({widths}), 0) FROM {table}").fetchone()
    return TableUsage(table, rows, payload)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # there is no WAL at present
        return 0
