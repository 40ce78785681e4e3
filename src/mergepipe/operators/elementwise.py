"""The block functions that several rules share: elementwise ones, and those with numbers for each row or column."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import RawBlock
from mergepipe.operators.base import BlockFunction

_NO_MARKS = np.empty((0, 0), np.uint8)
_NO_CUTS = np.empty((0, 3), np.uint32)
_NO_WORDS = np.empty(0, np.uint64)


SMALLEST_SUM = 1e-8


def nonzero_sum(weights_E: NDArray[np.float64]) -> float:
    """The sum of the weights, or 1 where it is next to zero: a divisor."""
    total = float(weights_E.sum())
    return total if abs(total) >= SMALLEST_SUM else 1.0


class Keep(IntEnum):
    """The selection of a delta's elements; the values are those of `kernels.merge`."""

    ALL = 0
    LARGE = 1
    RANDOM = 2
    BAND = 3
    NEAR = 4
    VARIED = 5
    MARKED = 6


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Weights that are divided by their sum over the experts that count in a block, and the anchor's weight."""

    weights_E: NDArray[np.float64]
    anchor_weight: float

    def among(self, counted_E: NDArray[np.int64]) -> NDArray[np.float32]:
        """The coefficients; equal to the fixed ones where every expert counts."""
        total = self.anchor_weight + float(self.weights_E[counted_E].sum())
        return (self.weights_E / (total or 1.0)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class ElementwiseRule:
    """`anchor_scale * M_0 +` a combination of sparsified deltas; see `kernels.merge.merge_block` for the arithmetic.

    All arrays hold one entry per expert of the recipe; a block that holds fewer uses the entries of those present.
    """

    coefficients_E: NDArray[np.float32]
    anchor_scale: float = 1.0
    keep: Keep = Keep.ALL
    votes_E: NDArray[np.float32] | None = None  # what counts for the sign; the coefficients if None
    cuts_E3: NDArray[np.uint32] | None = None  # see `operators.statistics.Cut`
    upper_cuts_E3: NDArray[np.uint32] | None = None
    stream_keys_E: NDArray[np.uint64] | None = None
    limits_E: NDArray[np.uint64] | None = None  # of random words
    scales_E: NDArray[np.float32] | None = None
    marks_MB: NDArray[np.uint8] | None = None  # a row for each expert, or one for all; see `kernels.merge.mark_nonzero`
    consensus: bool = False
    normalize: bool = False
    least_divisor: float = 0.0
    delta_scale: float = 1.0
    share_of: Shares | None = None
    unread_scale: float | None = None  # instead of `anchor_scale` where nothing is known of any expert

    @property
    def copies_base(self) -> bool:
        """True for a plain copy: no expert takes part and the scale is one."""
        return self.anchor_scale == 1.0 and not len(self.coefficients_E)

    def _keep_in(self, first_element: int) -> Keep:
        """Return how a block is selected: by marks, where there are any and it begins with a group of them."""
        from mergepipe.kernels.merge import MARK_ELEMENTS

        if self.marks_MB is not None and first_element % MARK_ELEMENTS == 0:
            return Keep.MARKED
        if self.keep is Keep.MARKED:
            raise ValueError(f"a block starts at element {first_element}, inside a group of {MARK_ELEMENTS} marks")
        return self.keep

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        from mergepipe.kernels.merge import Rule, merge_block

        scale = self.anchor_scale
        if self.unread_scale is not None and not len(block.counted_E):
            scale = self.unread_scale
        coefficients_E = self.coefficients_E if self.share_of is None else self.share_of.among(block.counted_E)
        rule = Rule(
            coefficients_E=coefficients_E,
            votes_E=coefficients_E if self.votes_E is None else self.votes_E,
            keep=int(self._keep_in(block.first_element)),
            lower_E3=np.zeros((len(coefficients_E), 3), np.uint32) if self.cuts_E3 is None else self.cuts_E3,
            upper_E3=_NO_CUTS if self.upper_cuts_E3 is None else self.upper_cuts_E3,
            keys_E=_NO_WORDS if self.stream_keys_E is None else self.stream_keys_E,
            limits_E=_NO_WORDS if self.limits_E is None else self.limits_E,
            scales_E=np.ones(len(coefficients_E), np.float32) if self.scales_E is None else self.scales_E,
            marks_MB=_NO_MARKS if self.marks_MB is None else self.marks_MB,
            consensus=self.consensus,
            normalize=self.normalize,
            least_divisor=np.float32(self.least_divisor),
            anchor_scale=np.float32(scale),
            delta_scale=np.float32(self.delta_scale),
        )
        merge_block(block, rule)


def row_rule(
    row_elements: int,
    coefficients_ER: NDArray[np.float32],
    anchor_scale_R: NDArray[np.float32],
    lower_bits_ER: NDArray[np.uint32] | None = None,
) -> BlockFunction:
    """`anchor_scale_R M_0 + sum_e coefficients_ER delta_e` of elements whose magnitude reaches `lower_bits_ER`."""

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.merge import merge_rows

        lower_ER = np.zeros(coefficients_ER.shape, np.uint32) if lower_bits_ER is None else lower_bits_ER
        merge_rows(block, row_elements, coefficients_ER, anchor_scale_R, lower_ER)

    return merge


def column_rule(coefficients_EP: NDArray[np.float32], anchor_scale_P: NDArray[np.float32]) -> BlockFunction:
    """`anchor_scale_P M_0 + sum_e coefficients_EP delta_e`; element `i` belongs to column `i % P`."""

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.merge import merge_columns

        merge_columns(block, coefficients_EP, anchor_scale_P)

    return merge
