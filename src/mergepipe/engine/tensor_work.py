"""The work on single tensors of a merge: the reduction that each needs first, and the function for its blocks."""

from __future__ import annotations

from dataclasses import replace

from mergepipe.checkpoints.adapted_tensors import Adapted
from mergepipe.checkpoints.content_id import rounding_key, stream_key
from mergepipe.core.rounding import TensorRounding, holds_results
from mergepipe.engine.jobs import BASE_ALONE, Sample, TensorWork
from mergepipe.engine.known_quantities import NOTHING_KNOWN, KnownQuantities
from mergepipe.engine.staged_reduction import StagedReduction
from mergepipe.engine.work import MergeWork
from mergepipe.operators.base import NOTHING_REDUCED, Operator, OperatorInput
from mergepipe.recipes.tasks import Action, MergeTask


def tensor_work(work: MergeWork, task: MergeTask) -> TensorWork:
    """Return the work on one tensor of a merge."""
    made = _unrounded(work, task)
    made.rounding = _rounding(work, task)
    return made


def result_rounding(task: MergeTask, seed: int | None) -> TensorRounding:
    """Return how the results of a task are rounded: stochastically by a seed, to nearest without one."""
    key = 0 if seed is None else rounding_key(seed, task.name)
    return TensorRounding(key, measures=not holds_results(task.dtype))


def _rounding(work: MergeWork, task: MergeTask) -> TensorRounding:
    """Return how a tensor's results are rounded: by the sum of base and adapter where that is made in one step."""
    if isinstance(task.base, Adapted) and task.base.rounding.measures:
        return task.base.rounding
    return result_rounding(task, work.seed if work.is_stochastic else None)


def _unrounded(work: MergeWork, task: MergeTask) -> TensorWork:
    if task.action is Action.COPY or not task.base.n_elements:
        return TensorWork(task, None, lambda: None)
    operator = work.operator
    inputs = _keyed_input(work, task)
    if not task.experts:
        return TensorWork(task, None, lambda: operator.block_function(inputs, NOTHING_REDUCED))
    access = work.access
    if access is None:
        return _reduced_work(task, operator, inputs, work.recorded.get(task.name, NOTHING_KNOWN))
    known = access.known(task.name)
    probability = access.probability(task.name)
    if probability == 1.0:
        return _reduced_work(task, operator, inputs, known)
    n_sampled = sum(run.span.n_elements for run in access.runs_of(0, task) if run.is_counted)
    if not n_sampled:
        return TensorWork(task, None, lambda: BASE_ALONE)
    sample = Sample(1 / probability, access.block_elements, operator.granularity(inputs))
    inputs = replace(inputs, drawn_probability=probability)
    return _reduced_work(task, operator, inputs, known, sample, n_sampled)


def _reduced_work(
    task: MergeTask,
    operator: Operator,
    inputs: OperatorInput,
    known: KnownQuantities,
    sample: Sample | None = None,
    n_sampled: int | None = None,
) -> TensorWork:
    """Return the work on a tensor with experts; the quantities of a sample are those of its `n_sampled` elements."""
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
