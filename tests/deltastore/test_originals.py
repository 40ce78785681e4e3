"""Originals of delta stores: what was packed is known by its content; times prove nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from packing_cases import PackFamily, make_family

import mergepipe
from mergepipe.deltastore.checkpoint import read_store
from mergepipe.errors import OutputError
from mergepipe.storage.contract import version_of
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.bucket_outputs import files_below
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
