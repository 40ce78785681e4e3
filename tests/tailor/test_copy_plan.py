"""Copy plans, how they are cut and carried out: laws over random layouts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.blocks import BF16, DTYPES, F16, F32, F64, DType, Span
from mergepipe.errors import CorruptError, LimitError, NotFoundError, UnsupportedError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES
from mergepipe.tailor.checkpoint import Piece, StoredState
from mergepipe.tailor.copy_plan import (
    AverageRange,
    Checksum,
    CopyRange,
    ElementRange,
    FilePlan,
    Literal,
    Patch,
    Segment,
    cut_chunks,
    joined,
    patch_states,
    patched_file,
)
from mergepipe.tailor.copy_writer import FEWEST_BYTES, ChecksumRenewal, cast_bytes, values_of, write_files
from support.faults import drop_from_page_cache, open_descriptors
from support.refusals import refuses

SOURCE = Path("source")


@st.composite
def layouts(draw: st.DrawFn, n_elements: int, *, gaps: bool) -> tuple[Piece, ...]:
    """A parameter cut at random places, its pieces scattered over two files in any order, with bytes between."""
    cuts = sorted({0, n_elements, *draw(st.lists(st.integers(0, n_elements), max_size=5))})
    spans = [Span(a, b) for a, b in pairwise(cuts)]
    kept = [span for span in spans if not gaps or draw(st.booleans())]
    ends = {"a": draw(st.integers(0, 9)), "b": draw(st.integers(0, 9))}
    places = {}
    for span in draw(st.permutations(kept)):
        file = draw(st.sampled_from("ab"))
        places[span] = Piece(Location.local(Path(file)), ends[file], span.n_elements * 4, span)
        ends[file] += span.n_elements * 4 + draw(st.integers(0, 9))
    return tuple(places[span] for span in kept)


def state(pieces: Sequence[Piece], n_elements: int) -> StoredState:
    return StoredState("p", "fp32", F32, (n_elements,), tuple(pieces))


@given(st.data(), st.integers(1, 40))
def test_patch_states__puts_every_element_in_its_place(data: st.DataObject, n_elements: int) -> None:
    given_state = state(data.draw(layouts(n_elements, gaps=False)), n_elements)
    target = state(data.draw(layouts(n_elements, gaps=True)), n_elements)
    values = np.arange(n_elements, dtype=np.float32) + 1
    files = {name: bytearray(1000) for name in "ab"}
    for piece in given_state.pieces:
        content = values[piece.span.start : piece.span.stop].tobytes()
        files[piece.file.name][piece.offset : piece.offset + piece.nbytes] = content
    out = {name: bytearray(1000) for name in "ab"}
    patched = 0
    for file, patch in patch_states([given_state], target):
        assert isinstance(patch.segment, CopyRange)
        source = patch.segment
        out[file.name][patch.offset : patch.stop] = files[source.file.name][
            source.offset : source.offset + source.nbytes
        ]
        patched += source.nbytes
    for piece in target.pieces:
        found = np.frombuffer(bytes(out[piece.file.name][piece.offset : piece.offset + piece.nbytes]), np.float32)
        assert np.array_equal(found, values[piece.span.start : piece.span.stop])
    assert patched == target.nbytes


def cast_range(file: Path, offset: int, n_elements: int) -> AverageRange:
    return AverageRange((ElementRange(Location.local(file), offset, F32),), (1.0,), n_elements, BF16)


RANGES = st.builds(
    lambda file, offset, nbytes, own: CopyRange(Location.local(Path(file)), offset, nbytes, own),
    st.sampled_from("ab"), st.integers(0, 60_000), st.integers(0, 40_000), st.booleans(),
)  # fmt: skip


def content_of(segment: Segment, files: dict[str, bytes]) -> bytes:
    if isinstance(segment, CopyRange):
        return files[segment.file.name][segment.offset : segment.offset + segment.nbytes]
    if isinstance(segment, AverageRange):
        (part,) = segment.parts
        raw = files[part.file.name][part.offset : part.offset + 4 * segment.n_elements]
        return np.frombuffer(raw, np.float32).astype(ml_dtypes.bfloat16).tobytes()
    assert isinstance(segment, Literal)
    return segment.content


@given(RANGES.filter(lambda r: r.nbytes > 0))
def test_cut_chunks__cuts_on_page_boundaries(segment: CopyRange) -> None:
    parts = [part for chunk in cut_chunks([segment], 2 * PAGE_BYTES) for part in chunk]
    starts = [part.offset for part in parts if isinstance(part, CopyRange)]
    assert [start % PAGE_BYTES for start in starts[1:]] == [0] * (len(starts) - 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.binary(min_size=1, max_size=9)), max_size=6))
def test_patched_file__replaces_the_patches_alone(patches: list[tuple[int, bytes]]) -> None:
    original, wanted = bytes(range(40)), bytearray(range(40))
    position, kept = 0, []
    for gap, content in patches:
        if position + gap + len(content) <= 40:
            kept.append(Patch(position + gap, Literal(content)))
            wanted[position + gap : position + gap + len(content)] = content
            position += gap + len(content)
    plan = patched_file("x", Location.local(SOURCE), 40, reversed(kept))
    assert b"".join(content_of(s, {"source": original}) for s in plan.segments) == bytes(wanted)
    assert plan.size_bytes == 40


@pytest.mark.parametrize("offsets", [(0, 3), (37,), (5, 5)])
def test_patched_file__refuses_patches_that_overlap_or_lie_outside(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="overlaps or lies outside"):
        patched_file("x", Location.local(SOURCE), 40, [Patch(at, Literal(b"1234")) for at in offsets])


@given(
    st.binary(min_size=1, max_size=400),
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_checksum_renewal__writes_the_checksum_of_what_passed(
    content: bytes, lengths: list[int], steps: list[int]
) -> None:
    """Members follow one another, each with four bytes for its checksum behind it; all are repeated at the end."""
    whole, ranges = bytearray(), []
    for length in lengths:
        start = len(whole)
        whole += (content * 60)[:length] + b"----"
        ranges.append((start, start + length))
    directory = len(whole)
    whole += b"++++" * len(ranges)
    checksums = [Checksum(a, b, (b, directory + 4 * i)) for i, (a, b) in enumerate(ranges)]
    renewal, position, out = ChecksumRenewal(checksums), 0, bytearray()
    while position < len(whole):
        step = steps[position % len(steps)]
        views = [np.frombuffer(bytearray(whole[position : position + step]), np.uint8)]
        renewal.pass_through(views)
        out += views[0].tobytes()
        position += step
    for index, (start, stop) in enumerate(ranges):
        crc = zlib.crc32(whole[start:stop]).to_bytes(4, "little")
        places = (stop, directory + 4 * index)
        assert [bytes(out[place : place + 4]) for place in places] == [crc, crc]
        assert out[start:stop] == whole[start:stop]


@pytest.mark.thorough
@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("memory_bytes", [FEWEST_BYTES, 64 << 20])
def test_write_files__writes_what_is_planned(tmp_path: Path, is_cold: bool, memory_bytes: int) -> None:
    large = np.random.default_rng(7).integers(0, 256, 20_000_001, dtype=np.uint8).tobytes()
    small = np.random.default_rng(0).standard_normal(30_000).astype(np.float32).tobytes()
    files = {"a": small, "b": large}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    segments: list[Segment] = [
        CopyRange(Location.local(tmp_path / "b"), 3, 11_000_003, is_skeleton=True),
        *(CopyRange(Location.local(tmp_path / "a"), 5 * i, 5, is_skeleton=False) for i in range(0, 4000, 2)),
        cast_range(tmp_path / "a", 4, 29_000),
        Literal(b"literal"),
        CopyRange(Location.local(tmp_path / "b"), 11_000_006, 8_999_995, is_skeleton=True),
    ]
    if is_cold:
        drop_from_page_cache(tmp_path)
    store = LocalStore()
    advanced: list[int] = []
    plan = FilePlan("out", tuple(segments))
    (written,) = write_files(store, [(plan, tmp_path / "out")], memory_bytes, advanced.append)
    assert (tmp_path / "out").read_bytes() == b"".join(content_of(s, files) for s in segments)
    assert (written.size_bytes, sum(advanced)) == (plan.size_bytes, plan.size_bytes)
    usage = store.ledger.usage()
    most_rounding = 2 * PAGE_BYTES * (len(segments) + 40)
    assert plan.read_bytes <= usage[Purpose.BASE] + usage[Purpose.EXPERT] <= plan.read_bytes + most_rounding


def test_write_files__refuses_too_little_memory() -> None:
    with pytest.raises(LimitError):
        write_files(LocalStore(), [], FEWEST_BYTES - 1, lambda _: None)


@pytest.mark.parametrize("stored", [F32, F64])
def test_cast_bytes__makes_the_bfloat16_of_ml_dtypes(stored: DType) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (patterns[:, None] | tails).ravel().view(np.float32)
    with np.errstate(invalid="ignore"):
        values = values if stored == F32 else values.astype(np.float64)
        expected = values.astype(ml_dtypes.bfloat16)
    cast = cast_bytes(values.view(np.uint8), stored, BF16, "x")
    assert cast.tobytes() == expected.tobytes()
    for wide, kind in ((F32, np.float32), (F16, np.float16)):
        with np.errstate(all="ignore"):
            assert cast_bytes(cast, BF16, wide, "x").tobytes() == expected.astype(kind).tobytes(), wide


def test_values_of__refuses_what_training_does_not_use() -> None:
    with pytest.raises(UnsupportedError):
        values_of(np.zeros(1, np.uint8), DTYPES["F8_E4M3"], "x")


# --- many files written in one go: the same bytes as one by one, and nothing left open


SOURCE_BYTES = 3 << 20


def write_sources(folder: Path, count: int) -> list[Location]:
    paths = [folder / f"source-{i}" for i in range(count)]
    for seed, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(seed).standard_normal(SOURCE_BYTES // 4, np.float32).tobytes())
    return [Location.local(path) for path in paths]


@pytest.mark.thorough
@given(data=st.data())
def test_write_files__writes_what_each_plan_says(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("many")
    sources = write_sources(folder, 2)
    files = {source.name: source.local_path.read_bytes() for source in sources}
    starts, sizes = st.integers(0, SOURCE_BYTES // 2), st.integers(0, SOURCE_BYTES // 2)
    segments: st.SearchStrategy[Segment] = st.one_of(
        st.builds(CopyRange, st.sampled_from(sources), starts, sizes, is_skeleton=st.booleans()),
        st.builds(Literal, st.binary(max_size=9)),
        st.builds(
            lambda at, n: cast_range(sources[0].local_path, 4 * at, n),
            st.integers(0, 250),
            st.integers(0, SOURCE_BYTES // 8),
        ),
    )
    contents = data.draw(st.lists(st.lists(segments, max_size=4).map(tuple), max_size=6))
    plans = [FilePlan(f"out-{i}", tuple(joined(found))) for i, found in enumerate(contents)]
    advanced: list[int] = []
    before = open_descriptors()
    jobs = [(plan, folder / plan.name) for plan in plans]
    written = write_files(LocalStore(), jobs, FEWEST_BYTES, advanced.append)
    expected = [b"".join(content_of(segment, files) for segment in found) for found in contents]
    assert [(folder / plan.name).read_bytes() for plan in plans] == expected
    digests = [(f.name, f.size_bytes, f.blake3) for f in written]
    assert digests == [(p.name, len(e), blake3(e).hexdigest(16)) for p, e in zip(plans, expected, strict=True)]
    assert (sum(advanced), open_descriptors()) == (sum(map(len, expected)), before)


def test_write_files__opens_a_source_once_however_many_files_read_it(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, 2)
    plans = [
        FilePlan(f"out-{i}", tuple(CopyRange(source, i, 9, is_skeleton=False) for source in sources)) for i in range(20)
    ]
    with mock.patch.object(LocalStore, "open", autospec=True, side_effect=LocalStore.open) as opened:
        write_files(LocalStore(), [(plan, tmp_path / plan.name) for plan in plans], FEWEST_BYTES, lambda _: None)
    assert [call.args[1].name for call in opened.call_args_list] == ["source-0", "source-1"]


def test_write_files__holds_no_more_files_open_than_it_reads_ahead(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, 12)
    plans = [FilePlan(f"out-{i}", (CopyRange(s, 0, 9, is_skeleton=False),)) for i, s in enumerate(sources)]
    before, most = open_descriptors(), 0

    def on_advance(_: int) -> None:
        nonlocal most
        most = max(most, len(open_descriptors() - before))

    write_files(LocalStore(), [(plan, tmp_path / plan.name) for plan in plans], FEWEST_BYTES, on_advance)
    assert 1 < most <= 5  # four sources and one output


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_write_files__that_fails_leaves_nothing_open(tmp_path: Path, bad: int) -> None:
    (source,) = write_sources(tmp_path, 1)
    starts = [SOURCE_BYTES - (8 if i == bad else 9) for i in range(6)]
    plans = [FilePlan(f"out-{i}", (CopyRange(source, at, 9, is_skeleton=False),)) for i, at in enumerate(starts)]
    before = open_descriptors()

    def write(jobs: list[tuple[FilePlan, Path]]) -> None:
        write_files(LocalStore(), jobs, FEWEST_BYTES, lambda _: None)

    with refuses(CorruptError, "storage.shrunk"):
        write([(plan, tmp_path / plan.name) for plan in plans])
    assert open_descriptors() <= before
    assert not (tmp_path / f"out-{bad}").exists()
    with pytest.raises(NotFoundError):
        write([(plans[(bad + 1) % 6], tmp_path / "nowhere" / "out")])
    assert open_descriptors() <= before
