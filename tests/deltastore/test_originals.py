"""Originals of delta stores: what was packed is known by its content; times prove nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import PackFamily, make_family

import mergepipe
from mergepipe.checkpoints.content_id import PassingContentId, content_id, samples
from mergepipe.checkpoints.contract import TensorEntry, files_of
from mergepipe.checkpoints.open_files import open_files
from mergepipe.deltastore.checkpoint import read_store
from mergepipe.deltastore.index import HEADER_FORMAT
from mergepipe.errors import OutputError
from mergepipe.runs.inputs import open_path
from mergepipe.storage.contract import version_of
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.bucket_outputs import files_below
from support.disk_families import weights_digest
from support.local_models import open_local
from support.public_names import HEADER_NAME
from support.refusals import refuses

Edit = Callable[[Path], Path]


@pytest.fixture(name="packed", scope="module")
def make_packed(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    """A family whose experts are packed in `stores`."""
    root = tmp_path_factory.mktemp("originals")
    family = make_family(root)
    for expert in family.experts:
        (expert / "notes.txt").write_text(f"about {expert.name}")
    mergepipe.pack(family.base, family.experts, root / "stores")
    return family


@pytest.fixture(name="family")
def copy_packed(packed: PackFamily, tmp_path: Path) -> PackFamily:
    """The same in a place of its own: times are kept, inodes are not, and no header knows the place."""
    shutil.copytree(packed.root, tmp_path / "family")
    root = tmp_path / "family"
    return PackFamily(root, root / "base", tuple(root / expert.name for expert in packed.experts))


def in_place(path: Path, at: int) -> Path:
    """Change a byte, and set the time back."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def weights_of(expert: Path) -> Path:
    return sorted(expert.glob("*.safetensors"))[-1]


EDITS: dict[str, Edit] = {
    "end of the weights": lambda expert: in_place(weights_of(expert), -1),
    "middle of the weights": lambda expert: in_place(weights_of(expert), weights_of(expert).stat().st_size // 2),
    "another file": lambda expert: in_place(expert / "notes.txt", 0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_pack__an_edit_with_the_time_set_back_is_seen_and_nothing_is_written(family: PackFamily, edit: str) -> None:
    changed = EDITS[edit](family.experts[1])
    before = files_below(family.root)
    with refuses(OutputError, "output.exists") as caught:
        mergepipe.pack(family.base, family.experts, family.root / "stores")
    assert str(changed) in str(caught.value)
    assert files_below(family.root) == before


def test_pack__a_copy_with_other_times_is_known_by_its_content(family: PackFamily) -> None:
    for path in (weights_of(family.base), weights_of(family.experts[0])):
        os.utime(path, ns=(1, 1))
    before = files_below(family.root)
    report = mergepipe.pack(family.base, family.experts, family.root / "stores")
    assert ([expert.is_new for expert in report.experts], files_below(family.root)) == ([False, False], before)
    in_place(weights_of(family.base), -1)
    with pytest.raises(OutputError) as caught:
        mergepipe.pack(family.base, family.experts[:1], family.root / "stores")
    assert str(weights_of(family.base)) in str(caught.value)


@pytest.mark.parametrize("time", [-(10**18), -1, 2**63 // 10**9 * 10**9 + 10**18])
def test_pack__takes_files_of_any_time(family: PackFamily, time: int) -> None:
    path = weights_of(family.experts[0])
    try:
        os.utime(path, ns=(time, time))
    except (OSError, OverflowError):
        os.utime(path, ns=(-1, -1))
    store = family.root / "others" / family.experts[0].name
    mergepipe.pack(family.base, family.experts[:1], store.parent)
    (file,) = [f for f in read_store(LocalStore(), Location.local(store)).header.files if f.name == path.name]
    assert file.version == version_of(path, path.stat())
    mergepipe.unpack(store, family.root / "back")
    assert files_below(family.root / "back") == files_below(family.experts[0])


# --- the content id that a store keeps of its original: the same, and for nothing


def stores(packed: PackFamily) -> list[Path]:
    return [packed.root / "stores" / expert.name for expert in packed.experts]


def id_of(path: Path) -> str:
    store = LocalStore()
    checkpoint = open_local(path, store)
    with open_files(store, files_of(checkpoint.tensors.values())) as files:
        return content_id(checkpoint, files)


def test_pack__keeps_the_content_id_of_the_original(packed: PackFamily) -> None:
    for store, expert in zip(stores(packed), packed.experts, strict=True):
        header = HEADER_FORMAT.parse((store / HEADER_NAME).read_bytes(), Location.local(store))
        assert header.content_id == id_of(expert)
        opened = open_path(LocalStore(), Location.local(store), open_local(packed.base))
        assert list(samples(opened)) == []


@given(data=st.data())
def test_passing_content_id__does_not_depend_on_how_bytes_pass_by(packed: PackFamily, data: st.DataObject) -> None:
    expert = open_local(packed.experts[0])
    passing = PassingContentId(expert)
    shown = data.draw(st.permutations(list(expert.tensors.values())))
    for entry in shown[: data.draw(st.integers(0, len(shown)))]:
        assert isinstance(entry, TensorEntry)
        content = np.frombuffer(entry.file.local_path.read_bytes(), np.uint8)[
            entry.offset : entry.offset + entry.nbytes
        ]
        cuts = sorted({0, entry.nbytes, *data.draw(st.lists(st.integers(0, entry.nbytes), max_size=4))})
        for start, stop in data.draw(st.permutations(list(pairwise(cuts)))):
            passing.show(entry.name, start, content[start:stop])
    store = LocalStore()
    with open_files(store, passing.missing_files) as files:
        assert passing.value(files) == id_of(packed.experts[0])


@pytest.mark.parametrize("budget", [None, "100%", "40%"])
def test_merge__of_packed_experts_at_random_samples_nothing(
    packed: PackFamily, tmp_path: Path, budget: str | None
) -> None:
    raw = mergepipe.merge(packed.recipe("dare_ties"), tmp_path / "raw", home=tmp_path / "h1")
    recipe = packed.recipe("dare_ties", stores(packed))
    report = mergepipe.merge(recipe, tmp_path / "out", budget=budget, home=tmp_path / "h2")
    assert report.analysis_bytes == 0
    assert raw.analysis_bytes > 0
    if budget != "40%":
        assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "raw")
