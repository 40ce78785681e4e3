"""Sums and scores that rules need of a whole tensor, as values that call the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import RawBlock
from mergepipe.operators.statistics import Cut

NO_MARKS = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class KeptMagnitudes:
    """Per expert the sum of |delta| (even places), and of what lies between two cuts (odd places)."""

    cuts_E3: NDArray[np.uint32]
    upper_cuts_E3: NDArray[np.uint32]

    @property
    def n_sums(self) -> int:
        return 2 * len(self.cuts_E3)

    def __call__(self, block: RawBlock, row_elements: int, sums_AK: NDArray[np.float64]) -> None:
        from mergepipe.kernels.atoms import common_multiple
        from mergepipe.kernels.select import add_kept_magnitudes

        add_kept_magnitudes(
            block.raw, block.base_offset, block.base_code, block.present_E, block.offsets_E, block.codes_E,
            block.first_element, block.n_elements, self.cuts_E3, self.upper_cuts_E3, row_elements,
            common_multiple(row_elements), sums_AK,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variance:
    """A score: the population variance of an element's deltas."""

    n_experts: int

    def __call__(self, block: RawBlock, skip: int, scores_N: NDArray[np.float32]) -> None:
        from mergepipe.kernels.select import variance_scores

        variance_scores(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E, skip, self.n_experts,
            scores_N,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SelectedEnergies:
    """Per expert the sum of delta^2 over the elements whose variance reaches a cut, which are marked."""

    n_experts: int
    cut: Cut

    @property
    def n_sums(self) -> int:
        return self.n_experts

    @property
    def mark_rows(self) -> int:
        return int(self.cut.bits > 0)

    def __call__(
        self, block: RawBlock, row_elements: int, sums_AK: NDArray[np.float64], marks_MB: NDArray[np.uint8]
    ) -> None:
        from mergepipe.kernels.atoms import common_multiple
        from mergepipe.kernels.select import add_selected_energies

        add_selected_energies(
            block.raw, block.base_offset, block.base_code, block.present_E, block.offsets_E, block.codes_E,
            block.first_element, block.n_elements, self.n_experts, np.array(self.cut, np.uint32), row_elements,
            common_multiple(row_elements), sums_AK, marks_MB[0] if len(marks_MB) else NO_MARKS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Per expert how many elements it changes by more than `epsilon` with others (even places) and alone (odd)."""

    n_experts: int
    epsilon: float

    @property
    def n_sums(self) -> int:
        return 2 * self.n_experts

    def __call__(self, block: RawBlock, row_elements: int, sums_AK: NDArray[np.float64]) -> None:
        from mergepipe.kernels.atoms import common_multiple
        from mergepipe.kernels.select import add_overlaps

        add_overlaps(
            block.raw, block.base_offset, block.base_code, block.present_E, block.offsets_E, block.codes_E,
            block.first_element, block.n_elements, np.float32(self.epsilon), row_elements,
            common_multiple(row_elements), sums_AK,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """A score: |delta| times the weight of its row (float32, not negative)."""

    row_elements: int
    weight_R: NDArray[np.float32]

    def __call__(self, block: RawBlock, skip: int, scores_N: NDArray[np.float32]) -> None:
        from mergepipe.kernels.select import importance_scores

        importance_scores(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E, block.first_element, skip,
            self.row_elements, self.weight_R, scores_N,
        )  # fmt: skip
