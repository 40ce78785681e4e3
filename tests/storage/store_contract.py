"""What every store promises: a subclass says how a store of some files is made, and inherits the tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from mergepipe.errors import CorruptError, NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileKind, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact
from support.refusals import refuses

ODD_NAMES = (
    "with space",
    "plus+sign",
    "per%20cent",
    "ünï",
    "#hash?",
    "back\\slash",
    "-dash",
    "a:b",
    "line\nbreak",
    ".x",
)


class StoreContract(ABC):
    """The tests that every store passes, with `names` that it takes."""

    names: ClassVar[tuple[str, ...]] = ODD_NAMES

    @pytest.fixture
    def root(self, tmp_path: Path) -> Location:
        """The folder that the files of a test are below."""
        return Location.local(tmp_path)

    @abstractmethod
    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        """A store that holds `files`, by their paths below `root`."""

    @abstractmethod
    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        """Put other content in the place of a file, by no more than the store's own means."""

    def test_open__reads_the_bytes_of_any_range(self, root: Location) -> None:
        store = self.make(root, {"a/b": bytes(range(200))})
        for is_direct in (False, True):
            file = store.open(root / "a/b", direct=is_direct)
            assert (file.location, file.size_bytes) == (root / "a/b", 200)
            assert is_direct or file.alignment == 1
            for start, stop in ((0, 200), (7, 9), (199, 200), (200, 200)):
                assert read_exact(file, start, stop, Purpose.BASE).tobytes() == bytes(range(start, stop))
            file.close()

    def test_open__a_range_past_the_end_is_a_short_read(self, root: Location) -> None:
        store = self.make(root, {"a": b"12345"})
        file, buffer = store.open(root / "a"), bytearray(8)
        assert (file.read_into(3, memoryview(buffer), Purpose.BASE), bytes(buffer[:2])) == (2, b"45")
        with refuses(CorruptError, "storage.shrunk"):
            read_exact(file, 3, 6, Purpose.BASE)
        file.close()

    def test_open__charges_what_is_requested(self, root: Location) -> None:
        store = self.make(root, {"a": b"12345"})
        file = store.open(root / "a")
        file.read_into(0, memoryview(bytearray(5)), Purpose.EXPERT)
        file.close()
        assert store.ledger.usage()[Purpose.EXPERT] == 5

    def test_empty_files__are_files_without_bytes(self, root: Location) -> None:
        store = self.make(root, {"empty": b""})
        status = store.stat(root / "empty")
        assert status is not None
        assert (status.kind, status.size_bytes) == (FileKind.FILE, 0)
        assert store.read_small(root / "empty", 0) == b""
        file = store.open(root / "empty", direct=True)
        assert file.size_bytes == len(read_exact(file, 0, 0, Purpose.BASE)) == 0
        file.close()

    def test_stat__tells_files_folders_and_nothing_apart(self, root: Location) -> None:
        store = self.make(root, {"folder/file": b"123"})
        file, folder = store.stat(root / "folder/file"), store.stat(root / "folder")
        assert file is not None
        assert folder is not None
        assert (file.is_file, file.is_folder, file.size_bytes) == (True, False, 3)
        assert (folder.is_file, folder.is_folder) == (False, True)
        for name in ("none", "fold", "folder/none", "folder/file/below", "nul\0"):
            assert store.stat(root / name) is None, name
            assert store.real_path(root / name) is None, name
        assert store.real_path(root / "folder/file") == root / "folder/file"

    def test_version__changes_when_a_file_is_overwritten(self, root: Location) -> None:
        store, path = self.make(root, {"a": b"old"}), root / "a"
        opened, before = store.open(path), store.stat(path)
        opened_version = opened.version
        self.overwrite(store, path, b"new")
        after = store.stat(path)
        assert before is not None
        assert after is not None
        assert before.version == opened_version != after.version
        opened.close()
        reopened = store.open(path)
        assert reopened.version == after.version
        reopened.close()

    def test_list__names_what_is_directly_below_in_order(self, root: Location) -> None:
        store = self.make(root, {"r/b": b"", "r/c/d/e": b"", "r/a": b"1", "other": b""})
        expected = (Entry("a", FileKind.FILE), Entry("b", FileKind.FILE), Entry("c", FileKind.FOLDER))
        assert store.list(root / "r") == expected
        assert store.list(root / "r/c") == (Entry("d", FileKind.FOLDER),)
        for name in ("none", "r/a"):
            with pytest.raises(NotFoundError):
                store.list(root / name)

    def test_names__may_have_any_characters(self, root: Location) -> None:
        store = self.make(root, {f"r/{name}": name.encode() for name in self.names})
        assert [entry.name for entry in store.list(root / "r")] == sorted(self.names)
        for name in self.names:
            assert store.read_small(root / "r" / name, 100) == name.encode()

    def test_read_small__refuses_larger_files_and_charges_metadata(self, root: Location) -> None:
        store = self.make(root, {"a": b"12345"})
        with pytest.raises(CorruptError) as caught:
            store.read_small(root / "a", 4)
        assert (caught.value.code, store.ledger.total_bytes()) == ("storage.too-large", 0)
        assert store.read_small(root / "a", 5) == b"12345"
        assert store.ledger.usage()[Purpose.METADATA] == 5

    def test_read_metadata__stops_at_the_end(self, root: Location) -> None:
        store = self.make(root, {"a": b"12345"})
        assert store.read_metadata(root / "a", 1, 2) == b"23"
        assert store.read_metadata(root / "a", 3, 9) == b"45"
        assert store.read_metadata(root / "a", 9, 9) == b""

    def test_readers__refuse_what_is_missing_or_no_file(self, root: Location) -> None:
        store = self.make(root, {"folder/file": b""})
        readers = (
            store.open,
            store.size_bytes,
            lambda p: store.read_small(p, 9),
            lambda p: store.read_metadata(p, 0, 9),
        )
        for read in readers:
            with refuses(NotFoundError, "storage.not-found"):
                read(root / "none")
            with refuses(StorageError, "storage.not-a-file"):
                read(root / "folder")

    def test_terms__hold_for_every_file(self, root: Location) -> None:
        store = self.make(root, {"a": bytes(5000)})
        file = store.open(root / "a", direct=True)
        assert store.terms(root).granularity_bytes % file.alignment == 0
        file.close()
