"""Estimate the expected loss of sign-electing rules where experts are not read, on sampled elements.

Omitting an expert loses its own elements, but it also leaves the mean of those that agree with it to
others, and lets others win elections: more is lost than it brought itself. How much depends on how many experts keep an
element, how large their kept values are, and on their weights. That is sampled: per tensor, and per access pattern
of its blocks, elements whose deltas are normal and independent between experts, with the recorded energy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import LeveledTensor, TensorEntry
from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.items import Candidates
from mergepipe.planning.candidates.operator_rules import Rules
from mergepipe.planning.estimates.energy_left import energies_by_tensor, energy_left
from mergepipe.planning.selection.select import Selection

SAMPLE_ELEMENTS = 4096
_QUANTILES = 512
_SHARES_KEPT = 4096  # one for each expert's tensor, where ties at cuts differ: 16 MiB
_LEAST_SHARE = 1e-30  # avoids quantiles of an empty share
_DIGITS = 4  # so that plans do not depend on the last bits of a sum
_SEED = 20_240_607


@dataclass(frozen=True, slots=True, eq=False)
class ElementSample:
    """Random numbers of the sampled elements (E, N), the same for every tensor, so that plans are comparable.

    `rank_EN` has evenly spread numbers from 0 to 1 in an order of each expert's own: an element is kept where it is
    below the share that is kept, and how large it is follows from where below.
    """

    rank_EN: NDArray[np.float64]
    sign_EN: NDArray[np.float64]
    noise_EN: NDArray[np.float64]


@lru_cache(maxsize=4)
def element_sample(n_experts: int) -> ElementSample:
    """Draw the element sample for a number of experts."""
    rng = np.random.default_rng(_SEED)
    shape = (n_experts, SAMPLE_ELEMENTS)
    even_N = (np.arange(SAMPLE_ELEMENTS) + 0.5) / SAMPLE_ELEMENTS
    return ElementSample(
        rank_EN=np.stack([rng.permutation(even_N) for _ in range(n_experts)]),
        sign_EN=rng.choice(np.array([-1.0, 1.0]), shape),
        noise_EN=rng.choice(np.array([-1.0, 1.0]), shape),
    )


@lru_cache(maxsize=_SHARES_KEPT)
def tail_magnitudes(share: float) -> NDArray[np.float64]:
    """Compute quantiles of |x| among the largest `share` of a normal sample, scaled to a mean square of 1."""
    normal = NormalDist()
    middle = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    above_Q = max(share, _LEAST_SHARE) * (1 - middle) / 2
    magnitude_Q = np.array([-normal.inv_cdf(float(above)) for above in above_Q])
    return np.asarray(magnitude_Q / np.sqrt(np.mean(np.square(magnitude_Q))), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ElectionExperts:
    """The experts (E) that contribute to a sign election: weights, shares kept, energies per element, what is read.

    `noise_E` is the squared error per element of a partial read; `is_read_E` is False for omitted experts.
    `tail_E` is the share of largest elements that kept ones come from: 1 where they are kept at random.
    """

    weight_E: NDArray[np.float64]
    share_E: NDArray[np.float64]
    energy_E: NDArray[np.float64]
    noise_E: NDArray[np.float64]
    is_read_E: NDArray[np.bool_]
    tail_E: NDArray[np.float64]
    normalize: bool


@lru_cache(maxsize=64)
def _unit_values(share_E: tuple[float, ...], tail_E: tuple[float, ...]) -> NDArray[np.float64]:
    """Draw the kept values (E, N), with a mean square of 1 among those kept, of the elements that any expert keeps."""
    sample, shares_E1 = element_sample(len(share_E)), np.array(share_E)[:, None]
    is_kept_EN = sample.rank_EN < shares_E1
    place_EN = sample.rank_EN / np.where(shares_E1 > 0, shares_E1, 1.0)
    quantile_EN = np.clip(place_EN * _QUANTILES, 0, _QUANTILES - 1).astype(np.int64)
    magnitude_EN = np.stack([tail_magnitudes(tail)[at_N] for tail, at_N in zip(tail_E, quantile_EN, strict=True)])
    return np.asarray(np.where(is_kept_EN, sample.sign_EN * magnitude_EN, 0.0)[:, is_kept_EN.any(axis=0)])


@lru_cache(maxsize=64)
def _unit_noise(share_E: tuple[float, ...]) -> NDArray[np.float64]:
    """Draw the signs of errors of kept values (E, N), of the elements that any expert keeps; 0 where not kept."""
    sample = element_sample(len(share_E))
    is_kept_EN = sample.rank_EN < np.array(share_E)[:, None]
    return np.asarray(np.where(is_kept_EN, sample.noise_EN, 0.0)[:, is_kept_EN.any(axis=0)])


def lost_and_total_energy(experts: ElectionExperts) -> tuple[float, float]:
    """Estimate the squared loss per element by unread experts, and the squared result per element."""
    share_E = tuple(experts.share_E.tolist())
    value_EN = _unit_values(share_E, tuple(experts.tail_E.tolist())) * _per_kept(experts.energy_E, experts)[:, None]
    read_EN = value_EN * experts.is_read_E[:, None]
    if experts.noise_E.any():
        noise_E = np.where(experts.is_read_E, _per_kept(experts.noise_E, experts), 0.0)
        read_EN += _unit_noise(share_E) * noise_E[:, None]
    whole_N = ties_consensus(value_EN, experts.weight_E, normalize=experts.normalize)
    lost_N = ties_consensus(read_EN, experts.weight_E, normalize=experts.normalize) - whole_N
    return float(lost_N @ lost_N) / SAMPLE_ELEMENTS, float(whole_N @ whole_N) / SAMPLE_ELEMENTS


def _per_kept(energy_E: NDArray[np.float64], experts: ElectionExperts) -> NDArray[np.float64]:
    """Compute the root mean square of kept values from energies per element."""
    share_E = experts.share_E
    return np.asarray(np.sqrt(np.divide(energy_E, share_E, out=np.zeros_like(energy_E), where=share_E > 0)))


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


def expected_energies(
    candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64], rules: Rules
) -> NDArray[np.float64]:
    """Estimate `energy_ET2` by expert and tensor: (energy left out, total), as if deltas were uncorrelated."""
    if rules.elects:
        return election_energies(candidates, selection, score_EB, rules)
    return energies_by_tensor(candidates, selection, score_EB)


def expected_error(energy_ET2: NDArray[np.float64]) -> float:
    """Compute the error relative to what the full merge changes."""
    lost, whole = energy_ET2.sum(axis=(0, 1))
    return float(np.sqrt(lost / whole)) if whole > 0 else 0.0


def election_energies(
    candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64], rules: Rules
) -> NDArray[np.float64]:
    """Estimate `energy_ET2` of tensors with sign elections: (loss, total), split over experts by their own parts.

    Zero for tensors without an election (`rules.elections_T`).
    """
    energy_ET2 = np.zeros((candidates.n_experts, len(candidates.columns.tasks), 2))
    left_EB = energy_left(candidates, selection, score_EB)
    for t, election in enumerate(rules.elections_T):
        inside = candidates.columns.of_tensor(t)
        if election is None or inside.start == inside.stop:
            continue
        lost = whole = 0.0
        for experts, n_elements in _access_patterns(candidates, selection, score_EB, left_EB, rules, t):
            square, square_of_all = lost_and_total_energy(experts)
            weight = n_elements * election.scale**2
            lost, whole = lost + square * weight, whole + square_of_all * weight
        is_free_EB = candidates.free_EB[:, inside]
        for column, total, parts_EB in ((0, lost, left_EB), (1, whole, score_EB)):
            part_E = np.where(is_free_EB, 0.0, parts_EB[:, inside]).sum(axis=1)
            energy_ET2[:, t, column] = _distributed(total, part_E)
    return energy_ET2


def _distributed(total: float, part_E: NDArray[np.float64]) -> NDArray[np.float64]:
    whole = part_E.sum()
    rounded = float(f"{total:.{_DIGITS}g}")
    return rounded * part_E / whole if whole > 0 else np.zeros_like(part_E)


def _access_patterns(
    candidates: Candidates,
    selection: Selection,
    score_EB: NDArray[np.float64],
    left_EB: NDArray[np.float64],
    rules: Rules,
    t: int,
) -> Iterator[tuple[ElectionExperts, int]]:
    """Group the blocks of a tensor by access pattern; yield each group's experts and number of elements."""
    election, columns = rules.elections_T[t], candidates.columns
    if election is None:
        return
    inside = columns.of_tensor(t)
    free_EB = candidates.free_EB[:, inside]
    form_EB = np.where(selection.served_EB[:, inside], -1, selection.level_EB[:, inside])
    form_EB = np.where(free_EB, -2, form_EB)
    _, pattern_B = np.unique(form_EB, axis=1, return_inverse=True)
    square_E1 = np.square(rules.coefficient_ET[:, t])[:, None]
    energy_EB, noise_EB = (
        np.divide(each_EB[:, inside], square_E1, out=np.zeros(form_EB.shape), where=(square_E1 > 0) & ~free_EB)
        for each_EB in (score_EB, left_EB)
    )
    share_E = _shares_kept(columns, rules, t, columns.by_expert(t, election.share_E, 0.0))
    for pattern in range(int(pattern_B.max(initial=-1)) + 1):
        own_B = pattern_B.ravel() == pattern
        n_elements = int(columns.n_B[inside][own_B].sum())
        is_read_E = form_EB[:, own_B][:, 0] != 0
        yield (
            ElectionExperts(
                weight_E=columns.by_expert(t, election.weight_E, 0.0),
                share_E=share_E,
                energy_E=energy_EB[:, own_B].sum(axis=1) / n_elements,
                noise_E=np.where(is_read_E, noise_EB[:, own_B].sum(axis=1) / n_elements, 0.0),
                is_read_E=is_read_E,
                tail_E=np.maximum(columns.by_expert(t, election.tail_E, 1.0), share_E),
                normalize=election.normalize,
            ),
            n_elements,
        )


def _shares_kept(columns: Columns, rules: Rules, t: int, share_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares of elements kept, ties at the cut included where recorded."""
    kept_share_E, n_elements = share_E.copy(), columns.tasks[t].base.n_elements
    for e in columns.participants(t):
        source = columns.source(e, t)
        if (e, t) in rules.shares_kept:
            kept_share_E[e] = rules.shares_kept[e, t]
        if share_E[e] == 1 or source is None or isinstance(source, TensorEntry):  # asked first: protocols are slow
            continue
        if isinstance(source, LeveledTensor):
            n_kept = source.kept_with_ties(int(share_E[e] * n_elements))
            kept_share_E[e] = kept_share_E[e] if n_kept is None else n_kept / n_elements
    return kept_share_E


def is_error_complete(columns: Columns, rules: Rules) -> bool:
    """Whether the expected error covers everything that is lost.

    Not for other non-additive rules, nor where an expert is trimmed inside a band of its store: there levels differ in
    what is kept, which is not recorded.
    """
    if not rules.elects:
        return rules.is_additive
    for t, election in enumerate(rules.elections_T):
        share_E = columns.by_expert(t, election.tail_E, 1.0) if election is not None else np.ones(columns.n_experts)
        n_elements = columns.tasks[t].base.n_elements
        for e in columns.participants(t) if n_elements else ():
            source = columns.source(e, t)
            if share_E[e] == 1 or source is None or not isinstance(source, LeveledTensor):
                continue
            if source.kept_with_ties(int(share_E[e] * n_elements)) is None:
                return False
    return True
