"""Gather known statistics of all candidates into arrays: norms, blocks equal to the base, equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BlockGrid
from mergepipe.operators.statistics import BLOCK_RECORD, N_OCTAVES, TensorStatistics
from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.level_ladders import NO_LADDERS, Ladder, Ladders
from mergepipe.planning.problem import PlanningProblem

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
