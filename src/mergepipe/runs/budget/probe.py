"""Sample experts of which nothing is known, for a small share of a budget, so that blocks can be planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mergepipe.checkpoints.contract import TensorEntry, files_of
from mergepipe.checkpoints.open_files import open_files
from mergepipe.checkpoints.read_cost import range_cost_bytes
from mergepipe.core.blocks import BlockGrid, DTypeKind
from mergepipe.engine.observer import Observer
from mergepipe.engine.work import AnalysisWork, EngineOptions
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.planning.budget import BudgetRequest, ShareBudget
from mergepipe.recipes.resolve.tasks import Action, MergeTask, TensorParameters
from mergepipe.runs.budget.packed_indices import least_full_cost
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.storage.contract import Store

MOST_OF_BUDGET = 1 / 8
MOST_OF_EVERYTHING = 1 / 80  # more buys less than reading blocks does
MOST_BLOCKS = 1 << 20  # of all experts: estimates of more (512 GiB in bfloat16) take too much memory and time
MOST_SAMPLES = 1 << 16  # of all experts: of more blocks every second, fourth ... is sampled, which takes seconds
MOST_SAMPLED = 1 / 32  # of a block: more than that hardly makes estimates better

StatisticsByTask = Mapping[str, TensorStatistics]


@dataclass(frozen=True, slots=True)
class Prober:
    """Samples experts through `store`; `on_tick` is called on the way."""

    store: Store
    engine: EngineOptions
    on_tick: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Statistics of all experts, estimates among them, and the bytes that were read of each to estimate."""

    statistics: tuple[StatisticsByTask, ...]
    cost_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Pairs of a task and one of its experts to sample, by which share of every `stride`-th block."""

    pairs: tuple[tuple[int, MergeTask], ...]  # the plan's expert, and the task with it alone
    fraction: float
    stride: int
    cost_bytes: tuple[int, ...]


def probe_unknown(
    prober: Prober,
    inputs: Inputs,
    recorded: Sequence[StatisticsByTask],
    budget: BudgetRequest,
    block_elements: int,
    request_bytes: int = 0,
    target_error: float | None = None,
) -> ProbeResult:
    """Sample the stored tensors of which nothing is known, for at most an eighth of the budget.

    Which pages are read follows from the tensors' sizes and places. Nothing is recorded: every run reads and charges
    its own samples, so that the same command gives the same plan.

    Where a request is worth `request_bytes`, fewer blocks are sampled: the requests of all samples cost at most an
    eighth of what reading the budget does, as long as each tensor is sampled once.
    Nothing is sampled for a budget that reads everything (unless a `target_error` above 0 may need less) or nothing,
    where one page of each tensor is too much, or of more than `MOST_BLOCKS` blocks.
    """
    everything_bytes = least_full_cost(inputs)
    limit_bytes = budget.limit_bytes(everything_bytes)
    is_all = limit_bytes >= everything_bytes or (isinstance(budget, ShareBudget) and budget.fraction == 1)
    pairs = () if (is_all and not target_error) or budget.is_zero else _unknown_pairs(inputs, recorded)
    most_bytes = min(limit_bytes * MOST_OF_BUDGET, everything_bytes * MOST_OF_EVERYTHING)
    block_bytes = block_elements * 2
    requests_bytes = (limit_bytes + -(-limit_bytes // block_bytes) * request_bytes) * MOST_OF_BUDGET
    most_requests = int(requests_bytes / request_bytes) if request_bytes else None
    sampling = _affordable(pairs, int(most_bytes), most_requests, block_elements, len(recorded)) if pairs else None
    if sampling is None:
        return ProbeResult(tuple(recorded), (0,) * len(recorded))
    estimates = _sampled(prober, inputs, sampling, block_elements)
    statistics: list[dict[str, TensorStatistics]] = [dict(of_expert) for of_expert in recorded]
    for (e, task), estimate in zip(sampling.pairs, estimates, strict=True):
        statistics[e][task.name] = estimate
    return ProbeResult(tuple(statistics), sampling.cost_bytes)


def _unknown_pairs(inputs: Inputs, recorded: Sequence[StatisticsByTask]) -> tuple[tuple[int, MergeTask], ...]:
    """List the stored tensors of experts without statistics, each as a task with that expert alone."""
    expert_of = {model: e for e, model in enumerate(inputs.expert_models)}
    pairs = []
    for task in inputs.resolution.tasks:
        for model, source in zip(task.expert_models, task.experts, strict=True):
            e = expert_of[model]
            is_stored = isinstance(source, TensorEntry) and isinstance(task.base, TensorEntry)
            is_float = task.base.dtype.kind is source.dtype.kind is DTypeKind.FLOAT
            wanted = task.action is Action.MERGE and task.base.n_elements and task.name not in recorded[e]
            if wanted and is_stored and is_float:
                alone = replace(
                    task, experts=(source,), expert_models=(model,), parameters=TensorParameters({}, {}, ({},))
                )
                pairs.append((e, alone))
    return tuple(pairs)


def _affordable(
    pairs: tuple[tuple[int, MergeTask], ...],
    limit_bytes: int,
    most_requests: int | None,
    block_elements: int,
    n_experts: int,
) -> _Sampling | None:
    """Choose how much is sampled within `limit_bytes`; None if a page of each tensor is more, or blocks are too many.

    At most `most_requests` are made, or as many as one sample of each tensor of an expert and of the base needs.
    """
    blocks = [BlockGrid(task.base.n_elements, block_elements).n_blocks for _, task in pairs]
    longest, stride = max(blocks), 1
    if sum(blocks) > MOST_BLOCKS:
        return None
    while stride <= longest and sum(-(-n_blocks // stride) for n_blocks in blocks) > MOST_SAMPLES:
        stride *= 2
    if most_requests is not None:
        while stride <= longest and 2 * sum(-(-n_blocks // stride) for n_blocks in blocks) > most_requests:
            stride *= 2
    while True:
        cost_E = _cost(pairs, 0.0, stride, block_elements, n_experts)
        if sum(cost_E) <= limit_bytes:
            break
        if stride > longest:
            return None
        stride *= 2
    fraction = MOST_SAMPLED
    while stride == 1 and fraction > 1 / 1024:
        more_E = _cost(pairs, fraction, stride, block_elements, n_experts)
        if sum(more_E) <= limit_bytes:
            return _Sampling(pairs, fraction, stride, tuple(more_E))
        fraction /= 2
    return _Sampling(pairs, 0.0, stride, tuple(cost_E))


def _cost(
    pairs: Sequence[tuple[int, MergeTask]],
    fraction: float,
    stride: int,
    block_elements: int,
    n_experts: int,
) -> list[int]:
    """Sum the bytes that a sampling requests of each expert."""
    from mergepipe.engine.reductions.probe_summary import sample_runs  # most plans sample nothing

    cost_E = [0] * n_experts
    for e, task in pairs:
        source = task.experts[0]
        if isinstance(source, TensorEntry):
            size = source.dtype.itemsize
            for run in sample_runs(0, task, BlockGrid(task.base.n_elements, block_elements), fraction, stride):
                first, stop = source.offset + run.span.start * size, source.offset + run.span.stop * size
                cost_E[e] += range_cost_bytes(first, stop, source.granularity_bytes)
    return cost_E


def _sampled(prober: Prober, inputs: Inputs, sampling: _Sampling, block_elements: int) -> list[TensorStatistics]:
    from mergepipe.engine.analysis import run_analysis  # most plans sample nothing

    tasks = tuple(task for _, task in sampling.pairs)
    statistics_by_place: dict[int, TensorStatistics] = {}
    place_of = {id(task): place for place, task in enumerate(tasks)}

    def take(task: MergeTask, _: int, statistics: TensorStatistics) -> None:
        statistics_by_place[place_of[id(task)]] = statistics

    # a fraction of 0 asks for one page: the engine takes 0 for no probe
    work = AnalysisWork(tasks, block_elements, (), sampling.fraction or 1e-9, sampling.stride)
    paths = files_of(source for task in tasks for source in (task.base, *task.experts))
    with open_files(prober.store, paths, [checkpoint for _, _, checkpoint in inputs.leaves()]) as files:
        run_analysis(work, files, prober.store, prober.engine, Observer(lambda _: prober.on_tick(), take))
    return [statistics_by_place[place] for place in range(len(tasks))]
