"""What the engine is given, as values: a merge or an analysis, the layout of the output, and options of speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from mergepipe.engine.known_quantities import KnownQuantities
from mergepipe.engine.planned_access import PlannedAccess
from mergepipe.operators.base import Operator
from mergepipe.operators.registry import operator_named
from mergepipe.recipes.tasks import MergeTask
from mergepipe.snapshots.shards import SINGLE_NAME, ShardLayout, TensorSpec, plan_shards
from mergepipe.storage.contract import CONNECTIONS

if TYPE_CHECKING:
    from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that never change the result: compute threads, the cap on buffers in bytes, requests at once a scheme."""

    threads: int
    memory_bytes: int
    connections: int = CONNECTIONS


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The shards to write, and the tasks in the order of their bytes in the shards."""

    shards: tuple[ShardLayout, ...]
    tasks: tuple[MergeTask, ...]

    @property
    def total_bytes(self) -> int:
        return sum(shard.file_bytes for shard in self.shards)

    def tasks_by_shard(self) -> list[tuple[MergeTask, ...]]:
        """Return the tasks of each shard."""
        tasks = iter(self.tasks)
        return [tuple(next(tasks) for _ in shard.tensors) for shard in self.shards]


def plan_output(
    tasks: Sequence[MergeTask],
    shard_bytes: int,
    components: Mapping[str, str] = MappingProxyType({}),
    single: str = SINGLE_NAME,
) -> OutputPlan:
    """Lay out the output's shards; `components` and `single` as in `plan_shards`."""
    by_name = {task.name: task for task in tasks}
    specs = [TensorSpec(task.name, task.dtype, task.shape) for task in tasks]
    shards = plan_shards(specs, shard_bytes, components=components, single=single)
    return OutputPlan(shards, tuple(by_name[spec.name] for shard in shards for spec in shard.tensors))


@dataclass(frozen=True, slots=True)
class MergeWork:
    """A merge to run, as a value: it holds no open file and no function of the process that made it.

    `files` are the versions of all files that it reads. `operator_name` and the tasks' parameters say how tensors
    are merged, `seed`, the content ids (by model, or none) and the `repeats` of models that are listed again key
    randomness. With `access` only what it plans is read, cut on its grid so that reads cost what was planned;
    `renormalize` divides weights by the sum of those selected.

    `recorded` quantities of tensors are not gathered again. With `is_stochastic` results are rounded stochastically.

    Law: the bytes that it makes depend on nothing else.
    """

    output: OutputPlan
    operator_name: str
    seed: int
    content_ids: Mapping[int, str]
    files: Mapping[Location, str] = field(default_factory=dict)
    repeats: Mapping[int, int] = field(default_factory=dict)
    access: PlannedAccess | None = None
    renormalize: bool = False
    recorded: Mapping[str, KnownQuantities] = field(default_factory=dict)
    is_stochastic: bool = False

    @property
    def operator(self) -> Operator:
        """The operator of that name in this process."""
        return operator_named(self.operator_name)


@dataclass(frozen=True, slots=True)
class AnalysisWork:
    """An analysis to run: tasks with their experts, the grid, and the densities whose cuts are computed."""

    tasks: tuple[MergeTask, ...]
    block_elements: int
    densities: tuple[float, ...]
