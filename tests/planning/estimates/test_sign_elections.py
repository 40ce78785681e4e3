"""What a consensus is expected to lose: the rule as in the paper, and expectations that hold for fresh elements."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid
from mergepipe.operators.statistics import BLOCK_RECORD, TensorStatistics
from mergepipe.planning.budget import ShareBudget
from mergepipe.planning.candidates.operator_rules import share_with_ties
from mergepipe.planning.choices import PlanningChoices, Policy
from mergepipe.planning.estimates import sign_elections
from mergepipe.planning.estimates.sign_elections import (
    ElectionExperts,
    lost_and_total_energy,
    tail_magnitudes,
    ties_consensus,
)
from mergepipe.planning.planner import rank_blocks
from support.planning_problems import BLOCK, make

VOTERS = ElectionExperts(
    weight_E=np.array([1.0, 0.5, 0.7, 0.4]),
    share_E=np.array([0.2, 0.2, 0.3, 0.1]),
    energy_E=np.array([1.0, 4.0, 0.25, 0.01]),
    noise_E=np.zeros(4),
    is_read_E=np.array([True, False, True, False]),
    tail_E=np.array([0.2, 0.2, 0.3, 0.1]),
    normalize=True,
)


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


def drawn(voters: ElectionExperts, n: int, seed: int) -> tuple[float, float]:
    """The same from normal deltas that are really trimmed."""
    rng = np.random.default_rng(seed)
    kept = []
    for share, energy in zip(voters.share_E, voters.energy_E, strict=True):
        deltas_N = rng.standard_normal(n)
        cut = np.sort(np.abs(deltas_N))[::-1][int(share * n)]
        kept_N = np.where(np.abs(deltas_N) > cut, deltas_N, 0.0)
        kept.append(kept_N * np.sqrt(energy / np.mean(np.square(kept_N))))
    value_EN: NDArray[np.float64] = np.stack(kept)
    whole_N = ties_consensus(value_EN, voters.weight_E, normalize=voters.normalize)
    seen_N = ties_consensus(value_EN * voters.is_read_E[:, None], voters.weight_E, normalize=voters.normalize)
    return float(np.mean(np.square(seen_N - whole_N))), float(np.mean(np.square(whole_N)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("read", [(0,), (0, 2), (1, 2, 3), (0, 1, 2)])
def test_lost_and_all__is_what_fresh_elements_lose(read: tuple[int, ...], *, normalize: bool) -> None:
    is_read_E = np.isin(np.arange(4), read)
    voters = replace(VOTERS, is_read_E=is_read_E, normalize=normalize)
    lost, whole = lost_and_total_energy(voters)
    real_lost, real_whole = drawn(voters, 200_000, 7)
    assert abs(np.sqrt(lost / whole) - np.sqrt(real_lost / real_whole)) < 0.03
    assert whole == pytest.approx(real_whole, rel=0.2)


def test_lost_and_all__is_nothing_where_all_is_read_and_everything_where_nothing_is() -> None:
    everyone = replace(VOTERS, is_read_E=np.ones(4, np.bool_))
    assert lost_and_total_energy(everyone)[0] == 0.0
    lost, whole = lost_and_total_energy(replace(VOTERS, is_read_E=np.zeros(4, np.bool_)))
    assert lost == whole > 0
    assert 0 < lost_and_total_energy(replace(everyone, noise_E=0.01 * VOTERS.energy_E))[0] < whole


def test_lost_and_all__counts_who_is_small_but_heard() -> None:
    """Leaving out an expert that brings a hundredth of the energy costs far more: it took part in means."""
    small = replace(
        VOTERS, weight_E=np.ones(2), share_E=np.array([0.5, 0.5]), energy_E=np.array([1.0, 0.01]), noise_E=np.zeros(2),
        is_read_E=np.array([True, False]), tail_E=np.array([0.5, 0.5]),
    )  # fmt: skip
    lost, whole = lost_and_total_energy(small)
    assert lost > 5 * 0.01 * whole


@given(st.floats(0.001, 1.0))
def test_tail_sizes__rise_and_have_a_mean_square_of_one(share: float) -> None:
    sizes_Q = tail_magnitudes(share)
    assert (np.diff(sizes_Q) > 0).all()
    assert np.mean(np.square(sizes_Q)) == pytest.approx(1.0)
    assert sizes_Q[0] >= 0


@pytest.mark.parametrize("share", [0.0, 1e-16, 1e-30])
def test_lost_and_all__takes_experts_of_whom_next_to_nothing_is_kept(share: float) -> None:
    sizes_Q = tail_magnitudes(share)
    assert np.isfinite(sizes_Q).all()
    assert np.mean(np.square(sizes_Q)) == pytest.approx(1.0)
    share_E = np.array([0.2, 0.2, 0.3, share])
    lost, whole = lost_and_total_energy(replace(VOTERS, share_E=share_E, tail_E=share_E))
    assert 0 < lost < whole


def test_share_with_ties__is_between_the_densities_around_a_cut() -> None:
    statistics = TensorStatistics(
        BlockGrid(10, 10), np.zeros(1, BLOCK_RECORD), np.array([0.1, 0.2, 0.3, 0.5]),
        np.array([9, 7, 7, 3], np.uint32), np.zeros(3),
    )  # fmt: skip
    assert share_with_ties(statistics, 7) == pytest.approx(0.4)
    assert share_with_ties(statistics, 9) is None
    assert share_with_ties(None, 7) is None


def test_expected_error__of_very_many_access_patterns_is_estimated_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make("ties", 6, 3, sizes={"w": 120 * BLOCK}).problem
    ranking = rank_blocks(problem, ShareBudget(Fraction(1)), Policy.NORM, PlanningChoices())
    errors: dict[int, list[float]] = {}
    for most in (sign_elections._MOST_PATTERNS, 1 << 6):
        monkeypatch.setattr(sign_elections, "_MOST_PATTERNS", most)
        fresh = replace(ranking, error_by_prefix={})
        errors[most] = [fresh._error_at(ranking.full_cost_bytes * share // 10) for share in (1, 3, 5, 8, 10)]
    some, every = errors.values()
    assert some == pytest.approx(every, rel=0.1)
    assert some != every
    assert some[-1] == every[-1] == 0
