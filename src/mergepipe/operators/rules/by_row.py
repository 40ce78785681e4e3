"""Block functions with numbers of their own for each row or column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import RawBlock


@dataclass(frozen=True, slots=True, eq=False)
class RowRule:
    """`anchor_scale_R M_0 + sum_e coefficients_ER delta_e` of elements whose magnitude reaches `lower_bits_ER`."""

    row_elements: int
    coefficients_ER: NDArray[np.float32]
    anchor_scale_R: NDArray[np.float32]
    lower_bits_ER: NDArray[np.uint32] | None = None
    copies_base: bool = False

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        from mergepipe.kernels.merge import merge_rows

        chosen = block.present_E
        lower_ER = self.lower_bits_ER
        merge_rows(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E,
            self.coefficients_ER[chosen], self.anchor_scale_R,
            np.zeros((len(chosen), len(self.anchor_scale_R)), np.uint32) if lower_ER is None else lower_ER[chosen],
            self.row_elements, block.first_element, block.out, block.out_offset, block.out_code, block.n_elements,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRule:
    """`anchor_scale_P M_0 + sum_e coefficients_EP delta_e`; element `i` belongs to column `i % P`."""

    coefficients_EP: NDArray[np.float32]
    anchor_scale_P: NDArray[np.float32]
    copies_base: bool = False

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        from mergepipe.kernels.merge import merge_columns

        merge_columns(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E,
            self.coefficients_EP[block.present_E], self.anchor_scale_P, block.first_element, block.out,
            block.out_offset, block.out_code, block.n_elements,
        )  # fmt: skip
