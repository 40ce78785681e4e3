"""What rules that look at whole models must give, in float64 numpy, slowly, each element by its textbook formula.

Companion of `support.oracle`, for rules whose result is one number per element up to rounding. Arrays: M models or
deltas, N elements, R rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.oracle import order_of_ranks

Numbers = NDArray[np.float64]
Scalar = float | bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelCase:
    """One merge: the base (any shape), the other models (one more axis, first), and the parameters in force.

    Without `has_base` no model is the base; where a rule has one, `models` are the others. `numbers` are weights by
    model and element.
    """

    base: Numbers
    models: Numbers
    shared: Mapping[str, Scalar]
    each: tuple[Mapping[str, Scalar], ...]
    has_base: bool = True
    numbers: Numbers | None = None


Merge = Callable[[ModelCase], Numbers]


def nuslerp(case: ModelCase) -> Numbers:
    """Along the great circle of two models, or of their differences from the base."""
    base, models, shared, each, has_base = case.base, case.models, case.shared, case.each, case.has_base
    first, second = (models[0] - base, models[1] - base) if has_base else (models[0], models[1])
    total = float(each[0]["weight"]) + float(each[1]["weight"])
    t = 0.5 if abs(total) < 1e-6 else float(each[1]["weight"]) / total
    axis = None if shared["nuslerp_flatten"] else 0 if shared["nuslerp_row_wise"] else -1
    lengths = [np.maximum(1e-7, np.sqrt(np.sum(v**2, axis=axis, keepdims=True))) for v in (first, second)]
    cosine = np.clip(np.sum(first / lengths[0] * (second / lengths[1]), axis=axis, keepdims=True), -1, 1)
    is_straight = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(is_straight, 0.0, cosine))
    curved = (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)
    merged = np.where(is_straight, (1 - t) * first + t * second, curved)
    return base + merged if has_base else np.asarray(merged)


def multislerp(case: ModelCase) -> Numbers:
    """Directions averaged in the tangent space at their weighted mean, and brought back to the sphere."""
    base, models, shared, each, has_base = case.base, case.models, case.shared, case.each, case.has_base
    if len(models) == 1:
        return np.asarray(models[0])
    vectors = (models - base if has_base else models).reshape(len(models), -1)
    weights = np.array([float(p["weight"]) for p in each])
    weights = weights / weights.sum() if shared["normalize_weights"] else weights
    eps = float(shared["eps"])
    lengths = np.linalg.norm(vectors, axis=1)
    units = vectors / (lengths + eps)[:, None]
    mean = weights @ units
    mean = mean / np.linalg.norm(mean)
    tangent = weights @ (units - (units @ mean)[:, None] * mean)
    angle = np.linalg.norm(tangent) + eps
    merged = ((mean * np.cos(angle) + tangent * (np.sin(angle) / angle)) * (lengths @ weights)).reshape(base.shape)
    return base + merged if has_base else np.asarray(merged)


def karcher(case: ModelCase) -> Numbers:
    """The point on the sphere whose squared angles to all directions are smallest, by steps along the mean tangent."""
    base, models, shared, has_base = case.base, case.models, case.shared, case.has_base
    everyone = np.concatenate([base[None], models]) if has_base else models
    vectors = everyone.reshape(len(everyone), -1)
    lengths, tolerance = np.linalg.norm(vectors, axis=1), float(shared["tol"])
    units = vectors[lengths > tolerance] / lengths[lengths > tolerance][:, None]
    if not len(units):
        return np.zeros_like(base)
    mean = units.mean(axis=0)
    mean = units[0] if np.linalg.norm(mean) < tolerance else mean / np.linalg.norm(mean)
    for _ in range(int(shared["max_iter"])):
        angles = np.arccos(np.clip(units @ mean, -1, 1))
        far = (angles >= tolerance) & (angles <= np.pi - tolerance)
        pulls = (angles[far] / np.sin(angles[far]))[:, None] * (units[far] - np.cos(angles[far])[:, None] * mean)
        tangent = pulls.sum(axis=0) / len(units)
        step = np.linalg.norm(tangent)
        if step < tolerance:
            break
        mean = np.cos(step) * mean + np.sin(step) * tangent / step
        mean = mean / np.linalg.norm(mean)
    return np.asarray((mean * lengths.mean()).reshape(base.shape))


def geometric_median(case: ModelCase) -> Numbers:
    """The point with the smallest weighted sum of distances, by steps on the vectors themselves."""
    vectors = case.models.reshape(len(case.models), -1)
    weights, tolerance = np.array([float(p["weight"]) for p in case.each]), float(case.shared["tol"])
    floor = tolerance * max(float(np.linalg.norm(a - b)) for a in vectors for b in vectors)
    shares = weights / weights.sum()
    for _ in range(int(case.shared["max_iter"]) if floor else 0):
        pulls = weights / np.maximum(floor, np.linalg.norm(vectors - shares @ vectors, axis=1))
        before, shares = shares, pulls / pulls.sum()
        if np.abs(shares - before).max() <= tolerance:
            break
    return np.asarray((shares @ vectors).reshape(case.base.shape))


def model_stock(case: ModelCase) -> Numbers:
    """From the base towards the mean of the models, as far as the angle between their differences allows."""
    base, models, shared = case.base, case.models, case.shared
    rows = base.shape[-1] if base.ndim > 1 and shared["filter_wise"] else base.size
    deltas = (models - base).reshape(len(models), -1, rows)
    lengths = np.linalg.norm(deltas, axis=2)
    pairs = list(itertools.combinations(range(len(models)), 2))
    cosines = [
        np.clip((deltas[i] * deltas[j]).sum(axis=1) / np.maximum(1e-6, lengths[i] * lengths[j]), -1, 1)
        for i, j in pairs
    ]
    cosine_R = np.mean(cosines, axis=0)
    denominator_R = 1 + (len(models) - 1) * cosine_R
    safe_R = np.where(np.abs(denominator_R) < 1e-6, np.inf, denominator_R)
    share_R = len(models) * cosine_R / safe_R
    return np.asarray(base + (share_R[:, None] * deltas.mean(axis=0)).reshape(base.shape))


def sce(case: ModelCase) -> Numbers:
    """The elements of highest variance, weighted by energy, of the majority's sign."""
    base, models, shared = case.base, case.models, case.shared
    deltas = (models - base).reshape(len(models), -1)
    if float(shared["select_topk"]) < 1:
        variance_N = deltas.var(axis=0).astype(np.float32)
        kept = int(np.count_nonzero(variance_N) * float(shared["select_topk"]))
        deltas = np.where(_ranked(variance_N, 0, kept), deltas, 0.0)
    energies = np.mean(deltas**2, axis=1)
    weights = energies / energies.sum() if energies.sum() >= 1e-6 else np.full(len(models), 1 / len(models))
    majority_N = np.where(deltas.sum(axis=0) >= 0, 1.0, -1.0)
    agreeing = weights[:, None] * (np.sign(deltas) == majority_N)
    merged_N = (deltas * agreeing).sum(axis=0) / np.maximum(1e-6, agreeing.sum(axis=0))
    return np.asarray(base + merged_N.reshape(base.shape))


def ramplus(case: ModelCase) -> Numbers:
    """What one model changes, scaled; what several change, averaged. With `r` 0 or missing: ram."""
    base, models, shared = case.base, case.models, case.shared
    deltas = (models - base).reshape(len(models), -1)
    epsilon = float(shared["epsilon"])
    changes = np.abs(deltas) > np.float32(epsilon)
    count_N = changes.sum(axis=0)
    scales = []
    for change_N in changes:
        own, common = int((change_N & (count_N == 1)).sum()), int((change_N & (count_N > 1)).sum())
        ratio = common / max(own, epsilon) if max(own, epsilon) > 0 else 0.0
        scales.append(1 + float(shared.get("r", 0.0)) * min(ratio, float(shared.get("alpha", 0.0))))
    factors = np.where(count_N == 1, np.array(scales)[:, None], 1 / np.maximum(1, count_N))
    return np.asarray(base + (np.where(changes, deltas, 0.0) * factors).sum(axis=0).reshape(base.shape))


def magmax(case: ModelCase) -> Numbers:
    """The change of largest magnitude of each element, the first of equal ones."""
    deltas = case.models - case.base
    largest = np.take_along_axis(deltas, np.abs(deltas).argmax(axis=0)[None], axis=0)[0]
    return np.asarray(case.base + float(case.shared["lambda"]) * largest)


def fisher(case: ModelCase) -> Numbers:
    """The average of the differences by weights, which may differ from element to element, or their sum."""
    weights, normalizes = weights_of(case), bool(case.shared["normalize"])
    plain = np.array([float(p["weight"]) for p in case.each]).reshape(-1, *[1] * case.base.ndim)
    weights = np.where((weights.sum(axis=0) == 0) & normalizes, plain, weights)
    total = (weights * (case.models - case.base)).sum(axis=0)
    return np.asarray(case.base + float(case.shared["lambda"]) * total / (weights.sum(axis=0) if normalizes else 1.0))


def sar(case: ModelCase) -> Numbers:
    """Of the changes of each element that of the largest weight; the largest of these, their sum of magnitudes kept."""
    deltas, shared = case.models - case.base, case.shared
    changes = np.abs(deltas) > np.float32(float(shared["epsilon"]))
    first = np.where(changes, weights_of(case), -1.0).argmax(axis=0)
    resolved = np.where(changes.any(axis=0), np.take_along_axis(deltas, first[None], axis=0)[0], 0.0)
    if float(shared["density"]) < 1:
        n_kept = int(np.count_nonzero(resolved) * float(shared["density"]))
        resolved = rescaled(resolved, np.where(_ranked(resolved, 0, n_kept), resolved, 0.0), shared)
    return np.asarray(case.base + float(shared["lambda"]) * resolved)


def weights_of(case: ModelCase) -> Numbers:
    """By model and element: the model's weight, times the numbers beside it."""
    weights = np.array([float(p["weight"]) for p in case.each]).reshape(-1, *[1] * case.base.ndim)
    return np.asarray(weights * (np.ones_like(case.models) if case.numbers is None else case.numbers))


def agreed(case: ModelCase) -> Numbers:
    """The weighted sum of differences, of elements that are in enough masks."""
    deltas = case.models - case.base
    weights = np.array([float(p["weight"]) for p in case.each]).reshape(-1, *[1] * case.base.ndim)
    total = (weights * deltas).sum(axis=0)
    masks = [np.abs(d) >= float(p["threshold"]) * np.abs(total - d) for d, p in zip(deltas, case.each, strict=True)]
    is_kept = np.sum(masks, axis=0) >= float(case.shared["least_models"])
    return np.asarray(case.base + np.where(is_kept, float(case.shared["lambda"]) * total, 0.0))


def nearswap(case: ModelCase) -> Numbers:
    """Each element towards the other model by at most `t`."""
    base, models, shared = case.base, case.models, case.shared
    share = np.clip(float(shared["t"]) / np.maximum(1e-6, np.abs(models[0] - base)), 0, 1)
    return np.asarray(share * models[0] + (1 - share) * base)


def arcee_fusion(case: ModelCase) -> Numbers:
    """The changes whose importance is an outlier of the tensor."""
    base, models = case.base, case.models
    return np.where(fused_importance(base, models[0]) >= 1.0, models[0], base)


def fused_importance(base: Numbers, model: Numbers) -> Numbers:
    """Importance over the threshold of arcee_fusion: 1 and more is taken."""
    shares = [np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) + 1e-8 for x in (model, base)]
    divergence = np.maximum(0.0, (shares[0] * np.log(shares[0] / shares[1])).sum(axis=-1, keepdims=True))
    importance = np.abs(model - base) * divergence
    ordered = np.sort(importance.ravel())
    low, median, high = (ordered[math.floor(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
    threshold = median + 1.5 * (high - low)
    return np.asarray(importance / threshold) if threshold > 0 else np.full(base.shape, np.inf)


def breadcrumbs(case: ModelCase) -> Numbers:
    """The weighted sum of differences without their largest and their smallest elements."""
    base, models, shared, each = case.base, case.models, case.shared, case.each
    deltas = np.stack([_banded(m - base, p, shared) for m, p in zip(models, each, strict=True)])
    weights = np.array([float(p["weight"]) for p in each])
    total = weights.sum() if shared["normalize"] and abs(weights.sum()) >= 1e-8 else 1.0
    return np.asarray(base + float(shared["lambda"]) * np.tensordot(weights, deltas, axes=1) / total)


def breadcrumbs_ties(case: ModelCase) -> Numbers:
    """As breadcrumbs, of what agrees with the sign of the weighted sum."""
    base, models, shared, each = case.base, case.models, case.shared, case.each
    return consensus(
        base, np.stack([_banded(m - base, p, shared) for m, p in zip(models, each, strict=True)]), shared, each
    )


def consensus(
    base: Numbers, deltas: Numbers, shared: Mapping[str, Scalar], each: tuple[Mapping[str, Scalar], ...]
) -> Numbers:
    """Elect the sign of the weighted sum, 0 counting as +, and merge what agrees."""
    weights = np.array([float(p["weight"]) for p in each]).reshape(-1, *[1] * base.ndim)
    weighted = weights * deltas
    agrees = np.sign(weighted) == np.where(weighted.sum(axis=0) >= 0, 1.0, -1.0)
    divisor = (weights * agrees).sum(axis=0) if shared["normalize"] else np.ones_like(base)
    merged = (weighted * agrees).sum(axis=0) / np.where(divisor == 0, 1.0, divisor)
    return np.asarray(base + float(shared["lambda"]) * merged)


def _banded(delta: Numbers, parameters: Mapping[str, Scalar], shared: Mapping[str, Scalar]) -> Numbers:
    density, n = float(parameters["density"]), delta.size
    if density >= 1:
        return delta
    target = int(density * n)
    bottom = max(0, n - target - int(float(parameters["gamma"]) * n))
    dropped = n - target - bottom
    return rescaled(delta, np.where(_ranked(delta, dropped, dropped + target), delta, 0.0), shared)


def _ranked(values: NDArray[Any], first: int, stop: int) -> NDArray[np.bool_]:
    """Which elements have the ranks from `first` to `stop`, the largest first."""
    is_ranked = np.zeros(values.shape, np.bool_)
    is_ranked.ravel()[order_of_ranks(values.astype(np.float32).ravel())[first:stop]] = True
    return is_ranked


def rescaled(delta: Numbers, kept: Numbers, shared: Mapping[str, Scalar]) -> Numbers:
    """What is kept, times the ratio of sums of magnitudes, if asked."""
    before, after = np.abs(delta).sum(), np.abs(kept).sum()
    if not shared["rescale"] or before < 1e-7 or after < 1e-7:
        return kept
    return np.asarray(kept * (before / after))


def ties(case: ModelCase) -> Numbers:
    """TIES with rescaling; without it, `support.oracle` says more."""
    base, models, shared, each = case.base, case.models, case.shared, case.each
    deltas = []
    for model, parameters in zip(models, each, strict=True):
        delta = model - base
        kept = int(float(parameters["density"]) * delta.size)
        deltas.append(rescaled(delta, np.where(_ranked(delta, 0, kept), delta, 0.0), shared))
    return consensus(base, np.stack(deltas), shared, each)


MERGES: dict[str, Merge] = {
    "nuslerp": nuslerp, "multislerp": multislerp, "karcher": karcher, "geometric_median": geometric_median,
    "model_stock": model_stock, "sce": sce, "ram": ramplus, "ramplus_tl": ramplus, "magmax": magmax, "fisher": fisher,
    "sar": sar, "consensus": agreed, "nearswap": nearswap, "arcee_fusion": arcee_fusion, "breadcrumbs": breadcrumbs,
    "breadcrumbs_ties": breadcrumbs_ties, "ties": ties,
}  # fmt: skip
