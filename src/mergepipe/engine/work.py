"""Describe work for the engine as values: what to merge or to analyse: tensors, parts, observers and executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.segments import Piece
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.tasks import MergeTask
from mergepipe.snapshots.shards import SINGLE_NAME, ShardLayout, ShardProgress, TensorDigest, TensorSpec, plan_shards
from mergepipe.storage.contract import RemoteSettings
from mergepipe.storage.ledger import Usage

if TYPE_CHECKING:
    from mergepipe.checkpoints.open_files import PinnedFile
    from mergepipe.engine.tensor_work import KnownQuantities, PlannedAccess
    from mergepipe.operators.base import Operator
    from mergepipe.recipes.tasks import MergeTask

# --- observe a run of the engine from the process that makes it: progress, statistics, and the bytes that are read ---


OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]
"""Receives the statistics of one expert (by its index in the task) of one tensor."""


@dataclass(frozen=True, slots=True)
class Tap:
    """Shows the bytes read of some tensors (by name), piece by piece, before they are merged.

    `look` is called once for each piece, from compute threads, with the buffer that it lies in.
    """

    tensors: frozenset[str]
    look: Callable[[MergeTask, Piece, NDArray[np.uint8]], None]


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks of one run, passed beside the work and never part of it: they have no effect on the output.

    `on_progress` is called about ten times a second with the shard that is being written, if any; `on_statistics` for
    the tensors of which the work gathers statistics. Both are called on the calling thread.
    """

    on_progress: Callable[[ShardProgress | None], None] = lambda _: None
    on_statistics: OnStatistics = lambda _task, _expert, _statistics: None
    tap: Tap | None = None


SILENT = Observer()


# --- describe work for the engine as values: what to merge or to analyse, and the parts that a merge is made in ---


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that never change the result: compute threads, the cap on buffers in bytes, how remote files are read."""

    threads: int
    memory_bytes: int
    remote: RemoteSettings = field(default_factory=RemoteSettings)


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

    `files` are all files that it reads, each at its version. `operator_name` and the tasks' parameters say how tensors
    are merged, `seed`, the content ids (by model, or none) and the `repeats` of models that are listed again key
    randomness. With `access` only what it plans is read, cut on its grid so that reads cost what was planned;
    `renormalize` divides weights by the sum of those selected.

    `recorded` quantities of tensors are not gathered again.

    Law: the bytes that it makes depend on nothing else.
    """

    output: OutputPlan
    operator_name: str
    seed: int
    content_ids: Mapping[int, str]
    files: tuple[PinnedFile, ...] = ()
    repeats: Mapping[int, int] = field(default_factory=dict)
    access: PlannedAccess | None = None
    renormalize: bool = False
    recorded: Mapping[str, KnownQuantities] = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True)
class Part:
    """Some shards of an output, by their ascending indices: what one worker makes.

    Law: its bytes do not depend on who makes it, nor on the other parts.
    """

    shards: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.shards) != sorted(set(self.shards)) or (self.shards and self.shards[0] < 0):
            raise ValueError(f"not ascending indices of shards: {self.shards}")


def whole(output: OutputPlan) -> Part:
    """Return the part that is everything."""
    return Part(tuple(range(len(output.shards))))


def split(output: OutputPlan, n_parts: int) -> tuple[Part, ...]:
    """Deal the shards to parts so that the largest part is small; with fewer shards than parts some are empty.

    Laws: the parts are disjoint and cover the output; equal outputs are split alike.
    """
    return split_sizes([shard.file_bytes for shard in output.shards], n_parts)


def split_sizes(file_bytes: Sequence[int], n_parts: int) -> tuple[Part, ...]:
    """Deal shards of these sizes to parts, as `split` does."""
    if n_parts < 1:
        raise ValueError(f"an output has at least one part, not {n_parts}")
    shards_of: list[list[int]] = [[] for _ in range(n_parts)]
    bytes_of = [0] * n_parts
    for index in sorted(range(len(file_bytes)), key=lambda index: (-file_bytes[index], index)):
        part = bytes_of.index(min(bytes_of))
        shards_of[part].append(index)
        bytes_of[part] += file_bytes[index]
    return tuple(Part(tuple(sorted(shards))) for shards in shards_of)


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of a finished part: the digests of its tensors by shard, and the bytes it read and wrote.

    Law: a part made again gives an equal result.
    """

    digests_of: Mapping[int, tuple[TensorDigest, ...]] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

    @property
    def digests(self) -> tuple[TensorDigest, ...]:
        """The digests of all tensors, in output order."""
        return tuple(digest for shard in sorted(self.digests_of) for digest in self.digests_of[shard])
