"""Rules by inner products: slerp, nuslerp, multislerp, karcher, model_stock's angles, and the geometric median."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import UnsupportedError
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    AllAlike,
    BlockFunction,
    ColumnGram,
    Influence,
    InnerProducts,
    Operator,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    ReductionRequest,
    RowGram,
)
from mergepipe.operators.elementwise import ElementwiseRule, column_rule, nonzero_sum, row_rule
from mergepipe.operators.spec import WEIGHT, BaseRole, OperatorSpec, ParameterSpec, Scope, shared

# --- rules that are fixed coefficients once the inner products of the models are known ---
# the linear algebra they share


Coefficients = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The vectors a rule combines, written in the base and the deltas.

    `vectors_PF`: one row per vector (P), its share of the base (0) and of each delta. `origin`: 1 where the result is
    relative to the base, which then has no part itself. `gram_GPP`: the vectors' inner products, by row or column (G).
    """

    vectors_PF: NDArray[np.float64]
    origin: float
    gram_GPP: NDArray[np.float64]

    @np.errstate(all="ignore")
    def scales(self, coefficients_GP: Coefficients) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factors of the deltas (E, G), and of the base (G), for given coefficients of the vectors."""
        shares_GF = coefficients_GP @ self.vectors_PF
        anchor_G = (self.origin + shares_GF[:, 0]).astype(np.float32)
        return np.ascontiguousarray(shares_GF[:, 1:].T, np.float32), anchor_G

    @np.errstate(all="ignore")
    def whole(self, coefficients_P: Coefficients) -> ElementwiseRule:
        """The rule with one set of coefficients for the whole tensor; a block without any delta is the base."""
        coefficients_EG, _ = self.scales(coefficients_P[None])
        anchor = self.origin + float((coefficients_P @ self.vectors_PF)[0])
        return ElementwiseRule(coefficients_EG[:, 0], anchor_scale=anchor, unread_scale=1.0)

    def by_row(self, coefficients_GP: Coefficients, row_elements: int) -> BlockFunction:
        """The rule with coefficients by row."""
        return row_rule(row_elements, *self.scales(coefficients_GP))

    def by_column(self, coefficients_GP: Coefficients) -> BlockFunction:
        """The rule with coefficients by column."""
        return column_rule(*self.scales(coefficients_GP))


@np.errstate(all="ignore")
def frame_of(inputs: OperatorInput, reduced: Reduced, *, is_origin: bool) -> Frame:
    """The frame of the deltas alone (`is_origin`), or of the anchor and the experts."""
    n_experts = len(inputs.experts)
    gram_GFF = _gram(reduced, n_experts)
    vectors_PF = np.eye(n_experts + 1)
    if is_origin:
        vectors_PF = vectors_PF[1:]
    else:
        vectors_PF[:, 0] = 1.0
    gram_GPP = vectors_PF @ gram_GFF @ vectors_PF.T
    return Frame(vectors_PF, 1.0 if is_origin else 0.0, gram_GPP)


def _gram(reduced: Reduced, n_experts: int) -> NDArray[np.float64]:
    if reduced.gram_GFF is not None:
        return reduced.gram_GFF
    if reduced.products_E3 is None or n_experts != 1:
        raise ValueError("inner products are needed")
    base_base, delta_delta, base_delta = reduced.products_E3[0]
    return np.array([[[base_base, base_delta], [base_delta, delta_delta]]], np.float64)


def lengths(gram_GPP: NDArray[np.float64]) -> NDArray[np.float64]:
    """The vectors' lengths (G, P)."""
    return np.sqrt(np.maximum(0.0, np.diagonal(gram_GPP, axis1=1, axis2=2)))


# --- spherical interpolation of two models ---


COLLINEAR_COSINE = 0.9995
SMALLEST_NORM = 1e-8


class Slerp(Plain):
    """`s_0 M_0 + s_1 M_1` on the great circle through the two flattened tensors; linear where they are collinear.

    Source: Shoemake 1985, "Animating rotation with quaternion curves"; thresholds as mergekit documents them.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "slerp",
        "spherical interpolation of two models",
        "Shoemake 1985; mergekit's documented parameters",
        BaseRole.REQUIRED,
        (shared("t", "0 is the base, 1 the other model", None),),
        max_experts=1,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """The other model's share on the great circle, or on the straight line where the angle is not known."""
        share_E = np.array([float(inputs.globals["t"])])
        if products_E3 is not None:
            rule = self.block_function(inputs, Reduced(products_E3=products_E3))
            share_E = rule.coefficients_E.astype(np.float64)
        return Influence(share_E, np.ones(1))

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        return InnerProducts() if reduced.products_E3 is None else None

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        if reduced.products_E3 is None:
            raise ValueError("slerp needs inner products")
        base_base, delta_delta, base_delta = (float(x) for x in reduced.products_E3[0])
        other_other = max(0.0, base_base + 2.0 * base_delta + delta_delta)
        base_share, other_share = slerp_shares(
            float(inputs.globals["t"]), base_base, other_other, base_base + base_delta
        )
        return ElementwiseRule(
            coefficients_E=np.array([other_share], np.float32), anchor_scale=base_share + other_share, unread_scale=1.0
        )


def slerp_shares(t: float, base_base: float, other_other: float, base_other: float) -> tuple[float, float]:
    """Factors of the two models at `t`, from their inner products; sums to one in the collinear case.

    A norm up to 1e-8 is not divided by, as in mergekit, so that two zero tensors interpolate linearly or vanish
    without a division by zero.
    """
    base_norm, other_norm = math.sqrt(base_base), math.sqrt(other_other)
    cosine = base_other
    cosine /= base_norm if base_norm > SMALLEST_NORM else 1.0
    cosine /= other_norm if other_norm > SMALLEST_NORM else 1.0
    if not abs(cosine) <= COLLINEAR_COSINE:
        return 1.0 - t, t
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


# --- interpolation on spheres of more than slerp: nuslerp, multislerp, karcher, and model_stock's angles ---


IDEAL_CELL_ELEMENTS = 1 << 20
SMALLEST_LENGTH = 1e-7
SMALLEST_TOTAL = 1e-6
SMALLEST_SINE = 1e-8
SMALLEST_PRODUCT = 1e-6
SMALLEST_DENOMINATOR = 1e-6

Gram = NDArray[np.float64]


def whole_gram(inputs: OperatorInput, reduced: Reduced) -> ReductionRequest | None:
    """All inner products of the whole tensor: those that statistics hold, where there is but one delta."""
    if len(inputs.experts) == 1 and reduced.gram_GFF is None:
        return InnerProducts() if reduced.products_E3 is None else None
    return RowGram(max(1, inputs.n_elements)) if reduced.gram_GFF is None else None


class _Weighted(Plain):
    """A rule whose influence is that of weights over their sum, as if all models lay along one line."""

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        parts = ((inputs.anchor,) if inputs.anchor else ()) + inputs.experts
        weights_P = np.array([float(p.get("weight", 1.0)) for p in parts])
        share_E = weights_P[len(parts) - len(inputs.experts) :] / nonzero_sum(weights_P)
        return Influence(share_E, np.ones_like(share_E))


class NuSlerp(_Weighted):
    """Slerp of two models, or of two deltas added to the base: of whole tensors, of rows, or of columns.

    Source: Shoemake 1985; thresholds as mergekit documents them. The models' lengths are not normalised, and a sine
    below 1e-8 counts as collinear.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "nuslerp",
        "spherical interpolation of two models, or of their deltas",
        "Shoemake 1985; mergekit's documented parameters",
        BaseRole.ORIGIN,
        (
            WEIGHT,
            shared("nuslerp_row_wise", "with flatten off: along the first dimension, not the last", False),
            shared("nuslerp_flatten", "the whole tensor is one vector", True),
        ),
        min_experts=2,
        max_experts=2,
    )

    def granularity(self, inputs: OperatorInput) -> int:
        return _cell_elements(inputs) if _by_column(inputs) else 1

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        if reduced.gram_GFF is not None or inputs.globals["nuslerp_flatten"] or len(inputs.shape) < 2:
            return whole_gram(inputs, reduced)
        return (
            ColumnGram(inputs.n_columns, _cell_elements(inputs)) if _by_column(inputs) else RowGram(inputs.row_elements)
        )

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        frame = frame_of(inputs, reduced, is_origin=not inputs.anchor)
        first, second = participant_weights(inputs)
        total = first + second
        t = 0.5 if abs(total) < SMALLEST_TOTAL else second / total
        shares_GP = great_circle_shares(t, frame.gram_GPP)
        if inputs.globals["nuslerp_flatten"] or len(inputs.shape) < 2:
            return frame.whole(shares_GP[0])
        return frame.by_column(shares_GP) if _by_column(inputs) else frame.by_row(shares_GP, inputs.row_elements)


def _by_column(inputs: OperatorInput) -> bool:
    is_flat = bool(inputs.globals["nuslerp_flatten"]) or len(inputs.shape) < 2
    return bool(inputs.globals["nuslerp_row_wise"]) and not is_flat


def _cell_elements(inputs: OperatorInput) -> int:
    return inputs.n_columns * max(1, IDEAL_CELL_ELEMENTS // inputs.n_columns)


def participant_weights(inputs: OperatorInput) -> list[float]:
    """The weights of the models that are combined, the anchor's first if it takes part."""
    return [float(p["weight"]) for p in ((inputs.anchor,) if inputs.anchor else ()) + inputs.experts]


@np.errstate(all="ignore")
def great_circle_shares(t: float, gram_G22: Gram) -> Coefficients:
    """Factors (G, 2) of two vectors at `t` on the great circle, or on the straight line where they are collinear."""
    lengths_G2 = np.maximum(SMALLEST_LENGTH, lengths(gram_G22))
    cosine_G = np.clip(gram_G22[:, 0, 1] / (lengths_G2[:, 0] * lengths_G2[:, 1]), -1.0, 1.0)
    is_straight_G = 1.0 - cosine_G**2 <= SMALLEST_SINE**2
    angle_G = np.arccos(np.where(is_straight_G, 0.0, cosine_G))
    shares_G2 = np.stack([np.sin((1.0 - t) * angle_G), np.sin(t * angle_G)], axis=1) / np.sin(angle_G)[:, None]
    return np.where(is_straight_G[:, None], np.array([1.0 - t, t]), shares_G2)


class MultiSlerp(_Weighted):
    """Barycentric interpolation: directions averaged in the tangent space at their weighted mean.

    Source: Goddard, "Multi-SLERP"; thresholds as mergekit documents them.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "multislerp",
        "barycentric interpolation on a hypersphere",
        "Goddard, goddard.blog/posts/multislerp-wow-what-a-cool-idea",
        BaseRole.ORIGIN,
        (
            WEIGHT,
            shared("normalize_weights", "divide the weights by their sum", True),
            ParameterSpec("eps", Scope.GLOBAL, "smallest length that is not treated as zero", default=1e-8, low=0.0),
        ),
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        return None if len(participant_weights(inputs)) == 1 else whole_gram(inputs, reduced)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        weights_P = np.array(participant_weights(inputs))
        if len(weights_P) == 1:
            alone = Reduced(gram_GFF=np.zeros((1, len(inputs.experts) + 1, len(inputs.experts) + 1)))
            return frame_of(inputs, alone, is_origin=not inputs.anchor).whole(np.ones(1))
        if inputs.globals["normalize_weights"]:
            weights_P = weights_P / (weights_P.sum() or 1.0)
        frame = frame_of(inputs, reduced, is_origin=not inputs.anchor)
        return frame.whole(barycentre(weights_P, frame.gram_GPP[0], float(inputs.globals["eps"])))


def barycentre(weights_P: Coefficients, gram_PP: Gram, eps: float) -> Coefficients:
    """The coefficients of the barycentre of vectors with these inner products."""
    if not np.isfinite(gram_PP).all():
        return np.full(len(weights_P), math.nan)
    lengths_P = lengths(gram_PP[None])[0]
    units_PP = np.diag(1.0 / (lengths_P + eps)) if (lengths_P + eps).all() else np.zeros_like(gram_PP)
    mean_P = weights_P @ units_PP
    length = _length(mean_P, gram_PP)
    if length < eps or length == 0.0:
        if len(weights_P) == 2 or not (lengths_P > eps).any():  # none of them has a direction
            return weights_P
        raise UnsupportedError.of(
            "model.unsupported",
            "multislerp",
            "the weighted directions of the models cancel out in a tensor, so there is no mean direction",
            "change the weights",
        )
    mean_P = mean_P / length
    tangents_PP = units_PP - (units_PP @ gram_PP @ mean_P)[:, None] * mean_P
    tangent_P = weights_P @ tangents_PP
    angle = _length(tangent_P, gram_PP) + eps
    direction_P = mean_P * math.cos(angle) + tangent_P * (math.sin(angle) / angle if angle else 1.0)
    return np.asarray(direction_P * float(lengths_P @ weights_P))


def _length(coefficients_P: Coefficients, gram_PP: Gram) -> float:
    return math.sqrt(max(0.0, float(coefficients_P @ gram_PP @ coefficients_P)))


class Karcher(_Weighted):
    """The Karcher (Fréchet) mean of the models' directions, times the mean of their lengths; all models alike.

    Source: arXiv 2603.04972; steps and thresholds as mergekit documents them.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "karcher",
        "mean of directions on a hypersphere, with equal weights",
        "arXiv 2603.04972",
        BaseRole.OPTIONAL,
        (
            ParameterSpec("max_iter", Scope.GLOBAL, "maximum number of steps", default=10.0, low=0.0, is_whole=True),
            ParameterSpec("tol", Scope.GLOBAL, "a shorter step ends the search", default=1e-5, low=0.0),
        ),
        min_experts=0,
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        return whole_gram(inputs, reduced) if inputs.experts else None

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        if not inputs.experts:
            return frame_of(inputs, Reduced(gram_GFF=np.zeros((1, 1, 1))), is_origin=False).whole(np.ones(1))
        frame = frame_of(inputs, reduced, is_origin=False)
        steps, tolerance = int(inputs.globals["max_iter"]), float(inputs.globals["tol"])
        return frame.whole(karcher_mean(frame.gram_GPP[0], steps, tolerance))


def karcher_mean(gram_PP: Gram, steps: int, tolerance: float) -> Coefficients:
    """The coefficients of the mean of vectors with these inner products; zero vectors have no direction."""
    if not np.isfinite(gram_PP).all():
        return np.full(len(gram_PP), math.nan)
    lengths_P = lengths(gram_PP[None])[0]
    valid_V = np.flatnonzero(lengths_P > tolerance)
    mean_P = np.zeros(len(lengths_P))
    if not len(valid_V):
        return mean_P
    units_VP = np.zeros((len(valid_V), len(lengths_P)))
    units_VP[np.arange(len(valid_V)), valid_V] = 1.0 / lengths_P[valid_V]
    mean_P = units_VP.mean(axis=0)
    length = _length(mean_P, gram_PP)
    mean_P = units_VP[0] if length < tolerance else mean_P / length
    for _ in range(steps):
        tangent_P = _tangent(mean_P, units_VP, gram_PP, tolerance)
        step = _length(tangent_P, gram_PP)
        if step < tolerance:
            break
        mean_P = math.cos(step) * mean_P + math.sin(step) / step * tangent_P
        mean_P = mean_P / (_length(mean_P, gram_PP) or 1.0)
    return np.asarray(mean_P * float(lengths_P.mean()))


def _tangent(mean_P: Coefficients, units_VP: Coefficients, gram_PP: Gram, tolerance: float) -> Coefficients:
    """The mean of the directions as seen from `mean_P`: where to go next.

    A direction opposite to the mean pulls nowhere: no way to it is shorter than another.
    """
    tangent_P = np.zeros_like(mean_P)
    for unit_P in units_VP:
        cosine = min(1.0, max(-1.0, float(mean_P @ gram_PP @ unit_P)))
        angle = math.acos(cosine)
        if tolerance <= angle <= math.pi - tolerance:
            tangent_P += angle / math.sin(angle) / len(units_VP) * (unit_P - cosine * mean_P)
    return tangent_P


class ModelStock(AllAlike):
    """`t mean(M_i) + (1 - t) M_0`, `t = k cos / (1 + (k - 1) cos)`, with the mean cosine between the deltas.

    Source: Jang et al. 2024 (arXiv 2403.19522), Eq. 5; where its denominator vanishes the base is kept.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "model_stock",
        "average of the models, drawn to the base by the angle between their deltas",
        "Jang et al. 2024, arXiv 2403.19522",
        BaseRole.REQUIRED,
        (shared("filter_wise", "angles row by row", False),),
        min_experts=2,
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        if reduced.gram_GFF is not None:
            return None
        return RowGram(inputs.row_elements if inputs.globals["filter_wise"] else max(1, inputs.n_elements))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        frame = frame_of(inputs, reduced, is_origin=True)
        share_G = stock_shares(frame.gram_GPP)
        coefficients_GP = np.repeat(share_G[:, None] / len(inputs.experts), len(inputs.experts), axis=1)
        if inputs.globals["filter_wise"]:
            return frame.by_row(coefficients_GP, inputs.row_elements)
        return frame.whole(coefficients_GP[0])


@np.errstate(all="ignore")
def stock_shares(gram_GPP: Gram) -> Coefficients:
    """Return the interpolation weights from the base to the mean of the models, by row."""
    count = gram_GPP.shape[1]
    lengths_GP = lengths(gram_GPP)
    cosines = []
    for i, j in combinations(range(count), 2):
        product_G = np.maximum(SMALLEST_PRODUCT, lengths_GP[:, i] * lengths_GP[:, j])
        cosines.append(np.clip(gram_GPP[:, i, j] / product_G, -1.0, 1.0))
    cosine_G = np.mean(cosines, axis=0)
    denominator_G = 1.0 + (count - 1) * cosine_G
    is_singular_G = np.abs(denominator_G) < SMALLEST_DENOMINATOR
    return np.where(is_singular_G, 0.0, count * cosine_G / np.where(is_singular_G, 1.0, denominator_G))


# --- the point whose distances to the models sum to the least ---


class GeometricMedian(_Weighted):
    """`argmin_x Σ w_i ||x - M_i||`, the tensor being one vector: an average whose weights fall with the distance to it.

    Source: Weiszfeld 1937, smoothed as in Pillutla et al. 2022 (arXiv 1912.13445, Algorithm 2). A shift of all models
    shifts the median, so that it is taken of the deltas; the base is not one of the models. Deviation: distances are
    bounded below by a share `tol` (at least 1e-7) of the largest one between two models, not by a number.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "geometric_median",
        "point with the smallest sum of distances to the models",
        "Weiszfeld 1937; Pillutla et al. 2022, arXiv 1912.13445",
        BaseRole.ORIGIN,
        (
            ParameterSpec("weight", Scope.MODEL, "factor of the distance to this model", default=1.0, low=0.0),
            ParameterSpec(
                "max_iter",
                Scope.GLOBAL,
                "maximum number of steps of the search",
                default=1000.0,
                low=0.0,
                is_whole=True,
            ),
            ParameterSpec("tol", Scope.GLOBAL, "a smaller change of the shares ends it", default=1e-6, low=0.0),
        ),
    )

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        return whole_gram(inputs, reduced)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        frame = frame_of(inputs, reduced, is_origin=True)
        n_origins = 1 if inputs.anchor else 0  # a model that is the anchor has no delta
        gram_PP = np.pad(frame.gram_GPP[0], (n_origins, 0))
        steps, tolerance = int(inputs.globals["max_iter"]), float(inputs.globals["tol"])
        shares_P = median_shares(np.array(participant_weights(inputs)), gram_PP, steps, tolerance)
        return frame.whole(shares_P[n_origins:])


def median_shares(weights_P: Coefficients, gram_PP: Gram, steps: int, tolerance: float) -> Coefficients:
    """The shares of vectors with these inner products in their geometric median; they sum to one."""
    if not np.isfinite(gram_PP).all():
        return np.full(len(weights_P), math.nan)
    _, exponent = math.frexp(float(np.abs(gram_PP).max(initial=0.0)))
    gram_PP = np.ldexp(gram_PP, -2 * (exponent // 2))  # near one: no digit of a length changes, and no sum is near zero
    squares_P = np.diagonal(gram_PP)
    largest_square = float((squares_P[:, None] + squares_P - 2.0 * gram_PP).max())
    shares_P = weights_P / nonzero_sum(weights_P)
    smallest = max(tolerance, SMALLEST_LENGTH) * math.sqrt(max(0.0, largest_square))
    for _ in range(steps if smallest > 0.0 else 0):
        distances_P = np.sqrt(np.maximum(0.0, shares_P @ gram_PP @ shares_P - 2.0 * gram_PP @ shares_P + squares_P))
        pulls_P = weights_P / np.maximum(smallest, distances_P)
        before_P, shares_P = shares_P, pulls_P / nonzero_sum(pulls_P)
        if np.abs(shares_P - before_P).max() <= tolerance:
            break
    return shares_P


OPERATORS: tuple[Operator, ...] = (Slerp(), NuSlerp(), MultiSlerp(), Karcher(), ModelStock(), GeometricMedian())
