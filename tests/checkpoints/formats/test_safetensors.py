"""What a sound safetensors file becomes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import WeightHeader
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.core.blocks import BF16, DTYPES, F32
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from support.rounding import NUMPY_DTYPES as FLOATS
from support.safetensors_bytes import file_bytes, honest_file, record
from support.stores import InMemoryStore, MetadataStore, StoreRequest

PATH = Location.parse("model.safetensors")
INTEGERS = {f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
NUMPY_DTYPES = {**FLOATS, **INTEGERS, "BOOL": np.dtype(np.bool_)}


def parse(content: bytes) -> WeightHeader:
    return read_header(InMemoryStore({PATH: content}), PATH)


def test_read_header__gives_entries_at_absolute_offsets() -> None:
    content = file_bytes({"b": record(4, 12, dtype="BF16", shape=[2, 2]), "a": record(0, 4)}, bytes(12))
    header = parse(content)
    a, b = header.entries
    assert (a.name, a.dtype, a.shape, a.file, a.offset, a.nbytes) == ("a", F32, (1,), PATH, len(content) - 12, 4)
    assert (b.name, b.dtype, b.shape, b.offset, b.nbytes) == ("b", BF16, (2, 2), len(content) - 8, 8)
    assert header.size_bytes == len(content)


def test_read_header__digests_prefix_and_header_only() -> None:
    content = file_bytes({"a": record(0, 4)}, b"1234")
    assert parse(content).digest == blake3(content[:-4]).hexdigest(length=16)
    assert parse(content[:-4] + b"abcd").digest == parse(content).digest


def test_read_header__orders_empty_tensors_before_their_neighbour() -> None:
    records = {"full": record(0, 4), "end": record(4, 4), "z": record(0, 0, shape=[3, 0]), "a": record(0, 0)}
    names = [entry.name for entry in parse(file_bytes(records, bytes(4))).entries]
    assert names == ["a", "z", "full", "end"]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_read_header__knows_every_dtype_of_the_table(name: str) -> None:
    size = DTYPES[name].itemsize
    (entry,) = parse(file_bytes({"a": record(0, 3 * size, dtype=name, shape=[3])}, bytes(3 * size))).entries
    assert entry.dtype is DTYPES[name]


def test_read_header__reads_prefix_and_header_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    content = honest_file("a", "b")
    path.write_bytes(content)
    store = MetadataStore()
    header = read_header(store, Location.local(path))
    assert store.reads == [
        StoreRequest("read", Location.local(path), 0, 8),
        StoreRequest("read", Location.local(path), 8, len(content) - 24),
    ]
    assert store.ledger.usage()[Purpose.METADATA] == header.entries[0].offset == len(content) - 16


def calls_of_parsing(n_tensors: int) -> int:
    """How many functions run, in Python and in C, to read a header of `n_tensors`."""
    content = file_bytes(
        {f"layers.{i}.weight": record(4 * i, 4 * i + 4) for i in range(n_tensors)}, bytes(4 * n_tensors)
    )
    n_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        header = parse(content)
    finally:
        sys.setprofile(None)
    assert len(header.entries) == n_tensors
    return n_calls


def test_read_header__work_grows_linearly_with_the_tensors() -> None:
    calls_of_parsing(1)  # imports and caches
    assert calls_of_parsing(2000) < 2.1 * calls_of_parsing(1000)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), SHAPES), max_size=8), st.integers(0, 99))
def test_read_header__reads_what_the_safetensors_library_writes(
    plan: dict[str, tuple[str, tuple[int, ...]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.frombuffer(
            rng.integers(0, 2, int(np.prod(shape)) * NUMPY_DTYPES[dtype].itemsize, np.uint8).tobytes(),
            NUMPY_DTYPES[dtype],
        ).reshape(shape)
        for name, (dtype, shape) in plan.items()
    }
    content = safetensors.numpy.save(arrays, {"format": "np"})
    header = parse(content)
    assert {e.name: (e.dtype.name, e.shape) for e in header.entries} == plan
    for entry in header.entries:
        assert content[entry.offset : entry.offset + entry.nbytes] == arrays[entry.name].tobytes()
