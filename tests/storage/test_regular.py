"""Regular files are opened and read whole, everything else is refused by name; versions change with the bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mergepipe.errors import CorruptError, NotFoundError, StorageError
from mergepipe.storage import contract
from mergepipe.storage.contract import modified_at, version_of
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import open_regular, read_small
from support.faults import open_descriptors
from support.refusals import refuses


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


MAKERS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_open_regular__refuses_what_is_no_regular_file_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    MAKERS[kind](path)
    before = open_descriptors()
    for read in (
        open_regular,
        lambda path: read_small(path, 10),
        lambda path: LocalStore().read_metadata(Location.local(path), 0, 9),
    ):
        with refuses(StorageError, "storage.not-a-file") as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: is {kind}, ")
    assert open_descriptors() <= before


def test_open_regular__refuses_a_fifo_that_took_the_place_of_a_file_it_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.write_bytes(b"1")
    os.mkfifo(fifo)
    before, seen = open_descriptors(), file.stat()
    monkeypatch.setattr(Path, "stat", lambda _, **__: seen)
    with pytest.raises(StorageError, match="is a FIFO"):
        open_regular(fifo)
    assert open_descriptors() <= before


def test_open_regular__follows_links_to_regular_files_and_leaves_the_descriptor_blocking(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    descriptor = open_regular(tmp_path / "link")
    assert os.get_blocking(descriptor)
    assert not os.get_inheritable(descriptor)
    assert os.read(descriptor, 20) == b"content"
    os.close(descriptor)


def test_read_small__asks_for_no_more_than_the_limit_of_a_file_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"12")
    requested: list[int] = []

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        requested.append(nbytes)
        content = read(descriptor, nbytes, offset)
        with path.open("ab") as stream:
            stream.write(b"345")
        return content

    read = os.pread
    monkeypatch.setattr(os, "pread", pread)
    with refuses(CorruptError, "storage.too-large", "at most 8"):
        read_small(path, 8)
    assert requested == [2, 3, 3]


def test_read_small__names_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", Path("a\0b"), Path("a\ud800b")):
        with refuses(NotFoundError, "storage.not-found") as caught:
            read_small(path, 5)
        assert str(caught.value).isprintable()
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(StorageError):
            read_small(path, 5)


def status(mtime_ns: int, ctime_ns: int, inode: int = 7) -> os.stat_result:
    return cast(os.stat_result, SimpleNamespace(st_mtime_ns=mtime_ns, st_ctime_ns=ctime_ns, st_ino=inode))


def test_version_of__changes_with_a_write_whose_time_is_set_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.utime(path, ns=(0, 0))
    before = version_of(path, path.stat())
    path.write_bytes(b"new")
    os.utime(path, ns=(0, 0))
    assert version_of(path, path.stat()) != before


@pytest.mark.parametrize("other", [status(1, 2, 8), status(1, 3), status(-1, 2), status(10**19, 2)])
def test_version_of__holds_every_time_and_inode(tmp_path: Path, other: os.stat_result) -> None:
    assert version_of(tmp_path, status(1, 2)) != version_of(tmp_path, other)
    assert version_of(tmp_path, status(1, 2, 2**64 - 1)).endswith(f".{2**64 - 1}")


@pytest.mark.parametrize(("read_only", "is_trusted"), [(True, False), (False, True)])
def test_version_of__in_an_image_that_repeats_its_times_is_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool, is_trusted: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0))
    here = version_of(tmp_path, status(10**9, 10**9))
    assert here == version_of(tmp_path, status(10**9, 10**9))
    monkeypatch.setattr(contract, "_PROCESS", "another")
    assert (here == version_of(tmp_path, status(10**9, 10**9))) == is_trusted
    assert version_of(tmp_path, status(10**9, 10**9 + 5)) == f"{10**9}.{10**9 + 5}.7"


def test_modified_at__is_the_epoch_beyond_all_calendars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_mtime=1e18))
    assert modified_at(tmp_path) == datetime.fromtimestamp(0, UTC)
