"""The planner's input as values: models, tasks, statistics, and the user's choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.core.canonical_json import digest_of
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.resolve.tasks import Action, MergeTask, Resolution
from mergepipe.storage.prices import Speeds


class Policy(StrEnum):
    """The policy that selects blocks; see `planning.selection_order`."""

    NORM = "norm"
    CONFLICT = "conflict"
    STRATIFIED = "stratified"
    RANDOM = "random"


class OnOmit(StrEnum):
    """The rule for coefficients where an expert is omitted."""

    KEEP = "keep"  # an omitted delta is a zero
    RENORMALIZE = "renormalize"  # weights are divided by the sum of those that were read


@dataclass(frozen=True, slots=True)
class AdjustPolicy:
    """Allows densities to fall under a tight budget, never below `min_density`; see `planning.density_adjustment`."""

    min_density: float

    def __post_init__(self) -> None:
        if not 0 < self.min_density <= 1:
            raise ValueError(f"not a density: {self.min_density}")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Choices beside budget and policy. `selection_seed` is what the policy `random` draws with.

    With a `target_error`, relative to what the full merge changes, no more of the budget is spent than it needs.
    """

    on_omit: OnOmit = OnOmit.KEEP
    adjust: AdjustPolicy | None = None
    selection_seed: int = 0
    target_error: float | None = None


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
    tensor without an entry, or with statistics of another grid, is one of which nothing is known.

    With `speeds` steps are priced in seconds. Of experts that are `unread` not even the index is read.
    """

    operator: str
    recipe: str
    seed: int
    block_elements: int
    resolution: Resolution
    models: tuple[PlanningModel, ...]
    statistics: tuple[Mapping[str, TensorStatistics], ...]
    speeds: Speeds | None = None
    unread: frozenset[int] = frozenset()

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
