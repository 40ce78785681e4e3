"""Weights in files of torch.save: archives, pickles in shards, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry, WeightHeader
from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_weights, read_torch_zip
from mergepipe.checkpoints.zip_directory import Window
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from support.late_modules import torch
from support.local_models import open_local
from support.stores import InMemoryStore, MetadataStore
from support.torch_bytes import Call, Member, Named, View, torch_bytes, torch_members, zip_bytes

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers(-(1 << 59), 1 << 59)
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


def opened(tmp_path: Path, content: bytes) -> tuple[TorchArchive, MetadataStore]:
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    store = MetadataStore()
    return read_torch_zip(store, Location.local(path)), store


@given(VALUES, st.integers(2, 5))
def test_load_inert__equals_pickle_on_plain_values(value: object, protocol: int) -> None:
    assert load_inert(pickle.dumps(value, protocol), "test") == value


def test_load_inert__keeps_sharing() -> None:
    shared = [1]
    first, second = pickle.loads(pickle.dumps([shared, shared])), load_inert(pickle.dumps([shared, shared]), "test")
    assert isinstance(second, list)
    assert (first[0] is first[1], second[0] is second[1]) == (True, True)


def test_load_inert__reads_a_value_that_contains_itself() -> None:
    value: list[object] = []
    value.append(value)
    loaded = load_inert(pickle.dumps(value), "test")
    assert isinstance(loaded, list)
    assert loaded[0] is loaded


def test_load_inert__reads_ordered_mappings_and_sets() -> None:
    value = {"o": OrderedDict(a=1, b=2), "s": {3}, "f": frozenset({4})}
    for protocol in (2, 4):
        assert load_inert(pickle.dumps(value, protocol), "test") == {"o": {"a": 1, "b": 2}, "s": [3], "f": [4]}


def test_read_torch_zip__gives_the_bytes_of_every_tensor(tmp_path: Path) -> None:
    flat = np.arange(40, dtype=np.float32)
    column = np.array([[1], [2]], np.float32)
    value = {"a": [flat[:0], View(flat, 3, (2, 5))], "b": {7: column}, "c": (View(flat, 0, (40,)),)}
    archive, _ = opened(tmp_path, torch_bytes(value))
    raw = archive.file.local_path.read_bytes()
    found = {p: raw[t.offset : t.offset + t.nbytes] for p, t in archive.tensors().items()}
    assert found == {"a[0]": b"", "a[1]": flat[3:13].tobytes(), "b[7]": column.tobytes(), "c[0]": flat.tobytes()}


def test_read_torch_zip__reads_no_tensor_byte_and_asks_once_for_all_between_two_tensors() -> None:
    path = Location.parse("s3://bucket/optimizer.pt")
    store = InMemoryStore(
        {path: torch_bytes([{"step": np.array(n, "f4"), "w": np.ones(100 + n, "f4")} for n in range(40)])}
    )
    archive = read_torch_zip(store, path)
    steps = b"".join(archive.read(path, t.offset, 4) for name, t in archive.tensors().items() if name.endswith("step"))
    assert (np.frombuffer(steps, "f4").tolist(), len(store.reads) < 50) == (list(range(40)), True)
    for tensor in (t for name, t in archive.tensors().items() if name.endswith("w")):
        for read in store.reads:
            assert read.offset + read.nbytes <= tensor.offset or read.offset >= tensor.offset + tensor.nbytes


def test_read_torch_zip__tells_where_each_checksum_is_written(tmp_path: Path) -> None:
    archive, _ = opened(tmp_path, torch_bytes({"w": np.arange(9, dtype=np.float32)}))
    raw = archive.file.local_path.read_bytes()
    for member in archive.members.values():
        written = {int.from_bytes(raw[at : at + 4], "little") for at in member.crc_offsets}
        assert (len(member.crc_offsets), written) == (2, {member.crc32})


def test_read_torch_zip__reads_an_archive_inside_a_larger_file(tmp_path: Path) -> None:
    item = torch_bytes(np.arange(2000, dtype=np.float32))
    path = tmp_path / "items"
    path.write_bytes(b"x" * 77 + item + b"y" * 50)
    archive = read_torch_zip(MetadataStore(), Location.local(path), Window(Location.local(path), 77, len(item)))
    (tensor,) = archive.tensors().values()
    stored = path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    assert stored == np.arange(2000, dtype=np.float32).tobytes()


def test_read_torch_zip__reads_sixty_four_bit_directories(tmp_path: Path) -> None:
    archive, _ = opened(tmp_path, zip_bytes(torch_members({"w": np.ones(3, np.float32)}), zip64=True))
    assert archive.tensors()["w"].nbytes == 12


def test_read_torch_zip__unwraps_parameters_and_takes_any_stride_where_a_dimension_is_one(tmp_path: Path) -> None:
    hooks = Call(Named("collections", "OrderedDict"))
    plain = View(np.ones(4, np.float32), 1, (3,))
    parameter = Call(Named("torch._utils", "_rebuild_parameter"), (plain, True, hooks))
    archive, _ = opened(tmp_path, torch_bytes([parameter, View(np.ones(3, np.float32), 0, (3, 1), (1, 99))]))
    assert [(tensor.shape, tensor.nbytes) for tensor in archive.tensors().values()] == [((3,), 12), ((3, 1), 12)]


def test_read_torch_zip__refuses_big_endian(tmp_path: Path) -> None:
    members = [m for m in torch_members({"w": np.ones(1, np.float32)}) if not m.name.endswith("byteorder")]
    members.append(Member("archive/byteorder", b"big"))
    with pytest.raises(UnsupportedError, match="byte order"):
        opened(tmp_path, zip_bytes(members))


A: NDArray[np.float32] = np.arange(24, dtype=np.float32)
STATE: dict[object, object] = {"a": View(A, 0, (4, 6)), "b": View(A, 6, (6,))}


def weights(tmp_path: Path, value: object, name: str = "w.bin") -> WeightHeader:
    (tmp_path / name).write_bytes(torch_bytes(value))
    return read_torch_weights(MetadataStore(), Location.local(tmp_path / name))


def values(entry: TensorEntry) -> list[float]:
    raw = entry.file.local_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    return [float(value) for value in np.frombuffer(raw, np.float32)]


@pytest.mark.parametrize(
    "wrapped",
    [
        STATE,
        {"state_dict": STATE, "epoch": 3},
        {"module": STATE},
        {"model": {"state_dict": STATE}},
        {**STATE, "x": None},
    ],
    ids=["plain", "lightning", "deepspeed", "twice", "with-nothing"],
)
def test_read_torch_weights__finds_the_state(tmp_path: Path, wrapped: object) -> None:
    found = {entry.name: entry for entry in weights(tmp_path, wrapped).entries}
    assert {name: values(entry) for name, entry in found.items()} == {"a": A.tolist(), "b": A[6:12].tolist()}
    assert (found["a"].shape, found["a"].offset + 24) == ((4, 6), found["b"].offset)


def test_read_torch_weights__digests_places_and_checksums(tmp_path: Path) -> None:
    first = weights(tmp_path, STATE, "1.bin").digest
    assert weights(tmp_path, STATE, "2.bin").digest == first
    changed = A.copy()
    changed[20] = -1  # seen through the checksum in the directory, without reading the tensor
    assert weights(tmp_path, {"a": View(changed, 0, (4, 6)), "b": View(changed, 6, (6,))}).digest != first


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1, 2], UnsupportedError, "has no mapping of names to tensors"),
        ({"optimizer": {"state": {}}}, UnsupportedError, "has no mapping of names to tensors"),
        ({**STATE, "step": 3}, UnsupportedError, "'step' holds a 'int', which is not a tensor"),
        ({**STATE, 7: View(A, 0, (2,))}, CorruptError, "7 cannot be a tensor's name"),
        ({"a": View(A, 0, (4, 6), (1, 4))}, UnsupportedError, "is not contiguous; call "),
    ],
)  # fmt: skip
def test_read_torch_weights__refuses_what_it_cannot_place(
    tmp_path: Path, value: object, error: type[MergePipeError], words: str
) -> None:
    with pytest.raises(error, match=words):
        weights(tmp_path, value)


def test_read_torch_weights__refuses_the_unzipped_format(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(UnsupportedError, match=r"older, unzipped format; load and save it again"):
        read_torch_weights(MetadataStore(), Location.local(tmp_path / "old.pt"))


def test_open_checkpoint__reads_sharded_pickles(tmp_path: Path) -> None:
    shards = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    for shard, name in shards.items():
        (tmp_path / shard).write_bytes(torch_bytes({name: STATE[name]}))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard, name in shards.items()}}))
    (tmp_path / "training_args.bin").write_bytes(b"not looked at")
    checkpoint = open_local(tmp_path, MetadataStore())
    assert list(checkpoint.tensors) == ["a", "b"]
    assert [file.name for file in checkpoint.file_ids] == sorted(shards)
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    with pytest.raises(CorruptError, match=r"must be a plain file name ending in \.bin or"):
        open_local(tmp_path, MetadataStore())


@pytest.mark.transformers
@pytest.mark.parametrize("nested", [False, True])
def test_open_checkpoint__reads_what_torch_saves(tmp_path: Path, *, nested: bool) -> None:
    first = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    state = {"w": torch.nn.Parameter(first), "tied": first, "row": first[1], "buffer": torch.tensor([True, False])}
    torch.save({"state_dict": state, "step": 1} if nested else state, tmp_path / "pytorch_model.bin")
    tensors = open_local(tmp_path, MetadataStore()).tensors
    places = {name: (t.dtype.name, t.shape, t.stored[0].offset) for name, t in tensors.items()}
    start = places["w"][2]
    assert places["w"] == ("BF16", (3, 4), start)
    assert places["tied"] == places["w"]
    assert places["row"] == ("BF16", (4,), start + 8)
    assert places["buffer"][:2] == ("BOOL", (2,))
