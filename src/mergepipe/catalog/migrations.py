"""The catalog's schema as numbered migrations, and the upgrade of a file from any version to the newest."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from mergepipe.core.values import dataclass

APPLICATION_ID = 0x4D504331  # "MPC1"


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration. `number` is the `user_version` it leads to; a published one never changes."""

    number: int
    statements: tuple[str, ...]


_SCHEMA_1 = (
    """
    CREATE TABLE models (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        path TEXT NOT NULL,
        kind TEXT NOT NULL,
        content_id TEXT,
        n_tensors INTEGER NOT NULL,
        n_parameters INTEGER NOT NULL,
        tensor_bytes INTEGER NOT NULL,
        dtypes TEXT NOT NULL,
        files TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE pairs (
        pk INTEGER PRIMARY KEY,
        expert INTEGER NOT NULL REFERENCES models ON DELETE CASCADE,
        base INTEGER NOT NULL REFERENCES models ON DELETE CASCADE,
        UNIQUE (expert, base)
    )
    """,
    "CREATE INDEX pairs_by_base ON pairs (base)",
    "CREATE TABLE tensor_names (pk INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """
    CREATE TABLE tensor_statistics (
        pk INTEGER PRIMARY KEY,
        pair INTEGER NOT NULL REFERENCES pairs ON DELETE CASCADE,
        tensor INTEGER NOT NULL REFERENCES tensor_names,
        is_probe INTEGER NOT NULL CHECK (is_probe IN (0, 1)),
        packed BLOB NOT NULL,
        UNIQUE (pair, tensor)
    )
    """,
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
)

# Version 1 identified models by the modification times of their files, which is not reliable: start anew.
_SCHEMA_2 = ("DELETE FROM models", "DELETE FROM tensor_names")

# Statistics belong to contents, which any number of models may have: each model of version 2 has its own.
_SCHEMA_3 = (
    "CREATE TEMP TABLE old_models AS SELECT * FROM models",
    "CREATE TEMP TABLE old_pairs AS SELECT * FROM pairs",
    "CREATE TEMP TABLE old_statistics AS SELECT * FROM tensor_statistics",
    "DROP TABLE tensor_statistics",
    "DROP TABLE pairs",
    "DROP TABLE models",
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
        is_probe INTEGER NOT NULL CHECK (is_probe IN (0, 1)),
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
    "INSERT INTO contents (pk, id, content_id) SELECT pk, id, content_id FROM old_models",
    """
    INSERT INTO models (pk, id, content, path, kind, n_tensors, n_parameters, tensor_bytes, dtypes, files)
    SELECT pk, id, pk, path, kind, n_tensors, n_parameters, tensor_bytes, dtypes, files FROM old_models
    """,
    "INSERT INTO pairs (pk, expert, base) SELECT pk, expert, base FROM old_pairs",
    """
    INSERT INTO tensor_statistics (pk, pair, tensor, is_probe, packed)
    SELECT pk, pair, tensor, is_probe, packed FROM old_statistics
    """,
    "DROP TABLE old_models",
    "DROP TABLE old_pairs",
    "DROP TABLE old_statistics",
)

MIGRATIONS = (Migration(1, _SCHEMA_1), Migration(2, _SCHEMA_2), Migration(3, _SCHEMA_3))
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


def expected_schema(migrations: tuple[Migration, ...] = MIGRATIONS) -> dict[str, str]:
    """Return what `schema` gives after all migrations."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection, migrations)
        return schema(connection)


def migrate(connection: sqlite3.Connection, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Apply the missing migrations in one transaction: after a failure or a crash the file is unchanged.

    Safe when several processes do it at once. The connection must be in autocommit mode.
    """
    if schema_version(connection) >= migrations[-1].number:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        present = schema_version(connection)  # another process may have been faster
        for migration in migrations:
            if migration.number > present:
                for statement in migration.statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {migration.number}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
