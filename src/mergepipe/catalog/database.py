"""The SQLite file: opened only if it is ours and sound, used in short transactions, its errors made typed ones.

Every error about the catalog itself has a code that starts with `catalog.` (see `is_catalog_trouble`), so that a merge
can tell "there is no index now" from trouble with its own inputs and outputs.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.migrations import (
    APPLICATION_ID,
    MIGRATIONS,
    Migration,
    expected_schema,
    migrate,
    schema,
    schema_version,
)
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from mergepipe.storage.regular import regular_status

LOCK_TIMEOUT_SECONDS = 10.0
SIDE_SUFFIXES = ("", "-wal", "-shm", "-journal")
PAGE_BYTES = 1024  # most rows are a few hundred bytes: 4096 costs a fifth more space and reads only a quarter faster
CHECKPOINT_BYTES = 4 << 20
REBUILD_HINT = "run `mergepipe catalog rebuild`"
_RETRY_SECONDS = 0.02
_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CORRUPT_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PERMISSION_CODES = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH)
_IO_CODES = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS)


def is_catalog_trouble(error: MergePipeError) -> bool:
    """Whether only the catalog is unusable: work that needs no statistics can go on without it."""
    return all(problem.code.startswith("catalog.") for problem in error.problems)


class Database:
    """One connection to the file, shared by the threads of one process.

    Commits survive a crash of the process at once and a power failure from the next WAL checkpoint on; the file stays
    sound in both cases. That suits an index of which the truth is elsewhere.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the file."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed if the block ends well, else rolled back."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise RuntimeError("a catalog must be opened again after a fork")
        connection = self._connection
        with self._lock, typed_errors(self.path):
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def check_integrity(self) -> None:
        """Read every page.

        Raises:
            CorruptError: `catalog.corrupt`, with SQLite's first finding.
        """
        with self.reading() as connection:
            found = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise CorruptError.of("catalog.corrupt", self.path, found, REBUILD_HINT)

    def close(self) -> None:
        """Close the connection; the last one in all processes moves the WAL into the file."""
        with self._lock, typed_errors(self.path):
            self._connection.close()


def open_database(
    home: Path, *, timeout_seconds: float = LOCK_TIMEOUT_SECONDS, migrations: tuple[Migration, ...] = MIGRATIONS
) -> Database:
    """Open the catalog's file under `home`, created or migrated where needed.

    Raises:
        ConflictError: `catalog.locked`, another process kept it locked for `timeout_seconds`.
        CorruptError: `catalog.corrupt`, not a sound SQLite file or tables are missing.
        MismatchError: `catalog.foreign`, a SQLite file of another application, which is left alone.
        UnsupportedError: `catalog.newer`, made by a newer version.
        StorageError: `catalog.not-a-file`, `catalog.permission`, `catalog.no-space` or `catalog.io`.
    """
    path = home / CATALOG_NAME
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_trouble(error, home) from error
    check_regular_files(path)
    with typed_errors(path):
        connection = sqlite3.connect(path, timeout=timeout_seconds, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, time.monotonic() + timeout_seconds, migrations)
        except BaseException:
            connection.close()
            raise
    return Database(path, connection)


def check_regular_files(path: Path) -> None:
    """Refuse a catalog's file, or one beside it, that is a FIFO or a device: SQLite would wait for it.

    Raises:
        StorageError: `catalog.not-a-file`.
    """
    for suffix in SIDE_SUFFIXES:
        file = path.with_name(path.name + suffix)
        try:
            regular_status(file)
        except NotFoundError:
            continue
        except StorageError as error:
            if error.code == "storage.not-a-file":
                hint = "remove it, or choose another home with --home"
                raise StorageError.of("catalog.not-a-file", file, error.problems[0].message, hint) from None


def _prepare(
    connection: sqlite3.Connection, path: Path, deadline_seconds: float, migrations: tuple[Migration, ...]
) -> None:
    while True:  # switching to WAL and recovering one do not wait for locks by themselves
        try:
            if _check_ours(connection, path, migrations[-1].number):
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")  # stays as it is on file systems that cannot share memory
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            migrate(connection, migrations)
            break
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in _BUSY_CODES or time.monotonic() >= deadline_seconds:
                raise
            time.sleep(_RETRY_SECONDS)
    expected, found = expected_schema(migrations), schema(connection)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise CorruptError.of("catalog.corrupt", path, f"missing or not as they should be: {wrong}", REBUILD_HINT)


def _check_ours(connection: sqlite3.Connection, path: Path, newest: int) -> bool:
    """Refuse what is not ours before anything is written to it; return whether it is still empty."""
    connection.execute("BEGIN")  # one view of all three, while another process may be creating it
    try:
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        version = schema_version(connection)
        tables = schema(connection)
    except sqlite3.OperationalError as error:
        if _primary_code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise CorruptError.of("catalog.corrupt", path, str(error), REBUILD_HINT) from error  # a header that lies
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if application != APPLICATION_ID and (application or version or tables):
        raise MismatchError.of(
            "catalog.foreign", path, "a database of another application", "choose another home with --home"
        )
    if version > newest:
        raise UnsupportedError.of(
            "catalog.newer", path, f"schema version {version}, {newest} is known", "update mergepipe, or use --home"
        )
    if version < 1 and tables:
        raise CorruptError.of("catalog.corrupt", path, f"tables of schema version {version}", REBUILD_HINT)
    return not tables


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors about the file into typed ones; mistakes in the SQL stay what they are."""
    try:
        yield
    except sqlite3.Error as error:
        typed = _typed(error, path)
        if typed is None:
            raise
        raise typed from error
    except UnicodeDecodeError as error:  # Python could not even make the message of SQLite's error
        raise CorruptError.of("catalog.corrupt", path, str(error), REBUILD_HINT) from error


def _typed(error: sqlite3.Error, path: Path) -> MergePipeError | None:
    code, reason = _primary_code(error), str(error)
    if code in _BUSY_CODES:
        return ConflictError.of(
            "catalog.locked", path, f"another process holds it ({reason})", "wait until it is done and run again"
        )
    if code in _CORRUPT_CODES or (
        code == 0 and isinstance(error, sqlite3.OperationalError)
    ):  # 0: text that is no UTF-8
        return CorruptError.of("catalog.corrupt", path, reason, REBUILD_HINT)
    if code in _PERMISSION_CODES:
        return StorageError.of("catalog.permission", path, reason, "check the permissions, or use --home")
    if code == sqlite3.SQLITE_FULL:
        return StorageError.of("catalog.no-space", path, reason, "free some space and run again")
    if code in _IO_CODES:
        return StorageError.of("catalog.io", path, reason, "check the disk, then run again")
    return None


def os_trouble(error: OSError, home: Path) -> MergePipeError:
    """Turn an `OSError` about the home or a file in it into the catalog's error of that meaning."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError.of("catalog.no-space", home, reason, "free some space and run again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return StorageError.of("catalog.permission", home, reason, "check the path, or use --home")
    return StorageError.of("catalog.io", home, reason, "check the disk, then run again")
