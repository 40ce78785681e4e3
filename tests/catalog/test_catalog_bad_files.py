"""Records of the catalog that are damaged, newer or out of reach: typed errors, and the others are not lost."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from catalog_cases import NOON, make_checkpoint, make_manifest, publish
from hypothesis import given
from hypothesis import strategies as st

from mergepipe import Catalog
from mergepipe.catalog.catalog import is_catalog_error, rebuild
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.errors import CorruptError, MergePipeError, Problem, StorageError
from mergepipe.storage.contract import CATALOG_RECORD_BYTES
from support.faults import open_descriptors
from support.refusals import refuses


def filled_home(home: Path, n_snapshots: int = 3) -> Path:
    """A catalog with a digest and snapshots; return the record of one of these."""
    catalog = Catalog(home)
    base = make_checkpoint(home.parent / "base")
    catalog.record_digests(with_digests(base, {base.files[0].location: "ab" * 32}))
    for number in range(n_snapshots):
        manifest = make_manifest(f"{number}", (home.parent / "base",))
        catalog.record_snapshot(manifest, home.parent / f"out-{number}", created=NOON)
    return sorted((home / "snapshots").iterdir())[0]


def test_catalog__is_one_file_for_each_place_and_nothing_else(tmp_path: Path) -> None:
    filled_home(tmp_path / "home")
    filled_home(tmp_path / "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["digests", "snapshots"]
    assert len(list((tmp_path / "home" / "snapshots").iterdir())) == 3
    assert len(list((tmp_path / "home" / "digests").iterdir())) == 1


def replaced(old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


TROUBLES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"no record" * 1000),
    **{f"cut at {share}": cut(share) for share in (0.03, 0.6, 0.99)},
    "another path": replaced(b"/out-", b"/OUT-"),
    "no time zone": replaced(b"+00:00", b""),
    "newer": replaced(b"mergepipe-catalog/7", b"mergepipe-catalog/8"),
    "of another kind": replaced(b'"snapshot"', b'"digest"'),
    "too large": lambda path: os.truncate(path, CATALOG_RECORD_BYTES + 1),
}


def put_folder(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent)


TROUBLES |= {"a folder": put_folder, "a pipe": put_fifo, "a link to a folder": put_link}


@pytest.mark.parametrize("name", TROUBLES)
def test_catalog__an_unreadable_record_is_passed_over_with_a_warning_and_a_rebuild_removes_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    publish(tmp_path / "results" / "one")
    path = filled_home(home)
    TROUBLES[name](path)
    descriptors = open_descriptors()
    assert len(Catalog(home).snapshots()) == 2
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "mergepipe catalog rebuild" in warning
    assert open_descriptors() <= descriptors
    assert os.path.lexists(path)
    Catalog(home).record_snapshot(make_manifest("new", ()), tmp_path / "new", created=NOON)
    assert len(Catalog(home).snapshots()) == 3
    report = rebuild(home, [tmp_path / "results"])
    assert [(problem.code, problem.where) for problem in report.unreadable] == [("catalog.damaged", str(path))]
    assert "catalog rebuild" not in str(report)
    assert len(report.missing) == 3
    caplog.clear()
    assert len(Catalog(home).snapshots()) == 4
    assert not caplog.messages
    assert not os.path.lexists(path)


@pytest.mark.parametrize("put", [put_folder, put_fifo])
def test_catalog__what_lies_in_the_place_of_a_digest_counts_as_none_until_a_rebuild(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    filled_home(tmp_path / "home")
    (path,) = (tmp_path / "home" / "digests").iterdir()
    put(path)
    base, catalog = make_checkpoint(tmp_path / "base"), Catalog(tmp_path / "home")
    assert catalog.with_known_digests(base).file_ids[0].sha256 is None
    rebuild(tmp_path / "home", [])
    catalog.record_digests(with_digests(base, {base.files[0].location: "cd" * 32}))
    assert catalog.with_known_digests(base).file_ids[0].sha256 == "cd" * 32


def test_catalog__a_damaged_digest_is_unknown_and_recorded_again(tmp_path: Path) -> None:
    filled_home(tmp_path / "home")
    (path,) = (tmp_path / "home" / "digests").iterdir()
    path.write_bytes(path.read_bytes().replace(b"abab", b"acab"))
    base, catalog = make_checkpoint(tmp_path / "base"), Catalog(tmp_path / "home")
    assert catalog.with_known_digests(base).file_ids[0].sha256 is None
    catalog.record_digests(with_digests(base, {base.files[0].location: "cd" * 32}))
    assert catalog.with_known_digests(base).file_ids[0].sha256 == "cd" * 32


@functools.cache
def filled_record() -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        path = filled_home(Path(place) / "home")
        return path.name, path.read_bytes()


@given(offset=st.integers(0), junk=st.binary(min_size=1, max_size=16))
def test_catalog__after_any_damage_it_works_or_says_so_and_a_rebuild_mends_it(offset: int, junk: bytes) -> None:
    name, raw = filled_record()
    content = bytearray(raw)
    start = offset % len(content)
    content[start : start + len(junk)] = junk
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "snapshots").mkdir()
        (Path(place) / "snapshots" / name).write_bytes(content)
        with contextlib.suppress(CorruptError):
            Catalog(Path(place)).snapshots()
        rebuild(Path(place), [])
        Catalog(Path(place)).snapshots()


def test_catalog__a_record_that_cannot_be_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_home(tmp_path / "home")
    catalog = Catalog(tmp_path / "home")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mergepipe.storage.owned.write_all", fails)
        with refuses(StorageError, "catalog.io"):
            catalog.record_snapshot(make_manifest("large"), tmp_path / "out-0", created=NOON)
    assert {row.sid for row in catalog.snapshots()} == {make_manifest(f"{number}").sid for number in range(3)}
    assert not [path for path in (tmp_path / "home" / "snapshots").iterdir() if path.name.startswith(".")]


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
    place = Path(tempfile.mkdtemp(dir="/tmp")).resolve()
    yield place
    for directory in (place, *(entry for entry in place.rglob("*") if entry.is_dir())):
        directory.chmod(0o755)
    shutil.rmtree(place)


def test_catalog__a_home_in_which_nothing_can_be_made_is_a_storage_error(reachable: Path) -> None:
    (reachable / "home").mkdir()
    (reachable / "home").chmod(0o555)
    with without_privileges(reachable), refuses(StorageError, "catalog.io"):
        Catalog(reachable / "home").record_snapshot(make_manifest("a"), reachable / "a", created=NOON)


def test_catalog__a_folder_that_may_not_be_written_can_be_read(reachable: Path) -> None:
    filled_home(reachable / "home").parent.chmod(0o555)
    with without_privileges(reachable):
        catalog = Catalog(reachable / "home")
        with refuses(StorageError, "catalog.io"):
            catalog.forget(catalog.snapshots()[0])
        assert len(catalog.snapshots()) == 3


@pytest.mark.parametrize("below", ["", "deeper"])
def test_catalog__a_file_in_the_place_of_its_home_is_a_storage_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "home").touch()
    with refuses(StorageError, "catalog.io"):
        Catalog(tmp_path / "home" / below)


def test_is_catalog_error__is_about_the_index_and_nothing_else() -> None:
    assert is_catalog_error(StorageError.of("catalog.io", "", "full"))
    assert not is_catalog_error(StorageError.of("storage.no-space", "", "full"))
    mixed = MergePipeError(Problem("catalog.io", "", ""), Problem("storage.io", "", ""))
    assert not is_catalog_error(mixed)
