"""What each operator's result must be, in float64 numpy, slowly: the reference that the kernels are tested against.

Written from DESIGN.md section 5 and the papers. Deltas are float32 differences, as defined there; everything else is
float64. What float32 arithmetic may add to that is bounded term by term, so an answer is a range of numbers, and where
rounding may decide a vote, one range for each outcome. Arrays: E experts, N elements, A alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import DType
from support.rounding import encode

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

UNIT = 2.0**-23  # twice the relative error of one rounding to float32
TINY = 2.0**-148  # twice the absolute error of one
LARGEST = 3e38
SMALLEST_SAFE_PRODUCT = 2.0**-140
FEW = 6  # roundings beside those of sums: coefficients, products, the last addition


@dataclass(frozen=True, slots=True)
class MergeCase:
    """One merge in a recipe's words. Weights and densities have one entry per expert; `rescale` is that of DARE."""

    operator: str
    weights: tuple[float, ...] = ()
    densities: tuple[float, ...] = ()
    base_weight: float = 0.0
    normalize: bool = False
    rescale: bool = True
    lambda_: float = 1.0
    t: float = 0.5
    scale: float = 1.0

    @property
    def is_random(self) -> bool:
        return self.operator.startswith("dare_")


WEIGHTS, DENSITIES = (0.7, 0.5, -0.3), (0.2, 0.37, 1.0)
CASES = {
    "linear": MergeCase("linear", WEIGHTS, DENSITIES, base_weight=0.4, normalize=True),
    "linear_sum": MergeCase("linear", WEIGHTS, DENSITIES, base_weight=0.4),
    "task_arithmetic": MergeCase("task_arithmetic", WEIGHTS, DENSITIES, lambda_=0.8),
    "ties": MergeCase("ties", WEIGHTS, DENSITIES, normalize=True, lambda_=1.1),
    "dare_linear": MergeCase("dare_linear", WEIGHTS, DENSITIES),
    "dare_ties": MergeCase("dare_ties", (0.7, 0.5, 0.3), DENSITIES, normalize=True),
    "slerp": MergeCase("slerp", (1.0,), (1.0,), t=0.3),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Acceptable results: inside one of the ranges `[low, high]` (NaN: NaN is right), or anything if undetermined."""

    low_AN: Numbers
    high_AN: Numbers
    undetermined_N: Mask

    def accepts(self, stored_N: NDArray[Any], dtype: DType) -> Mask:
        """Which elements of a result, in its stored dtype, are acceptable."""
        found_N = stored_N.astype(np.float64)
        accepted_N = self.undetermined_N.copy()
        for low_N, high_N in zip(self.low_AN, self.high_AN, strict=True):
            low_out_N = _rounded(low_N, dtype)
            inside_N = (low_out_N <= found_N) & (found_N <= _rounded(high_N, dtype))
            accepted_N |= inside_N | (np.isnan(low_out_N) & np.isnan(found_N))
        return accepted_N


def expected(
    case: MergeCase, base_N: NDArray[np.float32], experts_EN: NDArray[np.float32], kept_EN: Mask | None = None
) -> Expected:
    """The acceptable results of `case`; `kept_EN` is what DARE keeps."""
    with np.errstate(all="ignore"):
        deltas_EN = np.where(experts_EN == base_N, np.float32(0.0), experts_EN - base_N).astype(np.float64)
        base64_N = base_N.astype(np.float64)
        match case.operator:
            case "linear":
                return _linear(case, base64_N, deltas_EN)
            case "task_arithmetic":
                return _fixed(base64_N, deltas_EN, _scaled_weights(case))
            case "passthrough":
                return _sum_of([case.scale * base64_N])
            case "slerp":
                return _slerp(case, base64_N, experts_EN[0].astype(np.float64), deltas_EN[0])
            case "ties":
                trimmed_EN, unclear_N = _trim(case, deltas_EN)
                return _consensus(case, base64_N, trimmed_EN, unclear_N)
        if kept_EN is None:
            raise ValueError(f"{case.operator} needs the mask of kept elements")
        dropped_EN = _drop(case, deltas_EN, kept_EN)
        if case.operator == "dare_linear":
            return _fixed(base64_N, dropped_EN, _scaled_weights(case))
        return _consensus(case, base64_N, dropped_EN, np.zeros(base_N.shape, np.bool_))


def _rounded(values_N: Numbers, dtype: DType) -> Numbers:
    with np.errstate(all="ignore"):
        return encode(values_N.astype(np.float32), dtype).astype(np.float64)


def _sum_of(terms: list[Numbers]) -> Expected:
    """A sum of terms, each with the error of a few roundings."""
    total_N = np.sum(terms, axis=0)
    size_N = np.sum([_finite_size(term) for term in terms], axis=0)
    slack_N = (len(terms) + FEW) * (UNIT * size_N + TINY)
    return _one_range(total_N, slack_N, size_N)


def _one_range(value_N: Numbers, slack_N: Numbers, size_N: Numbers) -> Expected:
    slack_N = np.where(np.isfinite(value_N), slack_N, 0.0)
    return Expected((value_N - slack_N)[None], (value_N + slack_N)[None], size_N > LARGEST)


def _finite_size(values: Numbers) -> Numbers:
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def _linear(case: MergeCase, base_N: Numbers, deltas_EN: Numbers) -> Expected:
    """`sum w M` in its anchored form `(sum w) M_0 + sum w delta`, over the sum of weights if normalised."""
    total = case.base_weight + sum(case.weights)
    divisor = total if case.normalize else 1.0
    anchor_N = base_N * (total / divisor)
    return _sum_of([anchor_N, *(w / divisor * delta_N for w, delta_N in zip(case.weights, deltas_EN, strict=True))])


def _scaled_weights(case: MergeCase) -> list[float]:
    total = sum(case.weights)
    divisor = total if case.normalize and abs(total) >= 1e-8 else 1.0
    return [case.lambda_ * w / divisor for w in case.weights]


def _fixed(base_N: Numbers, deltas_EN: Numbers, coefficients: list[float]) -> Expected:
    return _sum_of([base_N, *(c * delta_N for c, delta_N in zip(coefficients, deltas_EN, strict=True))])


def _slerp(case: MergeCase, base_N: Numbers, other_N: Numbers, delta_N: Numbers) -> Expected:
    """Along the great circle between the flattened tensors; straight where they are collinear to 0.9995."""
    length_base, length_other = np.linalg.norm(base_N), np.linalg.norm(other_N)
    unit_base_N = base_N / length_base if length_base > 1e-8 else base_N
    unit_other_N = other_N / length_other if length_other > 1e-8 else other_N
    cosine = float(np.sum(unit_base_N * unit_other_N))
    share_base, share_other = 1.0 - case.t, case.t
    if abs(cosine) <= 0.9995:
        angle = math.acos(cosine)
        share_base, share_other = (math.sin(s * angle) / math.sin(angle) for s in (share_base, share_other))
    anchored = _sum_of([(share_base + share_other) * base_N, share_other * delta_N])
    if not (np.all(np.isfinite(base_N)) and np.all(np.isfinite(other_N))):
        return anchored
    size_N = np.abs(share_base * base_N) + np.abs(share_other * other_N) + np.abs(base_N)
    return _one_range(share_base * base_N + share_other * other_N, (FEW + 2) * (UNIT * size_N + TINY), size_N)


def order_of_ranks(delta_N: NDArray[np.float32]) -> NDArray[np.int64]:
    """Elements by falling magnitude, and by `tie_hashes` where magnitudes are equal; NaN come first.

    The key of a magnitude follows from its bits and the numbers of elements that are larger, and that have it; that of
    a single element is of no account.
    """
    bits_N = np.abs(delta_N).view(np.uint32)
    magnitudes, counts = np.unique(bits_N, return_counts=True)
    larger = len(bits_N) - np.cumsum(counts)
    facts = np.stack([magnitudes.astype("<i8"), larger, counts], axis=1).astype("<i8")
    keys = np.zeros(len(facts), np.uint32)
    for tie in np.flatnonzero(counts > 1):
        keys[tie] = int.from_bytes(blake3(facts[tie].tobytes()).digest(4), "little")
    return np.lexsort((tie_hashes(keys[np.searchsorted(magnitudes, bits_N)]), ~bits_N))


def tie_hashes(keys_N: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The hash of each element's index under its key: a hash of its run of 64, and its place there."""
    index_N: NDArray[np.uint64] = np.arange(len(keys_N), dtype=np.uint64)
    mixed_N = (index_N // 64 ^ index_N // 2**22) * 0x85EBCA6B % 2**26
    hash_N = (mixed_N ^ (mixed_N >> 13) ^ keys_N) * 0xC2B2AE35 % 2**26
    return np.asarray(hash_N * 64 + index_N % 64, np.uint32)


def reaching(delta_N: NDArray[np.float32], cut_3: Sequence[int]) -> Mask:
    """Which elements reach a cut, given as its bits, key and last hash."""
    bits, key, last = map(int, cut_3)
    bits_N = np.abs(delta_N).view(np.uint32)
    is_early_N = tie_hashes(np.full(len(bits_N), key, np.uint32)) <= last
    return np.asarray((bits_N > bits) | ((bits_N == bits) & is_early_N))


def _trim(case: MergeCase, deltas_EN: Numbers) -> tuple[Numbers, Mask]:
    """Keep exactly the first `floor(density n)` of each delta by `order_of_ranks`.

    Second, the elements about which nothing is said: a NaN where there are more NaN than elements to be kept.
    """
    trimmed_EN = np.zeros_like(deltas_EN)
    unclear_N = np.zeros(deltas_EN.shape[1], np.bool_)
    for e, density in enumerate(case.densities):
        delta_N = deltas_EN[e]
        count = math.floor(density * len(delta_N))
        if count == 0:
            continue
        nan_N = np.isnan(delta_N)
        if nan_N.sum() > count:
            unclear_N |= nan_N
        kept = order_of_ranks(delta_N.astype(np.float32))[:count]
        trimmed_EN[e, kept] = delta_N[kept]
    return trimmed_EN, unclear_N


def _drop(case: MergeCase, deltas_EN: Numbers, kept_EN: Mask) -> Numbers:
    scales_E1 = np.array([1.0 / d if case.rescale else 1.0 for d in case.densities])[:, None]
    return np.where(kept_EN, deltas_EN * scales_E1, 0.0)


def _consensus(case: MergeCase, base_N: Numbers, sparse_EN: Numbers, undetermined_N: Mask) -> Expected:
    """Elect the sign of the weighted sum, 0 counting as +, and average what agrees: TIES, Algorithm 1, steps 2-3."""
    weights_E1 = np.array(case.weights)[:, None]
    weighted_EN = weights_E1 * sparse_EN
    vote_N = weighted_EN.sum(axis=0)
    size_N = _finite_size(weighted_EN).sum(axis=0)
    rounding_N = (len(case.weights) + FEW) * UNIT * size_N + np.where(size_N > 0, len(case.weights) * TINY, 0.0)
    may_be_positive_N, may_be_negative_N = ~(vote_N < -rounding_N), vote_N < rounding_N
    undetermined_N = undetermined_N | (size_N * max(1.0, abs(case.lambda_)) + _finite_size(base_N) > LARGEST)
    ranges = []
    for agreeing_EN, possible_N in ((weighted_EN > 0, may_be_positive_N), (weighted_EN < 0, may_be_negative_N)):
        merged_N, slack_N, unclear_N = _merge_agreeing(case, sparse_EN, weighted_EN, agreeing_EN)
        value_N = np.where(np.isnan(vote_N), np.nan, base_N + merged_N)
        slack_N = slack_N + UNIT * (_finite_size(base_N) + _finite_size(merged_N)) + TINY
        slack_N = np.where(np.isfinite(value_N), slack_N, 0.0)
        possible_N = possible_N | np.isnan(vote_N)
        # An outcome that the vote excludes is an empty range.
        ranges.append((np.where(possible_N, value_N - slack_N, 1.0), np.where(possible_N, value_N + slack_N, 0.0)))
        undetermined_N = undetermined_N | (unclear_N & possible_N)
    low_AN, high_AN = (np.stack(side) for side in zip(*ranges, strict=True))
    return Expected(low_AN, high_AN, undetermined_N)


def _merge_agreeing(
    case: MergeCase, sparse_EN: Numbers, weighted_EN: Numbers, agreeing_EN: Mask
) -> tuple[Numbers, Numbers, Mask]:
    """The merged delta, a bound on its rounding, and where the divisor is too ill-conditioned to say anything."""
    weights_E1 = np.array(case.weights)[:, None]
    n = len(case.weights) + FEW
    sum_N = np.where(agreeing_EN, weighted_EN, 0.0).sum(axis=0)
    size_N = _finite_size(np.where(agreeing_EN, weighted_EN, 0.0)).sum(axis=0)
    unclear_N = np.zeros(sum_N.shape, np.bool_)
    share_N, share_error_N = np.ones_like(sum_N), np.zeros_like(sum_N)
    underflow_N = np.zeros_like(sum_N)
    if case.normalize:
        weight_sum_N = np.where(agreeing_EN, weights_E1, 0.0).sum(axis=0)
        weight_size_N = np.where(agreeing_EN, np.abs(weights_E1), 0.0).sum(axis=0)
        share_N = np.where(weight_sum_N == 0.0, 1.0, weight_sum_N)
        share_error_N = n * UNIT * weight_size_N / np.abs(share_N)
        is_exact = all(float(w * 1024).is_integer() and abs(w) < 4096 for w in case.weights)
        unclear_N = (weight_size_N > 0) & ~is_exact & (np.abs(weight_sum_N) < 1e-3 * weight_size_N)
        # A weighted delta that underflows to zero in float32 agrees with nobody, and leaves the divisor.
        lost_N = ((weighted_EN != 0) & (np.abs(weighted_EN) < SMALLEST_SAFE_PRODUCT)).any(axis=0)
        underflow_N = np.where(lost_N, 2 * abs(case.lambda_) * _finite_size(sparse_EN).max(axis=0), 0.0)
        unclear_N |= lost_N & (min(case.weights) <= 0)
    merged_N = case.lambda_ * (sum_N / share_N)
    slack_N = abs(case.lambda_) * n * (UNIT * size_N + TINY) / np.abs(share_N)
    return merged_N, slack_N + _finite_size(merged_N) * (share_error_N + FEW * UNIT) + underflow_N + TINY, unclear_N
