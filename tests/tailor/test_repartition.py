"""Composites for another number of ranks, and the archives they are written in."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import FORMATS, FULL, Pair, hidden, layer_groups, make_pair, tree, wrong_values
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.formats.inert_pickle import load_inert
from mergepipe.checkpoints.formats.inert_values import Global, PickledStorage, PickledTensor, Record
from mergepipe.checkpoints.formats.torch_zip import read_torch_zip
from mergepipe.checkpoints.formats.zip_directory import Window, read_zip_directory
from mergepipe.core.blocks import BF16
from mergepipe.errors import UnsupportedError
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.composition.archives.zip_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.composition.compose import compose
from mergepipe.tailor.composition.copy.plan import Fill, Literal
from mergepipe.tailor.composition.copy.writer import Copier
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint
from mergepipe.tailor.formats.pickle_node import Node
from support.stores import MetadataStore
from support.training_trees import KnownStates, decay_groups, write_zero3, write_zero12

PARITY = "default: new\ntake: [{from: old, units: [layers even, embed]}]\n"
ZERO = ("zero1", "zero2", "zero2-regrouped", "zero3", "zero3-regrouped", "zero3-saved", "hf-zero2")


def from_old(pair: Pair) -> list[str]:
    return [n for n in pair.old.shapes if any(part in n for part in ("embed_tokens", ".layers.0.", ".layers.2."))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ZERO)
def test_compose__writes_shards_for_another_number_of_ranks(tmp_path: Path, kind: str, world_size: int) -> None:
    if kind == "zero2-regrouped" and world_size > 2:
        pytest.skip("its groups of five elements are too small; see the refusal below")
    pair = make_pair(tmp_path, FORMATS[kind])
    pair.compose(PARITY, replace(FULL, world_size=world_size))
    made = open_training_checkpoint(MetadataStore(), Location.local(pair.out))
    assert (made.world_size, made.step, wrong_values(pair.out, pair, from_old(pair))) == (world_size, 9, [])
    for path in pair.out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    assert len(list(pair.out.rglob("*_optim_states.pt"))) == world_size


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_compose__to_other_ranks_and_back_gives_the_same_values_and_padding(
    tmp_path: Path, stage: int, world_size: int
) -> None:
    pair = make_pair(tmp_path, FORMATS[f"zero{stage}"])
    original = open_training_checkpoint(MetadataStore(), Location.local(pair.folder / "new")).world_size
    pair.compose("default: new", replace(FULL, world_size=world_size))
    back = tmp_path / "back"
    recipe = pair.recipe("default: out")
    compose(Location.local(recipe), back, replace(FULL, world_size=original), lambda *_: None)
    for path in sorted((tmp_path / "new").glob("*_optim_states.pt")):
        assert flat_tensors(back / path.name) == flat_tensors(path)


def flat_tensors(path: Path) -> Mapping[str, bytes]:
    """Every tensor of a file by its path, padding included."""
    content = path.read_bytes()
    archive = read_torch_zip(MetadataStore(), Location.local(path))
    return {name: content[t.offset : t.offset + t.nbytes] for name, t in archive.tensors().items()}


def test_compose__describes_each_ranks_part(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero2"])
    pair.compose("default: new", replace(FULL, world_size=2))
    archive = read_torch_zip(MetadataStore(), Location.local(pair.out / "zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    optimizer = Node(archive.root, "file").get("optimizer_state_dict")
    assert optimizer.get("partition_count").value == [2, 2]


def test_compose__drops_random_states_of_ranks_there_are_no_more(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["hf-zero2"])
    for rank in range(2):
        (tmp_path / "new" / f"rng_state_{rank}.pth").write_bytes(b"random")
    pair.compose("default: new", replace(FULL, world_size=1))
    assert sorted(p.name for p in pair.out.glob("rng_state*")) == ["rng_state_0.pth"]


def test_compose__refuses_another_number_of_ranks_for_other_formats(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["hf"])
    with pytest.raises(UnsupportedError) as caught:
        pair.compose("default: new", replace(FULL, world_size=2))
    assert caught.value.code == "tailor.world-size.format"


def test_compose__refuses_groups_too_small_for_the_ranks(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, lambda p, k: write_zero12(p, k, layer_groups(k.shapes), 2))
    before = tree(tmp_path / "new")
    with pytest.raises(UnsupportedError) as caught:
        pair.compose("default: new", replace(FULL, world_size=5))
    assert (caught.value.code, hidden(tmp_path), tree(tmp_path / "new")) == ("tailor.world-size.small", [], before)


@pytest.mark.parametrize("limit", [40, 100, 1000])
@pytest.mark.parametrize("ranks", [(1, 3), (2, 1), (3, 2), (2, 2)])
def test_compose__cuts_sub_groups_anew(tmp_path: Path, limit: int, ranks: tuple[int, int]) -> None:
    """Parameter groups are cut into sub-groups by the size of a rank's part: as if it had been saved by so many."""
    before, after = ranks
    pair = make_pair(tmp_path, lambda p, k: write_sub_groups(p, k, before, limit))
    pair.compose(PARITY, replace(FULL, world_size=after))
    assert wrong_values(pair.out, pair, from_old(pair)) == []
    write_sub_groups(tmp_path / "native", pair.new, after, limit)
    made, native = (
        open_training_checkpoint(MetadataStore(), Location.local(path)) for path in (pair.out, tmp_path / "native")
    )
    assert (made.flat_groups, made.world_size) == (native.flat_groups, after)
    for path in sorted((tmp_path / "native").glob("*_optim_states.pt")):
        found, wanted = options_of(pair.out / path.name), options_of(path)
        assert (found, flat_tensors(pair.out / path.name).keys()) == (wanted, flat_tensors(path).keys())
    shared = {step.parameters: step.value for step in made.steps}
    old = set(from_old(pair))
    assert shared == {names: 7.0 if old.issuperset(names) else 9.0 for names in native.flat_groups}


def write_sub_groups(folder: Path, known: KnownStates, world_size: int, limit: int) -> None:
    """ZeRO-3 with a `sub_group_size`."""
    members: list[list[int]] = []
    cut: list[list[str]] = []
    for group in decay_groups(known.shapes):
        first, n_elements = len(cut), limit
        for name in group:
            if n_elements >= limit:
                cut.append([])
                n_elements = 0
            cut[-1].append(name)
            n_elements += -(-known.arrays[name, "fp32"].size // world_size)
        members.append(list(range(first, len(cut))))
    config = {"zero_optimization": {"sub_group_size": limit}}
    write_zero3(folder, known, cut, world_size, members=members, config=config)


def options_of(path: Path) -> object:
    inner = ("optimizer_state_dict", "optimizer_state_dict", "param_groups")
    return Node(read_torch_zip(MetadataStore(), Location.local(path)).root, path.name).at(inner).value


def test_compose__refuses_sub_groups_that_its_settings_do_not_make(tmp_path: Path) -> None:
    config = {"zero_optimization": {"sub_group_size": 7}}
    pair = make_pair(tmp_path, lambda p, k: write_zero3(p, k, decay_groups(k.shapes), 2, config=config))
    with pytest.raises(UnsupportedError, match="sub_group_size of 7") as caught:
        pair.compose("default: new", replace(FULL, world_size=3))
    assert caught.value.code == "tailor.world-size.sub-groups"


# --- the writer

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
    members = [MemberPlan(f"data/{i}", (Literal(c), Fill(3))) for i, c in enumerate(contents)]
    plan = lay_out_archive("file.pt", "stem", members)
    Copier(LocalStore(), 32 << 20, lambda _: None).write(plan, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert [archive.read(f"stem/data/{i}") for i in range(len(contents))] == [c + bytes(3) for c in contents]
    listed = read_zip_directory(MetadataStore(), Window(Location.local(path), 0, path.stat().st_size))
    assert [m.offset % 64 for m in listed.values()] == [0] * len(contents)


def test_lay_out_archive__uses_zip64_beyond_four_gibibytes(tmp_path: Path) -> None:
    """Not written: laid over a sparse file, whose zeros are what the plan would fill in."""
    large = 5 << 30
    plan = lay_out_archive(
        "file.pt", "stem", [MemberPlan("data/0", (Fill(large),)), literal_member("data/1", b"after")]
    )
    path = tmp_path / "file.pt"
    with path.open("wb") as stream:
        for segment in plan.segments:
            stream.seek(segment.nbytes, 1) if isinstance(segment, Fill) else stream.write(literal(segment))
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


def test_known_values__are_not_all_alike(tmp_path: Path) -> None:
    """The comparisons above would notice a parameter of the other source."""
    pair = make_pair(tmp_path, FORMATS["zero2"])
    equal = [key for key, a in pair.old.arrays.items() if np.array_equal(a, pair.new.arrays[key])]
    assert equal == []
