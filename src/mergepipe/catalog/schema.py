"""The catalog's schema, of one version: a file of an older one is set aside by a rebuild, and analyzed again."""

from __future__ import annotations

import sqlite3
from contextlib import closing

APPLICATION_ID = 0x4D504331  # "MPC1"
SCHEMA_VERSION = 5
_STATEMENTS = (
    "CREATE TABLE tensor_names (pk INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """
    CREATE TABLE snapshots (
        pk INTEGER PRIMARY KEY,
        path TEXT NOT NULL UNIQUE,
        sid TEXT NOT NULL,
        operator TEXT NOT NULL,
        created TEXT NOT NULL,
        plan_digest TEXT,
        manifest_digest TEXT NOT NULL,
        base_bytes INTEGER NOT NULL,
        expert_bytes INTEGER NOT NULL,
        analysis_bytes INTEGER NOT NULL,
        metadata_bytes INTEGER NOT NULL,
        output_bytes INTEGER NOT NULL,
        coverage TEXT
    )
    """,
    "CREATE INDEX snapshots_by_sid ON snapshots (sid)",
    """
    CREATE TABLE snapshot_inputs (
        snapshot INTEGER NOT NULL REFERENCES snapshots ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role TEXT NOT NULL,
        model TEXT NOT NULL,
        path TEXT NOT NULL,
        content_id TEXT,
        read_bytes INTEGER NOT NULL,
        sid TEXT,
        PRIMARY KEY (snapshot, position)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE contents (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        digest TEXT UNIQUE,
        content_id TEXT
    )
    """,
    """
    CREATE TABLE models (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        content INTEGER NOT NULL REFERENCES contents,
        path TEXT NOT NULL,
        kind TEXT NOT NULL,
        n_tensors INTEGER NOT NULL,
        n_parameters INTEGER NOT NULL,
        tensor_bytes INTEGER NOT NULL,
        dtypes TEXT NOT NULL,
        files TEXT NOT NULL
    )
    """,
    "CREATE INDEX models_by_content ON models (content)",
    """
    CREATE TABLE pairs (
        pk INTEGER PRIMARY KEY,
        expert INTEGER NOT NULL REFERENCES contents ON DELETE CASCADE,
        base INTEGER NOT NULL REFERENCES contents ON DELETE CASCADE,
        UNIQUE (expert, base)
    )
    """,
    "CREATE INDEX pairs_by_base ON pairs (base)",
    """
    CREATE TABLE tensor_statistics (
        pk INTEGER PRIMARY KEY,
        pair INTEGER NOT NULL REFERENCES pairs ON DELETE CASCADE,
        tensor INTEGER NOT NULL REFERENCES tensor_names,
        packed BLOB NOT NULL,
        UNIQUE (pair, tensor)
    )
    """,
    """
    CREATE TABLE file_digests (
        location TEXT NOT NULL,
        version TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        sha256 TEXT NOT NULL,
        PRIMARY KEY (location, version, size_bytes)
    ) WITHOUT ROWID
    """,
)
TABLES = (
    "contents", "file_digests", "models", "pairs", "snapshot_inputs", "snapshots", "tensor_names", "tensor_statistics",
)  # fmt: skip


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the `user_version` of the file: 0 for an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def schema(connection: sqlite3.Connection) -> dict[str, str]:
    """Return tables and indexes by name, each with the statement that created it."""
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {str(name): str(sql) for name, sql in rows}


def expected_schema() -> dict[str, str]:
    """Return what `schema` gives of a new file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        create_schema(connection)
        return schema(connection)


def create_schema(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty file in one transaction: after a failure or a crash the file is unchanged.

    Safe when several processes do it at once. The connection must be in autocommit mode.
    """
    if schema_version(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not schema_version(connection):  # else another process was faster
            for statement in _STATEMENTS:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
