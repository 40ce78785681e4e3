"""Packed experts in a bucket: a merge asks for headers, the index and the planned levels; all can be read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packing_cases import make_family, tree

from mergepipe import api
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, PIECES_OF, Level, Piece
from mergepipe.deltastore.index import HEADER_FORMAT, HEADER_NAME, INDEX_NAME, PIECE_NAMES, StoreIndex
from mergepipe.errors import NotFoundError, RecipeError, UnsupportedError
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.storage.location import Location
from support.fault_server import BucketServer
from support.remote_stores import set_environment

RECIPE = """\
merge_method: task_arithmetic
base_model: {base}
models:
- {{model: "{packs}/expert-1", parameters: {{weight: 0.7}}}}
- {{model: "{packs}/expert-2", parameters: {{weight: 0.5}}}}
dtype: bfloat16
"""
BUCKET = "s3://bucket"
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Packs:
    """A base and packed experts, here and as objects on a server."""

    folder: Path
    server: BucketServer

    def recipe(self, packs: str) -> Path:
        path = self.folder / "recipe.yml"
        path.write_text(RECIPE.format(base=self.folder / "base", packs=packs))
        return path


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packs]:
    family = make_family(tmp_path)
    api.pack(family.base, family.experts, tmp_path / "packs", threads=2)
    root = tmp_path / "packs"
    files = {f"bucket/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with BucketServer(files) as server:
        set_environment(monkeypatch, server.url)
        yield Packs(tmp_path, server)


def merged(packs: Packs, place: str, out: str) -> dict[str, bytes]:
    api.merge(packs.recipe(place), packs.folder / out, options=MergeOptions(catalog=False, threads=2))
    return {path.name: path.read_bytes() for path in sorted((packs.folder / out).glob("*.safetensors"))}


def test_merge__of_remote_packs_is_that_of_packs_here(packs: Packs) -> None:
    assert merged(packs, BUCKET, "there") == merged(packs, str(packs.folder / "packs"), "here")


@pytest.mark.parametrize("budget", ["30%", "60%"])
def test_run__of_remote_packs_asks_for_headers_index_and_planned_levels_alone(packs: Packs, budget: str) -> None:
    options = PlanOptions(block_elements=BLOCK_ELEMENTS)
    decided = api.plan(packs.recipe(BUCKET), budget, home=packs.folder / "home", options=options)
    packs.server.requests.clear()
    api.run(decided, packs.folder / "out", options=RunOptions(home=packs.folder / "home", threads=2))
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
        api.unpack(f"{BUCKET}/expert-2", packs.folder / "unpacked")
    api.unpack(f"{BUCKET}/expert-2", packs.folder / "unpacked", base=packs.folder / "base", threads=2)
    assert tree(packs.folder / "unpacked") == tree(packs.folder / "expert-2")


def test_unpack__of_a_pack_that_was_moved_into_a_bucket_with_its_base_finds_it(packs: Packs) -> None:
    for place in ("base", "packs/expert-2"):
        for name, content in tree(packs.folder / place).items():
            packs.server.put(f"bucket/family/{place}/{name}", content)
    api.unpack(f"{BUCKET}/family/packs/expert-2", packs.folder / "unpacked", threads=2)
    assert tree(packs.folder / "unpacked") == tree(packs.folder / "expert-2")


def test_unpack__of_a_pack_here_finds_a_base_in_a_bucket(packs: Packs) -> None:
    for name, content in tree(packs.folder / "base").items():
        packs.server.put(f"bucket/base/{name}", content)
    api.pack(f"{BUCKET}/base", [packs.folder / "expert-2"], packs.folder / "others", threads=2)
    (packs.folder / "deep").mkdir()
    (packs.folder / "others").rename(packs.folder / "deep" / "er")
    api.unpack(packs.folder / "deep" / "er" / "expert-2", packs.folder / "unpacked", threads=2)
    assert tree(packs.folder / "unpacked") == tree(packs.folder / "expert-2")


def test_verify__of_a_remote_pack_names_the_tensor_that_is_damaged(packs: Packs) -> None:
    report = api.verify(f"{BUCKET}/expert-1", base=packs.folder / "base", options=RunOptions(threads=2))
    assert (report.is_sound, report.tensors, str(report.path)) == (True, 4, f"{BUCKET}/expert-1")
    file = f"bucket/expert-1/{PIECE_NAMES[Piece.HEAD]}"
    content = bytearray(packs.server.files[file])
    content[len(content) // 2] ^= 1
    packs.server.put(file, bytes(content))
    packs.server.put("bucket/expert-1/notes.txt", b"about expert-2")
    report = api.verify(f"{BUCKET}/expert-1", base=packs.folder / "base", options=RunOptions(threads=2))
    assert [each.kind for each in report.damages] == ["pack", "pack"]
    assert [each.tensor or each.file for each in report.damages] == ["a.wide", "notes.txt"]


def test_verify__of_a_pack_finds_a_base_that_moved(packs: Packs) -> None:
    (packs.folder / "base").rename(packs.folder / "moved")
    with pytest.raises(NotFoundError, match="give it with base"):
        api.verify(packs.folder / "packs" / "expert-1")
    assert api.verify(packs.folder / "packs" / "expert-1", base=packs.folder / "moved").is_sound
    with pytest.raises(RecipeError, match="is no packed expert"):
        api.verify(packs.folder / "moved", base=packs.folder)


def test_pack__onto_the_hub_or_a_web_server_is_refused_before_anything_is_read(packs: Packs) -> None:
    for place in ("hf://org/packs", f"{packs.server.url}/bucket"):
        with pytest.raises(UnsupportedError) as caught:
            api.pack(packs.folder / "base", [packs.folder / "expert-1"], place)
        assert caught.value.code == "pack.unsupported"
    assert packs.server.requests == []
