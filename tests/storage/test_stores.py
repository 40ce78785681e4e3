"""The local store, the one in memory and the Hub keep the contract of stores; locations; usages add up."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_contract import StoreContract

from mergepipe.errors import LimitError, RecipeError, StorageError
from mergepipe.storage.contract import Entry, FileKind, Store, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location, is_remote
from mergepipe.storage.remote.hub import HubStore
from mergepipe.storage.remote.hub_api import HubSettings
from mergepipe.storage.remote.retry import Transfers
from support.faults import replaced, system_error
from support.hub_server import HubServer, hub_server
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
        assert getattr(store.stat(root / "r/fifo"), "kind", None) is FileKind.OTHER

    def test_refusals__of_the_system_are_typed(self, root: Location, tmp_path: Path) -> None:
        store = LocalStore()
        (tmp_path / "circle").symlink_to("circle")
        for look in (store.stat, store.real_path):
            with refuses(StorageError, "storage.answer"):
                look(root / "circle")

        def refuse(*_: object, **_named: object) -> None:
            raise system_error(13)

        with replaced(os, "scandir", lambda _: refuse), refuses(StorageError, "storage.permission"):
            store.list(root)
        closed = replaced(os, "access", lambda _: lambda folder, _mode: folder != tmp_path)
        with closed, replaced(Path, "stat", lambda _: refuse), refuses(StorageError, "storage.permission") as caught:
            store.stat(Location.local(tmp_path / "folder/file"))
        assert str(caught.value).startswith(f"{tmp_path}: entering the folder failed")


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


class TestHubStore(StoreContract):
    """Models of the Hub, large files and small ones."""

    @pytest.fixture(scope="class", params=[1, 1 << 20], ids=["large", "small"])
    def server(self, request: pytest.FixtureRequest) -> Iterator[HubServer]:
        with hub_server(large_bytes=request.param) as server:
            yield server

    @pytest.fixture(autouse=True)
    def hub(self, server: HubServer, tmp_path: Path) -> None:
        server.reset()
        self._hub, self._cache = server, tmp_path

    @pytest.fixture
    def root(self) -> Location:
        return Location.parse("hf://org/name@branch/folder of tests")

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        self._hub.commit(root.root, {f"{root.key}/{name}": content for name, content in files.items()}, root.revision)
        return HubStore(HubSettings(self._hub.url, self._cache), Transfers(Ledger()))

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        assert isinstance(store, HubStore)
        self._hub.commit(location.root, {location.key: content}, location.revision)
        store.forget(location)


NAMES = st.text("abcXYZ019._- é%", min_size=1, max_size=8).filter(lambda name: name.strip("."))
FOLDERS = st.lists(NAMES, max_size=3).map("/".join)
ROOTS = st.sampled_from(
    [
        "s3://bucket",
        "gs://b",
        "az://box",
        "https://host:8080",
        "http://host/%20",
        "hf://org/name",
        "hf://o/n@v1",
        "/data",
        ".",
    ]
)


@given(ROOTS, FOLDERS)
def test_location__parses_what_it_writes(root: str, folder: str) -> None:
    location = Location.parse(f"{root}/{folder}" if folder else root)
    assert Location.parse(str(location)) == location
    assert pickle.loads(pickle.dumps(location)) == location


@given(ROOTS, FOLDERS, NAMES)
def test_location__a_name_below_it_has_it_as_parent(root: str, folder: str, name: str) -> None:
    location = Location.parse(f"{root}/{folder}" if folder else root)
    assert (location / name).parent == location
    assert (location / name).name == name
    assert (location / name).relative_to(location).as_posix() == name


@pytest.mark.parametrize(
    ("text", "scheme", "root", "revision", "key"),
    [
        ("s3://bucket", "s3", "bucket", "", ""),
        ("S3://bucket/a//b/", "s3", "bucket", "", "a/b"),
        ("https://host/dir/x.safetensors", "https", "host", "", "dir/x.safetensors"),
        ("https://host/my%20model/a%2Bb", "https", "host", "", "my model/a+b"),
        ("s3://bucket/my%20model", "s3", "bucket", "", "my%20model"),
        ("hf://org/name", "hf", "org/name", "", ""),
        ("hf://org/name@main/sub/folder", "hf", "org/name", "main", "sub/folder"),
        ("hf://org/name@refs/pr/7/sub", "hf", "org/name", "refs/pr/7", "sub"),
        ("hf://org/name@refs%2Fpr%2F7", "hf", "org/name", "refs/pr/7", ""),
        ("file:///data/my%20model", "", "", "", "/data/my model"),
        ("file://localhost/data/m", "", "", "", "/data/m"),
        ("models/base", "", "", "", "models/base"),
    ],
)
def test_parse__takes_the_parts_apart(text: str, scheme: str, root: str, revision: str, key: str) -> None:
    location = Location.parse(text)
    assert (location.scheme, location.root, location.revision, location.key) == (scheme, root, revision, key)


@pytest.mark.parametrize(
    "place",
    [
        "", None, 5, ["model"], "s3://", "hf://org", "hf://org/name@", "hf:///name", "hf://org/na me", "https://user:secret@host/x",
        "https://host/x?token=secret", "s3://key:secret@bucket/x", "s3://bucket/../other",
    ],
)  # fmt: skip
def test_location__refuses_what_names_nothing_or_holds_credentials(place: Any) -> None:
    with refuses(RecipeError, "location.invalid") as caught:
        Location.of(place)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("page", "model"), [("", ""), ("/tree/v1/", "@v1"), ("/blob/v1/a/b.pt", "@v1/a/b.pt")])
def test_parse__tells_the_model_of_a_page_of_the_hub(page: str, model: str) -> None:
    with pytest.raises(RecipeError, match=f"is a page of the Hub.* write hf://org/name{model}"):
        Location.parse(f"https://huggingface.co/org/name{page}")
    assert Location.parse("https://huggingface.co/org/name/resolve/v1").root == "huggingface.co"


def test_local__is_the_path_itself() -> None:
    location = Location.local(Path("/data/model"))
    assert (str(location / "x"), (location / "x").local_path) == ("/data/model/x", Path("/data/model/x"))
    assert location / "/elsewhere" == Location.local(Path("/elsewhere"))
    assert [is_remote(text) for text in ("/data", "file:///data", "s3://bucket/x")] == [False, False, True]
    with pytest.raises(RecipeError, match="not on this machine"):
        _ = Location.parse("s3://bucket/x").local_path


def test_locations__sort_by_store_and_path() -> None:
    texts = ["hf://org/name", "/b", "s3://a/x", "/a", "s3://a"]
    assert [str(location) for location in sorted(map(Location.parse, texts))] == [
        "/a", "/b", "hf://org/name", "s3://a", "s3://a/x",
    ]  # fmt: skip


charges = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Purpose), st.integers(0, 1 << 50)), max_size=8)
Charges = Sequence[tuple[str, Purpose, int]]


def ledger_of(made: Charges) -> Ledger:
    ledger = Ledger()
    for charge in made:
        ledger.charge(*charge)
    return ledger


@given(st.lists(charges, max_size=5))
def test_usage__of_parts_adds_up_to_that_of_the_whole(parts: list[Charges]) -> None:
    whole = ledger_of([charge for part in parts for charge in part]).usage()
    usages = [ledger_of(part).usage() for part in parts]
    for ordered in (usages, usages[::-1]):
        total, ledger = Usage(), Ledger()
        for usage in ordered:
            total = total + usage
            ledger.add(usage)
        assert total == whole + Usage() == ledger.usage() + Usage()
    assert total.total_bytes == sum(nbytes for part in parts for _, _, nbytes in part)


@given(charges, charges)
def test_usage__since_an_earlier_one_is_what_was_charged_since(earlier: Charges, later: Charges) -> None:
    ledger = ledger_of(earlier)
    before = ledger.usage()
    for charge in later:
        ledger.charge(*charge)
    assert ledger.usage() - before == ledger_of(later).usage() + Usage()


def test_ledger__refuses_usage_of_a_part_beyond_the_budget() -> None:
    ledger = ledger_of([("a", Purpose.EXPERT, 60)])
    ledger.expert_limit_bytes = 100
    ledger.add(ledger_of([("b", Purpose.EXPERT, 40), ("b", Purpose.BASE, 900)]).usage())
    with refuses(LimitError, "budget.exceeded"):
        ledger.add(ledger_of([("b", Purpose.ANALYSIS, 1)]).usage())
