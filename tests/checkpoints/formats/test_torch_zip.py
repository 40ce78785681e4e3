"""torch.save files as byte ranges."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.checkpoints.torch_file import TorchArchive, Window, read_torch_zip
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.location import Location
from support.stores import MetadataStore
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
    assert archive.tensors()["a[1]"].storage_key == archive.tensors()["c[0]"].storage_key


def test_read_torch_zip__reads_no_tensor_byte(tmp_path: Path) -> None:
    archive, store = opened(tmp_path, torch_bytes({"w": np.ones(5000, np.float32)}))
    tensor = archive.tensors()["w"]
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


def test_read_torch_zip__unwraps_parameters_and_subclasses(tmp_path: Path) -> None:
    hooks = Call(Named("collections", "OrderedDict"))
    plain = View(np.ones(4, np.float32), 1, (3,))
    value = {"p": Call(Named("torch._utils", "_rebuild_parameter"), (plain, True, hooks))}
    archive, _ = opened(tmp_path, torch_bytes(value))
    assert archive.tensors()["p"].shape == (3,)


def test_read_torch_zip__refuses_a_transposed_tensor(tmp_path: Path) -> None:
    archive, _ = opened(tmp_path, torch_bytes({"t": View(np.ones(6, np.float32), 0, (2, 3), (1, 2))}))
    with pytest.raises(UnsupportedError, match="not contiguous"):
        archive.tensors()


def test_read_torch_zip__accepts_any_stride_where_a_dimension_is_one(tmp_path: Path) -> None:
    archive, _ = opened(tmp_path, torch_bytes({"t": View(np.ones(3, np.float32), 0, (3, 1), (1, 99))}))
    assert archive.tensors()["t"].nbytes == 12


def test_read_torch_zip__refuses_big_endian(tmp_path: Path) -> None:
    members = [m for m in torch_members({"w": np.ones(1, np.float32)}) if not m.name.endswith("byteorder")]
    members.append(Member("archive/byteorder", b"big"))
    with pytest.raises(UnsupportedError, match="byte order"):
        opened(tmp_path, zip_bytes(members))


def test_read_torch_zip__refuses_the_older_format(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="older, unzipped format"):
        opened(tmp_path, pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"rest" * 20)


def test_read_torch_zip__refuses_a_zip_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"no data\.pkl"):
        opened(tmp_path, zip_bytes([Member("folder/notes.txt", b"hello")]))
