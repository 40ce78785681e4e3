"""Estimate what sign-electing rules lose where experts are not read, on sampled elements of one tensor.

Omitting an expert loses its own elements, but it also leaves the mean of those that agree with it to
others, and lets others win elections: more is lost than it brought itself. How much depends on how many experts keep an
element, how large their kept values are, and on their weights. That is sampled: per tensor, and per access pattern
of its blocks, elements whose deltas are normal and independent between experts, with the recorded energy.

An expert's sampled values are the same for all patterns of a tensor, up to a factor. The sums of either sign are thus
products of two matrices, computed for the patterns of several selections at once. Only errors of partial reads, which
can turn a sign, are added element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

SAMPLE_ELEMENTS = 4096
_QUANTILES = 512
_TAIL_POINTS = 1 << 15
_SHARES_KEPT = 8192  # one for each expert's tensor, where ties at cuts differ: 32 MiB
_VOTES_KEPT = 4  # for tensors with equal shares: 3 MiB each of 20 experts
_LEAST_SHARE = 1e-30  # avoids quantiles of an empty share
_SEED = 20_240_607
_PATTERNS_AT_ONCE = 16
_PRODUCTS_AT_ONCE = 1 << 18  # multiplications of a product of matrices: more of them OpenBLAS deals to threads
_ELEMENTS_AT_ONCE = 1024  # with as many patterns arrays of 128 KiB, which stay in the processor's cache
_EVEN = 1 - 1e-12  # sums of both signs that differ by less are a tie, whatever order they were added up in


@dataclass(frozen=True, slots=True, eq=False)
class ElementSample:
    """Random numbers of the sampled elements (E, N), the same for every tensor, so that plans are comparable.

    `order_EN` lists the elements in an order of each expert's own: the first are kept, later ones of them are larger.
    `even_N` are evenly spread numbers from 0 to 1: an element is kept where that of its place is below the share kept.
    """

    even_N: NDArray[np.float64]
    order_EN: NDArray[np.int64]
    sign_EN: NDArray[np.float64]
    noise_EN: NDArray[np.float64]


@lru_cache(maxsize=4)
def element_sample(n_experts: int) -> ElementSample:
    """Draw the element sample for a number of experts."""
    rng = np.random.default_rng(_SEED)
    shape = (n_experts, SAMPLE_ELEMENTS)
    even_N = (np.arange(SAMPLE_ELEMENTS) + 0.5) / SAMPLE_ELEMENTS
    return ElementSample(
        even_N=even_N,
        order_EN=np.stack([np.argsort(rng.permutation(even_N)) for _ in range(n_experts)]),
        sign_EN=rng.choice(np.array([-1.0, 1.0]), shape),
        noise_EN=rng.choice(np.array([-1.0, 1.0]), shape),
    )


@lru_cache(maxsize=_SHARES_KEPT)
def tail_magnitudes(share: float) -> NDArray[np.float64]:
    """Compute quantiles of |x| among the largest `share` of a normal sample, scaled to a mean square of 1."""
    middle = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    log_above_N, magnitude_N = _normal_tail()
    magnitude_Q = np.interp(np.log(max(share, _LEAST_SHARE) * (1 - middle) / 2), log_above_N, magnitude_N)
    return np.asarray(magnitude_Q / np.sqrt(np.mean(np.square(magnitude_Q))), np.float64)


@lru_cache(maxsize=1)
def _normal_tail() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the logarithms of probabilities from that of an empty share to a half, and the values that exceed them.

    Between them a straight line is within 1e-6 of the value.
    """
    normal, least = NormalDist(), np.log(_LEAST_SHARE / (4 * _QUANTILES))
    log_above_N = np.linspace(least, np.log(0.5), _TAIL_POINTS)
    magnitude_N = np.array([-normal.inv_cdf(above) for above in np.exp(log_above_N).tolist()])
    return log_above_N, magnitude_N


@dataclass(frozen=True, slots=True, eq=False)
class ElectionExperts:
    """The experts (E) that contribute to the sign election of a tensor: weights and shares of elements kept.

    `tail_E` is the share of largest elements that kept ones come from: 1 where they are kept at random.
    """

    weight_E: NDArray[np.float64]
    share_E: NDArray[np.float64]
    tail_E: NDArray[np.float64]
    normalize: bool

    def magnitudes_kept(self, energy_PE: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the root mean square of kept values from energies per element."""
        return np.asarray(
            np.sqrt(np.divide(energy_PE, self.share_E, out=np.zeros_like(energy_PE), where=self.share_E > 0))
        )


@dataclass(frozen=True, slots=True, eq=False)
class AccessPatterns:
    """Patterns (P) of what is read of the experts (E) in blocks of one tensor, with energies per element.

    `noise_PE` is the squared error per element of a partial read; `is_read_PE` is False for omitted experts.
    """

    energy_PE: NDArray[np.float64]
    noise_PE: NDArray[np.float64]
    is_read_PE: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Votes:
    """The kept values of the sampled elements, with a mean square of 1, by the sign that an expert votes for.

    Arrays with N hold the elements that several experts keep. `up_EN` and `down_EN` are magnitudes, 0 where the expert
    does not vote for the sign; `is_up_EN` and `is_down_EN` are 1 or 0. Of the elements that an expert keeps alone,
    whose result is its value, `alone_E` is the number and `alone_square_E` the sum of squares.
    """

    sign_E1: NDArray[np.float64]
    up_EN: NDArray[np.float64]
    down_EN: NDArray[np.float64]
    is_up_EN: NDArray[np.float64]
    is_down_EN: NDArray[np.float64]
    alone_E: NDArray[np.float64]
    alone_square_E: NDArray[np.float64]

    def values(self, elements: slice) -> NDArray[np.float64]:
        """Return the values themselves; 0 of experts without weight."""
        return (self.up_EN[:, elements] - self.down_EN[:, elements]) * self.sign_E1

    def slices(self) -> list[slice]:
        """Cut the elements into slices for `_PATTERNS_AT_ONCE` patterns."""
        n_experts, n_elements = self.up_EN.shape
        step = max(1, min(_ELEMENTS_AT_ONCE, _PRODUCTS_AT_ONCE // (_PATTERNS_AT_ONCE * max(1, n_experts))))
        return [slice(start, start + step) for start in range(0, n_elements, step)]

    def consensus(
        self, factor_PE: NDArray[np.float64], experts: ElectionExperts, elements: slice
    ) -> NDArray[np.float64]:
        """Merge as `ties_consensus` the values, those of each expert multiplied by a factor >= 0 of its pattern."""
        scale_PE = factor_PE * np.abs(experts.weight_E)
        up_PN, down_PN = scale_PE @ self.up_EN[:, elements], scale_PE @ self.down_EN[:, elements]
        elects_up_PN = up_PN >= down_PN * _EVEN
        elected_PN = np.where(elects_up_PN, up_PN, np.negative(down_PN, out=down_PN))
        if experts.normalize:
            weight_PE = np.where(factor_PE > 0, experts.weight_E, 0.0)
            if (weight_PE == weight_PE[:1]).all():
                weight_PE = weight_PE[:1]
            up_PN, down_PN = weight_PE @ self.is_up_EN[:, elements], weight_PE @ self.is_down_EN[:, elements]
            divisor_PN = np.where(elects_up_PN, up_PN, down_PN)
            divisor_PN[divisor_PN == 0] = 1.0
            elected_PN /= divisor_PN
        return elected_PN


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The sampled elements that the experts keep (K), one expert's after the other's.

    `is_shared_K` tells which of them other experts keep too, and `at_K` where those are in flat arrays (E, N) of such.
    """

    sample: ElementSample
    n_E: NDArray[np.int64]
    expert_K: NDArray[np.int64]
    element_K: NDArray[np.int64]
    is_shared_K: NDArray[np.bool_]
    at_K: NDArray[np.int64]
    n_shared: int

    @classmethod
    def of(cls, share_E: tuple[float, ...]) -> _Kept:
        sample = element_sample(len(share_E))
        n_E = np.searchsorted(sample.even_N, share_E)
        expert_K = np.repeat(np.arange(len(share_E)), n_E)
        element_K = np.concatenate([sample.order_EN[e, :n] for e, n in enumerate(n_E.tolist())])
        is_shared_N = np.bincount(element_K, minlength=SAMPLE_ELEMENTS) > 1
        n_shared = int(np.count_nonzero(is_shared_N))
        at_K = expert_K * n_shared + (np.cumsum(is_shared_N) - 1)[element_K]
        return cls(sample, n_E, expert_K, element_K, is_shared_N[element_K], at_K, n_shared)

    def spread(self, value_K: NDArray[np.float64], where_K: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return an array (E, N) of shared elements with the values of those in `where_K`, 0 elsewhere."""
        array_EN = np.zeros((len(self.n_E), self.n_shared))
        array_EN.reshape(-1)[self.at_K[where_K]] = value_K[where_K]
        return array_EN

    def magnitudes(self, share_E: tuple[float, ...], tail_E: tuple[float, ...]) -> NDArray[np.float64]:
        """Return the magnitudes of the kept elements (K), with a mean square of 1."""
        magnitudes = []
        for n, share, tail in zip(self.n_E.tolist(), share_E, tail_E, strict=True):
            quantile_N = np.minimum(self.sample.even_N[:n] / share * _QUANTILES, _QUANTILES - 1).astype(np.int64)
            magnitudes.append(tail_magnitudes(tail)[quantile_N])
        return np.concatenate(magnitudes)


@lru_cache(maxsize=_VOTES_KEPT)
def _votes(share_E: tuple[float, ...], tail_E: tuple[float, ...], sign_E: tuple[float, ...]) -> _Votes:
    """Draw the kept values of experts whose weights have the given signs."""
    kept = _Kept.of(share_E)
    magnitude_K, one_K = kept.magnitudes(share_E, tail_E), np.ones(len(kept.element_K))
    signed_K = kept.sample.sign_EN[kept.expert_K, kept.element_K] * np.array(sign_E)[kept.expert_K]
    up_K, down_K = kept.is_shared_K & (signed_K > 0), kept.is_shared_K & (signed_K < 0)
    square_K = np.where(kept.is_shared_K, 0.0, np.square(magnitude_K))
    return _Votes(
        np.array(sign_E)[:, None],
        kept.spread(magnitude_K, up_K),
        kept.spread(magnitude_K, down_K),
        kept.spread(one_K, up_K),
        kept.spread(one_K, down_K),
        np.asarray(np.bincount(kept.expert_K, ~kept.is_shared_K, len(share_E)), np.float64),
        np.asarray(np.bincount(kept.expert_K, square_K, len(share_E)), np.float64),
    )


@lru_cache(maxsize=_VOTES_KEPT)
def _unit_noise(share_E: tuple[float, ...]) -> NDArray[np.float64]:
    """Draw the signs of errors of kept values (E, N), of the elements that several experts keep; 0 where not kept."""
    kept = _Kept.of(share_E)
    return kept.spread(kept.sample.noise_EN[kept.expert_K, kept.element_K], kept.is_shared_K)


def lost_and_total_energies(
    experts: ElectionExperts, patterns: AccessPatterns
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimate by pattern the squared loss per element by what is not read, and the squared result per element.

    Memory: a few arrays of the sample (E, `SAMPLE_ELEMENTS`), and of 128 KiB.
    """
    share_E = tuple(experts.share_E.tolist())
    votes = _votes(share_E, tuple(experts.tail_E.tolist()), tuple(np.sign(experts.weight_E).tolist()))
    factor_PE = experts.magnitudes_kept(patterns.energy_PE)
    read_PE = factor_PE * patterns.is_read_PE
    error_PE = experts.magnitudes_kept(patterns.noise_PE) * patterns.is_read_PE
    loses_P = (read_PE != factor_PE).any(axis=1) | error_PE.any(axis=1)
    square_E = np.square(np.sign(experts.weight_E) if experts.normalize else experts.weight_E)  # of what stands alone
    whole_P = np.square(factor_PE) @ (square_E * votes.alone_square_E)
    lost_P = np.square(factor_PE - read_PE) @ (square_E * votes.alone_square_E)
    lost_P += np.square(error_PE) @ (square_E * votes.alone_E)
    for start in range(0, len(factor_PE), _PATTERNS_AT_ONCE):
        at = slice(start, start + _PATTERNS_AT_ONCE)
        losing = np.flatnonzero(loses_P[at])
        noisy = np.flatnonzero(error_PE[start + losing].any(axis=1))
        for elements in votes.slices():
            whole_PN = votes.consensus(factor_PE[at], experts, elements)
            whole_P[at] += np.einsum("pn,pn->p", whole_PN, whole_PN)
            lost_PN = whole_PN[losing]
            lost_PN -= votes.consensus(read_PE[at][losing], experts, elements)
            for row in noisy.tolist():
                p = start + losing[row]
                read_EN = votes.values(elements) * read_PE[p, :, None]
                read_EN += _unit_noise(share_E)[:, elements] * error_PE[p, :, None]
                read_N = ties_consensus(read_EN, experts.weight_E, normalize=experts.normalize)
                lost_PN[row] = whole_PN[losing[row]] - read_N
            lost_P[start + losing] += np.einsum("pn,pn->p", lost_PN, lost_PN)
    return lost_P / SAMPLE_ELEMENTS, whole_P / SAMPLE_ELEMENTS


def ties_consensus(
    value_EN: NDArray[np.float64], weight_E: NDArray[np.float64], *, normalize: bool
) -> NDArray[np.float64]:
    """Merge by TIES consensus (2306.01708, algorithm 1): weighted sum, or mean, of values of the elected sign."""
    weighted_EN = value_EN * weight_E[:, None]
    is_up_EN = weighted_EN > 0
    sum_N: NDArray[np.float64] = weighted_EN.sum(axis=0)
    up_N = (weighted_EN * is_up_EN).sum(axis=0)
    elects_up_N = sum_N >= 0
    elected_N: NDArray[np.float64] = np.where(elects_up_N, up_N, sum_N - up_N)
    if not normalize:
        return elected_N
    up_weight_N = weight_E @ is_up_EN
    down_weight_N = weight_E @ ((value_EN != 0) ^ is_up_EN)
    divisor_N = np.where(elects_up_N, up_weight_N, down_weight_N)
    return elected_N / np.where(divisor_N == 0, 1.0, divisor_N)
