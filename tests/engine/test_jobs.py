"""The passes of a job, and rules of several stages: what each holds for the next one, and what is read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergepipe
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BF16, RawBlock, Span
from mergepipe.engine.block_reductions import OnePass
from mergepipe.engine.jobs import Job, Stage, TensorWork
from mergepipe.engine.segments import (
    HELD_BYTES,
    RESERVED_BUFFERS,
    SHARE_READ_AGAIN,
    BufferSizes,
    HoldLimits,
    Run,
    SegmentShape,
)
from mergepipe.operators.base import NOTHING_REDUCED, Reduced
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.storage.location import Location
from support.disk_families import write_family

SIZES = BufferSizes(15 << 20, 1 << 20)


class Looks(OnePass):
    """A reduction that is done after a number of looks."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        """Nothing is shown."""

    def finish(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def result(self) -> Reduced:
        return NOTHING_REDUCED


def task_of(n_elements: int, n_experts: int) -> MergeTask:
    file = Location.local(Path("model"))
    entry = TensorEntry("t", BF16, (n_elements,), file, 0, n_elements * BF16.itemsize)
    parameters = TensorParameters({}, {}, ({},) * n_experts)
    experts = tuple(range(1, n_experts + 1))
    return MergeTask(
        "t", Action.MERGE, (n_elements,), BF16, entry, (entry,) * n_experts, parameters, expert_models=experts
    )


@given(
    n_segments=st.integers(1, 40), looks=st.integers(1, 4), whole=st.integers(1, 60), left=st.integers(0, 60),
    writes=st.booleans(),
)  # fmt: skip
def test_passes__see_every_segment_and_read_exactly_what_the_pass_before_does_not_hold(
    *, n_segments: int, looks: int, whole: int, left: int, writes: bool
) -> None:
    segments = tuple(SegmentShape(i, (Run(0, Span(i, i + 1), (), ()),)) for i in range(n_segments))
    limits = HoldLimits(whole, max(0, whole - left))
    work = TensorWork(task_of(n_segments, 1), Looks(looks), lambda: None)
    held: frozenset[int] = frozenset()
    stages = []
    for step in Job(segments, {0: work}, limits, writes=writes).passes():
        numbers = {segment.number for segment in step.segments}
        assert {segment.number for segment in step.unread} == numbers - held
        assert held <= numbers
        assert len(step.held) <= limits.whole_tensor
        stages.append(step.stage)
        if step.stage in (Stage.ACCUMULATE, Stage.REFINE) or (writes and step.stage is Stage.MERGE):
            assert [segment.number for segment in step.segments] == list(range(n_segments))
        held = step.held
    assert not held
    assert stages.count(Stage.REFINE) == looks - 1
    assert stages[-1] is Stage.MERGE or not writes


@pytest.mark.parametrize("n_experts", [2, 6])
def test_hold_limits__of_a_local_merge_spare_memory_where_little_is_read_again(n_experts: int) -> None:
    n_buffers = 256
    embedding, small = task_of(150_000_000, n_experts), task_of(3_000_000, n_experts)
    model_bytes = 2 * (n_experts + 2)
    limits = HoldLimits.sparing(n_buffers, SIZES, (embedding, *[small] * 150))
    assert limits.whole_tensor == HELD_BYTES // SIZES.total_bytes
    alone = HoldLimits.sparing(n_buffers, SIZES, (embedding,))
    assert alone.whole_tensor * SIZES.total_bytes >= 150_000_000 * model_bytes * (1 - 1 / SHARE_READ_AGAIN) * 0.8
    assert HoldLimits.sparing(8, SIZES, (embedding,)) == HoldLimits.of(8) == HoldLimits(8, 4)
    assert HoldLimits.of(n_buffers).part_of_tensor == n_buffers - RESERVED_BUFFERS


SHAPE = (1500, 700)
RECIPES: dict[str, dict[str, float | bool]] = {
    "sce": {"select_topk": 0.3}, "model_stock": {"filter_wise": True}, "ramplus_tl": {}, "multislerp": {},
    "breadcrumbs_ties": {"rescale": True}, "della": {},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_merge__of_several_stages_does_not_depend_on_memory_and_threads(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal(SHAPE).astype(np.float32) * np.float32(0.05)
    models = [{"t": base + e * rng.standard_normal(SHAPE).astype(np.float32) * np.float32(1e-3)} for e in range(4)]
    family = write_family(tmp_path, tuple(models))
    each = {"weight": 0.4, "density": 0.5} if name not in ("sce", "model_stock", "ramplus_tl") else {}
    each = {"weight": 0.4} if name == "multislerp" else each
    listed = [{"model": str(expert), "parameters": each} for expert in family.places[1:]]
    recipe = {"merge_method": name, "base_model": str(family.places[0]), "models": listed, "parameters": RECIPES[name]}
    reread = {}
    for memory_bytes, threads in ((14 << 20, 3), (1 << 30, 1)):
        out = tmp_path / f"out-{threads}"
        report = mergepipe.merge(recipe, out, memory_bytes=memory_bytes, threads=threads, catalog=False)
        reread[threads] = report.analysis_bytes
    merged = [next((tmp_path / f"out-{threads}").glob("*.safetensors")).read_bytes() for threads in (3, 1)]
    assert merged[0] == merged[1]
    assert reread[3] > reread[1]
