"""Work on single tensors of a merge: the reduction that each needs first, and the function for its blocks."""

from __future__ import annotations

from collections.abc import Callable

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid
from mergepipe.engine.observer import OnStatistics
from mergepipe.engine.pipeline.jobs import BASE_ALONE, Sample, TensorWork
from mergepipe.engine.planned_access import PlannedAccess
from mergepipe.engine.reductions.block_reductions import Reduction
from mergepipe.engine.reductions.known_quantities import NOTHING_KNOWN
from mergepipe.engine.reductions.staged_reduction import Needs, StagedReduction
from mergepipe.engine.reductions.tensor_summary import TensorSummary
from mergepipe.engine.work import MergeWork
from mergepipe.operators.base import NOTHING_REDUCED, OperatorInput, Reduced
from mergepipe.operators.statistics import COMMON_DENSITIES
from mergepipe.recipes.resolve.tasks import Action, MergeTask


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
