"""Many files written in one go: the same bytes as one by one, and nothing left open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import CorruptError, NotFoundError
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal, Segment
from mergepipe.tailor.copy_writer import FEWEST_BYTES, Copier
from support.faults import open_descriptors

SOURCE_BYTES = 3 << 20


class CountingStore(LocalStore):
    """Notes every file it opens, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:  # type: ignore[override]
        self.opened.append(location.name)
        return super().open(location, direct=direct)


def write_sources(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"source-{i}" for i in range(count)]
    for seed, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(seed).bytes(SOURCE_BYTES))
    return paths


def content_of(plan: FilePlan) -> bytes:
    parts = []
    for segment in plan.segments:
        if isinstance(segment, CopyRange):
            parts.append(segment.file.local_path.read_bytes()[segment.offset : segment.offset + segment.nbytes])
        else:
            parts.append(segment.content if isinstance(segment, Literal) else bytes(segment.nbytes))
    return b"".join(parts)


@given(data=st.data())
def test_write_all__writes_what_each_plan_says(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("many")
    sources = [Location.local(path) for path in write_sources(folder, 2)]
    starts, sizes = st.integers(0, SOURCE_BYTES // 2), st.integers(0, SOURCE_BYTES // 2)
    segments: st.SearchStrategy[Segment] = st.one_of(
        st.builds(CopyRange, st.sampled_from(sources), starts, sizes, is_skeleton=st.booleans()),
        st.builds(Literal, st.binary(max_size=9)),
    )
    contents = data.draw(st.lists(st.lists(segments, max_size=4).map(tuple), max_size=6))
    plans = [FilePlan(f"out-{i}", found) for i, found in enumerate(contents)]
    advanced: list[int] = []
    before = open_descriptors()
    copier = Copier(LocalStore(), FEWEST_BYTES, advanced.append)
    written = copier.write_all([(plan, folder / plan.name) for plan in plans])
    expected = [content_of(plan) for plan in plans]
    assert [(folder / plan.name).read_bytes() for plan in plans] == expected
    digests = [(f.name, f.size_bytes, f.blake3) for f in written]
    assert digests == [(p.name, len(e), blake3(e).hexdigest(16)) for p, e in zip(plans, expected, strict=True)]
    assert (sum(advanced), open_descriptors()) == (sum(map(len, expected)), before)


def test_write_all__opens_a_source_once_however_many_files_read_it(tmp_path: Path) -> None:
    first, second = write_sources(tmp_path, 2)
    plans = [
        FilePlan(
            f"out-{i}",
            (
                CopyRange(Location.local(first), i, 9, is_skeleton=False),
                CopyRange(Location.local(second), i, 9, is_skeleton=False),
            ),
        )
        for i in range(20)
    ]
    store = CountingStore()
    Copier(store, FEWEST_BYTES, lambda _: None).write_all([(plan, tmp_path / plan.name) for plan in plans])
    assert store.opened == ["source-0", "source-1"]


def test_write_all__holds_no_more_files_open_than_it_reads_ahead(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, 12)
    plans = [
        FilePlan(f"out-{i}", (CopyRange(Location.local(s), 0, 9, is_skeleton=False),)) for i, s in enumerate(sources)
    ]
    before, most = open_descriptors(), 0

    def on_advance(_: int) -> None:
        nonlocal most
        most = max(most, len(open_descriptors() - before))

    Copier(LocalStore(), FEWEST_BYTES, on_advance).write_all([(plan, tmp_path / plan.name) for plan in plans])
    assert 1 < most <= 5  # four sources and one output


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_write_all__that_fails_leaves_nothing_open(tmp_path: Path, bad: int) -> None:
    (source,) = write_sources(tmp_path, 1)
    plans = [
        FilePlan(
            f"out-{i}",
            (CopyRange(Location.local(source), SOURCE_BYTES - (8 if i == bad else 9), 9, is_skeleton=False),),
        )
        for i in range(6)
    ]
    before = open_descriptors()
    copier = Copier(LocalStore(), FEWEST_BYTES, lambda _: None)
    with pytest.raises(CorruptError):
        copier.write_all([(plan, tmp_path / plan.name) for plan in plans])
    assert open_descriptors() <= before
    assert not (tmp_path / f"out-{bad}").exists()
    with pytest.raises(NotFoundError):
        copier.write_all([(plans[(bad + 1) % 6], tmp_path / "nowhere" / "out")])
    assert open_descriptors() <= before
