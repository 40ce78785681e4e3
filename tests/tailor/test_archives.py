"""The archives that composites are written in."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.inert_pickle import Global, PickledStorage, PickledTensor, Record, load_inert
from mergepipe.checkpoints.torch_file import Window, read_zip_directory
from mergepipe.core.blocks import BF16
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import InertPickler, MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.copy_plan import CopyRange, Literal
from mergepipe.tailor.copy_writer import write_files
from support.stores import MetadataStore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_inert_pickler__is_read_back_as_it_was(value: object) -> None:
    assert load_inert(InertPickler().dump(value), "test") == value


def test_inert_pickler__keeps_records_and_tensors() -> None:
    storage = PickledStorage("7", BF16, 12)
    record = Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,))
    plain = Record(Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), (), {"cur_scale": 1.0})
    tensor = PickledTensor(storage, BF16, 2, (3, 2), (2, 1))
    found = load_inert(InertPickler().dump([record, plain, tensor, b"\x00\xff"]), "test")
    assert isinstance(found, list)
    again, object_again, view, raw = found
    assert (again.kind, again.args, again.state) == (record.kind, (3,), None)
    assert (object_again.kind, object_again.args, object_again.state) == (plain.kind, (), {"cur_scale": 1.0})
    assert (view.storage.key, view.dtype, view.storage_offset, view.shape) == ("7", BF16, 2, (3, 2))
    assert raw == b"\x00\xff"


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_lay_out_archive__is_a_valid_zip_with_aligned_members(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("zip") / "file.pt"
    members = [MemberPlan(f"data/{i}", (Literal(c),)) for i, c in enumerate(contents)]
    plan = lay_out_archive("file.pt", "stem", members)
    write_files(LocalStore(), [(plan, path)], 32 << 20, lambda _: None)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert [archive.read(f"stem/data/{i}") for i in range(len(contents))] == contents
    listed = read_zip_directory(MetadataStore(), Window(Location.local(path), 0, path.stat().st_size))
    assert [m.offset % 64 for m in listed.values()] == [0] * len(contents)


def test_lay_out_archive__uses_zip64_beyond_four_gibibytes(tmp_path: Path) -> None:
    """Not written: laid over a sparse file, whose zeros are what the plan would copy."""
    large = 5 << 30
    path = tmp_path / "file.pt"
    copied = CopyRange(Location.local(path), 0, large, is_skeleton=True)
    members = [MemberPlan("data/0", (copied,)), literal_member("data/1", b"after")]
    plan = lay_out_archive("file.pt", "stem", members)
    with path.open("wb") as stream:
        for segment in plan.segments:
            stream.seek(segment.nbytes, 1) if isinstance(segment, CopyRange) else stream.write(literal(segment))
    with zipfile.ZipFile(path) as archive:
        sizes = [(i.filename, i.file_size) for i in archive.infolist()]
        assert sizes == [("stem/data/0", large), ("stem/data/1", 5)]
        assert archive.read("stem/data/1") == b"after"
    listed = read_zip_directory(MetadataStore(), Window(Location.local(path), 0, path.stat().st_size))
    assert listed["stem/data/0"].nbytes == large
    places = plan.checksums[0].places
    assert listed["stem/data/0"].crc_offsets == places


def literal(segment: object) -> bytes:
    assert isinstance(segment, Literal)
    return segment.content
