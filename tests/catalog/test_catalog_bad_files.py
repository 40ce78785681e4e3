"""Catalog files that are damaged, foreign, newer, locked or out of reach: typed errors, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from catalog_cases import NOON, WEIGHTS_NAME, make_checkpoint, make_manifest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import PAGE_BYTES, SCHEMA_VERSION, is_catalog_error
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rebuild import rebuild
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    MismatchError,
    NotFoundError,
    Problem,
    StorageError,
    UnsupportedError,
)
from support.faults import open_descriptors
from support.refusals import refuses


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def filled_home(home: Path, n_snapshots: int = 30) -> Path:
    """A closed catalog with digests and snapshots; return its file."""
    with Catalog.open(home) as catalog:
        base = make_checkpoint(home.parent / "base")
        catalog.record_digests(with_digests(base, {WEIGHTS_NAME: "ab" * 32}))
        for number in range(n_snapshots):
            manifest = make_manifest(f"{number}", (home.parent / "base",))
            catalog.record_snapshot(manifest, home.parent / f"out-{number}", created=NOON)
        return catalog.path


def use_everything(home: Path) -> None:
    """Read all that a catalog holds."""
    with Catalog.open(home, timeout_seconds=0.05) as catalog:
        for snapshot in catalog.snapshots():
            catalog.lineage(snapshot.path)
        catalog.with_known_digests(make_checkpoint(home.parent / "read"))
        catalog.stats()


def test_catalog__is_wal_with_our_mark(tmp_path: Path) -> None:
    path = filled_home(tmp_path / "home")
    assert path == tmp_path / "home" / "catalog.sqlite3"
    assert [entry.name for entry in path.parent.iterdir()] == [CATALOG_NAME]
    with raw(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA application_id").fetchone() == (0x4D504331,)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert connection.execute("PRAGMA page_size").fetchone() == (PAGE_BYTES,)


def test_open__an_empty_file_is_a_new_catalog(tmp_path: Path) -> None:
    (tmp_path / CATALOG_NAME).touch()
    with Catalog.open(tmp_path) as catalog:
        assert catalog.snapshots() == ()


@pytest.mark.parametrize(
    "content", [b"not a database" * 1000, b"SQLite format 3\0".ljust(1024, b"x"), b"SQLite format 3\0" + b"\xff" * 9000]
)
def test_open__garbage_is_corrupt_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CATALOG_NAME).write_bytes(content)
    with refuses(CorruptError, "catalog.damaged") as caught:
        Catalog.open(tmp_path)
    assert "mergepipe catalog rebuild" in str(caught.value)
    assert (tmp_path / CATALOG_NAME).read_bytes() == content


@pytest.mark.parametrize("share", [0.03, 0.3, 0.6, 0.99])
def test_catalog__a_truncated_file_is_corrupt(tmp_path: Path, share: float) -> None:
    path = filled_home(tmp_path / "home")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(CorruptError) as caught:
        use_everything(tmp_path / "home")
    assert caught.value.code.startswith("catalog.damaged")


@functools.cache
def filled_content() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        return filled_home(Path(place) / "home", n_snapshots=6).read_bytes()


@given(page=st.integers(0), offset=st.integers(0, PAGE_BYTES - 16), junk=st.binary(min_size=1, max_size=16))
def test_catalog__after_any_damage_it_works_or_says_so_and_a_rebuild_mends_it(
    page: int, offset: int, junk: bytes
) -> None:
    content = bytearray(filled_content())
    start = page % (len(content) // PAGE_BYTES) * PAGE_BYTES + offset
    content[start : start + len(junk)] = junk
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / CATALOG_NAME).write_bytes(content)
        with contextlib.suppress(CorruptError, NotFoundError):  # not found: an index of SQLite's was hit
            try:
                use_everything(Path(place))
            except (MismatchError, UnsupportedError):  # the mark or the version was hit: not ours to mend
                return
        rebuild(Path(place), [])
        use_everything(Path(place))


def test_catalog__a_table_that_is_missing_is_corrupt(tmp_path: Path) -> None:
    with raw(filled_home(tmp_path / "home")) as connection:
        connection.execute("DROP TABLE file_digests")
    with pytest.raises(CorruptError, match="file_digests"):
        use_everything(tmp_path / "home")
    rebuild(tmp_path / "home", [])
    use_everything(tmp_path / "home")


@pytest.mark.parametrize("sql", ["UPDATE snapshots SET created = 'yesterday'", "UPDATE snapshots SET facts = 'few'"])
def test_catalog__a_row_that_makes_no_sense_is_corrupt(tmp_path: Path, sql: str) -> None:
    with raw(filled_home(tmp_path / "home")) as connection:
        connection.execute(sql)
    before = open_descriptors()
    with refuses(CorruptError, "catalog.damaged"):
        use_everything(tmp_path / "home")
    assert open_descriptors() <= before  # also while the error is held


@pytest.mark.parametrize("sql", ["CREATE TABLE theirs (x)", "PRAGMA application_id = 7", "PRAGMA user_version = 1"])
def test_open__a_database_of_another_application_is_left_alone(tmp_path: Path, sql: str) -> None:
    with raw(tmp_path / CATALOG_NAME) as connection:
        connection.execute(sql)
    content = (tmp_path / CATALOG_NAME).read_bytes()
    with refuses(MismatchError, "catalog.foreign"):
        Catalog.open(tmp_path)
    assert (tmp_path / CATALOG_NAME).read_bytes() == content


def test_open__a_newer_schema_is_refused_untouched(tmp_path: Path) -> None:
    with raw(filled_home(tmp_path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    content = (tmp_path / CATALOG_NAME).read_bytes()
    with refuses(UnsupportedError, "catalog.newer"):
        Catalog.open(tmp_path)
    assert (tmp_path / CATALOG_NAME).read_bytes() == content


def test_catalog__a_lock_held_too_long_is_a_conflict_and_reading_goes_on(tmp_path: Path) -> None:
    with raw(filled_home(tmp_path / "home")) as other:
        other.execute("BEGIN IMMEDIATE")
        with Catalog.open(tmp_path / "home", timeout_seconds=0.05) as catalog:
            assert len(catalog.snapshots()) == 30
            with refuses(ConflictError, "catalog.locked"):
                catalog.forget(catalog.snapshots()[0])
            other.execute("ROLLBACK")
            catalog.forget(catalog.snapshots()[0])
            assert len(catalog.snapshots()) == 29


def test_open__a_lock_held_while_it_is_made_is_a_conflict(tmp_path: Path) -> None:
    with raw(tmp_path / CATALOG_NAME) as other:
        other.execute("BEGIN EXCLUSIVE")
        with refuses(ConflictError, "catalog.locked"):
            Catalog.open(tmp_path, timeout_seconds=0.05)


def test_catalog__a_full_disk_is_a_storage_error_and_loses_nothing(tmp_path: Path) -> None:
    filled_home(tmp_path / "home")
    with Catalog.open(tmp_path / "home") as catalog:
        connection = catalog._database._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        large = replace(make_manifest("large"), operator="x" * 100_000)
        with refuses(StorageError, "catalog.no-space"):
            catalog.record_snapshot(large, tmp_path / "large", created=NOON)
        assert len(catalog.snapshots()) == 30
        connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        catalog.record_snapshot(large, tmp_path / "large", created=NOON)
        assert len(catalog.snapshots()) == 31


@contextlib.contextmanager
def without_privileges(place: Path) -> Iterator[None]:
    """Root may write everywhere: step down to another user, who can reach `place`."""
    if os.geteuid() != 0:
        yield
        return
    for entry in (place, *place.rglob("*")):
        os.chown(entry, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that any user can reach; pytest's own cannot be."""
    place = Path(tempfile.mkdtemp()).resolve()
    yield place
    for directory in (place, *(entry for entry in place.rglob("*") if entry.is_dir())):
        directory.chmod(0o755)
    shutil.rmtree(place)


def test_open__a_home_in_which_nothing_can_be_made_is_a_storage_error(reachable: Path) -> None:
    (reachable / "home").mkdir()
    (reachable / "home").chmod(0o555)
    with without_privileges(reachable), refuses(StorageError, "catalog.permission"):
        Catalog.open(reachable / "home")


def test_catalog__a_read_only_file_is_a_storage_error_when_it_is_written(reachable: Path) -> None:
    filled_home(reachable / "home").chmod(0o444)
    with without_privileges(reachable), Catalog.open(reachable / "home") as catalog:
        with refuses(StorageError, "catalog.permission"):
            catalog.forget(catalog.snapshots()[0])
        assert len(catalog.snapshots()) == 30


@pytest.mark.parametrize("inner", ["", "deeper"])
def test_open__a_home_that_is_a_file_is_a_storage_error(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").touch()
    with refuses(StorageError, "catalog.permission"):
        Catalog.open(tmp_path / "file" / inner)


def test_open__a_catalog_that_is_a_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / CATALOG_NAME).mkdir()
    with refuses(StorageError, "catalog.not-a-file"):
        Catalog.open(tmp_path)


def test_is_catalog_error__is_about_the_index_and_nothing_else() -> None:
    assert is_catalog_error(StorageError.of("catalog.no-space", "", "full"))
    assert not is_catalog_error(StorageError.of("storage.no-space", "", "full"))
    mixed = MergePipeError(Problem("catalog.locked", "", ""), Problem("storage.io", "", ""))
    assert not is_catalog_error(mixed)


def test_close__can_be_done_twice_and_ends_all_use(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path)
    catalog.close()
    catalog.close()
    with pytest.raises(sqlite3.ProgrammingError):
        catalog.snapshots()
