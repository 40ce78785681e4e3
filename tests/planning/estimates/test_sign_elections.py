"""What a consensus is expected to lose: the rule as in the paper, and expectations that hold for fresh elements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.planning.budget import ShareBudget
from mergepipe.planning.choices import PlanningChoices, Policy
from mergepipe.planning.estimates import expected_errors
from mergepipe.planning.estimates.sign_elections import (
    AccessPatterns,
    ElectionExperts,
    element_sample,
    lost_and_total_energies,
    tail_magnitudes,
    ties_consensus,
)
from mergepipe.planning.planner import rank_blocks
from support.planning_problems import BLOCK, make

VOTERS = ElectionExperts(
    weight_E=np.array([1.0, 0.5, 0.7, 0.4]),
    share_E=np.array([0.2, 0.2, 0.3, 0.1]),
    tail_E=np.array([0.2, 0.2, 0.3, 0.1]),
    normalize=True,
)
ENERGY_E = np.array([1.0, 4.0, 0.25, 0.01])


def lost_and_total(
    voters: ElectionExperts, read: Collection[int], energy_E: NDArray[np.float64] = ENERGY_E, noise: float = 0.0
) -> tuple[float, float]:
    """The estimate of one pattern, in which the experts `read` are read with a share `noise` of their energy lost."""
    is_read_PE = np.isin(np.arange(len(energy_E)), list(read))[None]
    lost_P, whole_P = lost_and_total_energies(
        voters, AccessPatterns(energy_E[None], noise * energy_E[None] * is_read_PE, is_read_PE)
    )
    return float(lost_P[0]), float(whole_P[0])


def slowly_elected(values: list[float], weights: list[float], *, normalize: bool) -> float:
    """One element, as TIES is written down."""
    is_up = sum(w * v for w, v in zip(weights, values, strict=True)) >= 0
    heard = [(w, v) for w, v in zip(weights, values, strict=True) if v != 0 and (w * v > 0) == is_up]
    total = sum(w * v for w, v in heard)
    return total / (sum(w for w, _ in heard) or 1.0) if normalize else total


@given(
    values=st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=3, max_size=3), min_size=1),
    normalize=st.booleans(),
)
def test_elected__is_the_consensus_of_ties(values: list[list[float]], *, normalize: bool) -> None:
    weights = [1.0, 0.5, 0.25]
    found_N = ties_consensus(np.array(values).T, np.array(weights), normalize=normalize)
    assert found_N.tolist() == pytest.approx([slowly_elected(each, weights, normalize=normalize) for each in values])


def drawn(voters: ElectionExperts, read: Collection[int], n: int, seed: int) -> tuple[float, float]:
    """The same from normal deltas that are really trimmed."""
    rng = np.random.default_rng(seed)
    kept = []
    for share, energy in zip(voters.share_E, ENERGY_E, strict=True):
        deltas_N = rng.standard_normal(n)
        cut = np.sort(np.abs(deltas_N))[::-1][int(share * n)]
        kept_N = np.where(np.abs(deltas_N) > cut, deltas_N, 0.0)
        kept.append(kept_N * np.sqrt(energy / np.mean(np.square(kept_N))))
    value_EN: NDArray[np.float64] = np.stack(kept)
    is_read_E1 = np.isin(np.arange(4), list(read))[:, None]
    whole_N = ties_consensus(value_EN, voters.weight_E, normalize=voters.normalize)
    seen_N = ties_consensus(value_EN * is_read_E1, voters.weight_E, normalize=voters.normalize)
    return float(np.mean(np.square(seen_N - whole_N))), float(np.mean(np.square(whole_N)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("read", [(0,), (0, 2), (1, 2, 3), (0, 1, 2)])
def test_lost_and_total__is_what_fresh_elements_lose(read: tuple[int, ...], *, normalize: bool) -> None:
    voters = replace(VOTERS, normalize=normalize)
    lost, whole = lost_and_total(voters, read)
    real_lost, real_whole = drawn(voters, read, 200_000, 7)
    assert abs(np.sqrt(lost / whole) - np.sqrt(real_lost / real_whole)) < 0.03
    assert whole == pytest.approx(real_whole, rel=0.2)


def test_lost_and_total__is_nothing_where_all_is_read_and_everything_where_nothing_is() -> None:
    assert lost_and_total(VOTERS, range(4))[0] == 0.0
    lost, whole = lost_and_total(VOTERS, ())
    assert lost == whole > 0
    assert 0 < lost_and_total(VOTERS, range(4), noise=0.01)[0] < whole


def test_lost_and_total__counts_who_is_small_but_heard() -> None:
    """Leaving out an expert that brings a hundredth of the energy costs far more: it took part in means."""
    share_E = np.array([0.5, 0.5])
    small = replace(VOTERS, weight_E=np.ones(2), share_E=share_E, tail_E=share_E)
    lost, whole = lost_and_total(small, (0,), np.array([1.0, 0.01]))
    assert lost > 5 * 0.01 * whole


EXPERTS = 5
NUMBERS = st.lists(st.floats(0.01, 1.0), min_size=EXPERTS, max_size=EXPERTS)


@settings(max_examples=40)
@given(
    weights=st.lists(st.sampled_from([-0.5, 0.0, 0.25, 1.0]), min_size=EXPERTS, max_size=EXPERTS),
    shares=NUMBERS,
    patterns=st.lists(st.tuples(NUMBERS, NUMBERS, st.sets(st.integers(0, EXPERTS - 1))), min_size=1, max_size=20),
    normalize=st.booleans(),
    is_noisy=st.booleans(),
)
def test_lost_and_total__of_patterns_together_is_the_consensus_of_each(
    weights: list[float],
    shares: list[float],
    patterns: list[tuple[list[float], list[float], set[int]]],
    *,
    normalize: bool,
    is_noisy: bool,
) -> None:
    share_E, weight_E = np.array(shares), np.array(weights)
    experts = ElectionExperts(weight_E, share_E, np.maximum(share_E, 0.5), normalize)
    energy_PE, noise_PE = (np.array([pattern[i] for pattern in patterns]) for i in (0, 1))
    is_read_PE = np.array([np.isin(np.arange(EXPERTS), list(read)) for _, _, read in patterns])
    noise_PE = noise_PE * 0.1 * is_noisy * is_read_PE
    lost_P, whole_P = lost_and_total_energies(experts, AccessPatterns(energy_PE, noise_PE, is_read_PE))
    sample = element_sample(EXPERTS)
    place_EN = np.argsort(sample.order_EN, axis=1)
    value_EN, error_EN = np.zeros(place_EN.shape), np.zeros(place_EN.shape)
    for e, share in enumerate(shares):
        kept_N = sample.even_N[place_EN[e]] < share
        quantile_N = (sample.even_N[place_EN[e]] / share * 512).astype(int)[kept_N]
        value_EN[e, kept_N] = (sample.sign_EN[e, kept_N] * tail_magnitudes(max(share, 0.5))[quantile_N]) / share**0.5
        error_EN[e, kept_N] = sample.noise_EN[e, kept_N] / share**0.5
    for energy_E, noise_E, is_read_E, lost, whole in zip(energy_PE, noise_PE, is_read_PE, lost_P, whole_P, strict=True):
        scaled_EN = value_EN * np.sqrt(energy_E)[:, None]
        read_EN = scaled_EN * is_read_E[:, None] + error_EN * np.sqrt(noise_E)[:, None]
        whole_N = ties_consensus(scaled_EN, weight_E, normalize=normalize)
        lost_N = ties_consensus(read_EN, weight_E, normalize=normalize) - whole_N
        assert whole == pytest.approx(np.mean(np.square(whole_N)), rel=1e-9, abs=1e-12)
        assert lost == pytest.approx(np.mean(np.square(lost_N)), rel=1e-9, abs=1e-12)


@given(st.floats(0.001, 1.0))
def test_tail_sizes__rise_and_have_a_mean_square_of_one(share: float) -> None:
    sizes_Q = tail_magnitudes(share)
    assert (np.diff(sizes_Q) > 0).all()
    assert np.mean(np.square(sizes_Q)) == pytest.approx(1.0)
    assert sizes_Q[0] >= 0


@pytest.mark.parametrize("share", [0.0, 1e-16, 1e-30])
def test_lost_and_total__takes_experts_of_whom_next_to_nothing_is_kept(share: float) -> None:
    sizes_Q = tail_magnitudes(share)
    assert np.isfinite(sizes_Q).all()
    assert np.mean(np.square(sizes_Q)) == pytest.approx(1.0)
    share_E = np.array([0.2, 0.2, 0.3, share])
    lost, whole = lost_and_total(replace(VOTERS, share_E=share_E, tail_E=share_E), (0, 2))
    assert 0 < lost < whole


def test_expected_error__of_very_many_access_patterns_is_estimated_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make("ties", 6, 3, sizes={"w": 120 * BLOCK}).problem
    ranking = rank_blocks(problem, ShareBudget(Fraction(1)), Policy.NORM, PlanningChoices())
    errors: dict[int, list[float]] = {}
    for most in (expected_errors._MOST_PATTERNS, 1 << 6):
        monkeypatch.setattr(expected_errors, "_MOST_PATTERNS", most)
        fresh = replace(ranking, error_by_prefix={})
        errors[most] = [fresh._error_at(ranking.full_cost_bytes * share // 10) for share in (1, 3, 5, 8, 10)]
    some, every = errors.values()
    assert some == pytest.approx(every, rel=0.1)
    assert some != every
    assert some[-1] == every[-1] == 0


def test_outlook__is_estimated_with_the_plan() -> None:
    problem = make("ties", 6, 3, sizes={"w": 120 * BLOCK, "v": 7 * BLOCK}).problem
    ranking = rank_blocks(problem, ShareBudget(Fraction(1, 5)), Policy.NORM, PlanningChoices())
    plan = ranking.plan(ranking.budget_bytes)
    estimated = dict(ranking.error_by_prefix)
    outlook = ranking.outlook(plan)
    assert outlook is not None
    assert outlook.larger_expected_error < outlook.expected_error
    assert ranking.error_by_prefix == estimated
