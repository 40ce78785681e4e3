"""Rules that select elements by all deltas, or by the whole tensor: sce, ram, magmax, nearswap, arcee_fusion."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import RawBlock
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    AllAlike,
    BlockFunction,
    Blockwise,
    Marks,
    Measure,
    Operator,
    OperatorInput,
    Reduced,
    ReductionRequest,
    RowSums,
    Score,
    ScoreCut,
    SoftmaxDivergence,
    Sums,
)
from mergepipe.operators.elementwise import ElementwiseRule, Keep, row_rule
from mergepipe.operators.spec import CHANGED, INT8_MASK, BaseRole, OperatorSpec, ParameterSpec, Scope, shared
from mergepipe.operators.statistics import NOTHING_KEPT_BITS, Cut

SMALLEST_ENERGY = 1e-6
SMALLEST_DIVISOR = 1e-6
INFINITY_BITS = 0x7F800000
_QUARTERS = (0.25, 0.5, 0.75)
_RAM = "arXiv 2601.13572"
_NO_MARKS = np.empty(0, np.uint8)


class Sce(AllAlike):
    """Select the elements of highest variance, weigh each delta by its energy there, and merge the majority's signs.

    Source: Wan et al. 2024 (arXiv 2408.07990), section 3.3. Exactly `floor(select_topk * v)` of the `v` elements with
    any variance are kept; equal variances are ordered as equal magnitudes are in TIES.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "sce",
        "select by variance, weigh by energy, erase minority signs",
        "Wan et al. 2024, arXiv 2408.07990",
        BaseRole.REQUIRED,
        (
            ParameterSpec(
                "select_topk",
                Scope.GLOBAL,
                "share of the elements with any variance that is kept",
                default=1.0,
                low=0.0,
                high=1.0,
                clamps=True,
            ),
            INT8_MASK,
        ),
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        n_experts, whole = len(inputs.experts), max(1, inputs.n_elements)
        selects = float(inputs.globals["select_topk"]) < 1.0
        if selects and reduced.score_cuts_R3 is None:
            return ScoreCut(_variance(n_experts), share=float(inputs.globals["select_topk"]))
        if (selects and self._kept(inputs, reduced) == 0) or len(reduced.sums) == 1 + selects:
            return None
        cut = _variance_cut(reduced)
        return RowSums(_selected_energies(n_experts, cut), n_experts, whole, int(cut.bits > 0))

    @staticmethod
    def _kept(inputs: OperatorInput, reduced: Reduced) -> int:
        return int(reduced.sums[0][0, 0] * float(inputs.globals["select_topk"]))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        n_experts = len(inputs.experts)
        if float(inputs.globals["select_topk"]) < 1.0 and self._kept(inputs, reduced) == 0:
            return ElementwiseRule(np.zeros(n_experts, np.float32))
        weights_E = energy_weights(reduced.sums[-1][0] / max(1, inputs.n_elements))
        if not np.isfinite(weights_E).all():  # an infinity has all the energy; no sign is then elected
            return ElementwiseRule(np.full(n_experts, np.nan, np.float32))
        return ElementwiseRule(
            coefficients_E=weights_E.astype(np.float32),
            votes_E=np.ones(n_experts, np.float32),
            keep=Keep.VARIED,
            cuts_E3=np.array([_variance_cut(reduced)] * n_experts, np.uint32),
            marks_MB=reduced.marks_MB,
            consensus=True,
            normalize=True,
            least_divisor=SMALLEST_DIVISOR,
        )


def _variance(n_experts: int) -> Score:
    """Score elements by the population variance of their deltas."""

    def score(block: RawBlock, scores_N: NDArray[np.float32]) -> None:
        from mergepipe.kernels.select import variance_scores

        variance_scores(block, n_experts, scores_N)

    return score


def _selected_energies(n_experts: int, cut: Cut) -> Measure:
    """Sum delta^2 by expert over the elements whose variance reaches a cut, and mark these."""

    def measure(block: RawBlock, row_elements: int, sums_AK: Sums, marks_MB: Marks) -> None:
        from mergepipe.kernels.select import add_selected_energies

        marks = marks_MB[0] if len(marks_MB) else _NO_MARKS
        add_selected_energies(block, n_experts, np.array(cut, np.uint32), row_elements, sums_AK, marks)

    return measure


def _variance_cut(reduced: Reduced) -> Cut:
    return Cut(0) if reduced.score_cuts_R3 is None else Cut(*reduced.score_cuts_R3[0].tolist())


@np.errstate(all="ignore")
def energy_weights(energies_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Energies over their sum; all alike where there is next to none."""
    total = float(energies_E.sum())
    return np.full(len(energies_E), 1.0 / len(energies_E)) if abs(total) < SMALLEST_ENERGY else energies_E / total


def overlap_rule(epsilon: float, own_scales_E: NDArray[np.float32]) -> BlockFunction:
    """The block function of ram and ramplus_tl; see `kernels.select.merge_overlapping`."""

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.select import merge_overlapping

        merge_overlapping(block, np.float32(epsilon), own_scales_E)

    return merge


@partial(
    Blockwise,
    OperatorSpec(
        "ram",
        "average the changes that several models make, keep those of one model",
        _RAM,
        BaseRole.REQUIRED,
        (CHANGED,),
    ),
)
def ram(inputs: OperatorInput) -> BlockFunction:
    """Add what one expert changes, and the mean of what several change.

    Source: arXiv 2601.13572. A change is a |delta| above `epsilon`; smaller deltas are dropped.
    """
    return overlap_rule(float(inputs.globals["epsilon"]), np.ones(len(inputs.experts), np.float32))


class RamPlus(AllAlike):
    """Merge like ram, scaling what one expert changes by `1 + r clip(shared / own, 0, alpha)`, counts by tensor.

    Source: arXiv 2601.13572.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "ramplus_tl",
        "as ram, with the changes of a single model amplified tensor by tensor",
        _RAM,
        BaseRole.REQUIRED,
        (
            shared("r", "strength of the amplification", 0.1),
            ParameterSpec("alpha", Scope.GLOBAL, "largest ratio of shared to own changes", default=0.2, low=0.0),
            CHANGED,
        ),
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        epsilon = np.float32(inputs.globals["epsilon"])

        def count_overlaps(block: RawBlock, row_elements: int, sums_AK: Sums, _: Marks) -> None:
            """Count by expert the elements that it changes with others (even places) and alone (odd places)."""
            from mergepipe.kernels.select import add_overlaps

            add_overlaps(block, epsilon, row_elements, sums_AK)

        return None if reduced.sums else RowSums(count_overlaps, 2 * len(inputs.experts), max(1, inputs.n_elements))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        epsilon = float(inputs.globals["epsilon"])
        counts_E2 = reduced.sums[0].reshape(-1, 2) if reduced.sums else np.zeros((len(inputs.experts), 2))
        own_E = np.maximum(counts_E2[:, 1], epsilon)
        ratio_E = np.divide(counts_E2[:, 0], own_E, out=np.zeros(len(own_E)), where=own_E > 0)
        scales_E = 1.0 + float(inputs.globals["r"]) * np.clip(ratio_E, 0.0, float(inputs.globals["alpha"]))
        return overlap_rule(epsilon, scales_E.astype(np.float32))


@partial(
    Blockwise,
    OperatorSpec(
        "magmax",
        "the largest change of each element",
        "Marczak et al. 2024, arXiv 2407.06322",
        BaseRole.REQUIRED,
        (shared("lambda", "factor of the merged delta", 1.0),),
    ),
)
def magmax(inputs: OperatorInput) -> BlockFunction:
    """`M_0 + lambda delta_j`, `j = argmax_i |delta_i|` element by element, the first of equal ones.

    Source: Marczak et al. 2024 (arXiv 2407.06322). The paper trains its models one after another; here they are any.
    """
    scale = np.float32(inputs.globals["lambda"])

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.select import merge_largest

        merge_largest(block, scale)

    return merge


@partial(
    Blockwise,
    OperatorSpec(
        "nearswap",
        "towards the other model where it is near",
        "alchemonaut, QuartetAnemoi-70B-t0.0001",
        BaseRole.REQUIRED,
        (shared("t", "largest step of an element", None),),
        max_experts=1,
    ),
)
def nearswap(inputs: OperatorInput) -> BlockFunction:
    """`M_0 + clip(t / |delta|, 0, 1) delta`: each element moves by at most `t`. A |delta| below 1e-6 counts as that.

    Source: alchemonaut, QuartetAnemoi-70B-t0.0001.
    """
    n_experts = len(inputs.experts)
    reach_E = np.full(n_experts, float(inputs.globals["t"]), np.float32)
    return ElementwiseRule(np.ones(n_experts, np.float32), keep=Keep.NEAR, scales_E=reach_E)


class ArceeFusion(AllAlike):
    """The deltas whose importance reaches `median + 1.5 (upper - lower quartile)` of the tensor.

    Importance is |delta| times the divergence of the softmax of the model's row from that of the base's.

    Source: Arcee AI. Deviation: quartiles are exact; mergekit samples a million elements of larger tensors.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "arcee_fusion",
        "the other model's most important changes",
        "Arcee AI, arcee.ai",
        BaseRole.REQUIRED,
        (),
        max_experts=1,
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        if not reduced.sums:
            return SoftmaxDivergence(inputs.row_elements)
        if reduced.score_cuts_R3 is None:
            n, row_elements, divergence_R = inputs.n_elements, inputs.row_elements, _divergence_R(reduced)

            def importance(block: RawBlock, scores_N: NDArray[np.float32]) -> None:
                from mergepipe.kernels.select import importance_scores

                importance_scores(block, row_elements, divergence_R, scores_N)

            return ScoreCut(importance, tuple(n - math.floor(share * (n - 1)) for share in _QUARTERS))
        return None

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        if reduced.score_cuts_R3 is None:
            return ElementwiseRule(np.zeros(len(inputs.experts), np.float32))
        lower, median, upper = reduced.score_cuts_R3[:, 0].copy().view(np.float32)
        with np.errstate(all="ignore"):
            cut = np.float32(median + np.float32(1.5) * (upper - lower))
        divergence_R = _divergence_R(reduced)
        ones_R = np.ones(len(divergence_R), np.float32)
        return row_rule(inputs.row_elements, ones_R[None], ones_R, magnitude_cuts(cut, divergence_R)[None])


def _divergence_R(reduced: Reduced) -> NDArray[np.float32]:
    return np.maximum(reduced.sums[0][:, 0], 0.0).astype(np.float32)


@np.errstate(all="ignore")
def magnitude_cuts(cut: np.float32, weight_R: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits of the smallest float32 that times the row's weight reaches `cut`, in float32; nothing does if undefined."""
    low_R = np.zeros(len(weight_R), np.uint32)
    high_R = np.full(len(weight_R), INFINITY_BITS + 1, np.uint32)  # beyond all magnitudes: nothing reaches the cut
    while (low_R < high_R).any():  # bisection: products with one weight order as the bits of the other factor do
        middle_R = (low_R + high_R) // np.uint32(2)
        reaches_R = middle_R.view(np.float32) * weight_R >= cut
        low_R = np.where(reaches_R | (low_R >= high_R), low_R, middle_R + np.uint32(1))
        high_R = np.where(reaches_R, middle_R, high_R)
    return np.where(low_R > INFINITY_BITS, np.uint32(NOTHING_KEPT_BITS), low_R)


OPERATORS: tuple[Operator, ...] = (Sce(), ram, RamPlus(), magmax, nearswap, ArceeFusion())
