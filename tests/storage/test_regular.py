"""Regular files opened and read whole: everything else is refused by name, at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe.errors import CorruptError, NotFoundError, StorageError
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
    with pytest.raises(CorruptError, match="at most 8") as caught:
        read_small(path, 8)
    assert caught.value.code == "storage.too-large"
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
