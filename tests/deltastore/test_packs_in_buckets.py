"""Experts packed into buckets, and pushed there and to the Hub: the stores of this machine, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packing_cases import write_model

from mergepipe import api
from mergepipe.deltastore.index import HEADER_FORMAT, HEADER_NAME
from mergepipe.errors import MergePipeError, OutputError, StorageError
from mergepipe.reports import PackReport
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.location import Location
from mergepipe.storage.remote.bucket_folder import BucketFolder
from support.bucket_outputs import (
    Killed,
    Requests,
    bucket_server,
    files_below,
    new_prefix,
    objects_below,
    watch_buckets,
)
from support.s3_server import S3Server

EXPERTS = ("expert-1", "expert-2")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts of it, and their stores packed on this machine."""
    root = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(3)
    base = rng.integers(15000, 16000, (300, 400), np.uint16)
    for number, name in enumerate(("base", *EXPERTS)):
        moved = base + rng.integers(0, 3, base.shape, np.uint16) * np.uint16(number > 0)
        folder = write_model(root / name, {"a.weight": moved, "b.norm": moved[0]})
        if number == 1:
            (folder / MANIFEST_NAME).write_text("an expert may be a snapshot")
    api.pack(root / "base", [root / name for name in EXPERTS], root / "packs", threads=2)
    return root


@pytest.fixture
def out(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nothing lies under."""
    return new_prefix(server, monkeypatch)


def pack(family: Path, out: str | Path) -> PackReport:
    experts = [family / name for name in EXPERTS]
    return api.pack(family / "base", experts, out, threads=2, home=family / "home")


def assert_packed(family: Path, out: str, name: str = "") -> None:
    """All that lies there are the stores of this machine, without its paths."""
    remote, wanted = objects_below(out), files_below(family / "packs" / name)
    assert remote.keys() == wanted.keys()
    for file, content in remote.items():
        if not file.endswith(HEADER_NAME):
            assert content == wanted[file]
            continue
        ours, theirs = (HEADER_FORMAT.parse(raw, Location.parse("x")) for raw in (content, wanted[file]))
        assert (ours.base, ours.expert) == ("base", Path(theirs.expert).name)
        assert (ours.tensors, ours.kept, ours.index_blake3) == (theirs.tensors, theirs.kept, theirs.index_blake3)


def test_pack__into_a_bucket_puts_each_header_last(family: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = watch_buckets(monkeypatch)
    report = pack(family, out)
    assert [str(expert.store) for expert in report.experts] == [f"{out}/{name}" for name in EXPERTS]
    for name in EXPERTS:
        created = [key for kind, key in requests.changes if kind == "create" and f"/{name}/" in key]
        assert created[-1].endswith(f"/{name}/{HEADER_NAME}")
    assert_packed(family, out)
    assert [path for path in (family / "home" / "uploads").rglob("*") if path.is_file()] == []
    requests.changes.clear()
    assert [expert.is_new for expert in pack(family, out).experts] == [False, False]
    assert requests.changes == []


def kill_at(requests: Requests, number: int, error: type[BaseException] = Killed) -> None:
    requests.changes.clear()
    requests.fails_at, requests.is_dead = number, False
    requests.error = error


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (8, 16, 20, 24, 28)]


@pytest.mark.parametrize("number", [12, *SLOW])
def test_pack__killed_leaves_all_or_nothing(
    family: Path, out: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    requests = watch_buckets(monkeypatch)
    kill_at(requests, number)
    with pytest.raises(Killed):
        pack(family, out)
    requests.is_dead, requests.fails_at = False, None
    before = objects_below(out)
    headers = {name for name in before if name.endswith(HEADER_NAME)}
    for header in headers:
        name = header.partition("/")[0]
        assert files_below(family / "packs" / name).keys() <= {key.partition("/")[2] for key in before}
    requests.changes.clear()
    pack(family, out)
    again = {key.partition("/")[2] for kind, key in requests.changes if kind == "overwrite"}
    assert again == set()  # what was sent is there
    assert_packed(family, out)


def test_pack__whose_upload_failed_is_not_packed_again(family: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = watch_buckets(monkeypatch)
    requests.fails_at = 12
    requests.error = lambda: StorageError.of("storage.unavailable", out, "the store is gone")
    with pytest.raises(StorageError) as caught:
        pack(family, out)
    assert any("gc" in note for note in caught.value.__notes__)
    requests.fails_at, requests.is_dead = None, False
    report = pack(family, out)
    assert max(expert.resumed_bytes for expert in report.experts) == report.experts[0].tensor_bytes
    assert_packed(family, out)


def test_pack__never_writes_among_objects_of_others(family: Path, out: str) -> None:
    BucketFolder(Location.parse(f"{out}/expert-2")).create("theirs.txt", b"theirs")
    with pytest.raises(OutputError) as caught:
        pack(family, out)
    assert caught.value.code == "output.not-ours"
    assert objects_below(f"{out}/expert-2") == {"theirs.txt": b"theirs"}
    with pytest.raises(MergePipeError, match="s3://nowhere: there is no such bucket"):
        pack(family, "s3://nowhere/packs")


def test_push__of_a_packed_expert_is_that_of_pack(family: Path, out: str) -> None:
    for name in EXPERTS:
        report = api.push(family / "packs" / name, f"{out}/{name}")
        assert_packed(family, f"{out}/{name}", name)
        assert report.files == len(files_below(family / "packs" / name))
        with pytest.raises(OutputError, match="packed expert already"):
            api.push(family / "packs" / name, f"{out}/{name}")
