"""Snapshots are verified, repaired, made again and compared: damage anywhere is found, named and mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mergepipe
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError
from support.disk_families import tree_digest
from support.families import TINY, write_family
from support.local_models import manifest_of
from support.public_names import BLOCKS_NAME, MANIFEST_NAME
from support.refusals import refuses

SHARD_BYTES = 30_000
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
MADE = [("ties", None), ("dare_linear", "60%"), ("linear", "40%")]


@pytest.fixture(scope="module", params=MADE, ids=lambda made: f"{made[0]}-{made[1]}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs and a snapshot `out` of them."""
    root = tmp_path_factory.mktemp("made")
    write_family(root / "family", TINY, 2)
    operator, budget = request.param
    density = "" if operator == "linear" else ", density: 0.5"
    models = "".join(f"- {{model: family/expert-{i}, parameters: {{weight: 0.{i}{density}}}}}\n" for i in (1, 2))
    text = f"merge_method: {operator}\nbase_model: family/base\nmodels:\n{models}dtype: bfloat16\n"
    (root / "recipe.yml").write_text(text)
    mergepipe.merge(root / "recipe.yml", root / "out", budget=budget, seed=5, shard_bytes=SHARD_BYTES, catalog=False)
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The snapshot, to be damaged, beside the original: it names its inputs relative to itself."""
    return Path(shutil.copytree(made / "out", made / tmp_path.name))


def files_of(snapshot: Path) -> list[Path]:
    return sorted(path for path in snapshot.rglob("*") if path.is_file())


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(bytes(content))


def test_verify__a_snapshot_is_sound(made: Path) -> None:
    report = mergepipe.verify(made / "out", deep_fraction=1.0)
    manifest = manifest_of(made / "out")
    assert (report.damages, report.notices) == ((), ())
    assert report.is_sound
    assert (report.sid, report.tensors) == (manifest.sid, len(manifest.tensors))
    assert report.replayed == tuple(tensor.name for tensor in manifest.tensors)
    assert report.read_bytes == report.replayed_bytes > 0
    assert len(manifest.files) > 2


@pytest.mark.thorough
def test_verify__a_flipped_bit_anywhere_is_found(copy: Path) -> None:
    for path in files_of(copy):
        sound = path.read_bytes()
        for position in sorted({0, 7, 8, len(sound) // 3, len(sound) // 2, len(sound) - 1}):
            flip(path, position, position % 8)
            try:
                found = bool(mergepipe.verify(copy).damages)
            except MergePipeError as error:
                found = path.name == MANIFEST_NAME and isinstance(error, CorruptError)
            assert found, (path.name, position)
            path.write_bytes(sound)
    assert mergepipe.verify(copy).is_sound


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def scramble(path: Path) -> None:
    for position in range(0, path.stat().st_size, 777):
        flip(path, position)


CHANGES: list[Callable[[Path], None]] = [cut, extend, empty, remove, scramble]


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_repair__brings_every_file_back_to_the_byte(
    made: Path, copy: Path, change: Callable[[Path], None], step: int
) -> None:
    """The fast form makes each change to every other file: some changes to the even ones, others to the odd ones."""
    wanted = {path.name: path.read_bytes() for path in files_of(made / "out")}
    inputs = tree_digest(made / "family")
    for path in files_of(copy)[CHANGES.index(change) % step :: step]:
        if path.name == MANIFEST_NAME or (change is cut and path.stat().st_size < 1000):
            continue
        change(path)
        assert not mergepipe.verify(copy).is_sound
        report = mergepipe.repair(copy)
        assert report.repaired
        assert {p.name: p.read_bytes() for p in files_of(copy)} == wanted
    assert tree_digest(made / "family") == inputs
    assert not [path for path in copy.parent.iterdir() if "repair" in path.name and path.name.startswith(".")]


def test_repair__mends_everything_at_once_and_keeps_times(made: Path, copy: Path) -> None:
    wanted = {path.name: path.read_bytes() for path in files_of(made / "out")}
    weights = sorted(copy.glob("*.safetensors"))
    scramble(weights[0])
    time = weights[0].stat().st_mtime_ns
    weights[1].unlink()
    (copy / BLOCKS_NAME).unlink()
    mergepipe.repair(copy)
    assert {path.name: path.read_bytes() for path in files_of(copy)} == wanted
    assert weights[0].stat().st_mtime_ns == time


def test_verify__lists_a_table_of_digests_that_is_no_file_and_repair_puts_it_back(made: Path, copy: Path) -> None:
    (copy / BLOCKS_NAME).unlink()
    os.mkfifo(copy / BLOCKS_NAME)
    assert [damage.kind for damage in mergepipe.verify(copy).damages] == ["blocks-file"]
    mergepipe.repair(copy)
    assert (copy / BLOCKS_NAME).read_bytes() == (made / "out" / BLOCKS_NAME).read_bytes()


def test_repair__leaves_a_sound_snapshot_alone(copy: Path) -> None:
    before = tree_digest(copy)
    assert mergepipe.repair(copy).repaired == ()
    assert tree_digest(copy) == before


def test_replay__gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    report = mergepipe.replay(made / "out", tmp_path / "again", catalog=False)
    manifest = manifest_of(made / "out")
    assert report.sid == manifest.sid
    for file in manifest.files:
        assert (tmp_path / "again" / file.name).read_bytes() == (made / "out" / file.name).read_bytes()
    assert mergepipe.diff(made / "out", tmp_path / "again").tensors == ()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Inputs and a snapshot of which a test may change anything."""
    write_family(tmp_path / "family", TINY, 2)
    models = "".join(f"- {{model: family/expert-{i}, parameters: {{weight: 0.{i}}}}}\n" for i in (1, 2))
    (tmp_path / "recipe.yml").write_text(f"merge_method: linear\nbase_model: family/base\nmodels:\n{models}")
    mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "out", shard_bytes=SHARD_BYTES, catalog=False)
    return tmp_path


def test_replay__says_which_input_is_gone(own: Path) -> None:
    (own / "family" / "expert-2").rename(own / "elsewhere")
    with refuses(NotFoundError, "input.not-found") as caught:
        mergepipe.replay(own / "out", own / "again", catalog=False)
    assert "expert-2" in str(caught.value)
    assert "expert-1" not in str(caught.value)


def test_replay__says_which_input_has_other_files(own: Path) -> None:
    (file,) = (own / "family" / "expert-1").glob("*.safetensors")
    file.write_bytes((own / "out" / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(MergePipeError, match="expert-1"):
        mergepipe.replay(own / "out", own / "again", catalog=False)
    assert not (own / "again").exists()


def test_replay__publishes_nothing_if_values_have_changed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (own / "family" / "expert-1").glob("*.safetensors")
    flip(file, -1, 3)
    with pytest.raises(ConflictError) as caught:
        mergepipe.replay(own / "out", own / "again", catalog=False)
    assert [problem.code for problem in caught.value.problems] == ["input.changed", "input.changed"]
    assert str(file) in str(caught.value)
    assert not (own / "again").exists()
    report = mergepipe.verify(own / "out", deep_fraction=1.0)
    causes = {(damage.kind, damage.message.split(": ")[1]) for damage in report.damages}
    assert causes == {("replay", "the values of an input have changed")}
    monkeypatch.setattr(mergepipe, "__version__", "9.9")
    (first, *_) = mergepipe.verify(own / "out", deep_fraction=1.0).damages
    assert first.message.endswith(", this is 9.9")
    flip(sorted((own / "out").glob("*.safetensors"))[-1], -1)
    damaged = tree_digest(own / "out")
    with refuses(ConflictError, "input.changed"):
        mergepipe.repair(own / "out")
    assert tree_digest(own / "out") == damaged


def test_diff__tells_what_differs_and_by_how_much(own: Path) -> None:
    other = own / "other.yml"
    other.write_text((own / "recipe.yml").read_text().replace("0.2", "0.5"))
    mergepipe.merge(other, own / "other", budget="50%", shard_bytes=SHARD_BYTES, catalog=False)
    found = mergepipe.diff(own / "out", own / "other")
    assert "-- {model: family/expert-2, parameters: {weight: 0.2}}" in found.recipe
    assert any(line.startswith("plan: none") for line in found.settings)
    assert found.inputs == ()
    assert len(found.tensors) > 0
    assert all(change.kind == "values" and change.norm and change.norm > 0 for change in found.tensors)
    assert found.norm is not None
    squares = sum((change.norm or 0.0) ** 2 for change in found.tensors)
    assert found.norm**2 == pytest.approx(squares)
    fast = mergepipe.diff(own / "out", own / "other", reads_tensors=False)
    assert [change.name for change in fast.tensors] == [change.name for change in found.tensors]
    assert {change.norm for change in fast.tensors} == {None}


def test_verify__of_the_golden_snapshot(tmp_path: Path) -> None:
    snapshot = Path(shutil.copytree(GOLDEN / "manifest-5", tmp_path / "golden"))
    assert mergepipe.verify(snapshot).is_sound
    flip(sorted(snapshot.glob("*.safetensors"))[0], -1)
    assert [damage.kind for damage in mergepipe.verify(snapshot).damages] == ["block"]
