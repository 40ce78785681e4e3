"""Catalog files that are damaged, foreign, newer, locked or out of reach: typed errors, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from catalog_cases import NOON, WEIGHTS_NAME, make_checkpoint, make_manifest, publish, snapshots_of
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.catalog.catalog import Catalog, rebuild
from mergepipe.catalog.database import CATALOG_NAME, PAGE_BYTES, SCHEMA_VERSION, is_catalog_error
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


def content(raw_bytes: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(raw_bytes)


def sql(statement: str, *, of_others: bool = False) -> Callable[[Path], None]:
    """A statement by somebody else, in a file of theirs or in ours."""

    def change(path: Path) -> None:
        if of_others:
            path.unlink()
        with raw(path) as connection:
            connection.execute(statement)

    return change


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def overwrite_a_page(path: Path) -> None:
    """The page of the first digest."""
    raw_bytes = bytearray(path.read_bytes())
    start = raw_bytes.index(b"ab" * 32) // PAGE_BYTES * PAGE_BYTES
    raw_bytes[start : start + PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    path.write_bytes(raw_bytes)


DAMAGED, FOREIGN = (CorruptError, "catalog.damaged"), (MismatchError, "catalog.foreign")
Refusal = tuple[type[MergePipeError], str]
TROUBLES: dict[str, tuple[Callable[[Path], object], Refusal, bool]] = {
    "text": (content(b"not a database" * 1000), DAMAGED, True),
    "a bad header": (content(b"SQLite format 3\0".ljust(1024, b"x")), DAMAGED, True),
    "a header alone": (content(b"SQLite format 3\0" + b"\xff" * 9000), DAMAGED, True),
    **{f"cut at {share}": (cut(share), DAMAGED, True) for share in (0.03, 0.3, 0.6, 0.99)},
    "a damaged page": (overwrite_a_page, DAMAGED, True),
    "no table": (sql("DROP TABLE file_digests"), DAMAGED, True),
    "no time": (sql("UPDATE snapshots SET created = 'yesterday'"), DAMAGED, True),
    "no facts": (sql("UPDATE snapshots SET facts = 'few'"), DAMAGED, True),
    "tables of others": (sql("CREATE TABLE theirs (x)", of_others=True), FOREIGN, False),
    "the mark of others": (sql("PRAGMA application_id = 7", of_others=True), FOREIGN, False),
    "no mark": (sql("PRAGMA user_version = 1", of_others=True), FOREIGN, False),
    "newer": (sql("PRAGMA user_version = 99"), (UnsupportedError, "catalog.newer"), False),
    "older": (sql(f"PRAGMA user_version = {SCHEMA_VERSION - 1}"), (UnsupportedError, "catalog.older"), True),
}
"""What happened to the file, how it is refused, and whether a rebuild sets it aside: else it is left alone."""


@pytest.mark.parametrize("name", TROUBLES)
def test_catalog__in_trouble_is_refused_and_set_aside_by_a_rebuild_or_left_alone(tmp_path: Path, name: str) -> None:
    change, (kind, code), is_mended = TROUBLES[name]
    home = tmp_path / "home"
    publish(tmp_path / "results" / "one")
    path = filled_home(home)
    for number in (1, 2):
        change(path)
        before, descriptors = path.read_bytes(), open_descriptors()
        with refuses(kind, code) as caught:
            use_everything(home)
        assert ("mergepipe catalog rebuild" in str(caught.value)) == (code in ("catalog.damaged", "catalog.older"))
        assert open_descriptors() <= descriptors  # also while the error is held
        assert path.read_bytes() == before
        if not is_mended:
            with refuses(kind, code):
                rebuild(home, [tmp_path / "results"])
            assert path.read_bytes() == before
            return
        report = rebuild(home, [tmp_path / "results"])
        assert [row.path.name for row in snapshots_of(home)] == ["one"]
        assert report.moved_aside == path.with_name(f"{CATALOG_NAME}.corrupt-{number}")
        assert report.moved_aside.read_bytes() == before
        path.unlink()
        filled_home(home)


def test_open__an_empty_file_is_a_new_catalog(tmp_path: Path) -> None:
    (tmp_path / CATALOG_NAME).touch()
    with Catalog.open(tmp_path) as catalog:
        assert catalog.snapshots() == ()


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
        connection = catalog._connection
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
