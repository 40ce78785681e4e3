"""Outputs that are one file: whole or not there, with a record beside them that everything else works by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mergepipe
from mergepipe.errors import NotFoundError, OutputError
from support.disk_families import make_models, write_bare, write_sharded

pytestmark = pytest.mark.usefixtures("exact_reads")
MODELS = make_models(2)
RECORDS = ["merged.mergepipe", "merged.safetensors"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "base", MODELS[0], 3)
    for number in (1, 2):
        write_bare(tmp_path / f"expert{number}.safetensors", MODELS[number])
    return write_recipe(tmp_path, "base")


def write_recipe(root: Path, base: str, weight: float = 0.4) -> Path:
    path = root / f"{weight}.yml"
    path.write_text(
        f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n"
        + "".join(f"- {{model: expert{n}.safetensors, parameters: {{weight: {weight}}}}}\n" for n in (1, 2))
    )
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_single_file__holds_what_the_folder_would(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "merged.safetensors"
    report = mergepipe.merge(recipe, out, catalog=False)
    in_folder = mergepipe.merge(recipe, tmp_path / "folder", catalog=False)
    assert names(out.parent) == RECORDS
    assert names(out.with_suffix(".mergepipe")) == ["mergepipe.blocks", "mergepipe.json"]
    assert out.read_bytes() == (tmp_path / "folder" / "model.safetensors").read_bytes()
    assert report.sid == in_folder.sid
    assert mergepipe.merge(recipe, tmp_path / "other.safetensors", catalog=False).sid == report.sid


def test_single_file__of_a_bare_base_is_not_cut(recipe: Path, tmp_path: Path) -> None:
    write_bare(tmp_path / "base.safetensors", MODELS[0])
    bare = write_recipe(tmp_path, "base.safetensors", 0.5)
    for out, shard_bytes in (("whole", None), ("cut", 100_000)):
        mergepipe.merge(bare, tmp_path / out, catalog=False, shard_bytes=shard_bytes)
    assert [path.name for path in (tmp_path / "whole").glob("*.safetensors")] == ["model.safetensors"]
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    del recipe


def test_single_file__is_verified_repaired_and_replayed_by_its_name(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    report = mergepipe.merge(recipe, out)
    whole = out.read_bytes()
    assert mergepipe.show(out).sid == mergepipe.explain(out, masks=tmp_path / "masks").sid == report.sid
    shutil.copy(out, tmp_path / "copy.safetensors")
    shutil.copytree(out.with_suffix(".mergepipe"), tmp_path / "copy.mergepipe")
    with pytest.raises(NotFoundError, match=r"copy.mergepipe is the record of another file"):
        mergepipe.verify(tmp_path / "copy.safetensors")
    assert mergepipe.verify(out).is_sound
    assert mergepipe.verify(out.with_suffix(".mergepipe")).is_sound
    out.write_bytes(whole[:-3] + b"xyz")
    assert [damage.file for damage in mergepipe.verify(out).damages] == ["../merged.safetensors"]
    mergepipe.repair(out)
    assert out.read_bytes() == whole
    out.unlink()
    mergepipe.repair(out.with_suffix(".mergepipe"))
    assert out.read_bytes() == whole
    mergepipe.replay(out, tmp_path / "again.safetensors", catalog=False)
    assert (tmp_path / "again.safetensors").read_bytes() == whole


def test_single_file__is_an_input_whose_lineage_is_known(recipe: Path, tmp_path: Path) -> None:
    first = mergepipe.merge(recipe, tmp_path / "expert1.merged.safetensors", home=tmp_path / "home")
    shutil.copy(tmp_path / "expert1.merged.safetensors", tmp_path / "copied.safetensors")
    text = recipe.read_text().replace("expert1.safetensors", "expert1.merged.safetensors")
    recipe.write_text(text)
    mergepipe.merge(recipe, tmp_path / "next", home=tmp_path / "home")
    shown = mergepipe.show(tmp_path / "next", home=tmp_path / "home")
    assert [source.sid for source in shown.inputs] == [None, first.sid, None]


def test_single_file__replaces_only_a_file_that_is_ours(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    mergepipe.merge(recipe, out, catalog=False)
    other = write_recipe(tmp_path, "base", 0.7)
    with pytest.raises(OutputError, match="already exists"):
        mergepipe.merge(other, out, catalog=False)
    mergepipe.merge(other, out, catalog=False, force=True)
    assert mergepipe.verify(out).is_sound
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "theirs.safetensors").write_bytes(out.read_bytes())
    with pytest.raises(OutputError, match=r"has no record in theirs\.mergepipe"):
        mergepipe.merge(other, tmp_path / "theirs.safetensors", catalog=False, force=True)
    (out.with_suffix(".mergepipe") / "mine.txt").write_text("x")
    with pytest.raises(OutputError, match=r"does not list.*mine\.txt"):
        mergepipe.merge(other, out, catalog=False, force=True)
