"""The archives that composites are written in."""

from __future__ import annotations

import copy
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.inert_pickle import Global, PickledStorage, PickledTensor, Record, load_inert
from mergepipe.checkpoints.zip_directory import Window, read_zip_directory
from mergepipe.core.blocks import BF16
from mergepipe.errors import CorruptError
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.archive_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.checkpoint import PicklePath
from mergepipe.tailor.copy_plan import CopyRange, Literal
from mergepipe.tailor.copy_writer import write_files
from mergepipe.tailor.pickle_writer import InertPickler, edit_pickle
from support.stores import MetadataStore

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text()
KEYS = st.sampled_from(["lr", "step", "a", "b"]) | st.integers(0, 3) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
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


# --- values changed inside a pickle: what was asked for changes, and nothing else


def paths(value: object, before: PicklePath = ()) -> list[PicklePath]:
    """Every path that ends with a key of a mapping, through mappings and lists."""
    found: list[PicklePath] = []
    items: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
        found = [(*before, key) for key in value]
    elif isinstance(value, list):
        items = list(enumerate(value))
    return found + [path for key, inner in items for path in paths(inner, (*before, key))]


def changed(value: Any, path: PicklePath, new: object) -> Any:
    result = copy.deepcopy(value)
    holder = result
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = new
    return result


@given(st.data(), st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), VALUES, st.integers(2, 5))
def test_edit_pickle__changes_what_was_asked_for_and_nothing_else(
    data: st.DataObject, value: dict[Any, Any], new: object, protocol: int
) -> None:
    path = data.draw(st.sampled_from(paths(value)))
    edited = edit_pickle(pickle.dumps(value, protocol), {path: new}, "test")
    assert load_inert(edited, "test") == pickle.loads(edited) == changed(value, path, new)


def test_edit_pickle__makes_several_changes_at_once() -> None:
    raw = pickle.dumps({"global_steps": 100, "groups": [{"lr": 0.5}, {"lr": 0.25}]}, 2)
    edits: dict[PicklePath, object] = {("groups", 1, "lr"): 1e-3, ("global_steps",): 70_000, ("groups", 0, "lr"): 2e-3}
    assert load_inert(edit_pickle(raw, edits, "test"), "test") == {
        "global_steps": 70_000,
        "groups": [{"lr": 2e-3}, {"lr": 1e-3}],
    }


def test_edit_pickle__leaves_values_that_others_refer_to() -> None:
    """The old value stands in the pickle first: what recalls it, or a text inside it, still finds it."""
    shared = {"last_epoch": [1, 2]}
    raw = pickle.dumps({"scheduler": shared, "again": shared, "last_epoch": "last_epoch"}, 2)
    edited = edit_pickle(raw, {("scheduler",): {"last_epoch": 9}}, "test")
    assert load_inert(edited, "test") == {
        "scheduler": {"last_epoch": 9}, "again": {"last_epoch": [1, 2]}, "last_epoch": "last_epoch",
    }  # fmt: skip


def test_edit_pickle__returns_the_same_bytes_where_nothing_is_asked_for() -> None:
    raw = pickle.dumps({"a": 1}, 2)
    assert edit_pickle(raw, {}, "test") is raw


@pytest.mark.parametrize("path", [("b",), ("a", "b"), ("list", 1, "x"), ("list", 0), ("list", 5, "x")])
def test_edit_pickle__refuses_a_path_that_is_not_there(path: PicklePath) -> None:
    raw = pickle.dumps({"a": 1, "list": [{"x": 1}, 2]}, 2)
    with pytest.raises(CorruptError, match="could be changed"):
        edit_pickle(raw, {path: 0}, "file")
