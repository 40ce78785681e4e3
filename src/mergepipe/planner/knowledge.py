"""What statistics say of every candidate, gathered into arrays: norms, blocks equal to the base, equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import BlockGrid
from mergepipe.planner.columns import Columns
from mergepipe.planner.problem import PlanningProblem
from mergepipe.statistics import BLOCK_RECORD, N_OCTAVES, TensorStatistics

REASON_MISSING = "no statistics: not analysed against this base"
REASON_OTHER_GRID = "its statistics are of blocks of another size"

_HASH_WORDS = np.dtype(
    {"names": ["low", "high"], "formats": ["<u8", "<u8"], "offsets": [0, 8], "itemsize": BLOCK_RECORD.itemsize}
)
_LARGEST_NORM = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """Arrays over experts (E) and blocks (B), or tensors (T); zeros where `known_ET` is False.

    Attributes:
        norm_EB: ||delta||, rounded up; norms that are not finite are `inf`.
        free_EB: the block equals the base's.
        same_as_EB: the first expert whose block holds the same bytes of the same dtype; itself if there is none.
        largest_EB, octaves_EOB: see `BLOCK_RECORD`; empty without octaves.
        exact_ET: known, and not from a probe: `norm_EB` is a bound.
    """

    known_ET: NDArray[np.bool_]
    exact_ET: NDArray[np.bool_]
    norm_EB: NDArray[np.float64]
    free_EB: NDArray[np.bool_]
    same_as_EB: NDArray[np.int16]
    largest_EB: NDArray[np.float32]
    octaves_EOB: NDArray[np.uint8]

    @property
    def usable_norm_EB(self) -> NDArray[np.float64]:
        """Norms to calculate with: the largest float32 for those that are not finite."""
        return np.minimum(self.norm_EB, _LARGEST_NORM)


def find_usable(problem: PlanningProblem, columns: Columns) -> tuple[NDArray[np.bool_], dict[tuple[int, int], str]]:
    """`known_ET`: where there are statistics of the right grid; and why not, by (expert, tensor), elsewhere."""
    known_ET = np.zeros((len(problem.experts), len(columns.tasks)), np.bool_)
    reasons: dict[tuple[int, int], str] = {}
    for e, of_expert in enumerate(problem.statistics):
        for t, task in enumerate(columns.tasks):
            statistics = of_expert.get(task.name)
            if statistics is None:
                if task.base.n_elements:  # else there is nothing to know
                    reasons[e, t] = REASON_MISSING
            elif statistics.grid != BlockGrid(task.base.n_elements, problem.block_elements):
                reasons[e, t] = REASON_OTHER_GRID
            else:
                known_ET[e, t] = True
    return known_ET, reasons


def gather_knowledge(
    problem: PlanningProblem, columns: Columns, known_ET: NDArray[np.bool_], *, with_octaves: bool
) -> Knowledge:
    """Copy what is needed out of the statistics.

    Memory: 30 bytes per candidate, 20 more with octaves.
    """
    n_experts, n_columns = len(problem.experts), columns.n_columns
    found = Knowledge(
        known_ET=known_ET,
        exact_ET=np.zeros_like(known_ET),
        norm_EB=np.zeros((n_experts, n_columns), np.float64),
        free_EB=np.zeros((n_experts, n_columns), np.bool_),
        same_as_EB=np.repeat(np.arange(n_experts, dtype=np.int16)[:, None], n_columns, axis=1),
        largest_EB=np.zeros((n_experts, n_columns if with_octaves else 0), np.float32),
        octaves_EOB=np.zeros((n_experts, N_OCTAVES, n_columns if with_octaves else 0), np.uint8),
    )
    low_EB = np.zeros((n_experts, n_columns), np.uint64)
    high_EB = np.zeros((n_experts, n_columns), np.uint64)
    for e, t in np.argwhere(known_ET).tolist():
        statistics, inside = problem.statistics[e][columns.tasks[t].name], columns.of_tensor(t)
        _copy(found, e, inside, statistics)
        found.exact_ET[e, t] = not statistics.is_estimate
        words_B = statistics.blocks_B.view(_HASH_WORDS)
        low_EB[e, inside] = words_B["low"]
        high_EB[e, inside] = words_B["high"]
    np.copyto(found.norm_EB, np.inf, where=np.isnan(found.norm_EB))
    _find_same(found, columns, low_EB, high_EB)
    return found


def _copy(found: Knowledge, e: int, columns: slice, statistics: TensorStatistics) -> None:
    blocks_B = statistics.blocks_B
    found.norm_EB[e, columns] = blocks_B["norm"]
    np.equal(blocks_B["changed"], 0, out=found.free_EB[e, columns])
    if found.octaves_EOB.shape[2]:
        found.largest_EB[e, columns] = blocks_B["largest"]
        found.octaves_EOB[e, :, columns] = blocks_B["octaves"].T


def _find_same(found: Knowledge, columns: Columns, low_EB: NDArray[np.uint64], high_EB: NDArray[np.uint64]) -> None:
    """Compare every expert's hashes with those of the experts before it."""
    dtypes = [[task.experts[e].dtype.name for task in columns.tasks] for e in range(len(low_EB))]
    for e in range(1, len(low_EB)):
        for earlier in range(e):
            equal_B = low_EB[e] == low_EB[earlier]
            if not equal_B.any():
                continue
            comparable_T = found.known_ET[e] & found.known_ET[earlier]
            comparable_T &= np.array([a == b for a, b in zip(dtypes[e], dtypes[earlier], strict=True)], np.bool_)
            equal_B &= (high_EB[e] == high_EB[earlier]) & comparable_T[columns.tensor_B]
            equal_B &= ~(found.free_EB[e] | found.free_EB[earlier]) & (found.same_as_EB[e] == e)
            found.same_as_EB[e, equal_B] = earlier
