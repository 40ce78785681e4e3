"""Object stores and web servers keep the contract of stores, and pin what they have looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from store_contract import ODD_NAMES, StoreContract

from mergepipe.errors import ConflictError, NotFoundError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, Store, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote.pinned_store import PinnedFile, PinnedStore
from support.fault_server import BucketServer
from support.remote_stores import remote_store, root_of, set_environment
from support.s3_server import S3Server, s3_server

OBJECT_NAMES = tuple(name for name in ODD_NAMES if name.isprintable())  # obstore takes no control characters


class PathView:
    """A remote store by paths below a folder of tests."""

    def __init__(self, store: PinnedStore, folder: Path, root: Location) -> None:
        self.store = store
        self._folder = folder
        self._root = root

    def again(self, kind: str) -> PathView:
        return PathView(remote_store(kind), self._folder, self._root)

    def at(self, path: Path) -> Location:
        return self._root / path.relative_to(self._folder).as_posix()

    @property
    def ledger(self) -> Ledger:
        return self.store.ledger

    @property
    def terms(self) -> StoreTerms:
        return self.store.terms(self._root)

    def stat(self, path: Path) -> FileStatus | None:
        return self.store.stat(self.at(path))

    def list(self, path: Path) -> tuple[Entry, ...]:
        return self.store.list(self.at(path))

    def real_path(self, path: Path) -> Path | None:
        location = self.store.real_path(self.at(path))
        return None if location is None else self._folder / location.relative_to(self._root)

    def open(self, path: Path, *, direct: bool = False) -> PathFile:
        return PathFile(self.store.open(self.at(path), direct=direct), path)

    def size_bytes(self, path: Path) -> int:
        return self.store.size_bytes(self.at(path))

    def read_metadata(self, path: Path, offset: int, nbytes: int) -> bytes:
        return self.store.read_metadata(self.at(path), offset, nbytes)

    def read_small(self, path: Path, limit_bytes: int) -> bytes:
        return self.store.read_small(self.at(path), limit_bytes)


class PathFile:
    """A remote file by its path."""

    alignment = 1

    def __init__(self, file: PinnedFile, path: Path) -> None:
        self.path = path
        self._file = file

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def version(self) -> str:
        return self._file.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        return self._file.read_into(offset, buffer, purpose)

    def close(self) -> None:
        self._file.close()


class RemoteContract(StoreContract):
    """What remote stores promise beside the contract; a version is the store's for its life."""

    def again(self, store: Store) -> Store:
        """Another store of the same files, which has looked at nothing yet."""
        raise NotImplementedError

    def test_version__changes_when_a_file_is_overwritten(self, tmp_path: Path) -> None:
        store, path = self.make(tmp_path, {"a": b"old"}), tmp_path / "a"
        opened, before = store.open(path), store.stat(path)
        self.overwrite(store, path, b"new")
        after, seen_anew = store.stat(path), self.again(store).stat(path)
        assert before is not None
        assert seen_anew is not None
        assert before == after
        assert before.version == opened.version != seen_anew.version
        readers: tuple[Callable[[], object], ...] = (
            lambda: opened.read_into(0, memoryview(bytearray(3)), Purpose.BASE),
            lambda: store.read_small(path, 9),
        )
        for read in readers:
            with pytest.raises(ConflictError) as caught:
                read()
            assert caught.value.code == "input.changed"


class BucketContract(RemoteContract):
    """Stores before the scripted server."""

    kind: ClassVar[str]
    server: BucketServer

    @pytest.fixture(autouse=True)
    def _serve(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with BucketServer({}) as server:
            self.server = server
            set_environment(monkeypatch, server.url)
            yield

    def make(self, root: Path, files: Mapping[str, bytes]) -> Store:
        for name, content in files.items():
            self.server.put(f"bucket/{name}", content)
        return PathView(remote_store(self.kind), root, root_of(self.kind, self.server))

    def again(self, store: Store) -> Store:
        assert isinstance(store, PathView)
        return store.again(self.kind)

    def overwrite(self, store: Store, path: Path, content: bytes) -> None:
        assert isinstance(store, PathView)
        self.server.put(f"bucket/{store.at(path).key.removeprefix('bucket/')}", content)


class ObjectNames(RemoteContract):
    """The names that obstore takes."""

    def test_names__may_have_any_characters(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {f"r/{name}": name.encode() for name in OBJECT_NAMES})
        assert [entry.name for entry in store.list(tmp_path / "r")] == sorted(OBJECT_NAMES)
        for name in OBJECT_NAMES:
            assert store.read_small(tmp_path / "r" / name, 100) == name.encode()


class ObjectContract(ObjectNames, BucketContract):
    """Buckets before the scripted server."""

    def test_list__asks_once_a_folder_and_stat_no_more(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"r/a": b"1", "r/b": b"22", "r/c/d": b""})
        for _ in range(2):
            store.list(tmp_path / "r")
            assert store.size_bytes(tmp_path / "r/b") == 2
            assert store.stat(tmp_path / "r/none") is None
            assert store.stat(tmp_path / "r/c") == FileStatus(FileKind.FOLDER, 0, "")
            store.open(tmp_path / "r/a").close()
        assert len(self.server.requests) == 1


class TestS3Store(ObjectContract):
    kind = "s3"


class TestGoogleStore(ObjectContract):
    kind = "gs"


class TestAzureStore(ObjectContract):
    kind = "az"


class TestWebStore(BucketContract):
    """A web server: it lists nothing, so a checkpoint's names are asked for."""

    kind = "http"

    def make(self, root: Path, files: Mapping[str, bytes]) -> Store:
        folders = {str(parent) for name in files for parent in list(Path(name).parents)[:-1]}
        return super().make(root, dict(files) | {f"{folder}/config.json": b"{}" for folder in folders})

    def test_list__names_what_is_directly_below_in_order(self, tmp_path: Path) -> None:
        index = json.dumps({"weight_map": {"t": "shard-1", "u": "shard-2", "v": "../w", "x": 3}}).encode()
        files = {"model.safetensors.index.json": index, "other": b"", "tokenizer.json": b"", "shard-1": b""}
        store = self.make(tmp_path, {f"r/{name}": content for name, content in files.items()} | {"r/deep/x": b""})
        names = ["config.json", "model.safetensors.index.json", "shard-1", "shard-2", "tokenizer.json"]
        assert store.list(tmp_path / "r") == tuple(Entry(name, FileKind.FILE) for name in names)
        n_requests = len(self.server.requests)
        assert store.stat(tmp_path / "r/merges.txt") is None
        assert store.size_bytes(tmp_path / "r/model.safetensors.index.json") == len(index)
        assert len(self.server.requests) == n_requests
        assert store.stat(tmp_path / "r/shard-2") is None
        assert store.stat(tmp_path / "r/other") is not None
        for name in ("none", "r/shard-1"):
            with pytest.raises(NotFoundError):
                store.list(tmp_path / name)

    def test_names__may_have_any_characters(self, tmp_path: Path) -> None:
        index = json.dumps({"weight_map": {name: name for name in ODD_NAMES}}).encode()
        files = {name: name.encode() for name in ODD_NAMES} | {"model.safetensors.index.json": index}
        store = self.make(tmp_path, {f"r/{name}": content for name, content in files.items()})
        assert [entry.name for entry in store.list(tmp_path / "r")] == sorted([*files, "config.json"])
        for name in ODD_NAMES:
            assert store.read_small(tmp_path / "r" / name, 100) == name.encode()

    def test_list__ignores_a_malformed_index(self, tmp_path: Path) -> None:
        for content in (b"{", b"[]", b'{"weight_map": 3}'):
            store = self.make(tmp_path, {"r/model.safetensors.index.json": content})
            assert [entry.name for entry in store.list(tmp_path / "r")] == [
                "config.json",
                "model.safetensors.index.json",
            ]


class TestMotoStore(ObjectNames):
    """The S3 of another project: listings, conditions and errors as theirs."""

    n_buckets: ClassVar[int] = 0
    server: S3Server
    bucket: str

    @pytest.fixture(scope="class")
    def moto(self) -> Iterator[S3Server]:
        with s3_server() as server:
            yield server

    @pytest.fixture(autouse=True)
    def _serve(self, moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        set_environment(monkeypatch, moto.url)
        TestMotoStore.n_buckets += 1
        self.bucket = f"bucket-{self.n_buckets}"
        self.server = moto
        moto.make_bucket(self.bucket)

    def make(self, root: Path, files: Mapping[str, bytes]) -> Store:
        self.server.put(self.bucket, files)
        return PathView(remote_store("s3"), root, Location.parse(f"s3://{self.bucket}"))

    def overwrite(self, store: Store, path: Path, content: bytes) -> None:
        assert isinstance(store, PathView)
        self.server.put(self.bucket, {store.at(path).key: content})

    def again(self, store: Store) -> Store:
        assert isinstance(store, PathView)
        return store.again("s3")

    def test_buckets__that_are_missing_hold_nothing(self) -> None:
        store, nowhere = remote_store("s3"), Location.parse("s3://no-such-bucket/model")
        assert store.stat(nowhere) is None
        with pytest.raises(NotFoundError, match="NoSuchBucket"):
            store.list(nowhere)
