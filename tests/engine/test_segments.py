"""The laws of cutting work into segments, and of laying a segment out in its buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BF16, F32, F64, GRAIN_ELEMENTS, DType, Span
from mergepipe.engine.segments import (
    FEWEST_BUFFERS,
    Run,
    SegmentLayout,
    Segments,
    choose_buffer_sizes,
    cut_everywhere,
    full_access,
    lay_out,
    plan_jobs,
    stored_bytes,
)
from mergepipe.errors import LimitError
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, BufferPool, round_up
from support.refusals import refuses

SIZES = st.one_of(
    st.integers(0, 9), st.integers(0, 3000), st.sampled_from([GRAIN_ELEMENTS, GRAIN_ELEMENTS + 1]),
    st.integers(0, 6 * GRAIN_ELEMENTS),
)  # fmt: skip
DTYPES = st.sampled_from([F64, F32, BF16])


@st.composite
def task_lists(draw: st.DrawFn) -> list[MergeTask]:
    """Tensors of a base and K experts, each model in one or two files, with or without gaps between tensors."""
    n_experts = draw(st.integers(0, 4))
    ends: dict[Path, int] = defaultdict(lambda: draw(st.integers(8, 9000)))
    tasks = []
    for index in range(draw(st.integers(1, 8))):
        n = draw(SIZES)
        is_copy = draw(st.sampled_from([False, False, False, True]))
        models = range(1 if is_copy else n_experts + 1)
        entries = tuple(_entry(draw, f"t{index}", n, f"model{m}", ends) for m in models)
        dtype = entries[0].dtype if is_copy else draw(DTYPES)
        parameters = TensorParameters({}, {}, ({},) * (len(entries) - 1))
        action = Action.COPY if is_copy else Action.MERGE
        experts = tuple(range(1, len(entries)))
        task = MergeTask(f"t{index}", action, (n,), dtype, entries[0], entries[1:], parameters, expert_models=experts)
        tasks.append(task)
    return tasks


def _entry(draw: st.DrawFn, name: str, n: int, model: str, ends: dict[Path, int]) -> TensorEntry:
    dtype: DType = draw(DTYPES)
    file = Path(model) / draw(st.sampled_from(["a", "b"]))
    offset = ends[file] + draw(st.sampled_from([0, 0, 1, 5000]))
    ends[file] = offset + n * dtype.itemsize
    return TensorEntry(name, dtype, (n,), Location.local(file), offset, n * dtype.itemsize)


def smallest_memory(tasks: list[MergeTask], cut_elements: int = GRAIN_ELEMENTS) -> int:
    """The least memory for which buffer sizes can be chosen."""
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            choose_buffer_sizes(tasks, middle, cut_everywhere(cut_elements))
            high = middle
        except LimitError:
            low = middle
    return high


@st.composite
def memories(draw: st.DrawFn, tasks: list[MergeTask], cut_elements: int = GRAIN_ELEMENTS) -> int:
    """From the smallest that is allowed up."""
    return smallest_memory(tasks, cut_elements) + draw(st.sampled_from([0, 1, PAGE_BYTES, 100_000, 3_000_000, 1 << 30]))


def check_jobs(
    tasks: list[MergeTask], jobs: list[Segments], wanted: dict[int, tuple[Run, ...]], cut_elements: int
) -> None:
    """Runs cover what was wanted in order, segments are numbered in order, cuts fall on the grid."""
    segments = list(chain.from_iterable(jobs))
    assert [segment.number for segment in segments] == list(range(len(segments)))
    runs = [run for segment in segments for run in segment.runs]
    assert [run.task_index for run in runs] == sorted(run.task_index for run in runs)
    for index, task in enumerate(tasks):
        own = [run for run in runs if run.task_index == index]
        edges = {0, *(run.span.stop for run in wanted[index])}
        position = 0
        for run in own:
            assert run.span.start == position
            assert run.span.start % cut_elements == 0 or run.span.start in edges
            (source,) = [w for w in wanted[index] if w.span.start <= run.span.start and run.span.stop <= w.span.stop]
            assert run.present == source.present
            position = run.span.stop
        assert own
        assert position == task.base.n_elements
    for job in jobs:
        assert len(job) == 1 or len({run.task_index for segment in job for run in segment.runs}) == 1


def wanted_runs(data: st.DataObject, tasks: list[MergeTask]) -> dict[int, tuple[Run, ...]]:
    """Full access, or runs of some grains that each read some of the experts."""
    if data.draw(st.booleans()):
        return {index: tuple(full_access(index, task)) for index, task in enumerate(tasks)}
    wanted = {}
    for index, task in enumerate(tasks):
        n = task.base.n_elements
        cuts = {0, n, *(c for g in data.draw(st.lists(st.integers(1, 5), max_size=3)) if (c := g * GRAIN_ELEMENTS) < n)}
        edges = sorted(cuts) if n else [0, 0]
        experts = st.sets(st.integers(0, max(0, len(task.experts) - 1)), max_size=len(task.experts))
        wanted[index] = tuple(
            Run(index, Span(a, b), tuple(sorted(data.draw(experts))) if task.experts else ())
            for a, b in pairwise(edges)
        )
    return wanted


@given(st.data())
def test_plan_jobs__covers_every_tensor_in_segments_that_fit(data: st.DataObject) -> None:
    tasks = data.draw(task_lists())
    cut_elements = data.draw(st.sampled_from([1, 3])) * GRAIN_ELEMENTS
    memory, in_part = data.draw(memories(tasks, cut_elements)), data.draw(st.booleans())
    sizes = choose_buffer_sizes(tasks, memory, cut_everywhere(cut_elements), in_part=in_part)
    wanted = wanted_runs(data, tasks)
    jobs = []
    for job in plan_jobs(tasks, sizes, lambda index, _: wanted[index], cut_everywhere(cut_elements)):
        jobs.append(job)
        assert len(jobs) <= len(tasks)
    check_jobs(tasks, jobs, wanted, cut_elements)
    for segment in chain.from_iterable(jobs):
        need = sum(stored_bytes(tasks[r.task_index], r.span.n_elements, r.present) for r in segment.runs)
        assert need <= sizes.raw_bytes
        out = sum(r.span.n_elements * tasks[r.task_index].dtype.itemsize for r in segment.runs)
        assert out <= sizes.out_bytes


@given(st.data())
def test_choose_buffer_sizes__leaves_room_for_the_fewest_buffers(data: st.DataObject) -> None:
    tasks = data.draw(task_lists())
    memory = data.draw(memories(tasks))
    sizes = choose_buffer_sizes(tasks, memory, in_part=data.draw(st.booleans()))
    pool = BufferPool(sizes.total_bytes, memory)
    assert pool.limit >= FEWEST_BUFFERS
    assert pool.limit * sizes.total_bytes <= memory
    assert sizes.raw_bytes % PAGE_BYTES == 0


def large_task(n_experts: int) -> MergeTask:
    entry = TensorEntry("t", F32, (1 << 20,), Location.local(Path("f")), 0, 4 << 20)
    parameters, models = TensorParameters({}, {}, ({},) * n_experts), tuple(range(1, n_experts + 1))
    return MergeTask("t", Action.MERGE, (1 << 20,), F32, entry, (entry,) * n_experts, parameters, expert_models=models)


def test_choose_buffer_sizes__cuts_what_hardly_reads_experts_into_few_segments_however_many_there_are() -> None:
    def n_segments(n_experts: int, *, in_part: bool) -> int:
        task, cut_of = large_task(n_experts), cut_everywhere(GRAIN_ELEMENTS)
        sizes = choose_buffer_sizes([task], 1 << 30, cut_of, in_part=in_part)
        (job,) = plan_jobs([task], sizes, lambda index, _: (Run(index, Span(0, 1 << 20), ()),), cut_of)
        return len(job)

    assert n_segments(20, in_part=True) == n_segments(2, in_part=True) == 1
    assert n_segments(20, in_part=False) > n_segments(2, in_part=False)


def test_choose_buffer_sizes__names_the_memory_it_needs() -> None:
    task = large_task(3)
    with refuses(LimitError, "memory.too-small") as caught:
        choose_buffer_sizes([task], 1000)
    needed = smallest_memory([task])
    assert str(needed) in str(caught.value)
    assert f"to {-(-needed // 2**20)}MiB or more" in str(caught.value)


def needed_ranges(layout: SegmentLayout, tasks: list[MergeTask]) -> Iterable[tuple[TensorEntry, Span, Purpose, int]]:
    """Every stored range of a segment, with the place where it must lie in the buffer."""
    for piece in layout.pieces:
        task = tasks[piece.run.task_index]
        yield task.base.stored[0], piece.run.span, Purpose.BASE, piece.base_offset
        for e, place in zip(piece.run.present, piece.expert_offsets, strict=True):
            yield task.experts[e].stored[0], piece.run.span, Purpose.EXPERT, place


def check_reads(layout: SegmentLayout, tasks: list[MergeTask], raw_bytes: int, alignments: dict[Location, int]) -> None:
    """Reads are aligned, apart from each other in the buffer and the file, and cover the needed pages and no more."""
    in_buffer = sorted((read.buffer_offset, read.buffer_offset + read.nbytes) for read in layout.reads)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(in_buffer))
    assert all(stop <= raw_bytes for _, stop in in_buffer)
    covered: dict[tuple[Location, Purpose], list[range]] = defaultdict(list)
    for read in layout.reads:
        assert read.nbytes > 0
        assert read.buffer_offset % PAGE_BYTES == 0
        assert (read.offset % alignments[read.file], read.nbytes % alignments[read.file]) == (0, 0)
        covered[(read.file, read.purpose)].append(range(read.offset, read.offset + read.nbytes))
    needed: dict[tuple[Location, Purpose], list[range]] = defaultdict(list)
    for entry, span, purpose, place in needed_ranges(layout, tasks):
        if span.n_elements == 0:
            continue
        start, size = entry.offset + span.start * entry.dtype.itemsize, span.n_elements * entry.dtype.itemsize
        grid = alignments[entry.file]
        needed[(entry.file, purpose)].append(range(start // grid * grid, round_up(start + size, grid)))
        (read,) = [
            r
            for r in layout.reads
            if (r.file, r.purpose) == (entry.file, purpose)
            and r.offset <= start
            and start + size <= r.offset + r.nbytes
        ]
        assert place - read.buffer_offset == start - read.offset
    assert {key: _union(ranges) for key, ranges in covered.items()} == {k: _union(r) for k, r in needed.items()}
    assert all(len(_union(ranges)) == len(ranges) for ranges in covered.values())  # what touches is one request


def _union(ranges: list[range]) -> list[range]:
    joined: list[range] = []
    for each in sorted(ranges, key=lambda r: r.start):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
        else:
            joined.append(each)
    return joined


@given(st.data())
def test_lay_out__reads_exactly_the_needed_pages_to_their_places(data: st.DataObject) -> None:
    tasks = data.draw(task_lists())
    sizes = choose_buffer_sizes(tasks, data.draw(memories(tasks)))
    wanted = wanted_runs(data, tasks)
    sources = [source for task in tasks for source in (task.base, *task.experts)]
    files = sorted({entry.file for source in sources for entry in source.stored})
    alignments = {file: data.draw(st.sampled_from([1, PAGE_BYTES])) for file in files}
    for job in plan_jobs(tasks, sizes, lambda index, _: wanted[index]):
        for segment in job:
            layout = lay_out(segment, tasks, sizes.raw_bytes, alignments.__getitem__)
            check_reads(layout, tasks, sizes.raw_bytes, alignments)
            position = sizes.raw_bytes
            for piece, run in zip(layout.pieces, segment.runs, strict=True):
                assert (piece.run, piece.out_offset) == (run, position)
                position += run.span.n_elements * tasks[run.task_index].dtype.itemsize
            assert position - sizes.raw_bytes <= sizes.out_bytes
