"""Checkpoints open from an object store as they do from the disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.errors import ConflictError, CorruptError, NotFoundError, StorageError
from mergepipe.storage.contract import Store
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.refusals import refuses
from support.safetensors_bytes import file_bytes, record
from support.stores import InMemoryStore, StoreRequest

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
FILES = {
    SHARDS[0]: file_bytes({"a": record(0, 4000, shape=[1000])}, bytes(range(250)) * 16),
    SHARDS[1]: file_bytes({"b": record(0, 8, shape=[2])}, bytes(8)),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "config.json": b"{}",
    "additional_chat_templates/tool.jinja": b"{{ x }}",
    "notes.txt": b"not the model's",
}


def in_memory(root: Path) -> InMemoryStore:
    """The checkpoint as objects."""
    return InMemoryStore({Location.local(root / name): content for name, content in FILES.items()})


def stored(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors by name, all of which are stored as they are."""
    return {name: tensor for name, tensor in checkpoint.tensors.items() if isinstance(tensor, TensorEntry)}


def identified(store: Store, checkpoint: Checkpoint) -> str:
    """The content id, which reads samples of the tensors."""
    with open_files(store, {checkpoint.root / file.name for file in checkpoint.files}, (checkpoint,)) as files:
        return content_id(checkpoint, files)


def test_open_checkpoint__finds_the_same_in_an_object_store(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    local, remote = LocalStore(), in_memory(tmp_path)
    here, there = open_checkpoint(local, Location.local(tmp_path)), open_checkpoint(remote, Location.local(tmp_path))
    as_here = {name: replace(entry, granularity_bytes=4096) for name, entry in stored(there).items()}
    assert {entry.granularity_bytes for entry in stored(there).values()} == {1}
    assert stored(here) == as_here
    assert here.sidecars == there.sidecars == ("additional_chat_templates/tool.jinja", "config.json")
    assert [(f.name, f.size_bytes, f.header_digest) for f in here.files] == [
        (f.name, f.size_bytes, f.header_digest) for f in there.files
    ]
    assert identified(local, here) == identified(remote, there)


def test_open_checkpoint__touches_nothing_but_its_store(tmp_path: Path) -> None:
    store = in_memory(tmp_path / "nowhere")
    assert set(open_checkpoint(store, Location.local(tmp_path / "nowhere")).tensors) == {"a", "b"}
    with pytest.raises(NotFoundError):
        open_checkpoint(store, Location.local(tmp_path))


def test_open_files__another_version_is_refused(tmp_path: Path) -> None:
    store = in_memory(tmp_path)
    checkpoint = open_checkpoint(store, Location.local(tmp_path))
    check_unchanged(store, (checkpoint,))
    store.put(Location.local(tmp_path / SHARDS[1]), FILES[SHARDS[1]])
    for look in (lambda: check_unchanged(store, (checkpoint,)), lambda: identified(store, checkpoint)):
        with refuses(ConflictError, "input.changed"):
            look()


def test_content_id__refuses_an_object_that_is_shorter_than_its_header_says(tmp_path: Path) -> None:
    store = in_memory(tmp_path)
    checkpoint = open_checkpoint(store, Location.local(tmp_path))
    store.put(Location.local(tmp_path / SHARDS[0]), FILES[SHARDS[0]][:2000])
    paths = {Location.local(tmp_path / shard) for shard in SHARDS}
    with open_files(store, paths) as files, refuses(CorruptError, "storage.shrunk"):
        content_id(checkpoint, files)


def test_open_checkpoint__reports_what_the_store_reports(tmp_path: Path) -> None:
    store = in_memory(tmp_path)

    def refuse_headers(request: StoreRequest) -> None:
        if request.operation == "read" and request.path.name == SHARDS[1]:
            raise StorageError.of("storage.io", request.path, "the network is gone")

    store.script = refuse_headers
    with pytest.raises(StorageError, match="the network is gone"):
        open_checkpoint(store, Location.local(tmp_path))
