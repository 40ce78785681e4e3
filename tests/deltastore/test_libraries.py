"""Libraries: equal tensors of packed experts stored once, members that stand alone, lying and missing members."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from packing_cases import SHAPES, PackFamily, content_of, halves, make_family, tree

import mergepipe
from mergepipe.checkpoints.contract import files_of
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.core.blocks import Span
from mergepipe.core.canonical_json import digest_of
from mergepipe.deltastore.checkpoint import open_store
from mergepipe.deltastore.header import HEADER_NAME
from mergepipe.deltastore.pack import builder as store_building
from mergepipe.deltastore.pack import own_files
from mergepipe.errors import NotFoundError, RecipeError, StorageError, UnsupportedError
from mergepipe.options import MergeOptions
from mergepipe.reports import LibraryMember
from mergepipe.storage import owned
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.safetensors_bytes import file_bytes

ALL = ("expert-1", "expert-2", "expert-3")


@pytest.fixture(scope="module", autouse=True)
def let_small_tensors_have_files() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_files, "OWN_FILE_BYTES", 4096)
        patch.setattr(own_files, "_PART_BYTES", 100_000)
        yield


@pytest.fixture(scope="module", name="family")
def make_sharing_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    """Expert 2 has the widest tensor of expert 1, and both have a head that the base lacks; expert 3 has neither."""
    family = make_family(tmp_path_factory.mktemp("family"), 3)
    rng = np.random.default_rng(3)
    head = halves(rng.standard_normal((300, 100)).astype(np.float32))
    for number, path in enumerate(family.experts[:2]):
        moved = {name: read_halves(path, name) for name in SHAPES}
        moved["a.wide"] = read_halves(family.experts[0], "a.wide")
        moved["z.head"] = head if number == 0 else head.copy()
        (path / "model.safetensors").write_bytes(content_of(moved))
    return family


def read_halves(model: Path, name: str) -> np.ndarray:
    array = mergepipe.load_file(model)[name]
    return halves(array)


@pytest.fixture(scope="module", name="library")
def pack_library(family: PackFamily) -> Path:
    """Each member packed by a call of its own; only the first names the base."""
    library = family.root / "library"
    mergepipe.pack(family.base, family.experts[:1], library, library=True)
    for expert in family.experts[1:]:
        mergepipe.pack([], [expert], library, library=True)
    return library


@pytest.fixture(name="copy")
def copy_library(library: Path, tmp_path: Path) -> Path:
    """A copy with the same hard links."""
    copy = tmp_path / "library"
    names: dict[int, Path] = {}
    for source in sorted(library.rglob("*")):
        target = copy / source.relative_to(library)
        if source.is_dir():
            target.mkdir(parents=True)
        elif source.stat().st_ino in names:
            os.link(names[source.stat().st_ino], target)
        else:
            shutil.copy2(source, target)
            names[source.stat().st_ino] = target
    return copy


def own_names(store: Path) -> set[str]:
    return {path.name for path in store.glob("mergepipe-store.tensor-*")}


def unpacked(store: Path, out: Path) -> dict[str, bytes]:
    mergepipe.unpack(store, out)
    return tree(out)


def members_of(library: Path) -> dict[str, LibraryMember]:
    return {member.store.name: member for member in mergepipe.list_packed(library).members}


def test_library__stores_equal_tensors_once_and_gives_every_original_back(
    family: PackFamily, library: Path, tmp_path: Path
) -> None:
    shared = own_names(library / "expert-1") & own_names(library / "expert-2")
    assert len(shared) == 2
    for name in shared:
        assert (library / "expert-1" / name).samefile(library / "expert-2" / name)
    assert not own_names(library / "expert-1") & own_names(library / "expert-3")
    for name, expert in zip(ALL, family.experts, strict=True):
        assert unpacked(library / name, tmp_path / name) == tree(expert)


def test_library__is_listed_with_sizes_norms_and_what_is_shared(family: PackFamily, library: Path) -> None:
    report = mergepipe.list_packed(library)
    members = members_of(library)
    assert tuple(members) == ALL
    assert report.problems == ()
    shared = sum((library / "expert-1" / name).stat().st_size for name in own_names(library / "expert-1")
                 & own_names(library / "expert-2"))  # fmt: skip
    assert [members[name].shared_bytes for name in ALL] == [shared, shared, 0]
    assert report.packed_bytes - report.stored_bytes == shared
    on_disk = {path.stat().st_ino: path.stat().st_size for path in library.rglob("*") if path.is_file()}
    assert report.stored_bytes == sum(on_disk.values())
    plain, base = mergepipe.load_file(family.experts[2]), mergepipe.load_file(family.base)
    deltas = np.concatenate([(plain[name] - base[name]).ravel().astype(np.float64) for name in SHAPES])
    assert members["expert-3"].delta_norm == pytest.approx(np.linalg.norm(deltas), rel=1e-4)
    assert {member.base for member in report.members} == {str(family.base)}


@pytest.mark.parametrize("operator", ["ties", "task_arithmetic"])
def test_library__members_merge_as_their_originals(
    family: PackFamily, library: Path, tmp_path: Path, operator: str
) -> None:
    raw = family.recipe(operator, family.experts[::2])
    options = MergeOptions(catalog=False, allow_dropped=("z.head",))
    mergepipe.merge(raw, tmp_path / "raw", options=options)
    packed = family.recipe(operator, [library / "expert-1", library / "expert-3"])
    mergepipe.merge(packed, tmp_path / "packed", options=options)
    assert (tmp_path / "packed" / "model.safetensors").read_bytes() == (
        tmp_path / "raw" / "model.safetensors"
    ).read_bytes()


def test_library__removing_a_member_leaves_the_others_and_those_who_read_them(
    family: PackFamily, copy: Path, tmp_path: Path
) -> None:
    reading = mergepipe.load_file(copy / "expert-2")
    shutil.rmtree(copy / "expert-1")  # which changes the time of change of the files that both had
    assert reading["a.wide"].tobytes() == mergepipe.load_file(family.experts[1])["a.wide"].tobytes()
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])
    assert mergepipe.verify(copy).is_sound
    assert [member.shared_bytes for member in mergepipe.list_packed(copy).members] == [0, 0]


def test_library__a_member_stands_alone_where_it_is_copied_to(family: PackFamily, copy: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(copy / "expert-2", tmp_path / "elsewhere")
    shutil.rmtree(copy)
    assert unpacked(alone, tmp_path / "out") == tree(family.experts[1])
    assert mergepipe.pack(family.base, [], tmp_path / "none").experts == ()


def test_library__packing_again_leaves_the_members_as_they_are(family: PackFamily, library: Path) -> None:
    before = tree(library)
    report = mergepipe.pack([], family.experts, library, library=True)
    assert [expert.is_new for expert in report.experts] == [False] * 3
    assert tree(library) == before


def test_library__of_all_experts_in_one_call_is_the_same(family: PackFamily, library: Path, tmp_path: Path) -> None:
    mergepipe.pack(family.base, family.experts, tmp_path / "library", library=True)
    assert tree(tmp_path / "library") == tree(library)
    report = mergepipe.list_packed(tmp_path / "library")
    assert report.stored_bytes == mergepipe.list_packed(library).stored_bytes


def test_library__an_opened_member_reads_the_same_in_another_process(family: PackFamily, library: Path) -> None:
    store = LocalStore()
    base = open_checkpoint(store, Location.local(family.base))
    opened = open_store(store, Location.local(library / "expert-2"), base)
    again = pickle.loads(pickle.dumps(opened))
    wide = again.tensors["a.wide"]
    assert wide == opened.tensors["a.wide"]
    assert hash(wide) == hash(opened.tensors["a.wide"])
    out = np.empty(2 * wide.n_elements, np.uint8)
    with open_files(store, files_of([wide]), (again, base)) as files:
        wide.opened(files)(Span(0, wide.n_elements), out, Purpose.EXPERT)
    assert out.tobytes() == read_halves(family.experts[0], "a.wide").tobytes()


def test_library__a_lying_member_is_not_shared_with(family: PackFamily, copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "expert-2")
    for name in own_names(copy / "expert-1"):
        content = bytearray((copy / "expert-1" / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / "expert-1" / name).write_bytes(content)
    mergepipe.pack([], [family.experts[1]], copy, library=True)
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])
    report = mergepipe.verify(copy)
    assert {damage.file.partition("/")[0] for damage in report.damages} == {"expert-1"}


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "short"])
def test_library__what_is_no_file_of_a_member_is_not_shared_with(
    family: PackFamily, copy: Path, tmp_path: Path, kind: str
) -> None:
    shutil.rmtree(copy / "expert-2")
    outside = tmp_path / "outside"
    for name in own_names(copy / "expert-1"):
        path = copy / "expert-1" / name
        path.rename(outside)
        if kind == "link":
            path.symlink_to(outside)
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(b"short")
    mergepipe.pack([family.base], [family.experts[1]], copy, library=True)
    for name in own_names(copy / "expert-2"):
        status = (copy / "expert-2" / name).lstat()
        assert status.st_nlink == 1
    assert outside.stat().st_nlink == 1
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])


def test_library__a_member_that_goes_while_another_is_packed_costs_only_the_sharing(
    family: PackFamily, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "expert-2")
    link = owned.link_file

    def remove_first(old: Path, new: Path, old_root: Path) -> None:
        shutil.rmtree(copy / "expert-1", ignore_errors=True)
        link(old, new, old_root)

    monkeypatch.setattr(owned, "link_file", remove_first)
    mergepipe.pack([family.base], [family.experts[1]], copy, library=True)
    assert not (copy / "expert-1").exists()
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])


def test_library__a_file_swapped_after_it_was_compared_is_not_taken(
    family: PackFamily, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "expert-2")
    link = owned.link_file

    def swap_first(old: Path, new: Path, old_root: Path) -> None:
        (tmp_path / "evil").write_bytes(b"evil")
        (tmp_path / "evil").rename(old)
        link(old, new, old_root)

    monkeypatch.setattr(owned, "link_file", swap_first)
    mergepipe.pack([family.base], [family.experts[1]], copy, library=True)
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])


def test_library__where_links_are_refused_the_content_is_written(
    family: PackFamily, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "expert-2")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(owned, "link_file", refuse)
    mergepipe.pack([], [family.experts[1]], copy, library=True)
    assert mergepipe.list_packed(copy).stored_bytes == mergepipe.list_packed(copy).packed_bytes
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])


@pytest.mark.parametrize("failing", [1, 3, 8])
def test_library__a_pack_that_fails_between_its_steps_leaves_nothing_and_is_begun_anew(
    family: PackFamily, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    shutil.rmtree(copy / "expert-2")
    before = tree(copy)
    monkeypatch.setattr(store_building, "NOTE_BLOCKS", 1)
    steps = 0

    def failing_step(path: Path, *rest: object) -> None:
        nonlocal steps
        steps += 1
        if steps == failing:
            raise OSError(28, "No space left on device")
        write(path, *rest)  # type: ignore[arg-type]

    write = own_files._write
    monkeypatch.setattr(own_files, "_write", failing_step)
    with pytest.raises(StorageError):
        mergepipe.pack([], [family.experts[1]], copy, library=True)
    assert tree(copy) == before
    assert [path.name for path in copy.iterdir() if path.name.startswith(".")] == []
    monkeypatch.setattr(own_files, "_write", write)
    report = mergepipe.pack([], [family.experts[1]], copy, library=True)
    assert report.experts[0].resumed_bytes == 0
    assert unpacked(copy / "expert-2", tmp_path / "out") == tree(family.experts[1])


def test_library__with_damaged_and_baseless_members_lists_and_verifies_the_others(
    family: PackFamily, copy: Path
) -> None:
    os.truncate(copy / "expert-1" / HEADER_NAME, 100)
    missing = next(iter(own_names(copy / "expert-3")))
    (copy / "expert-3" / missing).unlink()
    report = mergepipe.list_packed(copy)
    assert [member.store.name for member in report.members] == ["expert-2"]
    assert len(report.problems) == 2
    assert any(missing in problem for problem in report.problems)
    damages = mergepipe.verify(copy).damages
    assert [damage.file for damage in damages] == [f"expert-1/{HEADER_NAME}", f"expert-3/{HEADER_NAME}"]
    other = mergepipe.verify(copy / "expert-2", base=family.base)
    assert other.is_sound


@pytest.mark.parametrize("name", ["mergepipe-store.tensor-x.bin", "../mergepipe-store.tensor-" + 32 * "0" + ".bin", 7])
def test_library__a_header_that_names_another_file_is_refused(copy: Path, name: object) -> None:
    path = copy / "expert-1" / HEADER_NAME
    document = json.loads(path.read_text())
    document.pop("digest")
    next(tensor for tensor in document["tensors"] if "own_file" in tensor)["own_file"] = name
    path.write_text(json.dumps({**document, "digest": digest_of(document)}))
    (problem,) = mergepipe.list_packed(copy).problems
    assert "invalid own_file" in problem


def test_library__refuses_what_it_cannot_be(family: PackFamily, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as missing:
        mergepipe.pack([], family.experts, tmp_path, library=True)
    assert missing.value.code == "pack.base-missing"
    with pytest.raises(UnsupportedError) as remote:
        mergepipe.pack(family.base, family.experts, "s3://bucket/packed", library=True)
    assert remote.value.code == "pack.remote"
    with pytest.raises(NotFoundError) as empty:
        mergepipe.list_packed(tmp_path)
    assert empty.value.code == "library.not-found"


def test_pack__refuses_an_expert_with_a_file_of_a_name_that_members_share(family: PackFamily, tmp_path: Path) -> None:
    expert = shutil.copytree(family.experts[2], tmp_path / "odd")
    (expert / f"mergepipe-store.tensor-{32 * 'a'}.bin").write_bytes(file_bytes({}))
    with pytest.raises(UnsupportedError) as caught:
        mergepipe.pack(family.base, [expert], tmp_path / "packed")
    assert caught.value.code == "pack.file"
