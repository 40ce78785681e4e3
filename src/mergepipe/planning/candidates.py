"""What can be read: statistics on record, scores of blocks, and the items that compete for a budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BlockGrid
from mergepipe.operators.statistics import BLOCK_RECORD, N_OCTAVES, OCTAVE_SHARES, TensorStatistics
from mergepipe.planning.problem import ABSENT, Columns, PlanningProblem
from mergepipe.planning.rules import ALL, NO_LADDERS, UNKNOWN, Ladder, Ladders, Rules, ladder_steps

# --- gather known statistics of all candidates into arrays: norms, blocks equal to the base, equal blocks ---


REASON_MISSING = "no statistics: not analysed against this base"
REASON_UNIT = "its stored bytes make up every block"
REASON_OTHER_SIZE = "its statistics are of a tensor of another size"

_HASH_WORDS = np.dtype(
    {"names": ["low", "high"], "formats": ["<u8", "<u8"], "offsets": [0, 8], "itemsize": BLOCK_RECORD.itemsize}
)
_ROUNDED_UP = 1 + 2.0**-20  # the record's squares are float32
_LARGEST_NORM = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class KnownStatistics:
    """Arrays over experts (E) and blocks (B), or tensors (T); zeros where `known_ET` is False.

    Attributes:
        informed_ET: there are statistics, or the expert's own record of what its levels leave.
        norm_EB: ||delta||, rounded up; norms that are not finite are `inf`.
        free_EB: the block equals the base's, or the expert has no part in the tensor.
        same_as_EB: the first expert whose block holds the same bytes of the same dtype; itself if there is none.
        largest_EB, octaves_EOB: see `BLOCK_RECORD`; empty without octaves.
        exact_ET: known, not from larger blocks: `norm_EB` is a bound. Also where there is nothing to read.
    """

    known_ET: NDArray[np.bool_]
    informed_ET: NDArray[np.bool_]
    exact_ET: NDArray[np.bool_]
    norm_EB: NDArray[np.float64]
    free_EB: NDArray[np.bool_]
    same_as_EB: NDArray[np.int16]
    largest_EB: NDArray[np.float32]
    octaves_EOB: NDArray[np.uint8]

    @property
    def usable_norm_EB(self) -> NDArray[np.float64]:
        """Finite norms: the largest float32 in place of those that are not finite."""
        return np.minimum(self.norm_EB, _LARGEST_NORM)


def match_statistics(
    problem: PlanningProblem, columns: Columns
) -> tuple[NDArray[np.bool_], dict[tuple[int, int], str]]:
    """Find the tensors with statistics on the plan's grid (`known_ET`), and the reason for each other one."""
    known_ET = np.zeros((columns.n_experts, len(columns.tasks)), np.bool_)
    reasons: dict[tuple[int, int], str] = {}
    grids = [BlockGrid(task.base.n_elements, problem.block_elements) for task in columns.tasks]
    for e, of_expert in enumerate(problem.statistics):
        for t, task in enumerate(columns.tasks):
            statistics = of_expert.get(task.name)
            if columns.source(e, t) is None:
                continue
            if statistics is None:
                if task.base.n_elements:  # else there is nothing to know
                    reasons[e, t] = REASON_MISSING
            elif statistics.grid != grids[t]:
                reasons[e, t] = REASON_OTHER_SIZE
            else:
                known_ET[e, t] = True
    return known_ET, reasons


def gather_statistics(
    problem: PlanningProblem,
    columns: Columns,
    known_ET: NDArray[np.bool_],
    ladders: Ladders = NO_LADDERS,
    *,
    with_octaves: bool,
) -> KnownStatistics:
    """Copy norms, free and equal blocks from the statistics, or from what `ladders` record where there are none.

    Memory: 30 bytes per candidate, 20 more with octaves.
    """
    n_experts, n_columns = columns.n_experts, columns.n_columns
    silent_ET = columns.silent_ET()
    gathered = KnownStatistics(
        known_ET=known_ET,
        informed_ET=known_ET.copy(),
        exact_ET=silent_ET.copy(),
        norm_EB=np.zeros((n_experts, n_columns), np.float64),
        free_EB=silent_ET[:, columns.tensor_B],
        same_as_EB=np.repeat(np.arange(n_experts, dtype=np.int16)[:, None], n_columns, axis=1),
        largest_EB=np.zeros((n_experts, n_columns if with_octaves else 0), np.float32),
        octaves_EOB=np.zeros((n_experts, N_OCTAVES, n_columns if with_octaves else 0), np.uint8),
    )
    low_EB = np.zeros((n_experts, n_columns), np.uint64)
    high_EB = np.zeros((n_experts, n_columns), np.uint64)
    for e, t in np.argwhere(known_ET).tolist():
        statistics, inside = problem.statistics[e][columns.tasks[t].name], columns.of_tensor(t)
        _copy(gathered, e, inside, statistics)
        gathered.exact_ET[e, t] = not statistics.are_norms_spread
        words_B = statistics.blocks_B.view(_HASH_WORDS)
        low_EB[e, inside] = words_B["low"]
        high_EB[e, inside] = words_B["high"]
    np.copyto(gathered.norm_EB, np.inf, where=np.isnan(gathered.norm_EB))
    for (e, t), ladder in ladders.items():
        _apply_ladder_record(gathered, e, t, columns.of_tensor(t), ladder)
    _keep_units_together(gathered, columns)
    _match_equal_blocks(gathered, columns, low_EB, high_EB, ladders)
    return gathered


def _apply_ladder_record(gathered: KnownStatistics, e: int, t: int, columns: slice, ladder: Ladder) -> None:
    """Apply a ladder's record: a block of which nothing is stored equals the base's; infinities are not recorded."""
    gathered.free_EB[e, columns] |= ladder.cost_KB[-1] + ladder.square_B == 0
    if not gathered.known_ET[e, t]:
        gathered.norm_EB[e, columns] = np.sqrt(ladder.square_B) * _ROUNDED_UP
    gathered.informed_ET[e, t] = True


def _copy(gathered: KnownStatistics, e: int, columns: slice, statistics: TensorStatistics) -> None:
    blocks_B = statistics.blocks_B
    gathered.norm_EB[e, columns] = blocks_B["norm"]
    np.equal(blocks_B["changed"], 0, out=gathered.free_EB[e, columns])
    if gathered.octaves_EOB.shape[2]:
        gathered.largest_EB[e, columns] = blocks_B["largest"]
        gathered.octaves_EOB[e, :, columns] = blocks_B["octaves"].T


def _match_equal_blocks(
    gathered: KnownStatistics,
    columns: Columns,
    low_EB: NDArray[np.uint64],
    high_EB: NDArray[np.uint64],
    ladders: Ladders,
) -> None:
    """Compare every expert's block hashes with those of earlier experts. Encoded blocks never serve another expert."""
    comparable_ET = gathered.known_ET.copy()
    for e, t in ladders:
        comparable_ET[e, t] = False
    dtypes = [[_dtype(columns, e, t) for t in range(len(columns.tasks))] for e in range(len(low_EB))]
    analysed = [e for e in range(len(low_EB)) if gathered.known_ET[e].any()]
    for position, e in enumerate(analysed):
        for earlier in analysed[:position]:
            equal_B = low_EB[e] == low_EB[earlier]
            if not equal_B.any():
                continue
            comparable_T = comparable_ET[e] & comparable_ET[earlier]
            comparable_T &= np.array([a == b for a, b in zip(dtypes[e], dtypes[earlier], strict=True)], np.bool_)
            equal_B &= (high_EB[e] == high_EB[earlier]) & comparable_T[columns.tensor_B]
            equal_B &= ~(gathered.free_EB[e] | gathered.free_EB[earlier]) & (gathered.same_as_EB[e] == e)
            gathered.same_as_EB[e, equal_B] = earlier


def _dtype(columns: Columns, e: int, t: int) -> str:
    source = columns.source(e, t)
    return "" if source is None else source.dtype.name


def _keep_units_together(gathered: KnownStatistics, columns: Columns) -> None:
    """Make a tensor that is read as a unit free in all its blocks or in none."""
    for e, t in units(columns):
        inside = columns.of_tensor(t)
        gathered.free_EB[e, inside] = gathered.free_EB[e, inside].all()


def units(columns: Columns) -> list[tuple[int, int]]:
    """List (expert, tensor) pairs whose stored bytes are read all at once or not at all."""
    return [
        (e, t)
        for e in range(columns.n_experts)
        for t in range(len(columns.tasks))
        if not isinstance(source := columns.source(e, t), TensorEntry) and source is not None and source.is_unit
    ]


# --- score blocks by the energy that they contribute to the merge, after the operator's sparsification ---


def score_blocks(
    columns: Columns, known_statistics: KnownStatistics, rules: Rules, ladders: Ladders = NO_LADDERS
) -> NDArray[np.float64]:
    """Compute `score_EB`: squared coefficient times the energy of the delta that the operator keeps.

    The energy is `||delta||^2`, times the share above the tensor's cut for operators that trim, times the expected
    share left by random dropping and rescaling; of what can be read in part it is on record. Where nothing is known it
    is `n` times the typical energy of an element: the median over all known blocks that differ from the base, 1 if
    there are none; and every expert counts by the mean of the squared coefficients.
    """
    passing_EB = np.square(known_statistics.usable_norm_EB)
    for e in range(len(passing_EB)):
        passing_EB[e] *= rules.energy_factor_ET[e][columns.tensor_B]
        if rules.trims:
            passing_EB[e] *= _surviving_share(e, columns, known_statistics, rules)
    for (e, t), ladder in ladders.items():
        factor = rules.energy_factor_ET[e, t]
        passing_EB[e, columns.of_tensor(t)] = np.where(
            known_statistics.free_EB[e, columns.of_tensor(t)], 0.0, ladder.unread_B * factor
        )
    n_experts_T = np.maximum(1, (columns.slot_ET != ABSENT).sum(axis=0))
    even_T = np.square(rules.coefficient_ET).sum(axis=0) / n_experts_T
    typical = _typical_energy(passing_EB, columns, known_statistics)
    for e in range(len(passing_EB)):
        unknown_B = ~known_statistics.informed_ET[e][columns.tensor_B]
        passing_EB[e, unknown_B] = columns.n_B[unknown_B] * typical
        square_T = np.square(rules.coefficient_ET[e])
        factor_T = np.where(known_statistics.informed_ET[e] | (square_T == 0), square_T, even_T)
        passing_EB[e] *= factor_T[columns.tensor_B]
    return passing_EB


def _surviving_share(e: int, columns: Columns, known_statistics: KnownStatistics, rules: Rules) -> NDArray[np.float64]:
    """Estimate the share of each block's energy at or above its tensor's cut, from energies by octave of magnitude.

    Inside the octave that holds the cut, energy is taken to be spread evenly over the logarithm of magnitude: the
    share above the cut at `x` of the octave's upper end is `-log2 x`, here `(1 - x) (1 + 1 / 2x)`, which is within 0.01
    of it and the same on every machine.
    """
    bits_T = rules.cut_bits_ET[e]
    cut_T = np.where(bits_T == UNKNOWN, 0, bits_T).astype(np.uint32).view(np.float32)
    cut_T = np.where(np.isnan(cut_T), np.float32(np.inf), cut_T)
    position_B = octave_position(known_statistics.largest_EB[e], cut_T[columns.tensor_B])
    above_B, total_B = np.zeros_like(position_B), np.zeros_like(position_B)
    for octave in range(N_OCTAVES):
        share_B = OCTAVE_SHARES[known_statistics.octaves_EOB[e, octave]]
        total_B += share_B
        above_B += share_B * np.clip(position_B - np.float32(octave), np.float32(0), np.float32(1))
    return np.divide(above_B, total_B, out=np.zeros_like(total_B), where=total_B > 0).astype(np.float64)


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


def _typical_energy(passing_EB: NDArray[np.float64], columns: Columns, known_statistics: KnownStatistics) -> float:
    if known_statistics.informed_ET.all():
        return 1.0  # not used
    counts_EB = known_statistics.informed_ET[:, columns.tensor_B] & ~known_statistics.free_EB
    energies = (passing_EB / columns.n_B)[counts_EB]
    return float(np.median(energies)) if len(energies) else 1.0


def amplitudes(score_EB: NDArray[np.float64], columns: Columns, rules: Rules) -> NDArray[np.float64]:
    """Compute the square roots of the scores, with the signs of the coefficients."""
    signs_ET = np.where(rules.coefficient_ET < 0, -1.0, 1.0)
    return np.sqrt(score_EB) * signs_ET[:, columns.tensor_B]


# --- build the items of a selection: single blocks, level steps, whole tensors; each with cost and score ---


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every (expert, block) with its cost, and which of them share bytes or are read together.

    Attributes:
        cost_EB: bytes requested to read the block.
        free_EB: the block equals the base's and is never read.
        served_by_EB: the expert whose identical bytes serve the block; itself for most.
        whole_ET: the tensor of that expert is read in all its blocks, or not at all.
        ladders: of what can be read in part; `cost_EB` is that of all of a block.
    """

    columns: Columns
    cost_EB: NDArray[np.int64]
    free_EB: NDArray[np.bool_]
    served_by_EB: NDArray[np.int16]
    whole_ET: NDArray[np.bool_]
    ladders: Ladders = field(default_factory=dict)

    @property
    def n_experts(self) -> int:
        return len(self.cost_EB)

    def own_EB(self) -> NDArray[np.bool_]:
        """Mark blocks that can be selected: not free, not served by another expert, not of an unread expert."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        own_EB = ~self.free_EB & (self.served_by_EB == own_E1)
        own_EB[list(self.columns.unread)] = False
        return np.asarray(own_EB, np.bool_)

    def followers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return experts, columns and serving experts of the blocks that another expert's bytes serve."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        experts, columns = np.nonzero(self.served_by_EB != own_E1)
        return experts, columns, self.served_by_EB[experts, columns].astype(np.int64)


def find_candidates(
    columns: Columns,
    cost_EB: NDArray[np.int64],
    known_statistics: KnownStatistics,
    whole_ET: NDArray[np.bool_],
    ladders: Ladders = NO_LADDERS,
) -> Candidates:
    """Build the candidates; blocks of tensors that are read whole neither serve others nor are served."""
    served_by_EB = known_statistics.same_as_EB
    if whole_ET.any():
        own_EB = np.repeat(np.arange(len(cost_EB), dtype=np.int16)[:, None], columns.n_columns, axis=1)
        whole_EB = whole_ET[:, columns.tensor_B]
        serving_whole_EB = np.take_along_axis(whole_EB, served_by_EB.astype(np.int64), axis=0)
        served_by_EB = np.where(whole_EB | serving_whole_EB, own_EB, served_by_EB)
    return Candidates(columns, cost_EB, known_statistics.free_EB, served_by_EB, whole_ET, ladders)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Units of selection: first single blocks in order of expert and column, then whole tensors by cost.

    A block that can be read in part is several items, one for each step to a higher level, in order.

    Attributes:
        flat_I: `expert * n_columns + column` of the block, or of the tensor's first block.
        cost_I: bytes; of a step what it costs on top of those before.
        rate_I: score by byte.
        tensor_I: index of the tensor.
        level_I: the level after the step; `ALL` for blocks that are read unencoded.
        steepness_I: `rate_I` by that of reading all of the block at once.
        n_single: how many are (steps of) single blocks.
    """

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    tensor_I: NDArray[np.int64]
    level_I: NDArray[np.int8]
    steepness_I: NDArray[np.float64]
    n_single: int
    n_columns: int

    @property
    def expert_I(self) -> NDArray[np.int64]:
        return self.flat_I // self.n_columns

    @property
    def column_I(self) -> NDArray[np.int64]:
        return self.flat_I % self.n_columns

    def __len__(self) -> int:
        return len(self.flat_I)


@dataclass(frozen=True, slots=True, eq=False)
class _Singles:
    """Items that are single blocks or level steps; arrays as in `Items`."""

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    level_I: NDArray[np.int8]
    steepness_I: NDArray[np.float64]


def make_items(candidates: Candidates, score_EB: NDArray[np.float64], known_ET: NDArray[np.bool_]) -> Items:
    """Build the items; a serving block scores the square of the sum of the square roots of all scores it serves.

    The score of a step is the share of the block's score that it takes from what is left of the block.
    """
    columns = candidates.columns
    n_columns = max(1, columns.n_columns)
    own_EB = candidates.own_EB()
    single_EB = own_EB & ~candidates.whole_ET[:, columns.tensor_B]
    singles = _singles(candidates, score_EB, single_EB, known_ET)
    wholes = _whole_items(candidates, own_EB, score_EB, known_ET)
    whole_I3 = np.array([whole[:3] for whole in wholes], np.int64).reshape(-1, 3)
    levels = [_top_level(candidates, whole[1] // n_columns, whole[2]) for whole in wholes]
    return Items(
        flat_I=np.concatenate([singles.flat_I, whole_I3[:, 1]]),
        cost_I=np.concatenate([singles.cost_I, whole_I3[:, 0]]),
        rate_I=np.concatenate([singles.rate_I, [whole[3] for whole in wholes]]),
        tensor_I=np.concatenate([columns.tensor_B[singles.flat_I % n_columns], whole_I3[:, 2]]),
        level_I=np.concatenate([singles.level_I, np.array(levels, np.int8)]),
        steepness_I=np.concatenate([singles.steepness_I, np.ones(len(wholes))]),
        n_single=len(singles.flat_I),
        n_columns=n_columns,
    )


def _top_level(candidates: Candidates, e: int, t: int) -> int:
    """Return the level at which a whole tensor is read."""
    ladder = candidates.ladders.get((e, t))
    return ALL if ladder is None else ladder.levels_K[-1]


def _singles(
    candidates: Candidates, score_EB: NDArray[np.float64], single_EB: NDArray[np.bool_], known_ET: NDArray[np.bool_]
) -> _Singles:
    """Build items of blocks without levels, and level steps of the others, sorted by block."""
    columns = candidates.columns
    raw_EB = single_EB.copy()
    for e, t in candidates.ladders:
        raw_EB[e, columns.of_tensor(t)] = False
    flat_S = np.flatnonzero(raw_EB)
    cost_S = candidates.cost_EB.ravel()[flat_S]
    nominal_EB = np.where(known_ET[:, columns.tensor_B], candidates.cost_EB, _nominal_costs(candidates))
    rate_S = _with_followers(candidates, score_EB).ravel()[flat_S] / nominal_EB.ravel()[flat_S]
    parts = [_Singles(flat_S, cost_S, rate_S, np.full(len(flat_S), ALL, np.int8), np.ones(len(flat_S)))]
    for e, t in candidates.ladders:
        if not candidates.whole_ET[e, t]:
            parts.append(_steps(candidates, e, t, score_EB, single_EB))
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.flat_I for part in parts]), kind="stable")
    return _Singles(
        np.concatenate([part.flat_I for part in parts])[order],
        np.concatenate([part.cost_I for part in parts])[order],
        np.concatenate([part.rate_I for part in parts])[order],
        np.concatenate([part.level_I for part in parts])[order],
        np.concatenate([part.steepness_I for part in parts])[order],
    )


def _steps(
    candidates: Candidates, e: int, t: int, score_EB: NDArray[np.float64], single_EB: NDArray[np.bool_]
) -> _Singles:
    ladder, inside = candidates.ladders[e, t], candidates.columns.of_tensor(t)
    steps = ladder_steps(ladder)
    score_B, cost_B = score_EB[e, inside], ladder.cost_KB[-1]
    weight_B = np.divide(score_B, ladder.unread_B, out=np.zeros_like(score_B), where=ladder.unread_B > 0)
    whole_rate_B = np.divide(ladder.unread_B, cost_B, out=ladder.unread_B.copy(), where=cost_B > 0)
    whole_rate_S = whole_rate_B[steps.block_S]
    steepness_S = np.divide(steps.rate_S, whole_rate_S, out=np.zeros_like(whole_rate_S), where=whole_rate_S > 0)
    is_open_S = single_EB[e, inside][steps.block_S]
    flat_S = e * candidates.columns.n_columns + inside.start + steps.block_S
    rate_S = steps.rate_S * weight_B[steps.block_S]
    level_S, cost_S = steps.level_S, steps.cost_S
    return _Singles(flat_S[is_open_S], cost_S[is_open_S], rate_S[is_open_S], level_S[is_open_S], steepness_S[is_open_S])


def _with_followers(candidates: Candidates, score_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    experts, columns, serving = candidates.followers()
    if not len(experts):
        return score_EB
    amplitude_EB = np.sqrt(score_EB)
    np.add.at(amplitude_EB, (serving, columns), amplitude_EB[experts, columns])
    together_EB = score_EB.copy()
    together_EB[serving, columns] = np.square(amplitude_EB[serving, columns])
    return together_EB


def _whole_items(
    candidates: Candidates, own_EB: NDArray[np.bool_], score_EB: NDArray[np.float64], known_ET: NDArray[np.bool_]
) -> list[tuple[int, int, int, float]]:
    """(cost, flat, tensor, rate) of tensors that are read whole, by cost.

    Where nothing is known the rate leaves rounding to pages out, so that tensors of equal standing tie.
    """
    columns, wholes = candidates.columns, []
    for e, t in np.argwhere(candidates.whole_ET).tolist():
        inside = columns.of_tensor(t)
        cost = int(candidates.cost_EB[e, inside][own_EB[e, inside]].sum())
        if cost:
            first = score_EB[e, inside.start] / columns.n_B[inside.start]
            score = score_EB[e, inside].sum()
            rate = float(score / cost if known_ET[e, t] else first / _itemsize(columns, e, t))
            wholes.append((cost, e * columns.n_columns + inside.start, t, rate))
    return sorted(wholes)


def _nominal_costs(candidates: Candidates) -> NDArray[np.float64]:
    """Compute the bytes of blocks without rounding to pages, so that blocks of which nothing is known tie."""
    columns = candidates.columns
    size_ET = [[_itemsize(columns, e, t) for t in range(len(columns.tasks))] for e in range(candidates.n_experts)]
    size_EB = np.array(size_ET, np.float64).reshape(columns.slot_ET.shape)[:, columns.tensor_B]
    return np.asarray(size_EB * columns.n_B)


def _itemsize(columns: Columns, e: int, t: int) -> int:
    source = columns.source(e, t)
    return 1 if source is None else source.dtype.itemsize
