"""Adapters that `lora merge` and `lora extract` make are snapshots: recorded, verified, replaced, pushed, published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mergepipe
from mergepipe.errors import CorruptError, OutputError, RecipeError, StorageError, UnsupportedError
from support.bucket_outputs import check_published, files_below, new_prefix, objects_below
from support.crashes import Death, count_operations, run_killed
from support.families import FamilyShape, write_family
from support.hub_server import HubServer, written_hub
from support.model_folders import write_adapter
from support.refusals import refuses
from support.s3_server import S3Server

SHAPE = FamilyShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=96, vocab=260, tied=True)
MODEL = "me/adapter"
MANIFEST_NAME = "mergepipe.json"
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mergepipe.blocks", MANIFEST_NAME}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base and two experts in `models`, in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_family(tmp_path / "models", SHAPE, 2)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The stand-in, with a repository for adapters."""
    with written_hub(monkeypatch, tmp_path / "hf") as server:
        server.commit(MODEL, {"README.md": b"mine"})
        yield server


def extract(out: str | Path, expert: int = 1, **options: Any) -> mergepipe.ExtractLoraReport:
    return mergepipe.extract_lora("models/base", f"models/expert-{expert}", out, rank=4, **options)


def merge(out: str | Path, **options: Any) -> mergepipe.MergeLoraReport:
    """Merge two adapters that were extracted before."""
    for expert in (1, 2):
        if not Path(f"a{expert}").exists():
            extract(f"a{expert}", expert)
    return mergepipe.merge_lora(["a1", "a2"], out, weights=(0.5, 0.25), **options)


def names_here() -> set[str]:
    return {path.name for path in Path().iterdir()}


MAKERS: dict[str, Callable[..., mergepipe.ExtractLoraReport | mergepipe.MergeLoraReport]] = {
    "merge": merge,
    "extract": extract,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__are_snapshots_that_are_listed_verified_and_explained(models: Path, maker: str) -> None:
    report = MAKERS[maker]("made")
    assert set(files_below(Path("made"))) == FILES
    assert mergepipe.verify("made").is_sound
    assert mergepipe.verify(report.sid[:8]).is_sound
    newest = mergepipe.list_snapshots()[0]
    assert (newest.sid, newest.operator, newest.path) == (report.sid, f"lora {maker}", models / "made")
    found = mergepipe.show("made")
    assert (newest.sid, newest.path, newest.summary) == (found.sid, found.path, found.summary)
    assert found.version == mergepipe.__version__
    explanation = mergepipe.explain("made")
    n_inputs = 2 if maker == "merge" else 1
    assert (len(explanation.experts), explanation.touched) == (n_inputs, explanation.blocks)
    assert all(expert.realized_bytes for expert in explanation.experts)


def test_adapters__have_a_lineage_through_what_was_made_of_them(models: Path) -> None:
    merge("both")
    mergepipe.apply_lora("models/base", ["both"], "folded")
    tree = [(node.depth, node.role, node.model, node.operator) for node in mergepipe.lineage("folded")]
    assert tree == [
        (0, "snapshot", str(models / "folded"), "passthrough"),
        (1, "base", "models/base", None),
        (1, "adapter", "both", "lora merge"),
        (2, "adapter", "a1", "lora extract"),
        (3, "base", "models/base", None),
        (3, "expert", "models/expert-1", None),
        (2, "adapter", "a2", "lora extract"),
        (3, "base", "models/base", None),
        (3, "expert", "models/expert-2", None),
    ]
    assert [node.model for node in mergepipe.lineage("a1", down=True)][1:] == [
        str(models / "both"),
        str(models / "folded"),
    ]


@pytest.mark.usefixtures("models")
def test_adapters__are_compared_tensor_by_tensor() -> None:
    merge("both")
    merge("svd", method="svd", rank=8)
    difference = mergepipe.diff("both", "svd")
    assert difference.norm is not None
    assert difference.norm > 0
    assert "-merge_method: cat\n" in difference.recipe
    assert not mergepipe.diff("a1", "a1").tensors


@pytest.mark.thorough
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", sorted(FILES - {MANIFEST_NAME}))
def test_verify__finds_a_changed_byte_of_an_adapter(models: Path, maker: str, name: str) -> None:
    MAKERS[maker]("made")
    path = models / "made" / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert {damage.file for damage in mergepipe.verify("made").damages} == {name}
    assert name == "adapter_model.safetensors" or push_is_refused()


def push_is_refused() -> bool:
    with refuses(CorruptError, "snapshot.damaged"):
        mergepipe.push("made", "s3://bucket/nothing-is-asked-of-it")
    return True


@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__replace_only_what_mergepipe_made(models: Path, maker: str) -> None:
    first = MAKERS[maker]("made")
    with refuses(OutputError, "output.exists", "force"):
        MAKERS[maker]("made")
    again = MAKERS[maker]("made", force=True, base_model_id="org/base")
    assert again.sid == first.sid
    assert len([row for row in mergepipe.list_snapshots() if row.path == models / "made"]) == 1
    (models / "made" / "notes.txt").write_text("mine")
    with refuses(OutputError, "output.not-ours", "notes.txt"):
        MAKERS[maker]("made", force=True)
    assert (models / "made" / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__are_found_by_a_catalog_that_is_made_again(maker: str) -> None:
    report = MAKERS[maker]("made", catalog=False)
    assert "made" not in [row.path.name for row in mergepipe.list_snapshots()]
    mergepipe.rebuild_catalog(["made"])
    assert mergepipe.show(report.sid).operator == f"lora {maker}"


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__are_not_made_again_from_their_record(maker: str) -> None:
    MAKERS[maker]("made")
    with refuses(UnsupportedError, "model.unsupported", f"mergepipe lora {maker}"):
        mergepipe.verify("made", deep_fraction=1.0)
    with refuses(UnsupportedError, "model.unsupported", f"mergepipe lora {maker}"):
        mergepipe.replay("made", "again")


def test_adapters__have_a_card_of_their_base_and_no_path_of_this_machine(models: Path) -> None:
    mergepipe.extract_lora(
        models / "models/base", models / "models/expert-1", "a1", rank=4, base_model_id="org/base@v1"
    )
    mergepipe.extract_lora(models / "models/base", models / "models/expert-2", "a2", rank=4)
    mergepipe.merge_lora([models / "a1", models / "a2"], "both")
    for name in ("a1", "both"):
        card = (models / name / "README.md").read_text()
        metadata = yaml.safe_load(card.split("---")[1])
        assert (metadata["base_model"], metadata["base_model_relation"]) == ("org/base", "adapter")
        assert (metadata["library_name"], metadata["tags"]) == ("peft", ["lora", "mergepipe"])
        assert not [file for file, content in files_below(models / name).items() if str(models).encode() in content]
    assert "base_model_relation" not in (models / "a2" / "README.md").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__are_pushed_to_the_hub_and_to_a_bucket(
    models: Path, maker: str, hub: HubServer, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKERS[maker]("made")
    prefix = new_prefix(server, monkeypatch)
    for destination in (f"hf://{MODEL}", prefix):
        report = mergepipe.push("made", destination)
        assert report.sid == mergepipe.show("made").sid
        assert mergepipe.verify(destination).is_sound
    check_published(hub.model_files(MODEL), models / "made")
    check_published(objects_below(prefix), models / "made")


@pytest.mark.thorough
@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__are_published_on_the_hub_and_in_a_bucket(
    models: Path, maker: str, hub: HubServer, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is what a folder holds, to the byte; nothing is left on this machine."""
    local = MAKERS[maker]("made")
    prefix = new_prefix(server, monkeypatch)
    before = names_here()
    for destination in (f"hf://{MODEL}", prefix):
        report = MAKERS[maker](destination)
        assert (str(report.out), report.sid) == (destination, local.sid)
        with refuses(OutputError, "output.exists"):
            MAKERS[maker](destination)
    check_published(hub.model_files(MODEL), models / "made")
    check_published(objects_below(prefix), models / "made")
    assert names_here() == before
    MAKERS[maker](f"hf://{MODEL}", force=True)
    check_published(hub.model_files(MODEL), models / "made")


@pytest.mark.thorough
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("place", ["hf://me/adapter", "https://host/adapter", "out.safetensors"])
def test_adapters__are_written_nowhere_where_a_place_takes_none(
    maker: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token nothing goes to the Hub, and no folder `hf:` appears."""
    merge("both")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # offline the token would not be looked for
    monkeypatch.delenv("HF_TOKEN", raising=False)
    before = names_here()
    with pytest.raises((StorageError, OutputError)):
        MAKERS[maker](place)
    assert names_here() == before


@pytest.mark.thorough
@pytest.mark.parametrize("maker", MAKERS)
def test_adapters__appear_whole_or_not_at_all_whenever_the_process_is_killed(models: Path, maker: str) -> None:
    """The same command works afterwards; `gc` removes what a killed one left."""
    sound = MAKERS[maker]("sound")
    before = names_here()

    def make() -> None:
        MAKERS[maker]("made", catalog=False)

    n_operations = len(count_operations(make))
    mergepipe_files = files_below(models / "made")
    for at in range(0, n_operations, max(1, n_operations // 6)):
        for name in files_below(models / "made"):
            (models / "made" / name).unlink()
        if (models / "made").exists():
            (models / "made").rmdir()
        assert run_killed(make, at, Death.TORN)
        if (models / "made").exists():
            assert mergepipe.verify("made").is_sound
        left = models / ".made.mergepipe-staging"
        assert names_here() <= {*before, "made", left.name}
        if not (models / "made").exists():
            if left.exists() and at % 2:
                assert str(left) in {item.what for item in mergepipe.gc([models]).garbage if item.kind == "staging"}
            make()
        assert mergepipe.show("made").sid == sound.sid
        assert files_below(models / "made").keys() == mergepipe_files.keys()


@pytest.mark.thorough
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("method", ["cat", "svd", "linear", "ties"])
def test_merge_lora__is_recorded_as_a_recipe_that_makes_it_again(method: str) -> None:
    rank = 3 if method in ("svd", "ties") else None
    density = 0.5 if method == "ties" else None
    made = merge("made", method=method, rank=rank, density=density)
    recipe = json.loads((Path("made") / MANIFEST_NAME).read_text())["recipe"]
    Path("again.yml").write_text(recipe)
    again = mergepipe.merge_lora("again.yml", "again")
    assert (again.sid, again.method) == (made.sid, method)
    assert yaml.safe_load(recipe).get("rank") == rank


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": "8"}, "must be a whole number"),
        ({"parameters": {"weight": 2}}, "give each model its own weight"),
        ({"models": [{"model": "a1", "parameters": {"weight": [0, 1]}}]}, "must be one weight"),
        ({"models": [{"model": "a1", "parameters": {"density": 0.5}}]}, "must be one weight"),
    ],
)
def test_merge_lora__refuses_a_recipe_for_cat_with_what_it_would_ignore(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    recipe = {"output": "adapter", "merge_method": "cat", "models": [{"model": "a1"}], **changes}
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(RecipeError, match=message):
        mergepipe.merge_lora([tmp_path / "recipe.yml"], tmp_path / "out")


def test_merge_lora__warns_about_adapters_that_name_two_bases(tmp_path: Path) -> None:
    factors = {"a.lora_A.weight": np.ones((4, 8), np.float32), "a.lora_B.weight": np.ones((8, 4), np.float32)}
    for name, base in (("first", "org/one"), ("second", "org/two"), ("third", "org/one")):
        write_adapter(tmp_path / name, factors, base_model_name_or_path=base)
    report = mergepipe.merge_lora([tmp_path / "first", tmp_path / "second"], tmp_path / "out")
    assert [notice.partition(": ")[0] for notice in report.notices] == [
        f"{tmp_path / 'second'} was trained on 'org/two', and {tmp_path / 'first'} on 'org/one'"
    ]
    assert mergepipe.merge_lora([tmp_path / "first", tmp_path / "third"], tmp_path / "same").notices == ()


WITH_BLAS_THREADS = """
import sys
import mergepipe

n_threads = sys.argv[1]
for k in (1, 2):
    mergepipe.extract_lora("models/base", f"models/expert-{k}", f"expert-{k}-{n_threads}", rank=100)
mergepipe.merge_lora([f"expert-{k}-{n_threads}" for k in (1, 2)], f"merged-{n_threads}", method="svd", rank=60)
"""


@pytest.mark.thorough
def test_adapters__have_the_same_bytes_with_any_number_of_blas_threads(tmp_path: Path) -> None:
    shape = FamilyShape(hidden=320, layers=1, heads=4, kv_heads=4, head_dim=80, intermediate=400, vocab=260, tied=True)
    write_family(tmp_path / "models", shape, 2)  # large enough for BLAS to split the work
    made: dict[str, set[bytes]] = {"expert-1": set(), "expert-2": set(), "merged": set()}
    for n_threads in ("1", "2", "4"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": n_threads, "MERGEPIPE_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", WITH_BLAS_THREADS, n_threads]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=tmp_path)
        for name, contents in made.items():
            contents.add((tmp_path / f"{name}-{n_threads}" / "adapter_model.safetensors").read_bytes())
    assert {name: len(contents) for name, contents in made.items()} == {"expert-1": 1, "expert-2": 1, "merged": 1}
