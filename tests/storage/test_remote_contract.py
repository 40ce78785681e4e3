"""Object stores and web servers keep the contract of stores, and pin what they have looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from store_contract import ODD_NAMES, StoreContract

from mergepipe.errors import ConflictError, NotFoundError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from support.fault_server import BucketServer
from support.refusals import refuses
from support.remote_stores import remote_store, root_of, set_environment
from support.s3_server import S3Server, s3_server

OBJECT_NAMES = tuple(name for name in ODD_NAMES if name.isprintable())  # obstore takes no control characters


class RemoteContract(StoreContract):
    """What remote stores promise beside the contract; a version is the store's for its life."""

    kind: ClassVar[str] = "s3"

    def test_version__changes_when_a_file_is_overwritten(self, root: Location) -> None:
        store, path = self.make(root, {"a": b"old"}), root / "a"
        opened, before = store.open(path), store.stat(path)
        self.overwrite(store, path, b"new")
        after, seen_anew = store.stat(path), remote_store(self.kind).stat(path)
        assert before is not None
        assert seen_anew is not None
        assert before == after
        assert before.version == opened.version != seen_anew.version
        readers: tuple[Callable[[], object], ...] = (
            lambda: opened.read_into(0, memoryview(bytearray(3)), Purpose.BASE),
            lambda: store.read_small(path, 9),
        )
        for read in readers:
            with refuses(ConflictError, "input.changed"):
                read()


class BucketContract(RemoteContract):
    """Stores before the scripted server."""

    server: BucketServer

    @pytest.fixture(autouse=True)
    def _serve(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with BucketServer({}) as server:
            self.server = server
            set_environment(monkeypatch, server.url)
            yield

    @pytest.fixture
    def root(self, _serve: None) -> Location:
        return root_of(self.kind, self.server)

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        for name, content in files.items():
            self.server.put(f"bucket/{name}", content)
        return remote_store(self.kind)

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        self.server.put(f"bucket/{location.key.removeprefix('bucket/')}", content)


class ObjectContract(BucketContract):
    """Buckets before the scripted server."""

    names = OBJECT_NAMES

    def test_list__asks_once_a_folder_and_stat_no_more(self, root: Location) -> None:
        store = self.make(root, {"r/a": b"1", "r/b": b"22", "r/c/d": b""})
        for _ in range(2):
            store.list(root / "r")
            assert store.size_bytes(root / "r/b") == 2
            assert store.stat(root / "r/none") is None
            assert store.stat(root / "r/c") == FileStatus(FileKind.FOLDER, 0, "")
            store.open(root / "r/a").close()
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

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        folders = {str(parent) for name in files for parent in list(Path(name).parents)[:-1]}
        return super().make(root, dict(files) | {f"{folder}/config.json": b"{}" for folder in folders})

    def test_list__names_what_is_directly_below_in_order(self, root: Location) -> None:
        shards = ["shard-1.safetensors", "shard-2.bin"]
        weight_map = {"t": shards[0], "u": shards[1], "v": "../w.bin", "w": "notes", "x": 3}
        index = json.dumps({"weight_map": weight_map, "metadata": {"format": "pt"}}).encode()
        files = {"model.safetensors.index.json": index, "other": b"", "tokenizer.json": b"", shards[0]: b""}
        store = self.make(root, {f"r/{name}": content for name, content in files.items()} | {"r/deep/x": b""})
        names = ["config.json", "model.safetensors.index.json", *shards, "tokenizer.json"]
        assert store.list(root / "r") == tuple(Entry(name, FileKind.FILE) for name in names)
        n_requests = len(self.server.requests)
        assert store.stat(root / "r/merges.txt") is None
        assert store.size_bytes(root / "r/model.safetensors.index.json") == len(index)
        assert len(self.server.requests) == n_requests
        assert store.stat(root / "r" / shards[1]) is None
        assert store.stat(root / "r/other") is not None
        for name in ("none", f"r/{shards[0]}"):
            with pytest.raises(NotFoundError):
                store.list(root / name)

    def test_names__may_have_any_characters(self, root: Location) -> None:
        names = [f"{name}.bin" for name in ODD_NAMES]
        index = json.dumps({"weight_map": {name: name for name in names}}).encode()
        files = {name: name.encode() for name in names} | {"model.safetensors.index.json": index}
        store = self.make(root, {f"r/{name}": content for name, content in files.items()})
        assert [entry.name for entry in store.list(root / "r")] == sorted([*files, "config.json"])
        for name in names:
            assert store.read_small(root / "r" / name, 100) == name.encode()

    def test_list__ignores_a_malformed_index(self, root: Location) -> None:
        for content in (b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"t": "\\x.bin"}}'):
            store = self.make(root, {"r/model.safetensors.index.json": content})
            assert [entry.name for entry in store.list(root / "r")] == ["config.json", "model.safetensors.index.json"]


class TestMotoStore(RemoteContract):
    """The S3 of another project: listings, conditions and errors as theirs."""

    names = OBJECT_NAMES
    n_buckets: ClassVar[int] = 0
    server: S3Server

    @pytest.fixture(scope="class")
    def moto(self) -> Iterator[S3Server]:
        with s3_server() as server:
            yield server

    @pytest.fixture(autouse=True)
    def _serve(self, moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        set_environment(monkeypatch, moto.url)
        self.server = moto

    @pytest.fixture
    def root(self, _serve: None) -> Location:
        TestMotoStore.n_buckets += 1
        self.server.make_bucket(f"bucket-{self.n_buckets}")
        return Location.parse(f"s3://bucket-{self.n_buckets}")

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        self.server.put(root.root, files)
        return remote_store("s3")

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        self.server.put(location.root, {location.key: content})

    def test_buckets__that_are_missing_hold_nothing(self) -> None:
        store, nowhere = remote_store("s3"), Location.parse("s3://no-such-bucket/model")
        assert store.stat(nowhere) is None
        with pytest.raises(NotFoundError, match="NoSuchBucket"):
            store.list(nowhere)
