"""The problem that a planner solves: models, tasks, blocks as columns, and what reading each costs at each level."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import samples
from mergepipe.checkpoints.contract import (
    Checkpoint,
    ComputedTensor,
    LeveledTensor,
    TensorEntry,
    Unchanged,
    block_costs_bytes,
    range_cost_bytes,
)
from mergepipe.core.blocks import Span
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import UnsupportedError
from mergepipe.operators.base import NOTHING_REDUCED, MagnitudeCut, Operator, OperatorInput, Reduced
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.planning.plan import ALL
from mergepipe.recipes.tasks import Action, MergeTask, Resolution

# --- the problem that a planner solves: models, tasks and what is known of them ---


@dataclass(frozen=True, slots=True)
class PlanningModel:
    """One input: `text` as the recipe writes it; `content_id` where it is known without reading."""

    text: str
    checkpoint: Checkpoint
    content_id: str | None = None

    @property
    def identity(self) -> str:
        """The content id if known, else a digest of the files' names, sizes and headers."""
        files = sorted((f.name, f.size_bytes, f.header_digest) for f in self.checkpoint.file_ids)
        return self.content_id or digest_of(files)


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """The complete input of a plan. `models` are the resolution's; `experts` are those that any task uses as one.

    `statistics` has one mapping per expert, from the name of a task to what is known of its tensor in that task. A
    tensor without an entry is one of which nothing is known; statistics of another grid are carried over.

    Of experts that are `unread` not even the index is read. A sample is drawn by `importance`, of each task as a whole.
    """

    operator: str
    recipe: str
    seed: int
    block_elements: int
    resolution: Resolution
    models: tuple[PlanningModel, ...]
    statistics: tuple[Mapping[str, TensorStatistics], ...]
    unread: frozenset[int] = frozenset()
    importance: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.block_elements < 1:
            raise ValueError(f"blocks of {self.block_elements} elements")
        if len(self.statistics) != len(self.experts):
            raise ValueError(f"statistics of {len(self.statistics)} experts for {len(self.experts)}")
        if len(self.models) != len(self.resolution.models):
            raise ValueError(f"{len(self.models)} models for {len(self.resolution.models)}")

    @property
    def experts(self) -> tuple[PlanningModel, ...]:
        """The models whose reads are planned, in order: the E of all arrays."""
        return tuple(self.models[i] for i in self.resolution.expert_models)

    @property
    def tasks(self) -> tuple[MergeTask, ...]:
        """The tensors that are merged, in the base's order."""
        return tuple(task for task in self.resolution.tasks if task.action is Action.MERGE)


# --- lay out the blocks of all merged tensors as columns of one array, and compute what reading each costs ---


ABSENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One column per block (B), tensor after tensor (T). Tensor `t` owns columns `[first_T[t], first_T[t + 1])`.

    `first_T` has T + 1 entries; `element_B` and `n_B` are a block's first element and its number of elements.
    `slot_ET` is the place of expert `e` among the experts of task `t`, `ABSENT` if it has no part in it. Of experts
    that are `unread` not even the index is read: nothing is known of them, nothing can be selected.
    """

    tasks: tuple[MergeTask, ...]
    slot_ET: NDArray[np.int16]
    first_T: NDArray[np.int64]
    tensor_B: NDArray[np.int64]
    element_B: NDArray[np.int64]
    n_B: NDArray[np.int64]
    unread: frozenset[int] = frozenset()

    @property
    def n_columns(self) -> int:
        return len(self.tensor_B)

    @property
    def n_experts(self) -> int:
        return len(self.slot_ET)

    def source(self, expert: int, tensor: int) -> TensorEntry | ComputedTensor | None:
        """Return what is read of an expert for a tensor; None if it contributes nothing or is unread."""
        return None if expert in self.unread else self._source(expert, tensor)

    def _source(self, expert: int, tensor: int) -> TensorEntry | ComputedTensor | None:
        slot = int(self.slot_ET[expert, tensor])
        source = self.tasks[tensor].experts[slot] if slot != ABSENT else None
        return None if isinstance(source, Unchanged) else source

    def participants(self, tensor: int) -> list[int]:
        """Return the experts of a task, in the task's order."""
        slots_E = self.slot_ET[:, tensor]
        experts = np.flatnonzero(slots_E != ABSENT)
        return [int(e) for e in experts[np.argsort(slots_E[experts])]]

    def silent_ET(self) -> NDArray[np.bool_]:
        """Mark tensors of which there is nothing to read."""
        silent = [[self._source(e, t) is None for t in range(len(self.tasks))] for e in range(self.n_experts)]
        return np.array(silent, np.bool_).reshape(self.slot_ET.shape)

    def by_expert(self, tensor: int, values_S: NDArray[np.float64], absent: float) -> NDArray[np.float64]:
        """Spread values of a task's own experts (S) over all experts (E)."""
        slots_E = self.slot_ET[:, tensor]
        placed_E = np.full(self.n_experts, absent, np.float64)
        present_E = slots_E != ABSENT
        placed_E[present_E] = values_S[slots_E[present_E]]
        return placed_E

    def of_tensor(self, tensor: int) -> slice:
        """Return the slice of columns of one tensor."""
        return slice(int(self.first_T[tensor]), int(self.first_T[tensor + 1]))


def lay_out_columns(
    tasks: Sequence[MergeTask], expert_models: Sequence[int], block_elements: int, unread: frozenset[int] = frozenset()
) -> Columns:
    """Lay out `tasks` in blocks of `block_elements`, for the experts `expert_models`."""
    elements_T = np.array([task.base.n_elements for task in tasks], np.int64)
    blocks_T = -(-elements_T // block_elements)
    first_T = np.concatenate([[0], np.cumsum(blocks_T)]).astype(np.int64)
    tensor_B = np.repeat(np.arange(len(tasks)), blocks_T)
    element_B = (np.arange(first_T[-1]) - first_T[tensor_B]) * block_elements
    n_B = np.minimum(block_elements, elements_T[tensor_B] - element_B)
    return Columns(tuple(tasks), _slots(tasks, expert_models), first_T, tensor_B, element_B, n_B, unread)


def _slots(tasks: Sequence[MergeTask], expert_models: Sequence[int]) -> NDArray[np.int16]:
    expert_of = {model: e for e, model in enumerate(expert_models)}
    slot_ET = np.full((len(expert_models), len(tasks)), ABSENT, np.int16)
    for t, task in enumerate(tasks):
        if len(set(task.expert_models)) < len(task.expert_models):
            message = "merges two tensors of the same model"
            raise UnsupportedError.of("plan.unsupported", task.name, message, "merge it without a budget")
        for slot, model in enumerate(task.expert_models):
            slot_ET[expert_of[model], t] = slot
    return slot_ET


def read_costs(columns: Columns, known_pairs: Collection[tuple[int, int]] = ()) -> NDArray[np.int64]:
    """Compute `cost_EB`: bytes requested to read each block alone; a tensor read as a unit costs with its first block.

    What is `known_pairs` already, by expert and tensor, is left at 0.
    """
    cost_EB = np.zeros((columns.n_experts, columns.n_columns), np.int64)
    for e in range(columns.n_experts):
        sources = [columns.source(e, t) for t in range(len(columns.tasks))]
        stored_T = np.array([isinstance(source, TensorEntry) for source in sources], np.bool_)
        offset_T = np.array([s.offset if isinstance(s, TensorEntry) else 0 for s in sources], np.int64)
        itemsize_T = np.array([s.dtype.itemsize if isinstance(s, TensorEntry) else 1 for s in sources], np.int64)
        granularity_T = np.array([s.granularity_bytes if isinstance(s, TensorEntry) else 1 for s in sources], np.int64)
        tensor_B = columns.tensor_B
        costs_B = block_costs_bytes(
            offset_T[tensor_B], itemsize_T[tensor_B], columns.element_B, columns.n_B, granularity_T[tensor_B]
        )
        cost_EB[e] = np.where(stored_T[tensor_B], costs_B, 0)
        for t, source in enumerate(sources):
            if source is not None and not isinstance(source, TensorEntry) and (e, t) not in known_pairs:
                cost_B = cost_EB[e, columns.of_tensor(t)]
                inside = columns.of_tensor(t)
                spans = zip(columns.element_B[inside].tolist(), columns.n_B[inside].tolist(), strict=True)
                for b, (first, n) in enumerate(spans):
                    if b == 0 or not source.is_unit:
                        cost_B[b] = source.cost_bytes(Span(first, first + n))
    return cost_EB


# --- compute the cost of an expert's content id, which keys random operators ---


def sample_cost_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that `checkpoints.content_id.content_id` requests of the checkpoint's files."""
    cost = 0
    for sample in samples(checkpoint):
        if isinstance(sample.tensor, TensorEntry):
            offset = sample.tensor.offset
            cost += range_cost_bytes(offset + sample.first, offset + sample.stop, sample.tensor.granularity_bytes)
        else:
            cost += sample.tensor.cost_bytes(sample.span)
    return cost


# --- find the lowest level of each packed expert that gives the operator the same result ---


def sufficient_levels(operator: Operator, inputs: OperatorInput, task: MergeTask) -> tuple[tuple[int, int], ...]:
    """Return (expert, level) for experts of which a lower level gives the same result; the lowest such level.

    That is so for rules that keep nothing but the largest deltas of each expert, if a level has all of these.
    """
    if task.action is Action.COPY or not any(isinstance(source, LeveledTensor) for source in task.experts):
        return ()
    request = operator.reduction(inputs, NOTHING_REDUCED)
    if not isinstance(request, MagnitudeCut) or not operator.influence(inputs, None).trims:
        return ()
    if operator.reduction(inputs, Reduced(cuts_E3=np.zeros((len(inputs.experts), 3), np.uint32))) is not None:
        return ()  # other reductions need values below the cuts
    levels = []
    for e, (source, n_kept) in enumerate(zip(task.experts, request.kept_E, strict=True)):
        if isinstance(source, LeveledTensor):
            level = source.exact_level(n_kept)
            if level < source.last_level:
                levels.append((e, level))
    return tuple(levels)


# --- compute cost and remaining error of each level of packed experts by block, and the efficient steps between ---


_FOR_NOTHING = 1e150  # the rate of what costs nothing more


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """The levels (K, ascending) of one expert's tensor, by blocks (B). The last gives what reading everything gives.

    Attributes:
        levels_K: the levels; `ALL` for a source's last.
        cost_KB: bytes requested to read a block at the level.
        left_KB: what the level leaves of the squared delta, beyond what the last leaves: 0 at the last.
        unread_B: the same where nothing is read.
        square_B: ||delta||^2.
    """

    levels_K: tuple[int, ...]
    cost_KB: NDArray[np.int64]
    left_KB: NDArray[np.float64]
    unread_B: NDArray[np.float64]
    square_B: NDArray[np.float64]


Ladders = Mapping[tuple[int, int], Ladder]
"""By expert and tensor."""


def build_ladders(columns: Columns, operator: Operator, grid: int) -> Ladders:
    """Build the ladders of all tensors with levels whose encoded blocks fit into blocks of `grid` elements.

    Those of other grids are read in full or not at all, as anything else.
    """
    ladders: dict[tuple[int, int], Ladder] = {}
    for t, task in enumerate(columns.tasks):
        if not task.base.n_elements:
            continue
        open_task = _without_unread_experts(task, columns, t)
        sufficient = dict(sufficient_levels(operator, open_task.operator_input(), open_task))
        for slot, e in enumerate(columns.participants(t)):
            source = open_task.experts[slot]
            if isinstance(source, LeveledTensor) and grid % source.cut_elements == 0:
                top = sufficient.get(slot, source.last_level)
                ladders[e, t] = _ladder(source, top, grid // source.cut_elements)
    return ladders


def _without_unread_experts(task: MergeTask, columns: Columns, t: int) -> MergeTask:
    """Remove the experts whose index is not read from a task."""
    if not columns.unread:
        return task
    experts = list(task.experts)
    for slot, e in enumerate(columns.participants(t)):
        if e in columns.unread:
            experts[slot] = Unchanged(task.experts[slot].name, task.experts[slot].dtype, task.experts[slot].shape)
    return replace(task, experts=tuple(experts))


def _ladder(source: LeveledTensor, top: int, stretches: int) -> Ladder:
    levels = source.ladder(top)
    beyond_B = _joined(source.squared_errors(top), stretches)
    square_B = _joined(source.squared_errors(0), stretches)
    left_KB = np.stack([_joined(source.squared_errors(level), stretches) - beyond_B for level in levels])
    left_KB[-1] = 0.0
    return Ladder(
        levels_K=tuple(ALL if level == source.last_level else int(level) for level in levels),
        cost_KB=np.stack([source.level_costs_bytes(level, stretches) for level in levels]),
        left_KB=np.maximum(left_KB, 0.0),
        unread_B=np.maximum(square_B - beyond_B, 0.0),
        square_B=square_B,
    )


def _joined(values_C: NDArray[np.float64], stretches: int) -> NDArray[np.float64]:
    """Sum over the encoded blocks that make up a plan block."""
    joined: NDArray[np.float64] = np.add.reduceat(values_C, np.arange(0, len(values_C), stretches))
    return joined


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Level steps (S) of every block, in order of block and level.

    Each goes from the level of the one before to `level_S`, for `cost_S` more bytes, and takes `gain_S` from what is
    left. `rate_S`, gain by byte, never rises inside a block: taken in falling order, steps are taken in order.
    """

    block_S: NDArray[np.int64]
    level_S: NDArray[np.int8]
    cost_S: NDArray[np.int64]
    gain_S: NDArray[np.float64]
    rate_S: NDArray[np.float64]


def _gain_per_byte(gain_KB: NDArray[np.float64], cost_KB: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the rate of every level; a gain that costs nothing has the highest."""
    free_KB = np.where(gain_KB > 0, _FOR_NOTHING, 0.0)
    return np.divide(gain_KB, cost_KB, out=free_KB, where=cost_KB > 0)


def ladder_steps(ladder: Ladder) -> Steps:
    """Compute the lower hull of cost and remaining error: each step goes to the level with the most gain per byte."""
    n_levels, n_blocks = ladder.cost_KB.shape
    every, rungs_K1 = np.arange(n_blocks), np.arange(n_levels)[:, None]
    at_B, cost_B, left_B = np.full(n_blocks, -1), np.zeros(n_blocks, np.int64), ladder.unread_B
    ceiling_B = np.full(n_blocks, np.inf)
    parts = []
    for _ in range(n_levels):
        gain_KB = np.maximum(left_B - ladder.left_KB, 0.0)
        more_KB = np.maximum(ladder.cost_KB - cost_B, 0)
        rate_KB = np.where(rungs_K1 > at_B, _gain_per_byte(gain_KB, more_KB), -1.0)
        best_B = n_levels - 1 - rate_KB[::-1].argmax(axis=0)  # of equals the highest
        ceiling_B = np.minimum(ceiling_B, rate_KB[best_B, every])
        open_B = np.flatnonzero(at_B < n_levels - 1)
        level_of_open = best_B[open_B]
        level_S = np.array(ladder.levels_K, np.int8)[level_of_open]
        cost_S = np.maximum(ladder.cost_KB[level_of_open, open_B] - cost_B[open_B], 0)
        parts.append((open_B, level_S, cost_S, gain_KB[level_of_open, open_B], np.maximum(ceiling_B[open_B], 0.0)))
        at_B[open_B], cost_B[open_B] = level_of_open, ladder.cost_KB[level_of_open, open_B]
        left_B = np.where(at_B >= 0, ladder.left_KB[at_B, every], left_B)
    block_S, level_S, cost_S, gain_S, rate_S = (np.concatenate(column) for column in zip(*parts, strict=True))
    order_S = np.argsort(block_S, kind="stable")
    return Steps(block_S[order_S], level_S[order_S], cost_S[order_S], gain_S[order_S], rate_S[order_S])
