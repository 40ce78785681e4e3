"""Overlays hold what differs from the base; completed they are the merge to the byte; nothing takes one for a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

import mergepipe
from mergepipe import api as keeping
from mergepipe.checkpoints.formats.weight_files import OVERLAY_NAME, OVERLAY_TABLE_NAME
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    NotFoundError,
    OutputError,
    RecipeError,
    UnsupportedError,
)
from mergepipe.options import MergeOptions, RunOptions
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, record_of
from mergepipe.snapshots.overlay import writer as overlay_writer
from mergepipe.snapshots.overlay.reader import as_overlay, block_sizes, completed, is_overlay, open_overlay
from mergepipe.snapshots.overlay.table import (
    OVERLAY_VERSION,
    SIDECAR_FOLDER,
    BaseFile,
    BlockPlace,
    OverlayTable,
    overlay_table_of,
)
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.disk_families import tree_digest
from support.flat_options import call_flat

SHARD_BYTES = 3_000_000
BIG = 2 * DEFAULT_BLOCK_ELEMENTS + 1000  # elements: three blocks
MODELS = "models:\n- {model: expert-1, parameters: {weight: 0.5}}\n- {model: expert-2, parameters: {weight: 0.25}}\n"
SUM = f"merge_method: task_arithmetic\nbase_model: base\n{MODELS}"
TIES = f"merge_method: ties\nbase_model: base\nparameters: {{density: 0.5}}\n{MODELS}"
DARE = f"merge_method: dare_linear\nbase_model: base\nparameters: {{density: 0.5}}\n{MODELS}"
HALF = SUM + "dtype: float16\n"
LATER = f"name: base2\n{SUM}---\n" + SUM.replace("base_model: base", "base_model: base2")
Tensors = dict[str, NDArray[Any]]


def tensors_of(changed: float) -> Tensors:
    """A model; `changed` is added to one element of the second block of `big`, and to all of `small`."""
    rng = np.random.default_rng(7)
    big = rng.standard_normal(BIG).astype(np.float32)
    big[DEFAULT_BLOCK_ELEMENTS + 5] += np.float32(changed)
    return {
        "big": big,
        "half": rng.standard_normal((33, 7)).astype(np.float16),
        "ids": np.arange(11, dtype=np.int64),
        "none": np.zeros((0, 4), np.float32),
        "small": (rng.standard_normal((30, 40)) + changed).astype(np.float32),
        "untouched": rng.standard_normal((500, 500)).astype(np.float32),
    }


def write_models(root: Path) -> None:
    for name, changed in (("base", 0.0), ("expert-1", 0.5), ("expert-2", 1.0)):
        (root / name).mkdir(parents=True)
        save_file(tensors_of(changed), root / name / "model.safetensors")
        (root / name / "config.json").write_text(json.dumps({"model_type": "llama"}))


def merge(root: Path, out: str, recipe: str = SUM, **options: Any) -> Path:
    (root / "recipe.yml").write_text(recipe)
    call_flat(mergepipe.merge, root / "recipe.yml", root / out, shard_bytes=SHARD_BYTES, home=root / "home", **options)
    return root / out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, a merge `full` of them and the same as an `overlay`."""
    root = tmp_path_factory.mktemp("made")
    write_models(root)
    merge(root, "full")
    merge(root, "overlay", overlay=True)
    return root


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The same, of which a test may change anything."""
    write_models(tmp_path)
    merge(tmp_path, "full")
    merge(tmp_path, "overlay", overlay=True)
    return tmp_path


def contents(snapshot: Path) -> dict[str, bytes]:
    """Every file but the manifest."""
    paths = [path for path in snapshot.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    return {path.relative_to(snapshot).as_posix(): path.read_bytes() for path in paths}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(bytes(content))


def same_manifest(a: Path, b: Path) -> bool:
    """Whether two manifests are equal but for how the runs went."""
    first, second = (
        read_manifest_value(LocalStore(), Location.local(a)),
        read_manifest_value(LocalStore(), Location.local(b)),
    )
    return first.sid == second.sid and first == replace(second, realized=first.realized, run=first.run)


# --- what it holds ---


def test_overlay__stores_exactly_the_blocks_that_differ(made: Path) -> None:
    manifest = read_manifest_value(LocalStore(), Location.local(made / "overlay"))
    table = open_overlay(LocalStore(), Location.local(made / "overlay"), manifest).table
    numbered = [(t.name, i) for t in manifest.tensors for i in range(3 if t.name == "big" else int(t.name != "none"))]
    stored = {block for block, place in zip(numbered, table.places, strict=True) if place.is_stored}
    assert stored == {("big", 1), ("small", 0)}
    assert table.stored_bytes == 4 * (DEFAULT_BLOCK_ELEMENTS + 1200) == (made / "overlay" / OVERLAY_NAME).stat().st_size
    assert [file.path for file in table.files] == [str(made / "base" / "model.safetensors")]
    assert is_overlay(manifest)
    assert manifest.sid == read_manifest_value(LocalStore(), Location.local(made / "full")).sid
    assert completed(manifest) == replace(
        read_manifest_value(LocalStore(), Location.local(made / "full")), realized=manifest.realized, run=manifest.run
    )


@pytest.mark.parametrize(
    ("recipe", "budget"),
    [(SUM, None), (TIES, None), (DARE, None), (HALF, None), (LATER, None), (SUM, "50%"), (TIES, "50%"), (DARE, "50%")],
)
def test_materialise__gives_the_bytes_of_the_merge(tmp_path: Path, recipe: str, budget: str | None) -> None:
    write_models(tmp_path)
    inputs = {name: tree_digest(tmp_path / name) for name in ("base", "expert-1", "expert-2")}
    full = merge(tmp_path, "full", recipe, budget=budget, catalog=False, seed=3)
    overlay = merge(tmp_path, "overlay", recipe, budget=budget, catalog=False, seed=3, overlay=True)
    assert keeping.verify(overlay).is_sound
    report = keeping.materialise(overlay, tmp_path / "whole", options=RunOptions(catalog=False))
    assert contents(tmp_path / "whole") == contents(full)
    assert len(list(full.glob("*.safetensors"))) > 1 or recipe == HALF
    assert same_manifest(tmp_path / "whole", full)
    assert report.stored_bytes == (overlay / OVERLAY_NAME).stat().st_size
    assert report.stored_bytes + report.base_bytes < report.written_bytes
    assert keeping.verify(tmp_path / "whole").is_sound
    assert {name: tree_digest(tmp_path / name) for name in inputs} == inputs


def test_overlay__refers_to_no_file_that_is_removed_after_the_merge(tmp_path: Path) -> None:
    write_models(tmp_path)
    staged = f"name: base2\n{TIES}---\n" + SUM.replace("base_model: base", "base_model: base2")
    overlay = merge(tmp_path, "overlay", staged, overlay=True, catalog=False)
    files = open_overlay(
        LocalStore(), Location.local(overlay), read_manifest_value(LocalStore(), Location.local(overlay))
    ).table.files
    assert all(Path(file.path).is_file() for file in files)
    keeping.materialise(overlay, tmp_path / "whole", options=RunOptions(catalog=False))
    assert contents(tmp_path / "whole") == contents(merge(tmp_path, "full", staged, catalog=False))


def test_overlay__that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_models(tmp_path)

    def fail(_: object) -> bytes:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(overlay_writer, "block_digest", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        merge(tmp_path, "overlay", overlay=True, catalog=False)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "expert-1", "expert-2", "recipe.yml"}


@pytest.mark.parametrize("option", ["keep_sums", "resume"])
def test_overlay__refuses_options_without_meaning(made: Path, option: str) -> None:
    arguments: dict[str, Any] = {option: True}
    with pytest.raises(RecipeError) as caught:
        call_flat(mergepipe.merge, made / "recipe.yml", made / "never", overlay=True, catalog=False, **arguments)
    assert caught.value.code == "option.pair"
    assert option in str(caught.value)
    assert not (made / "never").exists()


# --- nobody takes it for a model ---


def test_overlay__is_refused_where_a_model_is_needed(made: Path, tmp_path: Path) -> None:
    (made / "recipe-2.yml").write_text(SUM.replace("expert-2", "overlay"))
    calls: list[Callable[[], object]] = [
        lambda: mergepipe.check(made / "recipe-2.yml"),
        lambda: mergepipe.merge(made / "recipe-2.yml", tmp_path / "out", options=MergeOptions(catalog=False)),
        lambda: keeping.repair(made / "overlay"),
        lambda: keeping.diff(made / "overlay", made / "full"),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="mergepipe materialise") as caught:
            call()
        assert caught.value.code in ("model.overlay", "snapshot.overlay")
    assert list(tmp_path.iterdir()) == []


def test_overlay__has_no_name_that_a_loader_looks_for(made: Path) -> None:
    names = {path.name for path in (made / "overlay").iterdir()}
    assert names == {
        "README.md", MANIFEST_NAME, "mergepipe.blocks", OVERLAY_NAME, OVERLAY_TABLE_NAME, SIDECAR_FOLDER
    }  # fmt: skip
    assert "mergepipe materialise" in (made / "overlay" / "README.md").read_text()


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_overlay__is_no_model_to_transformers(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    for folder in (made / "overlay", made / "overlay" / SIDECAR_FOLDER):
        with pytest.raises((OSError, ValueError)):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OSError, match="no file named"):
        transformers.LlamaForCausalLM.from_pretrained(made / "overlay", config=transformers.LlamaConfig())


# --- living with it ---


def test_overlay__is_shown_compared_replayed_and_kept(own: Path) -> None:
    assert (
        mergepipe.show(own / "overlay", home=own / "home").sid
        == read_manifest_value(LocalStore(), Location.local(own / "full")).sid
    )
    assert mergepipe.lineage(own / "overlay", home=own / "home")
    assert (
        mergepipe.explain(own / "overlay", home=own / "home").sid
        == read_manifest_value(LocalStore(), Location.local(own / "full")).sid
    )
    assert keeping.diff(own / "overlay", own / "full", reads_tensors=False).tensors == ()
    assert keeping.gc([own], home=own / "home").garbage == ()
    assert keeping.verify(own / "overlay", deep_fraction=1.0).is_sound
    keeping.replay(own / "overlay", own / "again", options=RunOptions(catalog=False))
    assert contents(own / "again") == contents(own / "full")
    merge(own, "next")  # looks through the overlay, which the catalog knows, for what comes out the same
    assert contents(own / "next") == contents(own / "full")


def test_materialise__replaces_the_overlay_only_when_told(own: Path) -> None:
    before = tree_digest(own / "overlay")
    with pytest.raises(OutputError) as caught:
        keeping.materialise(own / "overlay", options=RunOptions(catalog=False))
    assert caught.value.code == "overlay.in-place"
    assert tree_digest(own / "overlay") == before
    keeping.materialise(own / "overlay", force=True, options=RunOptions(home=own / "home"))
    assert contents(own / "overlay") == contents(own / "full")
    with pytest.raises(UnsupportedError) as again:
        keeping.materialise(own / "overlay", own / "other", options=RunOptions(catalog=False))
    assert again.value.code == "snapshot.not-overlay"


def test_materialise__refuses_what_it_would_destroy(own: Path) -> None:
    for out, code in (("full", "output.exists"), ("base", "output.overlaps-input")):
        with pytest.raises(OutputError) as caught:
            keeping.materialise(own / "overlay", own / out, options=RunOptions(catalog=False))
        assert caught.value.code == code
    with pytest.raises(OutputError) as forced:
        keeping.materialise(own / "overlay", own / "base", force=True, options=RunOptions(catalog=False))
    assert forced.value.code == "output.overlaps-input"


def test_materialise__finds_a_base_that_moved(own: Path) -> None:
    (own / "base").rename(own / "elsewhere")
    with pytest.raises(ConflictError, match="the file is gone"):
        keeping.materialise(own / "overlay", own / "whole", options=RunOptions(catalog=False))
    keeping.materialise(own / "overlay", own / "whole", base=own / "elsewhere", options=RunOptions(catalog=False))
    assert contents(own / "whole") == contents(own / "full")


# --- damage ---


def block_start(root: Path, *, is_stored: bool) -> int:
    table = open_overlay(
        LocalStore(),
        Location.local(root / "overlay"),
        read_manifest_value(LocalStore(), Location.local(root / "overlay")),
    ).table
    return next(place.offset for place in table.places if place.is_stored == is_stored)


@pytest.mark.parametrize("is_stored", [True, False])
def test_overlay__names_the_file_and_the_tensor_of_a_wrong_block(own: Path, is_stored: bool) -> None:
    path = own / "overlay" / OVERLAY_NAME if is_stored else own / "base" / "model.safetensors"
    flip(path, block_start(own, is_stored=is_stored))
    (damage,) = keeping.verify(own / "overlay").damages
    assert damage.kind == "block"
    assert damage.file == (OVERLAY_NAME if is_stored else str(path))
    assert damage.start == block_start(own, is_stored=is_stored) < damage.stop
    with pytest.raises(CorruptError if is_stored else ConflictError, match=damage.tensor) as caught:
        keeping.materialise(own / "overlay", own / "whole", options=RunOptions(catalog=False))
    assert caught.value.code == ("overlay.damaged" if is_stored else "overlay.base-changed")
    assert str(path) in str(caught.value)
    assert {path.name for path in own.iterdir()} & {"whole", ".whole.mergepipe-staging"} == set()


def test_overlay__says_that_the_base_is_gone_or_another(own: Path) -> None:
    base = own / "base" / "model.safetensors"
    base.write_bytes(base.read_bytes() + b"more")
    damages = keeping.verify(own / "overlay").damages
    assert {damage.file for damage in damages} == {str(base)}
    assert "bytes are needed" in damages[0].message or "are needed" in damages[0].message
    base.unlink()
    assert all("gone" in damage.message for damage in keeping.verify(own / "overlay").damages)
    with pytest.raises(ConflictError) as caught:
        keeping.materialise(own / "overlay", own / "whole", options=RunOptions(catalog=False))
    assert caught.value.code == "overlay.base-changed"


def test_overlay__damage_anywhere_in_it_is_found(own: Path) -> None:
    for path in sorted(path for path in (own / "overlay").rglob("*") if path.is_file()):
        sound = path.read_bytes()
        for position in sorted({0, 9, len(sound) // 2, len(sound) - 1}):
            flip(path, position)
            assert is_found(own / "overlay", own / "whole", path.name), (path.name, position)
            path.write_bytes(sound)
        path.unlink()
        assert is_found(own / "overlay", own / "whole", path.name), path.name
        path.write_bytes(sound)
    assert keeping.verify(own / "overlay").is_sound


def is_found(overlay: Path, out: Path, name: str) -> bool:
    """Whether verifying tells, and materialising refuses all but what it does not take over."""
    try:
        is_sound = keeping.verify(overlay).is_sound
    except MergePipeError as error:
        is_refused = name == MANIFEST_NAME and isinstance(error, CorruptError | NotFoundError)
        return is_refused or error.code == "blocks.newer"
    if name != "README.md":
        with pytest.raises(MergePipeError):
            keeping.materialise(overlay, out, options=RunOptions(catalog=False))
    shutil.rmtree(out, ignore_errors=True)
    return not is_sound


# --- the table ---

SIZES = (10, 20, 5)
TABLE = OverlayTable(
    (BaseFile("/base/a", 100, "5.6.7", "00"), BaseFile("/base/ä", 50, "-1.2.3", "11")),
    15,
    (BlockPlace(0, 0), BlockPlace(2, 30), BlockPlace(0, 10)),
)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3), st.integers(0, 10**12)), max_size=30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
def test_overlay_table__is_read_as_it_was_written(blocks: list[tuple[int, int, int]], name: str) -> None:
    files = tuple(BaseFile(f"/{name}/{i}", 2 * 10**12, f"{i}", "ab") for i in range(3))
    places, stored = [], 0
    for nbytes, source, offset in blocks:
        places.append(BlockPlace(source, offset if source else stored))
        stored += 0 if source else nbytes
    table = OverlayTable(files, stored, tuple(places))
    assert overlay_table_of(table.to_bytes(), "here", [nbytes for nbytes, _, _ in blocks]) == table


WRONG: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "empty": (b"", SIZES),
    "other file": (b"x" * 200, SIZES),
    "cut": (TABLE.to_bytes()[:-1], SIZES),
    "longer": (TABLE.to_bytes() + b"\0", SIZES),
    "other blocks": (TABLE.to_bytes(), SIZES[:2]),
    "other sizes": (TABLE.to_bytes(), (11, 20, 5)),
    "version 0": (TABLE.to_bytes()[:8] + bytes(4) + TABLE.to_bytes()[12:], SIZES),
    "no such file": (replace(TABLE, files=TABLE.files[:1]).to_bytes(), SIZES),
    "beyond the end": (
        replace(TABLE, files=(TABLE.files[0], replace(TABLE.files[1], size_bytes=49))).to_bytes(),
        SIZES,
    ),
    "overlap": (replace(TABLE, places=(*TABLE.places[:2], BlockPlace(0, 9))).to_bytes(), SIZES),
    "other size": (replace(TABLE, stored_bytes=14).to_bytes(), SIZES),
    "negative": (replace(TABLE, files=(TABLE.files[0], replace(TABLE.files[1], size_bytes=-1))).to_bytes(), SIZES),
    "no list": (TABLE.to_bytes().replace(b"[[", b"[{"), SIZES),
    "no number": (TABLE.to_bytes().replace(b'/base/a",100', b'/base/a",['), SIZES),
    "no list of lists": (TABLE.to_bytes().replace(b'"/base/a",100', b'"/base/a",1.0'), SIZES),
}


@pytest.mark.parametrize("why", WRONG)
def test_overlay_table__that_lies_is_refused(why: str) -> None:
    raw, sizes = WRONG[why]
    with pytest.raises(CorruptError) as caught:
        overlay_table_of(raw, "here", sizes)
    assert caught.value.code == "overlay.format"


def test_overlay_table__of_a_newer_version_is_refused() -> None:
    raw = TABLE.to_bytes()
    with pytest.raises(UnsupportedError) as caught:
        overlay_table_of(raw[:8] + (OVERLAY_VERSION + 1).to_bytes(4, "little") + raw[12:], "here", SIZES)
    assert caught.value.code == "overlay.newer"


def test_completed__undoes_as_overlay(made: Path) -> None:
    whole: Manifest = read_manifest_value(LocalStore(), Location.local(made / "full"))
    small = {"config.json": b"{}", "README.md": b"card", "a/b.jinja": b""}
    whole = replace(whole, sidecars=tuple(record_of(name, small[name]) for name in sorted(small)))
    table = OverlayTable((), sum(block_sizes(whole)), ())
    manifest, written = as_overlay(whole, small, table)
    assert completed(manifest) == whole
    assert {record.name for record in manifest.sidecars} == set(written)
