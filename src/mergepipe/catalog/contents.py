"""Rows of contents, which statistics belong to wherever they lie, and of the digests of files at their places."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mergepipe.catalog.rows import ModelRow


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 of the bytes that a file had at a location (links resolved) in a version."""

    location: str
    version: str
    size_bytes: int
    sha256: str


def content_of(connection: sqlite3.Connection, model: ModelRow) -> int:
    """Return the key of a model's content: that of its digest where it is known, else of the model alone.

    Equal locations and versions mean equal bytes: so a content is found again by the id of the model that first had it.
    """
    row = None
    if model.content_digest is not None:
        row = connection.execute("SELECT pk FROM contents WHERE digest = ?", (model.content_digest,)).fetchone()
    if row is None:
        row = connection.execute(
            "SELECT pk FROM contents WHERE id = ? AND (digest IS NULL OR ? IS NULL)", (model.id, model.content_digest)
        ).fetchone()
    if row is None:
        return add_content(connection, model)
    connection.execute(
        "UPDATE contents SET digest = coalesce(digest, ?), content_id = coalesce(content_id, ?) WHERE pk = ?",
        (model.content_digest, model.content_id, row[0]),
    )
    return int(row[0])


def add_content(connection: sqlite3.Connection, model: ModelRow) -> int:
    """Insert a content of a model alone; return its key."""
    cursor = connection.execute(
        "INSERT INTO contents (id, digest, content_id) VALUES (?, ?, ?)",
        (_free_id(connection, model.id), model.content_digest, model.content_id),
    )
    return int(cursor.lastrowid or 0)


def _free_id(connection: sqlite3.Connection, wanted: str) -> str:
    """Return the wanted id, with a number behind it while another content has it."""
    used_ids = {str(row[0]) for row in connection.execute("SELECT id FROM contents WHERE id LIKE ? || '%'", (wanted,))}
    numbered = (f"{wanted}.{number}" for number in range(len(used_ids)))
    return (
        wanted if wanted not in used_ids else next(identifier for identifier in numbered if identifier not in used_ids)
    )


def content_with_digest(connection: sqlite3.Connection, digest: str) -> int | None:
    """Return the key of the content with this digest, None if there is none."""
    row = connection.execute("SELECT pk FROM contents WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else int(row[0])


def drop_unused(connection: sqlite3.Connection, keys: Iterable[int]) -> None:
    """Remove those contents that no model has any more, with their statistics and unused tensor names."""
    connection.executemany(
        "DELETE FROM contents WHERE pk = ? AND pk NOT IN (SELECT content FROM models)", [(key,) for key in keys]
    )
    connection.execute("DELETE FROM tensor_names WHERE pk NOT IN (SELECT tensor FROM tensor_statistics)")


# --- digests of files ---


def record_digests(connection: sqlite3.Connection, digests: Iterable[FileDigest]) -> None:
    """Record the digests of files; what was known of the same version of a location is replaced."""
    connection.executemany(
        "INSERT OR REPLACE INTO file_digests (location, version, size_bytes, sha256) VALUES (?, ?, ?, ?)",
        [(digest.location, digest.version, digest.size_bytes, digest.sha256) for digest in digests],
    )


def forget_digests(connection: sqlite3.Connection, digests: Iterable[FileDigest]) -> None:
    """Forget the digests of files."""
    connection.executemany(
        "DELETE FROM file_digests WHERE location = ? AND version = ?",
        [(digest.location, digest.version) for digest in digests],
    )


def known_sha256(connection: sqlite3.Connection, location: str, version: str, size_bytes: int) -> str | None:
    """Return the SHA-256 of a version of a file, None if nobody has taken it."""
    row = connection.execute(
        "SELECT sha256 FROM file_digests WHERE location = ? AND version = ? AND size_bytes = ?",
        (location, version, size_bytes),
    ).fetchone()
    return None if row is None else str(row[0])


def all_digests(connection: sqlite3.Connection) -> Iterator[FileDigest]:
    """Yield the digest of every file."""
    for location, version, size, sha256 in connection.execute("SELECT * FROM file_digests").fetchall():
        yield FileDigest(str(location), str(version), int(size), str(sha256))
