"""The catalog's SQLite file: checked before use, accessed in short transactions, with typed errors.

Every error about the catalog itself has a code that starts with `catalog.` (see `is_catalog_error`), so that a merge
can continue without the index but not after errors of its own inputs and outputs.
"""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from mergepipe.storage.ranges import regular_status

CATALOG_NAME = "catalog.sqlite3"
APPLICATION_ID = 0x4D504331  # "MPC1"
SCHEMA_VERSION = 6
LOCK_TIMEOUT_SECONDS = 10.0
FILE_SUFFIXES = ("", "-wal", "-shm", "-journal")
PAGE_BYTES = 1024  # most rows are a few hundred bytes: 4096 costs a fifth more space and reads only a quarter faster
CHECKPOINT_BYTES = 4 << 20
REBUILD_HINT = "run `mergepipe catalog rebuild`"
_RETRY_SECONDS = 0.02
_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CORRUPT_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PERMISSION_CODES = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH)
_IO_CODES = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS)

_STATEMENTS = (
    """
    CREATE TABLE snapshots (
        path TEXT NOT NULL UNIQUE,
        sid TEXT NOT NULL,
        created TEXT NOT NULL,
        manifest_digest TEXT NOT NULL,
        facts TEXT NOT NULL
    )
    """,
    "CREATE INDEX snapshots_by_sid ON snapshots (sid)",
    """
    CREATE TABLE file_digests (
        location TEXT NOT NULL PRIMARY KEY,
        version TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        sha256 TEXT NOT NULL
    ) WITHOUT ROWID
    """,
)


def is_catalog_error(error: MergePipeError) -> bool:
    """Whether only the catalog is unusable, so that work that needs no statistics can continue without it."""
    return all(problem.code.startswith("catalog.") for problem in error.problems)


def open_database(home: Path, path: Path, timeout_seconds: float) -> sqlite3.Connection:
    """Open the catalog's file under `home`, created where there is none, in autocommit mode for any thread.

    Commits survive a crash of the process immediately, and a power failure from the next WAL checkpoint on; the file
    stays sound in both cases. That is enough for an index that can be rebuilt.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise catalog_os_error(error, home) from error
    check_regular_files(path)
    with typed_errors(path):
        connection = sqlite3.connect(path, timeout=timeout_seconds, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, time.monotonic() + timeout_seconds)
        except BaseException:
            connection.close()
            raise
    return connection


def check_regular_files(path: Path) -> None:
    """Refuse a catalog file, or one of SQLite's files next to it, that is a FIFO or a device: SQLite would block."""
    for suffix in FILE_SUFFIXES:
        file = path.with_name(path.name + suffix)
        try:
            regular_status(file)
        except NotFoundError:
            continue
        except StorageError as error:
            if error.code == "storage.not-a-file":
                hint = "remove it, or choose another home with --home"
                raise StorageError.of("catalog.not-a-file", file, error.problems[0].message, hint) from None


def _prepare(connection: sqlite3.Connection, path: Path, deadline_seconds: float) -> None:
    while True:  # switching to WAL and recovering a WAL do not wait for locks
        try:
            if _check_ours(connection, path):
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")  # has no effect on file systems without shared memory
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}")
            connection.execute("PRAGMA synchronous = NORMAL")
            create_schema(connection)
            break
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in _BUSY_CODES or time.monotonic() >= deadline_seconds:
                raise
            time.sleep(_RETRY_SECONDS)


def _check_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Refuse a foreign database before writing to it; return whether the file is still empty."""
    connection.execute("BEGIN")  # consistent values, while another process may be creating the file
    try:
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        version = schema_version(connection)
        has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    except sqlite3.OperationalError as error:
        if _primary_code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise CorruptError.of("catalog.damaged", path, str(error), REBUILD_HINT) from error  # a corrupt header
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if application != APPLICATION_ID and (application or version or has_tables):
        raise MismatchError.of(
            "catalog.foreign", path, "is a database of another application", "choose another home with --home"
        )
    if version > SCHEMA_VERSION:
        raise UnsupportedError.of(
            "catalog.newer",
            path,
            f"its schema has version {version}; this program reads version {SCHEMA_VERSION}",
            "update mergepipe, or use --home",
        )
    if 0 < version < SCHEMA_VERSION:
        raise UnsupportedError.of(
            "catalog.older",
            path,
            f"its schema has version {version}; this program reads version {SCHEMA_VERSION}",
            f"{REBUILD_HINT}, which sets it aside, and analyze again",
        )
    if version < 1 and has_tables:
        raise CorruptError.of("catalog.damaged", path, f"it has tables but schema version {version}", REBUILD_HINT)
    return not has_tables


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Convert SQLite's errors about the file to typed ones; errors in the SQL are not converted."""
    try:
        yield
    except sqlite3.Error as error:
        typed = _typed(error, path)
        if typed is None:
            raise
        raise typed from error
    except UnicodeDecodeError as error:  # the message of SQLite's error is not UTF-8
        raise CorruptError.of("catalog.damaged", path, str(error), REBUILD_HINT) from error


def _typed(error: sqlite3.Error, path: Path) -> MergePipeError | None:
    code, reason = _primary_code(error), str(error)
    if code in _BUSY_CODES:
        return ConflictError.of(
            "catalog.locked", path, f"another process has locked it ({reason})", "wait for it to finish and run again"
        )
    is_no_text = code == 0 and isinstance(error, sqlite3.OperationalError)  # no UTF-8
    if code in _CORRUPT_CODES or is_no_text or "no such table" in reason or "no such column" in reason:
        return CorruptError.of("catalog.damaged", path, reason, REBUILD_HINT)
    if code in _PERMISSION_CODES:
        return StorageError.of("catalog.permission", path, reason, "check the permissions, or use --home")
    if code == sqlite3.SQLITE_FULL:
        return StorageError.of("catalog.no-space", path, reason, "free some space and run again")
    if code in _IO_CODES:
        return StorageError.of("catalog.io", path, reason, "check the disk, then run again")
    return None


def catalog_os_error(error: OSError, home: Path) -> MergePipeError:
    """Convert an `OSError` about the home or a file in it to the catalog's error of the same meaning."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError.of("catalog.no-space", home, reason, "free some space and run again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return StorageError.of("catalog.permission", home, reason, "check the path, or use --home")
    return StorageError.of("catalog.io", home, reason, "check the disk, then run again")


# --- the schema, of one version ---


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the `user_version` of the file: 0 for an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


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


def stored_text(text: str, where: object) -> str:
    """Return a text that SQLite can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        if "\0" not in text:
            return text
    raise UnsupportedError.of(
        "catalog.path-encoding", ascii(str(where)), "paths that are not UTF-8 are not recorded", "rename it"
    )


# --- a file that is not used any more ---


_SIDE_FILES = ("", "-wal", "-shm")


def set_aside(path: Path) -> Path:
    """Rename the file and its WAL to the first free `.corrupt-N`."""
    _refuse_if_in_use(path)
    number = 1
    while path.with_name(f"{path.name}.corrupt-{number}").exists():
        number += 1
    aside = path.with_name(f"{path.name}.corrupt-{number}")
    try:
        for suffix in _SIDE_FILES:
            if path.with_name(path.name + suffix).exists():
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise catalog_os_error(error, path) from error
    return aside


def _refuse_if_in_use(path: Path) -> None:
    """Raise `catalog.locked` if another process is writing; a damaged file is accepted."""
    check_regular_files(path)
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        try:
            with typed_errors(path):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except CorruptError:
            return
