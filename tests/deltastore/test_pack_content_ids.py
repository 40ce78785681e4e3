"""The content id that a store keeps of its original: the same, and for nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import PackFamily, make_family

import mergepipe
from mergepipe.checkpoints.content_id import PassingContentId, content_id, samples
from mergepipe.checkpoints.contract import TensorEntry, files_of
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.deltastore.index import HEADER_FORMAT, HEADER_NAME
from mergepipe.runs.inputs import open_path
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.disk_families import weights_digest


@pytest.fixture(scope="module", name="family")
def make_packed_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    family = make_family(tmp_path_factory.mktemp("family"))
    mergepipe.pack(family.base, family.experts, family.root / "stores")
    return family


def stores(family: PackFamily) -> list[Path]:
    return [family.root / "stores" / expert.name for expert in family.experts]


def id_of(path: Path) -> str:
    store = LocalStore()
    checkpoint = open_checkpoint(store, Location.local(path))
    with open_files(store, files_of(checkpoint.tensors.values())) as files:
        return content_id(checkpoint, files)


def test_pack__keeps_the_content_id_of_the_original(family: PackFamily) -> None:
    for store, expert in zip(stores(family), family.experts, strict=True):
        header = HEADER_FORMAT.parse((store / HEADER_NAME).read_bytes(), Location.local(store))
        assert header.content_id == id_of(expert)
        opened = open_path(
            LocalStore(), Location.local(store), open_checkpoint(LocalStore(), Location.local(family.base))
        )
        assert list(samples(opened)) == []


@given(data=st.data())
def test_passing_content_id__does_not_depend_on_how_bytes_pass_by(family: PackFamily, data: st.DataObject) -> None:
    expert = open_checkpoint(LocalStore(), Location.local(family.experts[0]))
    passing = PassingContentId(expert)
    shown = data.draw(st.permutations(list(expert.tensors.values())))
    for entry in shown[: data.draw(st.integers(0, len(shown)))]:
        assert isinstance(entry, TensorEntry)
        content = np.frombuffer(entry.file.local_path.read_bytes(), np.uint8)[
            entry.offset : entry.offset + entry.nbytes
        ]
        cuts = sorted({0, entry.nbytes, *data.draw(st.lists(st.integers(0, entry.nbytes), max_size=4))})
        for start, stop in data.draw(st.permutations(list(pairwise(cuts)))):
            passing.show(entry.name, start, content[start:stop])
    store = LocalStore()
    with open_files(store, passing.missing_files) as files:
        assert passing.value(files) == id_of(family.experts[0])


@pytest.mark.parametrize("budget", [None, "100%", "40%"])
def test_merge__of_packed_experts_at_random_samples_nothing(
    family: PackFamily, tmp_path: Path, budget: str | None
) -> None:
    raw = mergepipe.merge(family.recipe("dare_ties"), tmp_path / "raw", home=tmp_path / "h1")
    recipe = family.recipe("dare_ties", stores(family))
    report = mergepipe.merge(recipe, tmp_path / "out", budget=budget, home=tmp_path / "h2")
    assert report.analysis_bytes == 0
    assert raw.analysis_bytes > 0
    if budget != "40%":
        assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "raw")
