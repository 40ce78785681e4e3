"""Experts packed into buckets and pushed to the Hub; merges of packs there ask for the planned levels alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from packing_cases import make_family, write_model

import mergepipe
from mergepipe import Plan
from mergepipe.deltastore.index import HEADER_FORMAT, PIECE_NAMES, StoreIndex
from mergepipe.deltastore.pieces import PIECES_OF, Level, Piece
from mergepipe.errors import MergePipeError, NotFoundError, OutputError, StorageError
from mergepipe.reports import PackReport
from mergepipe.storage.location import Location
from support.bucket_outputs import (
    Killed,
    Requests,
    bucket_folder,
    bucket_server,
    files_below,
    new_prefix,
    objects_below,
    watch_buckets,
)
from support.fault_server import BucketServer
from support.model_folders import recipe_of
from support.public_names import BLOCK_ELEMENTS, HEADER_NAME, INDEX_NAME, MANIFEST_NAME
from support.refusals import refuses
from support.remote_stores import set_environment
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
    mergepipe.pack(root / "base", [root / name for name in EXPERTS], root / "packs", threads=2)
    return root


@pytest.fixture
def out(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nothing lies under."""
    return new_prefix(server, monkeypatch)


def pack(family: Path, out: str | Path) -> PackReport:
    experts = [family / name for name in EXPERTS]
    return mergepipe.pack(family / "base", experts, out, threads=2, home=family / "home")


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


@pytest.mark.thorough
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


def kill_at(requests: Requests, number: int) -> None:
    requests.changes.clear()
    requests.fails_at, requests.is_dead = number, False


SLOW = [pytest.param(eighths, marks=pytest.mark.slow) for eighths in (1, 2, 4, 5, 6, 7)]


@pytest.mark.parametrize("eighths", [3, *SLOW])
def test_pack__killed_leaves_all_or_nothing(
    family: Path, out: str, monkeypatch: pytest.MonkeyPatch, eighths: int
) -> None:
    requests = watch_buckets(monkeypatch)
    pack(family, f"{out}-whole")
    kill_at(requests, len(requests.changes) * eighths // 8 - 1)
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
    bucket_folder(f"{out}/expert-2").create("theirs.txt", b"theirs")
    with refuses(OutputError, "output.not-ours"):
        pack(family, out)
    assert objects_below(f"{out}/expert-2") == {"theirs.txt": b"theirs"}
    with pytest.raises(MergePipeError, match="s3://nowhere: there is no such bucket"):
        pack(family, "s3://nowhere/packs")


def test_push__of_a_packed_expert_is_that_of_pack(family: Path, out: str) -> None:
    for name in EXPERTS:
        report = mergepipe.push(family / "packs" / name, f"{out}/{name}")
        assert_packed(family, f"{out}/{name}", name)
        assert report.files == len(files_below(family / "packs" / name))
        with pytest.raises(OutputError, match="packed expert already"):
            mergepipe.push(family / "packs" / name, f"{out}/{name}")


BUCKET = "s3://bucket"
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Packs:
    """A base and packed experts, here and as objects on a server."""

    folder: Path
    server: BucketServer

    def recipe(self, packs: str) -> Path:
        path = self.folder / "recipe.yml"
        models = {f"{packs}/expert-1": {"weight": 0.7}, f"{packs}/expert-2": {"weight": 0.5}}
        path.write_text(json.dumps(recipe_of("task_arithmetic", models, self.folder / "base", dtype="bfloat16")))
        return path


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packs]:
    family = make_family(tmp_path)
    mergepipe.pack(family.base, family.experts, tmp_path / "packs", threads=2)
    root = tmp_path / "packs"
    files = {f"bucket/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with BucketServer(files) as server:
        set_environment(monkeypatch, server.url)
        yield Packs(tmp_path, server)


def merged(packs: Packs, place: str, out: str) -> dict[str, bytes]:
    mergepipe.merge(packs.recipe(place), packs.folder / out, catalog=False, threads=2)
    return {path.name: path.read_bytes() for path in sorted((packs.folder / out).glob("*.safetensors"))}


def test_merge__of_remote_packs_is_that_of_packs_here(packs: Packs) -> None:
    assert merged(packs, BUCKET, "there") == merged(packs, str(packs.folder / "packs"), "here")


@pytest.mark.parametrize("budget", ["30%", "60%"])
def test_run__of_remote_packs_asks_for_headers_index_and_planned_levels_alone(packs: Packs, budget: str) -> None:
    decided = mergepipe.plan(packs.recipe(BUCKET), budget, home=packs.folder / "home", block_elements=BLOCK_ELEMENTS)
    packs.server.requests.clear()
    mergepipe.run(decided, packs.folder / "out", home=packs.folder / "home", threads=2)
    sent = 0
    for e, name in enumerate(("expert-1", "expert-2")):
        allowed = planned_pages(packs.folder / "packs" / name, decided, e)
        reads = [request for request in packs.server.reads if request.path.startswith(f"bucket/{name}/")]
        for request in reads:
            file = request.path.rpartition("/")[2]
            if file in PIECE_NAMES.values():
                assert request.range is not None
                start = request.range[0]
                pages = range(start // PAGE, -(-(start + request.nbytes) // PAGE))
                assert {(file, page) for page in pages} <= allowed
                sent += request.nbytes
        others = {request.path.rpartition("/")[2] for request in reads} - set(PIECE_NAMES.values())
        assert others <= {HEADER_NAME, INDEX_NAME, "config.json", "notes.txt"}
    assert 0 < sent <= decided.budget_bytes


def planned_pages(folder: Path, decided: Plan, e: int) -> set[tuple[str, int]]:
    """The pages that hold pieces of the levels planned for an expert, by file."""
    header = HEADER_FORMAT.parse((folder / HEADER_NAME).read_bytes(), Location.local(folder))
    index = StoreIndex.parse((folder / INDEX_NAME).read_bytes(), "x")
    first_rows = {tensor.name: tensor.first_row for tensor in header.tensors}
    pages = set()
    for tensor in decided.tensors:
        access = dict(zip(tensor.models, tensor.access, strict=True))[e]
        level_of = {block: level for start, stop, level in access.levels for block in range(start, stop)}
        for start, stop in access.blocks:
            for block in range(start, stop):
                row = first_rows[tensor.name] + block
                for piece in PIECES_OF[Level(level_of.get(block, Level.LOSSLESS))]:
                    at, end = (int(offset) for offset in index.offsets_PR[piece, row : row + 2])
                    pages |= {(PIECE_NAMES[piece], page) for page in range(at // PAGE, -(-end // PAGE)) if end > at}
    return pages


def test_unpack__of_a_remote_pack_is_the_original(packs: Packs) -> None:
    with pytest.raises(NotFoundError, match="give it with base"):  # a store names its base relative to itself
        mergepipe.unpack(f"{BUCKET}/expert-2", packs.folder / "unpacked")
    mergepipe.unpack(f"{BUCKET}/expert-2", packs.folder / "unpacked", base=packs.folder / "base", threads=2)
    assert files_below(packs.folder / "unpacked") == files_below(packs.folder / "expert-2")


def test_unpack__of_a_pack_that_was_moved_into_a_bucket_with_its_base_finds_it(packs: Packs) -> None:
    for place in ("base", "packs/expert-2"):
        for name, content in files_below(packs.folder / place).items():
            packs.server.put(f"bucket/family/{place}/{name}", content)
    mergepipe.unpack(f"{BUCKET}/family/packs/expert-2", packs.folder / "unpacked", threads=2)
    assert files_below(packs.folder / "unpacked") == files_below(packs.folder / "expert-2")


def test_unpack__of_a_pack_here_finds_a_base_in_a_bucket(packs: Packs) -> None:
    for name, content in files_below(packs.folder / "base").items():
        packs.server.put(f"bucket/base/{name}", content)
    mergepipe.pack(f"{BUCKET}/base", [packs.folder / "expert-2"], packs.folder / "others", threads=2)
    (packs.folder / "deep").mkdir()
    (packs.folder / "others").rename(packs.folder / "deep" / "er")
    mergepipe.unpack(packs.folder / "deep" / "er" / "expert-2", packs.folder / "unpacked", threads=2)
    assert files_below(packs.folder / "unpacked") == files_below(packs.folder / "expert-2")


def test_verify__of_a_remote_pack_names_the_tensor_that_is_damaged(packs: Packs) -> None:
    report = mergepipe.verify(f"{BUCKET}/expert-1", base=packs.folder / "base", threads=2)
    assert (report.is_sound, report.tensors, str(report.path)) == (True, 4, f"{BUCKET}/expert-1")
    file = f"bucket/expert-1/{PIECE_NAMES[Piece.HEAD]}"
    content = bytearray(packs.server.files[file])
    content[len(content) // 2] ^= 1
    packs.server.put(file, bytes(content))
    packs.server.put("bucket/expert-1/notes.txt", b"about expert-2")
    report = mergepipe.verify(f"{BUCKET}/expert-1", base=packs.folder / "base", threads=2)
    assert [each.kind for each in report.damages] == ["pack", "pack"]
    assert [each.tensor or each.file for each in report.damages] == ["a.wide", "notes.txt"]
    with pytest.raises(NotFoundError, match="not a snapshot"):
        mergepipe.verify(packs.folder / "base", base=packs.folder)


def test_pack__onto_a_web_server_is_refused_before_anything_is_read(packs: Packs) -> None:
    with refuses(OutputError, "output.place"):
        mergepipe.pack(packs.folder / "base", [packs.folder / "expert-1"], f"{packs.server.url}/bucket")
    assert packs.server.requests == []
