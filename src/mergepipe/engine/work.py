"""Work for the engine: what to merge or to analyse, in which parts, and for single tensors what each needs first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.core.blocks import BlockGrid, RawBlock, Span
from mergepipe.engine.jobs import BASE_ALONE, Sample, Tap, TensorWork
from mergepipe.engine.segments import Run, full_access
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    InnerProducts,
    MagnitudeCut,
    Operator,
    OperatorInput,
    Reduced,
    ReductionRequest,
)
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import NOTHING_KEPT, Cut, TensorStatistics, rank_of_density
from mergepipe.planning.plan import ALL, PlannedTensor, Products
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.snapshots.shards import SINGLE_NAME, ShardLayout, TensorDigest, TensorSpec, plan_shards
from mergepipe.storage.contract import CONNECTIONS
from mergepipe.storage.ledger import Usage

if TYPE_CHECKING:
    from mergepipe.storage.location import Location

# --- observe a run of the engine from the process that makes it: progress, statistics, and the bytes that are read ---


OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]
"""Receives the statistics of one expert (by its index in the task) of one tensor."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks of one run, passed beside the work and never part of it: they have no effect on the output.

    `on_progress` is called about ten times a second, `on_statistics` for the tensors of which the work gathers
    statistics. Both are called on the calling thread.
    """

    on_progress: Callable[[], None] = lambda: None
    on_statistics: OnStatistics = lambda _task, _expert, _statistics: None
    tap: Tap | None = None


SILENT = Observer()


# --- describe work for the engine as values: what to merge or to analyse, and the parts that a merge is made in ---


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

    `recorded` quantities of tensors are not gathered again.

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


# --- answer requests for tensor-wide quantities from a plan or from statistics instead of looking at blocks ---


@dataclass(frozen=True, slots=True)
class ExpertQuantities:
    """The exact tensor-wide quantities of one expert's tensor that are known: magnitude cuts, and inner products.

    `cuts` are by the number of elements that reach them. A plan's is at None: the one that its rule wants.
    """

    n_elements: int
    cuts: Mapping[int | None, Cut]
    products: Products | None

    @classmethod
    def of(cls, statistics: TensorStatistics) -> ExpertQuantities:
        """Keep the quantities of exact statistics, without their blocks."""
        n_elements = statistics.grid.n_elements
        ranks = [rank_of_density(density, n_elements) for density in statistics.densities_D.tolist()]
        cuts: dict[int | None, Cut] = {}
        for rank, cut_3 in zip(ranks, statistics.cuts_D3.tolist(), strict=True):
            cuts.setdefault(rank, Cut(*cut_3))
        base, delta, mixed = statistics.products_3.tolist()
        return cls(n_elements, cuts, (base, delta, mixed))

    def cut(self, n_kept: int) -> Cut | None:
        """Return the cut that keeps `n_kept` elements, if it is known."""
        if n_kept == 0:
            return NOTHING_KEPT
        if n_kept >= self.n_elements:
            return Cut(0)
        return self.cuts.get(n_kept, self.cuts.get(None))


@dataclass(frozen=True, slots=True)
class KnownQuantities:
    """The quantities of all experts of one tensor that are known without looking at it; of no experts, nothing is.

    Law: what is known is equal to what a reduction would gather.
    """

    experts: tuple[ExpertQuantities, ...] = ()

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request if all of it is known."""
        match request:
            case MagnitudeCut(kept_E, dropped_E) if self.experts:
                lower_E3 = _all_cuts(self._cuts(kept_E))
                upper_E3 = _all_cuts(self._cuts(dropped_E)) if dropped_E else None
                if lower_E3 is None or (dropped_E and upper_E3 is None):
                    return None
                return Reduced(cuts_E3=lower_E3, upper_cuts_E3=upper_E3)
            case InnerProducts() if self.experts:
                products = [expert.products for expert in self.experts]
                return None if None in products else Reduced(products_E3=np.array(products, np.float64))
            case _:  # of several experts together, and by row, nothing is known
                return None

    def lacking(self, request: ReductionRequest) -> ReductionRequest:
        """Return what of a request has to be gathered: no cuts that are known."""
        if not isinstance(request, MagnitudeCut) or request.dropped_E or not self.experts:
            return request
        pairs = zip(request.kept_E, self._cuts(request.kept_E), strict=True)
        return MagnitudeCut(tuple(n_kept if cut is None else 0 for n_kept, cut in pairs))

    def completed(self, request: ReductionRequest | None, gathered: Reduced) -> Reduced:
        """Join what of a request was gathered with what is known of it."""
        if not isinstance(request, MagnitudeCut) or request.dropped_E or not self.experts or gathered.cuts_E3 is None:
            return gathered
        pairs = zip(self._cuts(request.kept_E), gathered.cuts_E3.tolist(), strict=True)
        return replace(gathered, cuts_E3=np.array([cut or found_3 for cut, found_3 in pairs], np.uint32))

    def _cuts(self, kept_E: Sequence[int]) -> list[Cut | None]:
        return [expert.cut(n_kept) for expert, n_kept in zip(self.experts, kept_E, strict=True)]


def _all_cuts(cuts_E: Sequence[Cut | None]) -> NDArray[np.uint32] | None:
    return None if None in cuts_E else np.array(cuts_E, np.uint32).reshape(-1, 3)


# --- translate a plan for the engine: runs of equal access per tensor, and known tensor-wide quantities ---


OMITTED = 0
FREE = -1  # equal to the base: known without reading
UNREAD_PRODUCTS = (1.0, 0.0, 0.0)  # of an expert of which nothing is read: as if it were the base itself


@dataclass(frozen=True, slots=True)
class PlannedAccess:
    """The planned accesses by tensor name. Tensors without a plan are read in full."""

    tensors: Mapping[str, PlannedTensor]
    block_elements: int

    def runs_of(self, task_index: int, task: MergeTask) -> Iterable[Run]:
        """Return the runs of blocks for which the same experts are read, in order, covering the tensor."""
        planned = self.tensors.get(task.name)
        if planned is None:
            return full_access(task_index, task)
        return self._runs(task_index, planned)

    def _runs(self, task_index: int, planned: PlannedTensor) -> Iterator[Run]:
        grid = BlockGrid(planned.n_elements, self.block_elements)
        levels_EB = level_of_blocks(planned, grid.n_blocks)
        if grid.n_blocks == 0:
            yield Run(task_index, Span(0, 0), ())
            return
        changes = np.flatnonzero((levels_EB[:, 1:] != levels_EB[:, :-1]).any(axis=0)) + 1
        for first, last in pairwise([0, *changes.tolist(), grid.n_blocks]):
            level_E = levels_EB[:, first].tolist()
            present = tuple(e for e, level in enumerate(level_E) if level > 0)
            free = tuple(e for e, level in enumerate(level_E) if level == FREE)
            span = Span(grid.span(first).start, grid.span(last - 1).stop)
            levels = tuple((e, level_E[e]) for e in present if level_E[e] != ALL)
            yield Run(task_index, span, present, free, levels)

    def factor(self, name: str) -> float:
        """Return what the merged delta of a tensor is multiplied by: of a sample 1 / its probability, else 1."""
        planned = self.tensors.get(name)
        return 1.0 if planned is None else planned.factor

    def known(self, name: str) -> KnownQuantities:
        """Return the tensor-wide quantities that the plan holds of a tensor; of experts that are not read any will do.

        Those count as if they were the base itself.
        """
        planned = self.tensors.get(name)
        if planned is None:
            return KnownQuantities()
        products_E = planned.products or (None,) * len(planned.models)
        experts = []
        for access, cut, products in zip(planned.access, planned.cuts_E, products_E, strict=True):
            cut = NOTHING_KEPT if cut is None and not access.blocks else cut
            cuts: dict[int | None, Cut] = {} if cut is None else {None: cut}
            experts.append(ExpertQuantities(planned.n_elements, cuts, products if access.blocks else UNREAD_PRODUCTS))
        return KnownQuantities(tuple(experts))


def level_of_blocks(planned: PlannedTensor, n_blocks: int) -> NDArray[np.int16]:
    """Return per expert and block (E, B) the level at which it is read, or `OMITTED`, or `FREE`."""
    levels_RB = np.full((len(planned.reads), n_blocks), OMITTED, np.int16)
    for access, levels_B in zip(planned.reads, levels_RB, strict=True):
        for start, stop in access.blocks:
            levels_B[start:stop] = ALL
        for start, stop in access.free:
            levels_B[start:stop] = FREE
        for start, stop, level in access.levels:
            levels_B[start:stop] = level
    return levels_RB[list(planned.read_of)] if planned.read_of else np.tile(levels_RB, (len(planned.models), 1))


# --- gather what an operator needs of a whole tensor in stages, each of which may depend on earlier ones ---


class StagedReduction:
    """A `Reduction` that gathers what `operator` needs of a tensor, one request after another, while it `is_open`.

    What is `known` without looking at the tensor is not gathered. Of a sample only `n_sampled` elements are looked at:
    ranks are those among them, sums are theirs. A stage that is done makes way for the next one, which sees every block
    as the other's refinement would. Memory: that of the largest of them.
    """

    def __init__(
        self,
        operator: Operator,
        inputs: OperatorInput,
        known: KnownQuantities = KnownQuantities(),
        n_sampled: int | None = None,
    ) -> None:
        self._operator, self._inputs, self._known, self._n_sampled = operator, inputs, known, n_sampled
        self._begin(NOTHING_REDUCED)
        self._is_new = False

    def _begin(self, reduced: Reduced) -> None:
        """Advance as far as known quantities allow, and begin to gather the next request, if any."""
        earlier: list[ReductionRequest] = []
        while (request := self._operator.reduction(self._inputs, reduced)) is not None:
            if request in earlier:
                raise ValueError(f"{self._operator.spec.name} asks again for {request}")
            earlier.append(request)
            answer = self._known.answer(request)
            if answer is None:
                break
            reduced = reduced.joined(answer)
        self._reduced, self._request = reduced, request
        self._current = None
        if request is not None:
            from mergepipe.engine.block_reductions import make_reduction  # many merges reduce nothing

            n_elements, lacking = self._inputs.n_elements, self._known.lacking(request)
            if self._n_sampled is not None:
                lacking = lacking.among(self._n_sampled, n_elements)
            self._current = make_reduction(lacking, n_elements, len(self._inputs.experts), self._n_sampled)
        self._is_new = True  # it has not seen the blocks yet

    @property
    def is_open(self) -> bool:
        """Whether the tensor has to be looked at."""
        return self._current is not None

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        if self._current:
            self._current.survey(blocks)

    def narrow(self) -> None:
        if self._current:
            self._current.narrow()

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        if self._current:
            self._current.accumulate(blocks)

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        if self._current and self._is_new:
            self._current.accumulate(blocks)
        elif self._current:
            self._current.refine(blocks)

    def finish(self) -> bool:
        self._is_new = False
        if self._current is None:
            return True
        if not self._current.finish():
            return False
        self._begin(self._reduced.joined(self._known.completed(self._request, self._current.result())))
        return not self.is_open

    def result(self) -> Reduced:
        return self._reduced


# --- work on single tensors of a merge: the reduction that each needs first, and the function for its blocks ---


def tensor_work(work: MergeWork, task: MergeTask) -> TensorWork:
    """Return the work on one tensor of a merge."""
    if task.action is Action.COPY or not task.base.n_elements:
        return TensorWork(task, None, lambda: None)
    inputs, operator, access = _keyed_input(work, task), work.operator, work.access
    if not task.experts:
        return TensorWork(task, None, lambda: operator.block_function(inputs, NOTHING_REDUCED))
    known = work.recorded.get(task.name, KnownQuantities()) if access is None else access.known(task.name)
    factor, n_sampled, sample = 1.0 if access is None else access.factor(task.name), None, None
    if access is not None and factor != 1.0:  # its quantities are those of the sample
        n_sampled = sum(run.span.n_elements for run in access.runs_of(0, task) if run.is_counted)
        if not n_sampled:
            return TensorWork(task, None, lambda: BASE_ALONE)
        sample = Sample(factor, access.block_elements, operator.granularity(inputs))
    staged = StagedReduction(operator, inputs, known, n_sampled)
    reduction = staged if staged.is_open else None
    return TensorWork(task, reduction, lambda: operator.block_function(inputs, staged.result()), sample)


def _keyed_input(work: MergeWork, task: MergeTask) -> OperatorInput:
    """Return the input of a task, with one stream key per expert for random operators; each tensor has its own."""
    if not work.operator.is_random:
        return task.operator_input(renormalize=work.renormalize)
    sources = zip(task.expert_models, task.experts, strict=True)
    keys = tuple(
        stream_key(work.seed, work.content_ids[model], source.name, work.repeats.get(model, 0))
        for model, source in sources
    )
    return task.operator_input(keys, renormalize=work.renormalize)
