"""The problem that a planner solves: models, tasks, their blocks as columns, and what reading each costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import samples
from mergepipe.checkpoints.contract import (
    Checkpoint,
    ComputedTensor,
    TensorEntry,
    Unchanged,
    block_costs_bytes,
    range_cost_bytes,
)
from mergepipe.core.blocks import Span
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import UnsupportedError
from mergepipe.operators.statistics import TensorStatistics
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
        files = sorted((f.name, f.size_bytes, f.header_digest) for f in self.checkpoint.files)
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
