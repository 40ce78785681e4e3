"""The local store and the one in memory keep the contract of stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest
from store_contract import StoreContract

from mergepipe.errors import StorageError
from mergepipe.storage.contract import Entry, FileKind, Store, StoreTerms
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.faults import replaced, system_error
from support.refusals import refuses
from support.stores import InMemoryStore


class TestLocalStore(StoreContract):
    """Files of this machine."""

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        for name, content in files.items():
            path = (root / name).local_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return LocalStore()

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        del store
        path = location.local_path
        path.with_name("beside").write_bytes(content)
        path.with_name("beside").rename(path)

    def test_links__are_followed(self, root: Location, tmp_path: Path) -> None:
        store = self.make(root, {"r/file": b"123"})
        (tmp_path / "r/link").symlink_to("file")
        (tmp_path / "r/dangling").symlink_to("nowhere")
        (tmp_path / "r/circle").symlink_to("circle")
        (tmp_path / "r/up").symlink_to(tmp_path)
        os.mkfifo(tmp_path / "r/fifo")
        assert store.list(root / "r") == (
            Entry("circle", FileKind.OTHER), Entry("dangling", FileKind.OTHER), Entry("fifo", FileKind.OTHER),
            Entry("file", FileKind.FILE), Entry("link", FileKind.FILE), Entry("up", FileKind.FOLDER),
        )  # fmt: skip
        assert store.stat(root / "r/dangling") is None
        assert store.stat(root / "r/link") == store.stat(root / "r/file")
        assert store.real_path(root / "r/up/r/link") == Location.local((tmp_path / "r/file").resolve())
        fifo = store.stat(root / "r/fifo")
        assert fifo is not None
        assert fifo.kind is FileKind.OTHER

    def test_refusals__of_the_system_are_typed(self, root: Location, tmp_path: Path) -> None:
        store = LocalStore()
        (tmp_path / "circle").symlink_to("circle")
        for look in (store.stat, store.real_path):
            with refuses(StorageError, "storage.answer"):
                look(root / "circle")

        def refuse(_path: Path) -> None:
            raise system_error(13)

        with replaced(os, "scandir", lambda _: refuse), refuses(StorageError, "storage.answer"):
            store.list(root)


class TestInMemoryStore(StoreContract):
    """An object store in memory."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Location:
        return Location("memory", "bucket", PurePosixPath(*tmp_path.parts[1:]))

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        return InMemoryStore({root / name: content for name, content in files.items()})

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        assert isinstance(store, InMemoryStore)
        store.put(location, content)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_terms__are_checked(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not the terms of a store"):
        StoreTerms(*numbers)
