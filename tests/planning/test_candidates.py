"""Scores of blocks, densities that fall towards what the budget can hold, and what content ids cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import content_id
from mergepipe.operators.statistics import COMMON_DENSITIES, N_OCTAVES, OCTAVE_SHARES
from mergepipe.planning.budget import PlanningChoices, Policy, ShareBudget
from mergepipe.planning.candidates import find_candidates, octave_position
from mergepipe.planning.planner import adjusted_density, rank_blocks
from mergepipe.planning.problem import sample_cost_bytes
from mergepipe.recipes.recipe import Scalar
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES
from mergepipe.storage.location import Location
from support.octaves import decode_octaves
from support.planning_problems import BLOCK, Given, checkpoint, make


def scores_of(given: Given) -> NDArray[np.float64]:
    return find_candidates(given.problem, samples=False).score_EB


SIZES = {"w": 6 * BLOCK}


def energies(given: Given, keep_above: float = 0.0) -> NDArray[np.float64]:
    delta_EN = np.stack([each["w"] for each in given.experts]).astype(np.float64) - given.base["w"]
    kept_EN = np.where(np.abs(delta_EN) >= keep_above, delta_EN, 0.0)
    return np.asarray(np.square(kept_EN).reshape(len(delta_EN), -1, BLOCK).sum(axis=2), np.float64)


def test_scores__of_fixed_coefficients_are_squared_coefficients_times_energy() -> None:
    given = make("task_arithmetic", 2, sizes=SIZES, weights=(0.5, -2.0), parameters={"lambda": 3.0})
    expected_EB = np.array([[1.5], [-6.0]]) ** 2 * energies(given)
    np.testing.assert_allclose(scores_of(given), expected_EB, rtol=1e-5)


@pytest.mark.parametrize("density", [0.02, 0.2, 0.5])
def test_scores__of_ties_are_the_energy_above_the_tensors_cut(density: float) -> None:
    given = make("ties", 1, sizes=SIZES, parameters={"weight": 1.0, "density": density, "normalize": False})
    statistics = given.problem.statistics[0]["w"]
    known = statistics.cut(int(density * statistics.grid.n_elements))
    assert known is not None
    cut = float(np.array([known.bits], np.uint32).view(np.float32)[0])
    true_B, found_B = energies(given, cut)[0], scores_of(given)[0]
    assert found_B.sum() == pytest.approx(true_B.sum(), rel=0.2)
    assert np.argsort(found_B)[-3:].tolist() == np.argsort(true_B)[-3:].tolist()
    assert (found_B[true_B == 0] < 0.05 * energies(given)[0][true_B == 0]).all()


@pytest.mark.parametrize(("rescale", "factor"), [(True, 4.0), (False, 0.25)])
def test_scores__of_dare_are_the_expected_energy_of_what_is_kept(rescale: bool, factor: float) -> None:
    parameters: Mapping[str, Scalar] = {"weight": 0.5, "density": 0.25, "rescale": rescale}
    given = make("dare_linear", 2, sizes=SIZES, parameters=parameters)
    np.testing.assert_allclose(scores_of(given), 0.25 * factor * energies(given), rtol=1e-5)


def test_scores__of_slerp_are_squared_shares_of_the_other_model() -> None:
    given = make("slerp", 1, sizes=SIZES)
    np.testing.assert_allclose(scores_of(given), 0.3**2 * energies(given), rtol=0.01)


def test_scores__of_what_is_not_known_take_the_typical_energy_of_an_element() -> None:
    given = make("task_arithmetic", 2, sizes=SIZES, parameters={"weight": 0.5}).without_statistics([(1, "w")])
    typical = np.median(energies(given)[0] / BLOCK)
    np.testing.assert_allclose(scores_of(given)[1], 0.25 * BLOCK * typical, rtol=1e-5)
    nothing = given.without_statistics([(0, "w"), (1, "w")])
    np.testing.assert_allclose(scores_of(nothing), 0.25 * BLOCK)


def test_octave_shares__agree_with_the_statistics() -> None:
    octaves_BO = np.random.default_rng(0).integers(0, 241, (50, N_OCTAVES)).astype(np.uint8)
    shares_BO = OCTAVE_SHARES[octaves_BO].astype(np.float64)
    total_B1 = shares_BO.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares_BO / total_B1, decode_octaves(octaves_BO), rtol=1e-5)


@given(largest=st.floats(1e-6, 1e6), octaves=st.integers(0, N_OCTAVES - 1), inside=st.floats(0.51, 0.99))
def test_octave_position__counts_whole_octaves_and_a_share_of_the_last(
    largest: float, octaves: int, inside: float
) -> None:
    cut = largest * inside / 2.0**octaves
    found = float(octave_position(np.array([largest], np.float32), np.array([cut], np.float32))[0])
    share = 1 - inside if octaves == N_OCTAVES - 1 else -math.log2(inside)
    assert found == pytest.approx(octaves + share, abs=0.011)


def test_octave_position__keeps_all_or_nothing_at_the_ends() -> None:
    largest = np.array([1.0, 1.0, 1.0, np.inf, 0.0], np.float32)
    cut = np.array([0.0, 1.5, np.inf, 1.0, 0.0], np.float32)
    assert octave_position(largest, cut).tolist() == [16.0, 0.0, 0.0, 16.0, 16.0]


SHARES = st.floats(0.001, 1.0)


@given(density=SHARES, lowest=SHARES, held=st.floats(0, 1), is_known=st.booleans())
def test_adjusted_density__stays_between_the_bound_and_the_recipe(
    density: float, lowest: float, held: float, is_known: bool
) -> None:
    known = COMMON_DENSITIES if is_known else None
    found = adjusted_density(density, lowest, held, known)
    assert min(density, lowest) <= found <= density
    assert found == density or not is_known or found in COMMON_DENSITIES


@given(density=SHARES, lowest=SHARES)
def test_adjusted_density__is_the_recipes_where_everything_is_held(density: float, lowest: float) -> None:
    assert adjusted_density(density, lowest, 1.0, None) == density
    assert adjusted_density(density, lowest, 1.0, COMMON_DENSITIES) == density


@pytest.mark.parametrize(
    ("operator", "density", "share", "adjusted"),
    [
        ("ties", 0.5, Fraction(12, 100), 0.15),
        ("ties", 0.5, Fraction(1, 100), 0.1),
        ("ties", 0.05, Fraction(1, 100), 0.05),
        ("dare_linear", 0.5, Fraction(1, 4), 0.25),
        ("dare_ties", 0.5, Fraction(9, 10), 0.5),
    ],
)
def test_plan__uses_the_adjusted_density_and_says_so(
    operator: str, density: float, share: Fraction, adjusted: float
) -> None:
    given = make(operator, parameters={"weight": 1.0, "density": density}).with_content_ids()
    ranking = rank_blocks(given.problem, ShareBudget(share), Policy.NORM, PlanningChoices(min_density=0.1))
    plan = ranking.plan(ranking.budget_bytes)
    densities = [
        float(each["density"]) for tensor in plan.tensors for each in plan.parameters[tensor.parameters].experts
    ]
    assert densities == pytest.approx([adjusted] * 15, rel=1e-4)
    said = f"density {density:g} -> {densities[0]:g}" if densities[0] != density else f"density stays at {density:g}"
    assert [(each.where, each.decision) for each in plan.adjustments] == [
        (f"expert './expert-{e}'", said) for e in range(3)
    ]
    if operator == "ties":
        assert None not in plan.tensors[0].cuts_E
    assert plan.planned_bytes <= plan.budget_bytes


def test_plan__adjusts_nothing_unless_asked() -> None:
    ranking = rank_blocks(make("ties").problem, ShareBudget(Fraction(1, 50)), Policy.NORM, PlanningChoices())
    plan = ranking.plan(ranking.budget_bytes)
    assert plan.adjustments == ()
    assert plan.parameters[0].experts[0]["density"] == 0.2


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_planning_choices__refuse_what_is_no_density(density: float) -> None:
    with pytest.raises(ValueError, match="not a density"):
        PlanningChoices(min_density=density)


class CountingFile:
    """A file of zeros that is read in pages."""

    location = Location.parse("/zeros")
    size_bytes = 2**62
    alignment = DIRECT_ALIGNMENT_BYTES
    version = ""

    def __init__(self) -> None:
        self.requested_bytes = 0

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        self.requested_bytes += len(buffer)
        return len(buffer)

    def close(self) -> None:
        """Nothing to close."""


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 40_000), min_size=1, max_size=6),
    first_offset=st.integers(0, 9000),
)
def test_sample_cost__is_what_the_engine_requests(sizes: dict[str, int], first_offset: int) -> None:
    model = checkpoint("m", {name: np.zeros(n, np.float32) for name, n in sizes.items()}, first_offset)
    file = CountingFile()
    content_id(model, {tensor.stored[0].file: file for tensor in model.tensors.values()})
    assert sample_cost_bytes(model) == file.requested_bytes
