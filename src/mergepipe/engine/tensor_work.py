"""Work on single tensors of a merge: the quantities that each needs first, and the function for its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid, Span
from mergepipe.engine.block_reductions import Reduction, make_reduction
from mergepipe.engine.jobs import BASE_ALONE, Sample, TensorWork
from mergepipe.engine.segments import Run, full_access
from mergepipe.engine.tensor_summary import TensorSummary
from mergepipe.engine.work import MergeWork, OnStatistics
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    InnerProducts,
    MagnitudeBand,
    MagnitudeCut,
    Operator,
    OperatorInput,
    RawBlock,
    Reduced,
    ReductionRequest,
    ScoreCut,
)
from mergepipe.operators.statistics import COMMON_DENSITIES, NOTHING_KEPT, Cut, TensorStatistics, rank_of_density
from mergepipe.planning.plan import ALL, PlannedTensor
from mergepipe.recipes.tasks import Action, MergeTask

# --- answer requests for tensor-wide quantities from what is on record instead of reading blocks ---


class KnownQuantities(Protocol):
    """The tensor-wide quantities of one tensor that are known without reading it."""

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request, equal to what a reduction would give; None if any of it must be gathered."""
        ...

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return the part of a request that must be gathered."""
        ...

    def completed(self, reduced: Reduced) -> Reduced:
        """Join gathered quantities with the known ones."""
        ...


class NothingKnown:
    """Base of what knows little: all of a request is gathered."""

    __slots__ = ()

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Know nothing."""
        return None

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return all of the request."""
        return request

    def completed(self, reduced: Reduced) -> Reduced:
        """Return what was gathered."""
        return reduced


NOTHING_KNOWN = NothingKnown()


@dataclass(frozen=True, slots=True)
class ExpertQuantities:
    """The exact tensor-wide quantities of one expert's tensor: magnitude cuts by density, and inner products."""

    n_elements: int
    cuts: tuple[tuple[float, Cut], ...]  # by density
    products: tuple[float, float, float]

    @classmethod
    def of(cls, statistics: TensorStatistics) -> ExpertQuantities:
        """Keep the quantities of exact statistics, without their blocks."""
        cuts = zip(statistics.densities_D.tolist(), starmap(Cut, statistics.cuts_D3.tolist()), strict=True)
        base, delta, mixed = statistics.products_3.tolist()
        return cls(statistics.grid.n_elements, tuple(cuts), (base, delta, mixed))

    def cut(self, n_kept: int) -> Cut | None:
        """Return the cut that keeps `n_kept` elements, if a recorded density keeps as many."""
        if n_kept == 0:
            return NOTHING_KEPT
        if n_kept >= self.n_elements:
            return Cut(0)
        for density, cut in self.cuts:
            if rank_of_density(density, self.n_elements) == n_kept:
                return cut
        return None


@dataclass(frozen=True, slots=True)
class RecordedQuantities(NothingKnown):
    """The quantities on record of all experts of one tensor."""

    experts: tuple[ExpertQuantities, ...]

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request if every expert has what it asks for."""
        match request:
            case MagnitudeCut(kept_E):
                cuts_E3 = self._cuts(kept_E)
                return None if cuts_E3 is None else Reduced(cuts_E3=cuts_E3)
            case MagnitudeBand(kept_E, dropped_E):
                lower_E3, upper_E3 = self._cuts(kept_E), self._cuts(dropped_E)
                return None if lower_E3 is None or upper_E3 is None else Reduced(lower_E3, upper_cuts_E3=upper_E3)
            case InnerProducts():
                return Reduced(products_E3=np.array([expert.products for expert in self.experts]))
            case _:  # of several experts together, and by row, nothing is on record
                return None

    def _cuts(self, kept_E: Sequence[int]) -> NDArray[np.uint32] | None:
        cuts = [expert.cut(n_kept) for expert, n_kept in zip(self.experts, kept_E, strict=True)]
        return None if None in cuts else np.array(cuts, np.uint32)


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
        """Return the tensor-wide quantities that the plan holds of a tensor."""
        planned = self.tensors.get(name)
        return NOTHING_KNOWN if planned is None else PlannedQuantities(planned)


@dataclass(frozen=True, slots=True)
class PlannedQuantities(NothingKnown):
    """The quantities that a plan holds of one tensor. Of experts that are not read nothing has to be known."""

    planned: PlannedTensor

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return a request for the experts that are read and whose quantities the plan lacks."""
        match request:
            case MagnitudeCut(kept_E):
                is_open_E = [cut is None for cut in self._cuts_E()]
                open_E = tuple(n_kept if is_open else 0 for n_kept, is_open in zip(kept_E, is_open_E, strict=True))
                return MagnitudeCut(open_E) if any(is_open_E) else None
            case InnerProducts():
                return None if None not in self._products_E() else request
            case _:  # a plan knows nothing of it
                return request

    def completed(self, reduced: Reduced) -> Reduced:
        """Join the reduced quantities with those that the plan holds, of all experts or of some."""
        cuts_E, products_E = self._cuts_E(), self._products_E()
        recorded = Reduced(
            cuts_E3=None if None in cuts_E else np.array(cuts_E, np.uint32),
            products_E3=None if None in products_E else np.array(products_E, np.float64),
        )
        if recorded.cuts_E3 is not None or recorded.products_E3 is not None:
            return reduced.joined(recorded)
        if reduced.cuts_E3 is None:
            return reduced
        joined_E = [
            cut if planned_cut is None else planned_cut
            for planned_cut, cut in zip(cuts_E, reduced.cuts_E3.tolist(), strict=True)
        ]
        return replace(reduced, cuts_E3=np.array(joined_E, np.uint32))

    def _cuts_E(self) -> list[Cut | None]:
        """Return the cuts; any will do where nothing is read."""
        reads_E = zip(self.planned.cuts_E, self.planned.access, strict=True)
        return [NOTHING_KEPT if cut is None and not access.blocks else cut for cut, access in reads_E]

    def _products_E(self) -> list[tuple[float, float, float] | None]:
        products_E = self.planned.products or (None,) * len(self.planned.models)
        reads_E = zip(products_E, self.planned.access, strict=True)
        return [products if access.blocks else UNREAD_PRODUCTS for products, access in reads_E]


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


@dataclass(frozen=True, slots=True)
class Needs:
    """The stages of quantities that `operator` needs of a tensor, less those that are `known` without looking at it.

    Of a sample only `sampled_elements` are looked at: ranks are those among them, sums are theirs.
    """

    operator: Operator
    inputs: OperatorInput
    known: KnownQuantities = NOTHING_KNOWN
    sampled_elements: int | None = None

    def reduction(self, request: ReductionRequest, n_experts: int) -> Reduction:
        """Make the reduction that answers `request`."""
        n_elements = self.inputs.n_elements
        if self.sampled_elements is None:
            return make_reduction(request, n_elements, n_experts)
        request = _among(request, n_elements, self.sampled_elements)
        return make_reduction(request, n_elements, n_experts, self.sampled_elements)

    def next(self, reduced: Reduced) -> tuple[Reduced, ReductionRequest | None]:
        """Advance as far as known quantities allow; return them, and the next request to gather, if any."""
        earlier: list[ReductionRequest] = []
        while (request := self.operator.reduction(self.inputs, reduced)) is not None:
            if request in earlier:
                raise ValueError(f"{self.operator.spec.name} asks again for {request}")
            earlier.append(request)
            answer = self.known.answer(request)
            unanswered = self.known.unanswered(request) if answer is None else None
            if unanswered is not None:
                return reduced, unanswered
            reduced = self.known.completed(reduced) if answer is None else reduced.joined(answer)
        return reduced, None


def _among(request: ReductionRequest, n_elements: int, n_sampled: int) -> ReductionRequest:
    """Return a request with its ranks in proportion among `n_sampled` of the `n_elements`."""

    def ranks(of_all: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank * n_sampled // n_elements for rank in of_all)

    match request:
        case MagnitudeCut(kept_E):
            return MagnitudeCut(ranks(kept_E))
        case MagnitudeBand(kept_E, dropped_E):
            return MagnitudeBand(ranks(kept_E), ranks(dropped_E))
        case ScoreCut(score, of_scores):
            return ScoreCut(score, tuple(max(1, rank) for rank in ranks(of_scores)))
        case _:
            return request


class StagedReduction:
    """A `Reduction` that gathers one request after another. Memory: that of the largest of them.

    A stage that is done makes way for the next one, which sees every block as the other's refinement would.
    """

    def __init__(self, needs: Needs, first: Reduction, n_experts: int, reduced: Reduced = NOTHING_REDUCED) -> None:
        self._needs = needs
        self._n_experts = n_experts
        self._reduced = reduced
        self._current: Reduction | None = first
        self._is_new = False  # the current stage has not seen the blocks yet

    def survey(self, block: RawBlock) -> None:
        if self._current:
            self._current.survey(block)

    def narrow(self) -> None:
        if self._current:
            self._current.narrow()

    def accumulate(self, block: RawBlock) -> None:
        if self._current:
            self._current.accumulate(block)

    def refine(self, block: RawBlock) -> None:
        if self._current and self._is_new:
            self._current.accumulate(block)
        elif self._current:
            self._current.refine(block)

    def finish(self) -> bool:
        self._is_new = False
        if self._current is None:
            return True
        if not self._current.finish():
            return False
        joined = self._needs.known.completed(self._reduced.joined(self._current.result()))
        self._reduced, request = self._needs.next(joined)
        if request is None:
            self._current = None
            return True
        self._current = self._needs.reduction(request, self._n_experts)
        self._is_new = True
        return False

    def result(self) -> Reduced:
        return self._reduced


# --- work on single tensors of a merge: the reduction that each needs first, and the function for its blocks ---


def tensor_work(work: MergeWork, task: MergeTask, on_statistics: OnStatistics) -> TensorWork:
    """Return the work on one tensor of a merge; it passes on the statistics that are to be gathered."""
    if task.action is Action.COPY or not task.base.n_elements:
        return TensorWork(task, None, no_function)
    inputs, operator = operator_input(work, task), work.operator
    if work.access is not None and work.access.factor(task.name) != 1.0:
        return _sampled_work(work, task, inputs, work.access)
    if not task.experts:
        return TensorWork(task, None, lambda _: operator.block_function(inputs, NOTHING_REDUCED))
    needs = _needs(work, task, inputs)
    recorded, request = needs.next(NOTHING_REDUCED)
    gathers = work.access is None and task.name in work.statistics_of
    if not gathers and request is None:
        return TensorWork(task, None, lambda _: operator.block_function(inputs, recorded))
    first: Reduction
    on_reduced = _nothing_to_report
    if gathers:
        grid = BlockGrid(inputs.n_elements, DEFAULT_BLOCK_ELEMENTS)
        first = summary = TensorSummary(grid, len(task.experts), request, COMMON_DENSITIES)
        on_reduced = reporter(task, summary, on_statistics)
    elif request is not None:
        first = needs.reduction(request, len(task.experts))
    staged = StagedReduction(needs, first, len(task.experts), recorded)
    return TensorWork(task, staged, lambda reduced: operator.block_function(inputs, reduced), on_reduced)


def _sampled_work(work: MergeWork, task: MergeTask, inputs: OperatorInput, access: PlannedAccess) -> TensorWork:
    """Return the work on a tensor of which a sample is read: its quantities are those of the sample."""
    operator = work.operator
    n_sampled = sum(run.span.n_elements for run in access.runs_of(0, task) if run.is_counted)
    if not n_sampled:
        return TensorWork(task, None, lambda _: BASE_ALONE)
    needs = Needs(operator, inputs, access.known(task.name), n_sampled)
    recorded, request = needs.next(NOTHING_REDUCED)
    staged = None
    if request is not None:
        n_experts = len(task.experts)
        staged = StagedReduction(needs, needs.reduction(request, n_experts), n_experts, recorded)
    return TensorWork(
        task,
        staged,
        lambda reduced: operator.block_function(inputs, recorded if staged is None else reduced),
        sample=Sample(access.factor(task.name), operator.granularity(inputs)),
    )


def _needs(work: MergeWork, task: MergeTask, inputs: OperatorInput) -> Needs:
    """Return the operator's needs of a tensor, less what the plan or the statistics know."""
    if work.access is not None:
        return Needs(work.operator, inputs, work.access.known(task.name))
    if task.name in work.recorded and task.name not in work.statistics_of:
        return Needs(work.operator, inputs, work.recorded[task.name])
    return Needs(work.operator, inputs, NOTHING_KNOWN)


def reporter(task: MergeTask, summary: TensorSummary, on_statistics: OnStatistics) -> Callable[[], None]:
    """Return a function that passes on the statistics of every expert of a task."""

    def report() -> None:
        for e in range(len(task.experts)):
            on_statistics(task, e, summary.statistics(e))

    return report


def _nothing_to_report() -> None:
    """Report nothing: the tensor's statistics are not gathered."""


def no_function(_: Reduced = NOTHING_REDUCED) -> None:
    """Return no block function: bytes are copied, or nothing is written."""


def operator_input(work: MergeWork, task: MergeTask) -> OperatorInput:
    return OperatorInput(
        globals=task.parameters.globals,
        anchor=task.parameters.anchor,
        experts=task.parameters.experts,
        n_elements=task.base.n_elements,
        stream_keys=_stream_keys(work, task),
        renormalize=work.renormalize,
        shape=task.shape,
    )


def _stream_keys(work: MergeWork, task: MergeTask) -> tuple[int, ...]:
    """Derive one stream key per expert, for random operators; each tensor of a model has its own."""
    if not work.operator.is_random:
        return ()
    sources = zip(task.expert_models, task.experts, strict=True)
    return tuple(
        stream_key(work.seed, work.content_ids[model], source.name, work.repeats.get(model, 0))
        for model, source in sources
    )
