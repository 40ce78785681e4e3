"""Densities fall towards what the budget can hold, inside their bounds, and every decision is told."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.operators.statistics import COMMON_DENSITIES
from mergepipe.planning.budget import AdjustPolicy, PlanningChoices, Policy, ShareBudget
from mergepipe.planning.planner import adjusted_density, rank_blocks
from support.planning_problems import make

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
    ranking = rank_blocks(given.problem, ShareBudget(share), Policy.NORM, PlanningChoices(adjust=AdjustPolicy(0.1)))
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
def test_adjust_policy__refuses_what_is_no_density(density: float) -> None:
    with pytest.raises(ValueError, match="not a density"):
        AdjustPolicy(density)
