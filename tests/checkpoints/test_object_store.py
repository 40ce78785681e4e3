"""Checkpoints through a store: what is asked of it, what reads cost, and digests of what passes by."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import Checkpoint, TensorEntry, block_costs_bytes, range_cost_bytes
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.core.blocks import BF16, DTYPES, F32, BlockGrid, DType, Span
from mergepipe.errors import ConflictError, CorruptError, NotFoundError, StorageError
from mergepipe.jobs.analyze import MOST_READ_AGAIN_FRACTION, PassingDigests
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES, LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES
from support.local_models import open_local
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
    with open_files(store, {file.location for file in checkpoint.files}, (checkpoint,)) as files:
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
    assert [(f.name, f.size_bytes, f.header_digest) for f in here.file_ids] == [
        (f.name, f.size_bytes, f.header_digest) for f in there.file_ids
    ]
    assert identified(local, here) == identified(remote, there)


def test_open_checkpoint__touches_nothing_but_its_store(tmp_path: Path) -> None:
    store = in_memory(tmp_path / "nowhere")
    assert set(open_local(tmp_path / "nowhere", store).tensors) == {"a", "b"}
    with pytest.raises(NotFoundError):
        open_local(tmp_path, store)


def test_open_files__another_version_is_refused(tmp_path: Path) -> None:
    store = in_memory(tmp_path)
    checkpoint = open_local(tmp_path, store)
    check_unchanged(store, (checkpoint,))
    store.put(Location.local(tmp_path / SHARDS[1]), FILES[SHARDS[1]])
    for look in (lambda: check_unchanged(store, (checkpoint,)), lambda: identified(store, checkpoint)):
        with refuses(ConflictError, "input.changed"):
            look()


def test_content_id__refuses_an_object_that_is_shorter_than_its_header_says(tmp_path: Path) -> None:
    store = in_memory(tmp_path)
    checkpoint = open_local(tmp_path, store)
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
        open_local(tmp_path, store)


FLOATS = st.sampled_from([F32, BF16])


def entry(dtype: DType, n: int, offset: int) -> TensorEntry:
    return TensorEntry("t", dtype, (n,), Location.local(Path("/f")), offset, n * dtype.itemsize)


def test_cost__counts_the_pages_that_direct_reads_ask_for() -> None:
    assert PAGE_BYTES == DIRECT_ALIGNMENT_BYTES
    assert range_cost_bytes(0, 1) == range_cost_bytes(4095, 4096) == 4096
    assert range_cost_bytes(4095, 4097) == 8192
    assert range_cost_bytes(5, 5) == range_cost_bytes(5, 5, 1) == 0
    assert range_cost_bytes(4095, 4097, 1) == 2


@given(
    dtype=FLOATS,
    n=st.integers(1, 50_000),
    offset=st.integers(0, 2**40),
    block=st.integers(1, 20_000),
    granularity=st.sampled_from([1, 512, 4096]),
)
def test_block_costs__agree_for_one_and_for_many(
    dtype: DType, n: int, offset: int, block: int, granularity: int
) -> None:
    tensor = replace(entry(dtype, n, offset), granularity_bytes=granularity)
    spans = list(BlockGrid(n, block).spans())[:50]
    many = block_costs_bytes(
        np.full(len(spans), offset),
        np.full(len(spans), dtype.itemsize),
        np.array([span.start for span in spans]),
        np.array([span.n_elements for span in spans]),
        np.full(len(spans), granularity),
    )
    assert many.tolist() == [tensor.cost_bytes(span) for span in spans]
    assert granularity > 1 or sum(many.tolist()) == sum(span.n_elements for span in spans) * dtype.itemsize


@given(dtype=FLOATS, offset=st.integers(0, 10_000), block=st.integers(1, 3000), chosen=st.sets(st.integers(0, 11)))
def test_block_costs__are_at_least_what_joined_requests_ask_for(
    dtype: DType, offset: int, block: int, chosen: set[int]
) -> None:
    tensor = entry(dtype, 12 * block, offset)
    pages: set[int] = set()
    for index in chosen:
        start = offset + index * block * dtype.itemsize
        pages |= set(range(start // PAGE_BYTES, -(-(start + block * dtype.itemsize) // PAGE_BYTES)))
    costs = sum(tensor.cost_bytes(Span(i * block, (i + 1) * block)) for i in chosen)
    assert len(pages) * PAGE_BYTES <= costs


U8 = DTYPES["U8"]
HEADER_BYTES = 10
SIZES = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), min_size=1, max_size=6)


def write(path: Path, sizes: list[tuple[bool, int]]) -> tuple[list[TensorEntry], bytes]:
    """A file of tensors behind a header; return those that pass by, and its bytes."""
    offset, shown = HEADER_BYTES, []
    for number, (is_shown, size) in enumerate(sizes):
        if is_shown:
            shown.append(TensorEntry(str(number), U8, (size,), Location.local(path), offset, size))
        offset += size
    content = np.random.default_rng(offset).bytes(offset)
    path.write_bytes(content)
    return shown, content


@given(SIZES, st.integers(1, 30), st.sampled_from((0, 20, 10_000)), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_finish__is_the_digest_of_the_file_or_nothing(
    sizes: list[tuple[bool, int]], piece: int, waiting_bytes: int, order: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, store = Location.local(Path(folder) / "file"), LocalStore()
        shown, content = write(path.local_path, sizes)
        file = store.open(path)
        digests = PassingDigests({path: file}, shown, waiting_bytes)
        pieces = [(entry, first) for entry in shown for first in range(0, entry.nbytes, piece)]
        order.shuffle(pieces)
        for entry, first in (*pieces, *pieces[:2]):
            start = entry.offset + first
            stop = min(start + piece, entry.offset + entry.nbytes)
            digests.show(entry, first, np.frombuffer(content[start:stop], np.uint8))
        found = digests.finish()
        file.close()
    unseen = len(content) - sum(entry.nbytes for entry in shown)
    read_bytes = store.ledger.usage()[Purpose.ANALYSIS]
    assert read_bytes <= unseen + len(content) * MOST_READ_AGAIN_FRACTION
    if found or waiting_bytes > len(content):
        assert found == {path: hashlib.sha256(content).hexdigest()}
        assert waiting_bytes <= len(content) or read_bytes == unseen
