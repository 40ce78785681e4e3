"""The blocks that a budget may read, with their costs and scores, and the statistics of the experts' tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BlockGrid
from mergepipe.operators.base import (
    Influence,
    InnerProducts,
    MagnitudeCut,
    Operator,
    OperatorInput,
    Reduced,
    ReductionRequest,
)
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import BLOCK_RECORD, N_OCTAVES, NOTHING_KEPT, OCTAVE_SHARES, Cut, TensorStatistics
from mergepipe.planning.problem import (
    ABSENT,
    Columns,
    Ladders,
    PlanningProblem,
    build_ladders,
    lay_out_columns,
    read_costs,
    sample_cost_bytes,
)
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.ranges import PAGE_BYTES

REASON_MISSING = "no statistics: not analysed against this base"
REASON_UNIT = "its stored bytes make up every block"
REASON_OTHER_SIZE = "its statistics are of a tensor of another size"
REASON_NO_CUT = "the magnitude cut of its density is not in the statistics"
REASON_NO_PRODUCTS = "its inner products are not finite"
REASON_ROWS = "the rule needs whole rows, which blocks would cut"
REASON_NOT_STATED = "the rule does not say what a part of a delta does"
REASON_NOT_KEPT = "the rule needs sums or cuts over the whole tensor that statistics do not hold"

Pair = tuple[int, int]
"""An expert and a tensor, by their indices."""

Products = tuple[float, float, float]

LARGEST_NORM = float(np.finfo(np.float32).max)  # in place of those that are not finite


# --- what the rule says of one tensor, its tensor-wide quantities answered from statistics ---


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The operator evaluated on one tensor; the mappings are by expert.

    Attributes:
        cuts, products: the tensor-wide quantities that the operator wants, where they are known.
        cut_errors: how far the share that a cut keeps is off at most, where it is estimated from a histogram.
        lacking: why a tensor has to be read whole or not at all.
    """

    influence: Influence
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    cut_errors: Mapping[int, float] = field(default_factory=dict)
    products: Mapping[int, Products] = field(default_factory=dict)
    lacking: Mapping[int, str] = field(default_factory=dict)


def evaluate_rule(
    operator: Operator,
    task: MergeTask,
    statistics: Mapping[int, TensorStatistics | None],
    read_experts: Sequence[int],
    block_elements: int,
) -> Rule:
    """Evaluate the operator on one tensor of some experts, of which there is something to read of `read_experts`."""
    inputs = task.operator_input()
    request = operator.reduction(inputs) if statistics and task.base.n_elements else None
    cuts, cut_errors, products = dict[int, Cut](), dict[int, float](), dict[int, Products]()
    lacking = dict[int, str]()
    match request:
        case MagnitudeCut(kept_E, ()):
            for (e, known), n_kept in zip(statistics.items(), kept_E, strict=True):
                cut = known_cut(known, n_kept, task.base.n_elements)
                estimate = known.estimated_cut(n_kept) if cut is None and known is not None else None
                if estimate is not None:
                    cut, cut_errors[e] = estimate.cut, estimate.share_error
                if cut is not None:
                    cuts[e] = cut
                elif e in read_experts:
                    lacking[e] = REASON_NO_CUT
        case InnerProducts():
            for e, known in statistics.items():
                if known is not None and np.isfinite(known.products_3).all():
                    base, delta, mixed = known.products_3.tolist()
                    products[e] = (base, delta, mixed)
                elif e in read_experts:
                    lacking[e] = REASON_NO_PRODUCTS
        case _:
            pass
    influence = operator.influence(inputs, np.array(list(products.values()), np.float64) if products else None)
    reason = whole_tensor_reason(operator, inputs, request, block_elements) if influence.is_known else REASON_NOT_STATED
    if reason is not None:
        lacking.update(dict.fromkeys(read_experts, reason))
    return Rule(influence, cuts, cut_errors, products, lacking)


def known_cut(statistics: TensorStatistics | None, n_kept: int, n_elements: int) -> Cut | None:
    """Return the cut that exactly `n_kept` elements reach, None if no recorded density has that rank."""
    if n_kept == 0 or n_kept >= n_elements:
        return NOTHING_KEPT if n_kept == 0 else Cut(0)
    return None if statistics is None else statistics.cut(n_kept)


def whole_tensor_reason(
    operator: Operator, inputs: OperatorInput, request: ReductionRequest | None, block_elements: int
) -> str | None:
    """Return why a tensor must be read whole or not at all even if `request` is answered; None if it need not."""
    granularity = operator.granularity(inputs)
    if granularity > 1 and block_elements % granularity and inputs.n_elements > block_elements:
        return REASON_ROWS
    if request is None or request.is_of_merged:
        return None
    match request:
        case MagnitudeCut(_, ()):
            reduced = Reduced(cuts_E3=np.zeros((len(inputs.experts), 3), np.uint32))
        case InnerProducts():
            reduced = Reduced(products_E3=np.zeros((len(inputs.experts), 3)))
        case _:
            return REASON_NOT_KEPT
    following = operator.reduction(inputs, reduced)
    return None if following is None or following.is_of_merged else REASON_NOT_KEPT


# --- every block with its cost and score ---


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every block (B) of every expert (E) with its cost and score, and what is known of each expert's tensor (T).

    Attributes:
        cost_EB: bytes requested to read all of a block, alone.
        score_EB: see `_score`.
        square_EB: ||delta||^2, as far as it is known; 0 elsewhere.
        free_EB: the block equals the base's, or the expert has no part in the tensor: it is never read.
        informed_ET: statistics, or the expert's own record of what its levels leave, say what is in the blocks.
        whole: why a tensor of an expert is read in all its blocks or not at all.
        unknown: why nothing is known of tensors that are planned by blocks.
        spread: tensors whose norms are shared out from larger blocks, and bound nothing.
        ladders: the tensors that can be read in part; `cost_EB` is that of all of a block.
        content_E: bytes to compute the content ids of experts that take part, where they key randomness.
        side_E: bytes of indices, which are read to make any plan.
        full_E: bytes of reading each expert in full; of one whose index is not read, at least.
    """

    columns: Columns
    cost_EB: NDArray[np.int64]
    score_EB: NDArray[np.float64]
    square_EB: NDArray[np.float64]
    free_EB: NDArray[np.bool_]
    informed_ET: NDArray[np.bool_]
    rules: tuple[Rule, ...]
    statistics: Mapping[Pair, TensorStatistics]
    whole: Mapping[Pair, str]
    unknown: Mapping[Pair, str]
    spread: frozenset[Pair]
    ladders: Ladders
    content_E: NDArray[np.int64]
    side_E: NDArray[np.int64]
    full_E: NDArray[np.int64]

    @property
    def n_experts(self) -> int:
        return len(self.cost_EB)

    @property
    def trims(self) -> bool:
        """Whether the operator keeps only what reaches a magnitude cut, of some tensor."""
        return any(rule.influence.trims for rule in self.rules)

    @property
    def own_EB(self) -> NDArray[np.bool_]:
        """Mark blocks that can be selected: not free, and not of an expert whose index is not read."""
        own_EB = ~self.free_EB
        own_EB[list(self.columns.unread)] = False
        return own_EB


def find_candidates(problem: PlanningProblem, *, samples: bool) -> Candidates:
    """Work out costs, scores and what is known of a problem.

    What a sample does not know of a whole tensor it takes from what it reads, so that only whole rows are in its way.
    Memory: 28 bytes for each block of each expert.
    """
    operator = operator_named(problem.operator)
    columns = lay_out_columns(problem.tasks, problem.resolution.expert_models, problem.block_elements, problem.unread)
    n_experts, n_tensors = columns.n_experts, len(columns.tasks)
    pairs = [(e, t) for t in range(n_tensors) for e in columns.participants(t) if columns.source(e, t) is not None]
    statistics, unusable = _match_statistics(problem, columns, pairs)
    ladders = build_ladders(columns, operator, problem.block_elements)
    rules = []
    for t, task in enumerate(columns.tasks):
        experts = columns.participants(t)
        known = {e: statistics.get((e, t)) for e in experts}
        read_experts = [e for e in experts if columns.source(e, t) is not None]
        rules.append(evaluate_rule(operator, task, known, read_experts, problem.block_elements))

    is_cut_in_rows_T = [_cuts_rows(operator, problem, task) for task in columns.tasks] if samples else []
    lacking = (
        {(e, t): REASON_ROWS for e, t in pairs if is_cut_in_rows_T[t]}
        if samples
        else {(e, t): reason for t, rule in enumerate(rules) for e, reason in rule.lacking.items()}
    )
    units = [(e, t) for e, t in pairs if _is_unit(columns, e, t)]
    unknown = {pair: reason for pair, reason in unusable.items() if pair not in ladders}
    whole = {**dict.fromkeys(units, REASON_UNIT), **lacking}
    if not samples:
        whole = {pair: unknown.pop(pair, reason) for pair, reason in whole.items()}

    informed_ET = np.zeros((n_experts, n_tensors), np.bool_)
    free_EB = columns.silent_ET()[:, columns.tensor_B]
    energy_EB = np.zeros((n_experts, columns.n_columns), np.float64)
    square_EB = np.zeros_like(energy_EB)
    for e in range(n_experts):
        known_T = {t: statistics[e, t] for t in range(n_tensors) if (e, t) in statistics}
        for t, square_B, energy_B, is_same_B in _passing_energy(e, known_T, rules, problem.block_elements):
            informed_ET[e, t], energy_EB[e, columns.of_tensor(t)] = True, energy_B
            square_EB[e, columns.of_tensor(t)] = square_B
            free_EB[e, columns.of_tensor(t)] |= is_same_B
    for (e, t), ladder in ladders.items():
        informed_ET[e, t], energy_EB[e, columns.of_tensor(t)] = True, ladder.unread_B
        square_EB[e, columns.of_tensor(t)] = ladder.square_B
        # What no byte is stored of is the base in the expert's dtype: infinities and tiny deltas are not on its record.
        dtype, base_dtype = columns.tasks[t].experts[columns.slot_ET[e, t]].dtype, columns.tasks[t].base.dtype
        if dtype is base_dtype or dtype.itemsize > base_dtype.itemsize:
            free_EB[e, columns.of_tensor(t)] |= ladder.cost_KB[-1] + ladder.square_B == 0
    cost_EB = read_costs(columns, ladders)
    for e, t in (*units, *(pair for pair, reason in lacking.items() if reason == REASON_ROWS)):
        inside = columns.of_tensor(t)
        free_EB[e, inside] = free_EB[e, inside].all()
        if (e, t) in lacking and lacking[e, t] == REASON_ROWS:  # cut between rows: the page at a cut may be read twice
            source = columns.source(e, t)
            step = source.granularity_bytes if isinstance(source, TensorEntry) else PAGE_BYTES
            cost_EB[e, inside] += 0 if step == 1 else step
    for (e, t), ladder in ladders.items():
        cost_EB[e, columns.of_tensor(t)] = ladder.cost_KB[-1]
    score_EB = _score(columns, rules, np.where(free_EB, 0.0, energy_EB), informed_ET, free_EB)
    content_E = _content_costs(problem) * (~free_EB).any(axis=1)
    indices = [model.checkpoint.encoded for model in problem.experts]
    side_E = _bytes_of(0 if i is None or e in problem.unread else i.cost_bytes for e, i in enumerate(indices))
    unread_E = _bytes_of(i.least_bytes if i is not None and e in problem.unread else 0 for e, i in enumerate(indices))
    is_open_E = np.array([e not in problem.unread for e in range(n_experts)], np.bool_)
    full_E = (cost_EB * ~free_EB).sum(axis=1) * is_open_E + content_E + side_E + unread_E
    return Candidates(
        columns=columns,
        cost_EB=cost_EB,
        score_EB=score_EB,
        square_EB=np.where(free_EB, 0.0, square_EB),
        free_EB=free_EB,
        informed_ET=informed_ET,
        rules=tuple(rules),
        statistics=statistics,
        whole=whole,
        unknown=unknown,
        spread=frozenset(pair for pair, one in statistics.items() if _is_spread(one, problem.block_elements)),
        ladders=ladders,
        content_E=content_E,
        side_E=side_E,
        full_E=full_E,
    )


def _bytes_of(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), np.int64)


def _match_statistics(
    problem: PlanningProblem, columns: Columns, pairs: Sequence[Pair]
) -> tuple[dict[Pair, TensorStatistics], dict[Pair, str]]:
    """Find the statistics of experts' tensors, and the reason for each that has none."""
    statistics, reasons = dict[Pair, TensorStatistics](), dict[Pair, str]()
    for e, t in pairs:
        task = columns.tasks[t]
        recorded = problem.statistics[e].get(task.name)
        if recorded is None:
            if task.base.n_elements:  # else there is nothing to know
                reasons[e, t] = REASON_MISSING
        elif recorded.grid.n_elements != task.base.n_elements:
            reasons[e, t] = REASON_OTHER_SIZE
        else:
            statistics[e, t] = recorded
    return statistics, reasons


def _cuts_rows(operator: Operator, problem: PlanningProblem, task: MergeTask) -> bool:
    """Whether the rule needs whole rows or columns of a tensor, and blocks would cut them."""
    inputs = task.operator_input()
    if inputs.n_elements <= problem.block_elements:
        return False
    request = operator.reduction(inputs)
    return operator.granularity(inputs) > 1 or (request is not None and request.needs_rows(inputs.n_elements))


def _is_unit(columns: Columns, e: int, t: int) -> bool:
    """Whether the stored bytes of an expert's tensor are read all at once or not at all."""
    source = columns.source(e, t)
    return source is not None and not isinstance(source, TensorEntry) and source.is_unit


def _content_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Return the bytes to compute each expert's content id, 0 where it is known or not needed."""
    if not operator_named(problem.operator).is_random:
        return np.zeros(len(problem.experts), np.int64)
    return _bytes_of(
        sample_cost_bytes(model.checkpoint) if model.content_id is None and e not in problem.unread else 0
        for e, model in enumerate(problem.experts)
    )


# --- score blocks by the energy that they contribute to the merge, after the operator's sparsification ---


def _score(
    columns: Columns,
    rules: Sequence[Rule],
    energy_EB: NDArray[np.float64],
    informed_ET: NDArray[np.bool_],
    free_EB: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Compute `score_EB`: squared coefficient times the energy of the delta that the operator keeps.

    The energy is `||delta||^2`, times the share above the tensor's cut for operators that trim, times the expected
    share left by random dropping and rescaling; of what can be read in part it is on record. Where nothing is known it
    is `n` times the typical energy of an element: the median over all known blocks that differ from the base, 1 if
    there are none; and every expert counts by the mean of the squared coefficients.
    """
    factor_ET = np.ones((columns.n_experts, len(rules)))
    for t, rule in enumerate(rules):
        factor_ET[:, t] = columns.by_expert(t, rule.influence.energy_factor_E, 1.0)
    score_EB = energy_EB * factor_ET[:, columns.tensor_B]
    informed_EB = informed_ET[:, columns.tensor_B]
    if not informed_ET.all():
        energies = (score_EB / columns.n_B)[informed_EB & ~free_EB]
        typical = float(np.median(energies)) if len(energies) else 1.0
        score_EB = np.where(informed_EB, score_EB, columns.n_B * typical)
    square_ET = np.square(coefficients(columns, rules))
    even_T = square_ET.sum(axis=0) / np.maximum(1, (columns.slot_ET != ABSENT).sum(axis=0))
    weight_ET = np.where(informed_ET | (square_ET == 0), square_ET, even_T)
    return np.asarray(score_EB * weight_ET[:, columns.tensor_B], np.float64)


def coefficients(columns: Columns, rules: Sequence[Rule]) -> NDArray[np.float64]:
    """Return the signed factor (E, T) of each expert's delta on the result."""
    coefficient_ET = np.zeros((columns.n_experts, len(rules)))
    for t, rule in enumerate(rules):
        coefficient_ET[:, t] = columns.by_expert(t, rule.influence.coefficients_E, 0.0)
    return coefficient_ET


def _passing_energy(
    e: int, statistics: Mapping[int, TensorStatistics], rules: Sequence[Rule], block_elements: int
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]]:
    """Yield each tensor of an expert with the energy of planned blocks, what of it passes the cut, and which blocks
    equal the base's.

    All are worked out by the blocks of the statistics, and shared out by elements where the plan's are others.
    """
    if not statistics:
        return
    blocks_B = np.concatenate([known.blocks_B for known in statistics.values()], dtype=BLOCK_RECORD)
    square_B = np.square(np.fmin(blocks_B["norm"].astype(np.float64), LARGEST_NORM))
    energy_B = square_B.copy()
    trims_T = [rules[t].influence.trims for t in statistics]
    if any(trims_T):
        n_T = [len(known.blocks_B) for known in statistics.values()]
        cut_T = np.array([rules[t].cuts.get(e, Cut(0)).bits for t in statistics], np.uint32).view(np.float32)
        energy_B *= np.where(np.repeat(trims_T, n_T), _surviving_share(blocks_B, np.repeat(cut_T, n_T)), 1.0)
    changed_B = (blocks_B["changed"] != 0).astype(np.float64)
    start = 0
    for t, known in statistics.items():
        inside, planned = slice(start, start + len(known.blocks_B)), BlockGrid(known.grid.n_elements, block_elements)
        of_blocks = [square_B[inside], energy_B[inside], changed_B[inside]]
        if planned != known.grid:
            of_blocks = [share_out(old_B, known.grid, planned) for old_B in of_blocks]
        square, energy, changed = of_blocks
        yield t, square, energy, changed == 0
        start = inside.stop


def share_out(values_O: NDArray[np.float64], old: BlockGrid, new: BlockGrid) -> NDArray[np.float64]:
    """Share the values of a tensor's old blocks (O) out over its new blocks, by elements.

    Laws: the sum stays; a new block has 0 only if all old blocks that it overlaps have.
    """
    if not old.n_elements:
        return values_O
    starts = [np.arange(0, old.n_elements, grid.block_elements) for grid in (old, new)]
    start_P = np.unique(np.concatenate(starts))  # pieces: each lies in one old block and in one new one
    n_P = np.diff(np.append(start_P, old.n_elements))
    old_P = start_P // old.block_elements
    share_P = n_P / np.minimum(old.block_elements, old.n_elements - old_P * old.block_elements)
    shared: NDArray[np.float64] = np.add.reduceat(
        values_O[old_P] * share_P, np.flatnonzero(start_P % new.block_elements == 0)
    )
    return shared


def _is_spread(statistics: TensorStatistics, block_elements: int) -> bool:
    """Whether the plan's blocks cut those of the statistics."""
    grid = statistics.grid
    return grid.n_elements > block_elements and block_elements % grid.block_elements != 0


def _surviving_share(blocks_B: NDArray[np.void], cut_B: NDArray[np.float32]) -> NDArray[np.float64]:
    """Estimate the share of each block's energy at or above its tensor's cut, from energies by octave of magnitude.

    Inside the octave that holds the cut, energy is taken to be spread evenly over the logarithm of magnitude: the
    share above the cut at `x` of the octave's upper end is `-log2 x`, here `(1 - x) (1 + 1 / 2x)`, which is within 0.01
    of it and the same on every machine.
    """
    position_B = octave_position(blocks_B["largest"], np.where(np.isnan(cut_B), np.float32(np.inf), cut_B))
    share_BO = OCTAVE_SHARES[blocks_B["octaves"]].astype(np.float64)
    inside_BO = np.clip(position_B[:, None] - np.arange(N_OCTAVES), 0.0, 1.0)
    above_B, total_B = (np.cumsum(values_BO, axis=1)[:, -1] for values_BO in (share_BO * inside_BO, share_BO))
    share_B: NDArray[np.float64] = np.divide(above_B, total_B, out=np.zeros_like(total_B), where=total_B > 0)
    return share_B


def octave_position(largest_B: NDArray[np.float32], cut_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """Count the octaves between `cut` and `largest`; the octave of the cut counts by its share of energy."""
    ratio_B = np.full_like(largest_B, np.inf)
    np.divide(largest_B, cut_B, out=ratio_B, where=(cut_B > 0) & np.isfinite(largest_B))
    mantissa_B, exponent_B = np.frexp(np.where(np.isfinite(ratio_B) & (ratio_B >= 1), ratio_B, np.float32(1)))
    octave_B = np.clip(exponent_B - 1, 0, N_OCTAVES - 1)
    in_last_B = octave_B == N_OCTAVES - 1
    cut_in_octave_B = np.ldexp(np.float32(0.5) / mantissa_B, np.minimum(octave_B - (exponent_B - 1), 0)).astype(
        np.float32
    )
    above_B = np.float32(1) - cut_in_octave_B
    above_B = np.where(in_last_B, above_B, above_B * (np.float32(1) + np.float32(0.5) / cut_in_octave_B))
    position_B = np.where(ratio_B < 1, np.float32(0), octave_B.astype(np.float32) + above_B)
    return np.where(np.isposinf(ratio_B), np.float32(N_OCTAVES), position_B).astype(np.float32)
