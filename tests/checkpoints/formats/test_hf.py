"""What a sound directory or bare file becomes, and what a directory without a single answer is told."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from mergepipe.checkpoints.directory import SIDECAR_NAMES, choose_weights, open_checkpoint
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import version_of
from mergepipe.storage.location import Location
from support.local_models import open_local
from support.refusals import refuses
from support.safetensors_bytes import honest_file
from support.stores import MetadataStore

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(root: Path, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json") -> None:
    (root / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def write_sharded(root: Path) -> None:
    (root / SHARD_2).write_bytes(honest_file("z", "a"))
    (root / SHARD_1).write_bytes(honest_file("m"))
    write_index(root, {"a": SHARD_2, "z": SHARD_2, "m": SHARD_1})


def write_hub_snapshot(cache: Path) -> Path:
    """A hub cache folder as the hub's client leaves it: relative links from the snapshot into the blobs."""
    blobs = cache / "models--org--name" / "blobs"
    snapshot = cache / "models--org--name" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, content in ((SHARD_1, honest_file("a")), (SHARD_2, honest_file("b")), ("config.json", b"{}")):
        (blobs / f"hash-{name}").write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / f"hash-{name}")
    write_index(snapshot, {"a": SHARD_1, "b": SHARD_2})
    return snapshot


def test_open_checkpoint__reads_a_bare_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(honest_file("b", "a"))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_local(path, MetadataStore())
    assert (checkpoint.path.local_path, checkpoint.root.local_path, checkpoint.sidecars) == (path, tmp_path, ())
    assert list(checkpoint.tensors) == ["b", "a"]
    assert checkpoint.tensors["a"].stored[0].file.local_path == path


def test_open_checkpoint__fingerprints_each_file(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    os.utime(tmp_path / SHARD_1, ns=(5, 123_456_789))
    first, second = open_local(tmp_path, MetadataStore()).file_ids
    header = read_header(MetadataStore(), Location.local(tmp_path / SHARD_1))
    version = version_of(tmp_path / SHARD_1, (tmp_path / SHARD_1).stat())
    assert (first.name, first.version, first.header_digest) == (SHARD_1, version, header.digest)
    assert version.startswith("123456789.")
    assert first.size_bytes == (tmp_path / SHARD_1).stat().st_size
    assert second.name == SHARD_2


def test_open_checkpoint__orders_tensors_by_shard_then_offset(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    checkpoint = open_local(tmp_path, MetadataStore())
    assert [(t.name, t.stored[0].file.name) for t in checkpoint.tensors.values()] == [
        ("m", SHARD_1), ("z", SHARD_2), ("a", SHARD_2)
    ]  # fmt: skip
    assert checkpoint.tensor_bytes == 24


def test_open_checkpoint__reads_only_headers_and_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    store = MetadataStore()
    checkpoint = open_local(tmp_path, store)
    all_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert store.ledger.total_bytes() == all_bytes - checkpoint.tensor_bytes


def test_open_checkpoint__ignores_safetensors_files_the_index_does_not_name(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"no safetensors file")
    assert sorted(open_local(tmp_path, MetadataStore()).tensors) == ["a", "m", "z"]


def test_open_checkpoint__an_index_may_name_the_single_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(honest_file("a"))
    write_index(tmp_path, {"a": "model.safetensors"})
    assert list(open_local(tmp_path, MetadataStore()).tensors) == ["a"]


def test_open_checkpoint__refuses_a_single_file_beside_an_index_of_others(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(honest_file("a"))
    with refuses(CorruptError, "checkpoint.damaged"):
        open_local(tmp_path, MetadataStore())


def test_open_checkpoint__an_index_needs_neither_metadata_nor_a_true_total_size(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(honest_file("a"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert list(open_local(tmp_path, MetadataStore()).tensors) == ["a"]
    index.write_text('{"metadata": {"total_size": -1.5e3}, "weight_map": {"a": "x.safetensors"}}')
    assert list(open_local(tmp_path, MetadataStore()).tensors) == ["a"]


def test_open_checkpoint__lists_sidecars_sorted_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(honest_file("a"))
    left_out = ("modeling_custom.py", "README.md", "optimizer.pt", "pytorch_model.bin", ".gitattributes")
    for name in (*SIDECAR_NAMES, "qwen.tiktoken", *left_out):
        (tmp_path / name).write_text("[]" if name == "modules.json" else "{}")
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("x")
    (templates / "notes.txt").write_text("x")
    expected = sorted([*SIDECAR_NAMES, "qwen.tiktoken", "additional_chat_templates/tool_use.jinja"])
    assert list(open_local(tmp_path, MetadataStore()).sidecars) == expected


def test_open_checkpoint__follows_links_of_and_to_a_hub_cache(tmp_path: Path) -> None:
    snapshot = write_hub_snapshot(tmp_path)
    checkpoint = open_local(snapshot, MetadataStore())
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.sidecars == ("config.json",)
    assert checkpoint.tensors["a"].stored[0].file.local_path == snapshot / SHARD_1
    link = tmp_path / "model"
    link.symlink_to(snapshot)
    assert list(open_local(link, MetadataStore()).tensors) == ["a", "b"]


def test_open_checkpoint__follows_links_inside_the_directory(tmp_path: Path) -> None:
    (tmp_path / "real.bytes").write_bytes(honest_file("a"))
    (tmp_path / "model.safetensors").symlink_to("real.bytes")
    assert list(open_local(tmp_path, MetadataStore()).tensors) == ["a"]


def test_open_checkpoint__follows_the_link_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.safetensors").write_bytes(honest_file("a"))
    link = tmp_path / "link.safetensors"
    link.symlink_to("elsewhere/x.safetensors")
    assert open_local(link, MetadataStore()).file_ids[0].name == "link.safetensors"


@pytest.mark.parametrize("path", ["absent", "absent/model.safetensors", "absent.safetensors", "nul\0byte"])
def test_open_checkpoint__a_missing_path_is_not_found(tmp_path: Path, path: str) -> None:
    with refuses(NotFoundError, "model.not-found"):
        open_local(tmp_path / path, MetadataStore())


@pytest.mark.parametrize(("name", "hint"), [("model.onnx", "convert it to"), ("config.json", "name its folder")])
def test_open_checkpoint__a_bare_file_must_be_of_a_known_format(tmp_path: Path, name: str, hint: str) -> None:
    path = tmp_path / name
    path.write_bytes(honest_file("a"))
    with pytest.raises(UnsupportedError, match=rf"must end in one of \.safetensors, \.bin.*{hint}"):
        open_local(path, MetadataStore())


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "other.safetensors"], "model.safetensors"),
        (["model.safetensors.index.json", "model.safetensors"], "model.safetensors.index.json"),
        (["m.fp16.safetensors.index.json", "a.safetensors"], "m.fp16.safetensors.index.json"),
        (["weights.safetensors", "config.json"], "weights.safetensors"),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
        (["model.safetensors", "adapter_config.json"], "model.safetensors"),
        (["weights.safetensors", "._weights.safetensors"], "weights.safetensors"),
        (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin", "training_args.bin"], "pytorch_model.bin"),
        (["pytorch_model.bin.index.json", "x.bin"], "pytorch_model.bin.index.json"),
        (["model.pt", "optimizer.pt", "rng_state.pth"], "model.pt"),
    ],
)
def test_choose_weights__prefers_index_then_model_then_the_only_candidate(names: list[str], chosen: str) -> None:
    assert choose_weights(Location.local(Path("x")), names) == chosen


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ([], NotFoundError, ["found: nothing"]),
        (["optimizer.bin", "training_args.bin"], NotFoundError, ["training_args.bin"]),
        (["model.onnx"], UnsupportedError, ["model.onnx", "not yet read"]),
        (["model-Q4.gguf"], UnsupportedError, ["holds 'model-Q4.gguf', GGUF files; name the file: x/model-Q4.gguf"]),
        (["adapter_config.json", "adapter_model.safetensors"], UnsupportedError, ["`mergepipe lora merge`"]),
        (["adapter_config.json", "adapter_model.bin"], UnsupportedError, ["needs its base"]),
        (["a.safetensors", "b.safetensors"], CorruptError, ["'a.safetensors', 'b.safetensors'"]),
        ([SHARD_1, SHARD_2], CorruptError, [SHARD_1, SHARD_2]),
        (["a.safetensors.index.json", "b.safetensors.index.json"], CorruptError, ["2 candidates"]),
        ([SHARD_1], CorruptError, ["one of 2 shards"]),
        (["pytorch_model-00001-of-00002.bin"], CorruptError, ["pytorch_model.bin.index.json"]),
        ([f"{i:03}.safetensors" for i in range(50)], CorruptError, ["50 candidates", "and 40 more"]),
    ],
)
def test_choose_weights__says_what_it_found(names: list[str], error: type[MergePipeError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        choose_weights(Location.local(Path("x")), names)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.part", "m.gguf"])
def test_open_checkpoint__names_pointers_and_gguf_by_their_first_bytes(tmp_path: Path, name: str) -> None:
    path = Location.local(tmp_path / name)
    path.local_path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:")
    with refuses(CorruptError, "checkpoint.damaged", "is a git LFS pointer instead of the file; fetch it with"):
        open_checkpoint(MetadataStore(), path)
    if name != "m.gguf":
        path.local_path.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) * 8)
        with refuses(
            UnsupportedError, "checkpoint.unsupported", r"is a GGUF file by its first bytes; rename it to m\.gguf"
        ):
            open_checkpoint(MetadataStore(), path)
