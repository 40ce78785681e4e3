"""The problem that a planner solves: models, tasks and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.core.canonical_json import digest_of
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.tasks import Action, MergeTask, Resolution


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

    Of experts that are `unread` not even the index is read. A request of each expert's files is worth `request_bytes`
    more bytes: shorter gaps between selected blocks are selected too; none where empty. A sample is drawn by
    `importance`, of each task as a whole.
    """

    operator: str
    recipe: str
    seed: int
    block_elements: int
    resolution: Resolution
    models: tuple[PlanningModel, ...]
    statistics: tuple[Mapping[str, TensorStatistics], ...]
    unread: frozenset[int] = frozenset()
    request_bytes: tuple[int, ...] = ()
    importance: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.block_elements < 1:
            raise ValueError(f"blocks of {self.block_elements} elements")
        if len(self.statistics) != len(self.experts):
            raise ValueError(f"statistics of {len(self.statistics)} experts for {len(self.experts)}")
        if self.request_bytes and len(self.request_bytes) != len(self.experts):
            raise ValueError(f"requests of {len(self.request_bytes)} experts for {len(self.experts)}")
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
