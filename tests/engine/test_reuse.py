"""Runs whose result is known: how they are cut out of the work, and what that leaves to be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BF16, Span
from mergepipe.engine.pipeline.segment_layout import lay_out
from mergepipe.engine.pipeline.segments import Reusable, full_access, plan_jobs, with_reuse
from mergepipe.engine.pipeline.segments import choose_buffer_sizes as sizes_for
from mergepipe.engine.tensor_work import can_reuse
from mergepipe.engine.work import MergeWork, plan_output
from mergepipe.recipes.resolve.tasks import Action, MergeTask, TensorParameters
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

GRAIN = 16_384
N_GRAINS = 40
N = GRAIN * N_GRAINS - 5


def entry(name: str, file: str) -> TensorEntry:
    return TensorEntry(name, BF16, (N,), Location.local(Path(file)), 4096, 2 * N)


def task(operator: str = "task_arithmetic") -> MergeTask:
    own = {"weight": 0.5, "density": 0.3} if operator == "ties" else {"weight": 0.5}
    given = {"lambda": 1.0, "normalize": False, "rescale": False}
    parameters = TensorParameters(given, {}, (own, own))
    experts = (entry("w", "/a"), entry("w", "/b"))
    return MergeTask("w", Action.MERGE, (N,), BF16, entry("w", "/base"), experts, parameters, expert_models=(1, 2))


def known(*grains: tuple[int, int]) -> Reusable:
    return Reusable(entry("w", "/earlier"), tuple(Span(a * GRAIN, min(N, b * GRAIN)) for a, b in grains))


edges = st.lists(st.integers(0, N_GRAINS), unique=True, max_size=8).map(sorted)


@given(edges)
def test_with_reuse__covers_the_tensor_once_and_reuses_what_is_known(cuts: list[int]) -> None:
    pairs = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    reusable = known(*pairs)
    runs = tuple(with_reuse(full_access, {"w": reusable})(0, task()))
    assert [run.span.start for run in runs] == [0, *(run.span.stop for run in runs[:-1])]
    assert runs[-1].span.stop == N
    assert tuple(run.span for run in runs if run.reused) == reusable.spans
    assert all((run.present, run.sources) == (() if run.reused else (0, 1),) * 2 for run in runs)


def test_lay_out__reads_of_a_known_run_nothing_but_the_result() -> None:
    one = task()
    sizes = sizes_for([one], 1 << 30)
    jobs = plan_jobs([one], sizes, with_reuse(full_access, {"w": known((0, N_GRAINS))}))
    reads = [
        read
        for job in jobs
        for shape in job.segments
        for read in lay_out(shape, [one], sizes.raw_bytes, lambda _: 1).reads
    ]
    assert {(str(read.file), read.purpose) for read in reads} == {("/earlier", Purpose.REUSE)}
    assert sum(read.nbytes for read in reads) == 2 * N


@pytest.mark.parametrize(
    ("operator", "grains", "expected"),
    [("task_arithmetic", (0, 3), True), ("ties", (0, 3), False), ("ties", (0, N_GRAINS), True)],
)
def test_can_reuse__a_part_only_where_blocks_do_not_wait_for_one_another(
    operator: str, grains: tuple[int, int], expected: bool
) -> None:
    work = MergeWork(plan_output([task(operator)], 1 << 40), operator, 0, {}, reusable={"w": known(grains)})
    assert can_reuse(work, task(operator)) == expected
