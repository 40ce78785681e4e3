"""Rules by weights, by the importance of elements, and by agreement with the sum: linear, fisher, sar, consensus.

A model's importances are numbers beside its delta: `weight: {file: ...}` in a recipe. They are read, and paid for, as
one more expert of the tensor, behind the models; an expert's `NUMBERS_OF` says whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import RawBlock
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    NUMBERS_OF,
    AllAlike,
    BlockFunction,
    Blockwise,
    DividedWeights,
    Influence,
    Marks,
    Operator,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    ReductionRequest,
    RowSums,
    ScoreCut,
    Sums,
)
from mergepipe.operators.elementwise import ElementwiseRule, Shares, nonzero_sum
from mergepipe.operators.sparse import SMALLEST_SUM
from mergepipe.operators.spec import (
    CHANGED,
    LAMBDA,
    WEIGHT,
    BaseRole,
    OperatorSpec,
    ParameterSpec,
    Scope,
    normalize_flag,
    rescale_to_magnitudes,
)
from mergepipe.operators.statistics import NOTHING_KEPT, Cut

if TYPE_CHECKING:
    from mergepipe.kernels.select import Weighed


class Linear(Plain):
    """`sum_i w_i M_i`, weights normalised by default, written around the anchor: `(sum w) M_0 + sum_i w_i delta_i`.

    Source: Wortsman et al. 2022 (arXiv 2203.05482). The anchored form is what lets an omitted delta be a zero.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "linear",
        "weighted average",
        "Wortsman et al. 2022, arXiv 2203.05482",
        BaseRole.OPTIONAL,
        (WEIGHT, normalize_flag(True)),
        min_experts=0,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        coefficients_E = self.block_function(inputs, Reduced()).coefficients_E.astype(np.float64)
        divided = DividedWeights(inputs.weights_E(), float(inputs.anchor["weight"]))
        return Influence(
            coefficients_E,
            np.ones_like(coefficients_E),
            is_additive=True,
            divided=divided if inputs.globals["normalize"] else None,
        )

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        weights_E = inputs.weights_E()
        total = float(inputs.anchor["weight"]) + float(weights_E.sum())
        if inputs.globals["normalize"]:
            coefficients_E = (weights_E / (total or 1.0)).astype(np.float32)
            shares = Shares(weights_E, float(inputs.anchor["weight"])) if inputs.renormalize else None
            return ElementwiseRule(coefficients_E, share_of=shares)
        return ElementwiseRule(coefficients_E=weights_E.astype(np.float32), anchor_scale=total)


class Passthrough(Plain):
    """The single model, times `scale`."""

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "passthrough",
        "copy of one model",
        "mergekit's documented parameters",
        BaseRole.NONE,
        (ParameterSpec("scale", Scope.MODEL, "factor on every tensor", default=1.0),),
        min_experts=0,
        max_experts=0,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(np.empty(0), np.empty(0), is_additive=True)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(np.empty(0, np.float32), anchor_scale=float(inputs.anchor.get("scale", 1.0)))


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """The models (K) that are merged: their factors, and which experts hold their importances, -2 for none."""

    factor_K: NDArray[np.float64]
    expert_K: NDArray[np.int64]

    @classmethod
    def of(cls, inputs: OperatorInput) -> _Numbers:
        from mergepipe.kernels.select import WITHOUT_NUMBERS

        models = [p for p in inputs.experts if NUMBERS_OF not in p]
        expert_K = np.full(len(models), WITHOUT_NUMBERS, np.int64)
        for e, parameters in enumerate(inputs.experts):
            if NUMBERS_OF in parameters:
                expert_K[int(parameters[NUMBERS_OF])] = e
        return cls(np.array([float(p["weight"]) for p in models], np.float64), expert_K)

    def weighed(self, block: RawBlock) -> Weighed:
        """Return the rows of deltas and importances in a block, and the factors."""
        from mergepipe.kernels.select import OMITTED, WITHOUT_NUMBERS, Weighed

        n_experts = max(len(self.factor_K), int(self.expert_K.max(initial=-1)) + 1)
        row_E = np.full(n_experts, OMITTED, np.int64)
        row_E[block.present_E] = np.arange(len(block.present_E))
        numbers_K = np.where(self.expert_K < 0, WITHOUT_NUMBERS, row_E[np.maximum(self.expert_K, 0)])
        return Weighed(row_E[: len(self.factor_K)], numbers_K, self.factor_K)


class Fisher(Plain):
    """`M_0 + lambda sum_i w_i F_i delta_i / sum_i w_i F_i`, element by element: with `lambda` 1 an average of models.

    Source: Matena and Raffel 2021 (arXiv 2111.09832), Eq. 6; F_i is the diagonal of the Fisher information, or any
    importance that is not negative. Without `normalize` it is the sum alone: of masks, or of coefficients by element.
    Deviation: where all F_i are zero the models are averaged by their w_i, in place of a floor under F_i.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "fisher",
        "average weighted by the importance of each element",
        "Matena and Raffel 2021, arXiv 2111.09832",
        BaseRole.REQUIRED,
        (WEIGHT, normalize_flag(True), LAMBDA),
        takes_numbers=True,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """State the factors alone: importances are not known before they are read."""
        weights_E = inputs.weights_E()
        divisor = nonzero_sum(weights_E) if inputs.globals["normalize"] else 1.0
        return Influence(weights_E * float(inputs.globals["lambda"]) / divisor, np.ones_like(weights_E))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        numbers, scale = _Numbers.of(inputs), float(inputs.globals["lambda"])
        normalizes = bool(inputs.globals["normalize"])

        def merge(block: RawBlock) -> None:
            from mergepipe.kernels.select import merge_weighted

            merge_weighted(block, numbers.weighed(block), normalizes, scale)

        return merge


@dataclass(frozen=True, slots=True, eq=False)
class _Resolved:
    """Deltas of which each element keeps the most important change: its score, and its measure for cuts."""

    numbers: _Numbers
    epsilon: float
    cuts_23: NDArray[np.uint32]

    @classmethod
    def of(cls, inputs: OperatorInput, reduced: Reduced) -> _Resolved:
        cut = Cut(0) if reduced.score_cuts_R3 is None else Cut(*reduced.score_cuts_R3[0].tolist())
        cuts_23 = np.array([cut, NOTHING_KEPT], np.uint32)
        return cls(_Numbers.of(inputs), float(inputs.globals["epsilon"]), cuts_23)

    def magnitudes(self, block: RawBlock, scores_N: NDArray[np.float32]) -> None:
        """Score elements by what is left of them."""
        from mergepipe.kernels.select import resolved_scores

        resolved_scores(block, self.numbers.weighed(block), np.float32(self.epsilon), scores_N)

    def add_magnitudes(self, block: RawBlock, row_elements: int, sums_AK: Sums, _: Marks) -> None:
        """Sum magnitudes before and after the cut."""
        from mergepipe.kernels.select import add_resolved

        epsilon, cuts = np.float32(self.epsilon), self.cuts_23
        add_resolved(block, self.numbers.weighed(block), epsilon, cuts, row_elements, sums_AK)

    def merged(self, block: RawBlock, scale: float) -> None:
        """Merge a block."""
        from mergepipe.kernels.select import merge_resolved

        epsilon, cuts = np.float32(self.epsilon), self.cuts_23
        merge_resolved(block, self.numbers.weighed(block), epsilon, cuts, np.float32(scale))


class Sar(AllAlike):
    """`M_0 + lambda delta_j`: where several models change an element, `j` is the one with the largest `w_i F_i`.

    A change is a |delta| above `epsilon`. Of the changes left the `density` share of largest magnitude is kept, and
    with `rescale` multiplied so that the sum of magnitudes stays.
    Source: Wu et al. 2026 (SAR-Merging, arXiv 2606.18521): importance decides where updates overlap, then what is
    left is sparsified by magnitude and rescaled. Deviation: the constants are chosen here; density 1 keeps all.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "sar",
        "the most important of several changes of an element",
        "Wu et al. 2026, arXiv 2606.18521",
        BaseRole.REQUIRED,
        (
            WEIGHT,
            ParameterSpec("density", Scope.GLOBAL, "share of the changes that is kept", default=1.0, low=0.0, high=1.0),
            rescale_to_magnitudes(True),
            CHANGED,
            LAMBDA,
        ),
        takes_numbers=True,
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        share = float(inputs.globals["density"])
        if share >= 1.0:
            return None
        if reduced.score_cuts_R3 is None:
            return ScoreCut(_Resolved.of(inputs, reduced).magnitudes, share=share)
        wants_sums = inputs.globals["rescale"] and len(reduced.sums) == 1
        measure = _Resolved.of(inputs, reduced).add_magnitudes
        return RowSums(measure, 2, max(1, inputs.n_elements)) if wants_sums else None

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        resolved, scale = _Resolved.of(inputs, reduced), float(inputs.globals["lambda"])
        if len(reduced.sums) > 1:
            before, after = reduced.sums[-1].sum(axis=0).tolist()
            scale *= before / after if after >= SMALLEST_SUM else 1.0
        return lambda block: resolved.merged(block, scale)


@partial(
    Blockwise,
    OperatorSpec(
        "consensus",
        "the sum of deltas, where several models agree with it",
        "Wang et al. 2024, arXiv 2405.07813",
        BaseRole.REQUIRED,
        (
            WEIGHT,
            ParameterSpec("threshold", Scope.MODEL, "a higher one makes the mask smaller", default=0.4, low=0.0),
            ParameterSpec(
                "least_models", Scope.GLOBAL, "masks that have to agree", default=2.0, low=0.0, is_whole=True
            ),
            LAMBDA,
        ),
    ),
)
def consensus(inputs: OperatorInput) -> BlockFunction:
    """`M_0 + lambda` times the weighted sum of deltas, where at least `least_models` have a use for it; else the base.

    A model has where `|delta_i| >= threshold_i |sum - delta_i|`: its TALL mask.
    Source: Wang et al. 2024 (arXiv 2405.07813), Eq. 4 and 5. Deviation: the paper chooses thresholds by validation
    accuracy among 0.2, 0.3, ... 0.6; the default is their middle.
    """
    weights_E = inputs.weights_E().astype(np.float32)
    thresholds_E = np.array([float(p["threshold"]) for p in inputs.experts], np.float32)
    least, scale = int(inputs.globals["least_models"]), np.float32(inputs.globals["lambda"])

    def merge(block: RawBlock) -> None:
        from mergepipe.kernels.select import merge_agreed

        chosen = block.present_E
        merge_agreed(block, weights_E[chosen], thresholds_E[chosen], least, scale)

    return merge


OPERATORS: tuple[Operator, ...] = (Fisher(), Sar(), consensus)
AVERAGES: tuple[Operator, ...] = (Linear(),)
COPIES: tuple[Operator, ...] = (Passthrough(),)
