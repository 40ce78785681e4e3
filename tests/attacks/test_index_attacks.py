"""Every way a checkpoint directory can lie: its index, its links, its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.directory import MAX_PROBLEMS
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError
from mergepipe.storage.contract import WEIGHT_INDEX_BYTES
from support.local_models import open_local
from support.refusals import refusal, refuses
from support.safetensors_bytes import file_bytes, honest_file
from support.stores import MetadataStore

INDEX = "model.safetensors.index.json"
A, B = "a.safetensors", "b.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint directory with two shards and, beside it, a sound file that is none of its business."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.safetensors").write_bytes(honest_file("secret"))
    (tmp_path / "outside" / "t.jinja").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / A).write_bytes(honest_file("a"))
    (folder / B).write_bytes(honest_file("b"))
    return folder


def write_index(root: Path, weight_map: object) -> None:
    (root / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(root: Path, error: type[MergePipeError] = CorruptError) -> MergePipeError:
    return refusal(lambda: open_local(root, MetadataStore()), error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "a JSON object is needed, found []"),
        (b"{", "not valid JSON: "),
        (b'{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}', "the key 'a' occurs twice in one JSON object"),
        (b'{"weight_map":{},"weight_map":{"a":"a.safetensors"}}', "the key 'weight_map' occurs twice in one"),
        (b'{"metadata":{"total_size":NaN},"weight_map":{"a":"a.safetensors"}}', "JSON has no number NaN"),
        (b"{}", "'weight_map' must be a non-empty object of"),
        (b'{"weight_map":null}', "'weight_map' must be a non-empty object of"),
        (b'{"weight_map":[]}', "'weight_map' must be a non-empty object of"),
        (b'{"weight_map":{}}', "'weight_map' must be a non-empty object of"),
        (b'{"weight_map":{"a":1}}', "the shard of tensor 'a' must be a string,"),
        (b'{"weight_map":{"a":["a.safetensors"]}}', "the shard of tensor 'a' must be a string,"),
    ],
)
def test_open_checkpoint__refuses_a_malformed_index(root: Path, text: bytes, words: str) -> None:
    (root / INDEX).write_bytes(text)
    error = refused(root)
    assert (error.code, words in str(error)) == ("checkpoint.damaged", True)


@pytest.mark.parametrize(
    "shard",
    [
        "", ".", "..", "../outside/secret.safetensors", "/etc/passwd", "sub/a.safetensors", "./a.safetensors",
        "a.safetensors/", "..\\outside\\secret.safetensors", "C:\\a.safetensors", "a\0.safetensors",
        "a\n.safetensors", "pytorch_model.bin", "a.safetensors ", "{root}/a.safetensors",
    ],
)  # fmt: skip
def test_open_checkpoint__a_shard_is_a_plain_safetensors_name(root: Path, shard: str) -> None:
    write_index(root, {"a": shard.replace("{root}", str(root))})
    error = refused(root)
    assert error.code == "checkpoint.damaged"
    assert str(error).isprintable()


def test_open_checkpoint__an_index_over_the_cap_is_not_read(root: Path) -> None:
    with (root / INDEX).open("wb") as file:
        file.truncate(WEIGHT_INDEX_BYTES + 1)
    store = MetadataStore()
    with refuses(CorruptError, "storage.too-large"):
        open_local(root, store)
    assert store.reads == []


def test_open_checkpoint__names_all_missing_shards(root: Path) -> None:
    write_index(root, {"a": A, "c": "c.safetensors", "d": "d.safetensors"})
    error = refused(root, NotFoundError)
    assert [p.code for p in error.problems] == ["checkpoint.incomplete"] * 2
    assert "'c.safetensors'" in str(error.problems[0])
    assert "'d.safetensors'" in str(error.problems[1])


@pytest.mark.parametrize(
    ("weight_map", "reason", "words"),
    [
        ({"a": A, "b": B, "c": A}, "does not hold it", ["'c'", A]),
        ({"a": A, "b": A}, "does not hold it", ["'b'", A]),
        ({"a": B, "b": A}, "but stored in", ["'a'", A, B]),
    ],
)
def test_open_checkpoint__refuses_an_index_that_disagrees_with_the_shards(
    root: Path, weight_map: dict[str, str], reason: str, words: list[str]
) -> None:
    write_index(root, weight_map)
    error = refused(root)
    assert error.code == "checkpoint.damaged"
    assert [word for word in (reason, *words) if word not in str(error.problems[0])] == []


@pytest.mark.parametrize("n_lies", [MAX_PROBLEMS, MAX_PROBLEMS + 5])
def test_open_checkpoint__lists_a_bounded_number_of_disagreements(root: Path, n_lies: int) -> None:
    write_index(root, {"a": A, "b": B, **{f"x{i:02}": A for i in range(n_lies)}})
    problems = refused(root).problems
    assert len(problems) == MAX_PROBLEMS + (n_lies > MAX_PROBLEMS)
    assert problems[-1].message.startswith("and 5 more" if n_lies > MAX_PROBLEMS else "tensor 'x19'")


@pytest.mark.parametrize("name", [A, INDEX, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("target", ["../outside/secret.safetensors", "{outside}/secret.safetensors"])
def test_open_checkpoint__refuses_links_out_of_the_directory(root: Path, name: str, target: str) -> None:
    write_index(root, {"a": A, "b": B})
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(target.format(outside=root.parent / "outside"))
    error = refused(root)
    assert error.code == "checkpoint.damaged"
    assert str(root / name) in str(error)
    assert str(root.parent / "outside" / "secret.safetensors") in str(error)


@pytest.mark.parametrize("repository", ["models--org--name", "datasets--org--name"])
@pytest.mark.parametrize(
    "target", ["models--org--other/blobs/x", "models--org--name/refs/x", "models--org--name-2/blobs/x", "blobs/x"]
)
def test_open_checkpoint__hub_links_lead_only_to_blobs_of_the_same_repository(
    tmp_path: Path, repository: str, target: str
) -> None:
    snapshot = tmp_path / repository / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (tmp_path / target).parent.mkdir(parents=True)
    (tmp_path / target).write_bytes(honest_file("a"))
    (snapshot / "model.safetensors").symlink_to(tmp_path / target)
    assert refused(snapshot).code == "checkpoint.damaged"


@pytest.mark.parametrize("place", ["models/snapshots", "models--org--name/others"])
def test_open_checkpoint__hub_rule_needs_a_hub_folder(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place / "rev"
    folder.mkdir(parents=True)
    blobs = (tmp_path / place).parent / "blobs"
    blobs.mkdir()
    (blobs / "x").write_bytes(honest_file("a"))
    (folder / "model.safetensors").symlink_to("../../blobs/x")
    assert refused(folder).code == "checkpoint.damaged"


@pytest.mark.parametrize("name", [INDEX, "config.json", "model.safetensors"])
def test_open_checkpoint__other_dangling_links_are_named(root: Path, name: str) -> None:
    if name == "config.json":
        write_index(root, {"a": A, "b": B})
    (root / name).symlink_to("nowhere")
    error = refused(root, NotFoundError)
    assert (error.code, error.problems[0].where) == ("checkpoint.incomplete", str(root / name))


@pytest.mark.parametrize("name", [A, INDEX, "config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_open_checkpoint__refuses_what_is_no_regular_file(root: Path, name: str, make: Callable[[Path], None]) -> None:
    write_index(root, {"a": A, "b": B})
    (root / name).unlink(missing_ok=True)
    make(root / name)
    error = refused(root)
    assert (error.code, error.problems[0].where) == ("checkpoint.damaged", str(root / name))


def link(place: Path, target: str | Path) -> Path:
    """A link in the place of a file; returns the folder that it lies in."""
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    return place.parent


def put(place: Path, content: bytes) -> Path:
    place.write_bytes(content)
    return place.parent


def blobs_elsewhere(root: Path) -> Path:
    snapshot = root / "models--org--name" / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    link(snapshot.parent.parent / "blobs", root.parent / "outside")
    return link(snapshot / "model.safetensors", "../../blobs/secret.safetensors")


def pipe(place: Path) -> Path:
    os.mkfifo(place)
    return place


DAMAGED, SECRET = "checkpoint.damaged", "../outside/secret.safetensors"
LIES: dict[str, tuple[dict[str, str], Callable[[Path], Path], str, str]] = {
    "shard name that is too long": ({"a": "x" * 5000 + ".safetensors"}, lambda root: root, "storage.answer", ""),
    "tensor that the index hides": (
        {"a": A, "b": B}, lambda root: put(root / A, honest_file("a", "hidden")), DAMAGED, "'hidden'",
    ),
    "tensor in two shards": (
        {"a": A, "b": B}, lambda root: put(root / B, honest_file("b", "a")), DAMAGED, f"in 2 shards: '{A}', '{B}'",
    ),
    "lying shard": ({"a": A, "b": B}, lambda root: put(root / B, file_bytes("{}", b"x")), DAMAGED, f"/{B}: "),
    "single file that links out": ({}, lambda root: link(root / "model.safetensors", SECRET), DAMAGED, ""),
    "template folder that links out": (
        {"a": A, "b": B}, lambda root: link(root / "additional_chat_templates", "../outside"), DAMAGED, "",
    ),
    "chain of links that ends outside": (
        {"a": A, "b": B}, lambda root: link(link(root / "hop", SECRET) / "config.json", "hop"), DAMAGED, "",
    ),
    "blobs of a hub folder that link out": ({}, blobs_elsewhere, DAMAGED, ""),
    "shard that links nowhere": (
        {"a": A, "b": B}, lambda root: link(root / B, "nowhere"), "checkpoint.incomplete", f"'{B}'",
    ),
    "link to itself": ({}, lambda root: link(root / "model.safetensors", "model.safetensors"), "storage.answer", ""),
    "pipe as a bare file": ({}, lambda root: pipe(root / "pipe.safetensors"), DAMAGED, ""),
    "file name that is no text": (
        {"a": A, "b": B}, lambda root: put(root / os.fsdecode(b"\xff.tiktoken"), b"x"), DAMAGED, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_open_checkpoint__refuses_every_lie(root: Path, lie: str) -> None:
    weight_map, arrange, code, words = LIES[lie]
    if weight_map:
        write_index(root, weight_map)
    error = refused(arrange(root), MergePipeError)
    assert (error.code, words in str(error)) == (code, True)
    assert str(error).encode()


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([A, B, "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON | st.dictionaries(st.sampled_from("abc"), st.sampled_from([A, B, "c", "../x"]) | st.text(max_size=4)))
def test_open_checkpoint__any_weight_map_opens_soundly_or_is_refused(root: Path, weight_map: object) -> None:
    write_index(root, weight_map)
    try:
        tensors = open_local(root, MetadataStore()).tensors
    except MergePipeError:
        return
    assert {name: tensor.stored[0].file.name for name, tensor in tensors.items()} == weight_map
