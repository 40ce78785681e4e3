"""The bound is never smaller than what omission really costs, measured on the deltas in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.blocks import BlockGrid
from mergepipe.engine.planned_access import OMITTED, source_of_blocks
from mergepipe.planning.budget import ByteBudget, ShareBudget
from mergepipe.planning.choices import OnOmit, PlanningChoices, Policy
from mergepipe.planning.plan import Plan, PlannedTensor
from mergepipe.planning.planner import plan_merge
from support.planning_problems import DEFAULT_SIZES, Given, make, random_arrays


def present_elements(plan: Plan, tensor: PlannedTensor) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which elements (E, N) of the experts' deltas the merge knows."""
    grid = BlockGrid(tensor.n_elements, plan.block_elements)
    present_EB = source_of_blocks(tensor, grid.n_blocks) != OMITTED
    lengths = [span.n_elements for span in grid.spans()]
    return np.repeat(present_EB, lengths, axis=1)


def coefficients(operator: str, tensor: PlannedTensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.array([float(each["weight"]) for each in tensor.experts])
    if operator == "task_arithmetic":
        return weights * float(tensor.globals["lambda"])
    total = float(weights.sum()) + float(tensor.anchor["weight"])
    return weights / (total or 1.0) if tensor.globals["normalize"] else weights


def squared_error(given: Given, plan: Plan, tensor: PlannedTensor) -> tuple[float, float]:
    """Squared ||M_full - M_A|| and ||M_full - M_0|| of one tensor."""
    deltas_EN = np.stack([each[tensor.name] for each in given.experts]).astype(np.float64) - given.base[tensor.name]
    present_EN = present_elements(plan, tensor)
    alpha_E1 = coefficients(plan.operator, tensor)[:, None]
    full_N = (alpha_E1 * deltas_EN).sum(axis=0)
    planned_EN = np.where(present_EN, alpha_E1, 0.0)
    if plan.on_omit == OnOmit.RENORMALIZE:
        weights_E1 = np.array([float(each["weight"]) for each in tensor.experts])[:, None]
        divisor_N = float(tensor.anchor["weight"]) + np.where(present_EN, weights_E1, 0.0).sum(axis=0)
        planned_EN = np.where(present_EN, weights_E1, 0.0) / np.where(divisor_N == 0, 1.0, divisor_N)
    error_N = full_N - (planned_EN * deltas_EN).sum(axis=0)
    return float(error_N @ error_N), float(full_N @ full_N)


def check(given: Given, plan: Plan) -> tuple[float, float]:
    """Measured error and what merging changed, once the bound was compared."""
    squares = [squared_error(given, plan, tensor) for tensor in plan.tensors]
    error, changed = (math.sqrt(sum(column)) for column in zip(*squares, strict=True))
    assert plan.bound is not None
    assert error <= plan.bound.absolute
    return error, changed


ORDERS = [policy for policy in Policy if policy is not Policy.SAMPLE]  # whose merges are near the full one
WEIGHTS = st.tuples(*[st.sampled_from([0.0, 0.2, 0.5, 1.0, -0.3, 2.0])] * 3)


@given(
    operator=st.sampled_from(["linear", "task_arithmetic"]),
    policy=st.sampled_from(ORDERS),
    weights=WEIGHTS,
    seed=st.integers(0, 4),
    budget=st.integers(0, 300_000),
)
def test_bound__is_never_below_the_error(
    operator: str, policy: Policy, weights: tuple[float, ...], seed: int, budget: int
) -> None:
    given = make(operator, 3, seed, weights=weights, parameters={})
    check(given, plan_merge(given.problem, ByteBudget(budget), policy, PlanningChoices()))


@given(policy=st.sampled_from(ORDERS), weights=WEIGHTS, seed=st.integers(0, 4), budget=st.integers(0, 300_000))
def test_bound__of_renormalised_weights_is_never_below_the_error(
    policy: Policy, weights: tuple[float, ...], seed: int, budget: int
) -> None:
    given = make("linear", 3, seed, weights=weights, parameters={})
    options = PlanningChoices(on_omit=OnOmit.RENORMALIZE)
    check(given, plan_merge(given.problem, ByteBudget(budget), policy, options))


@given(budget=st.integers(0, 300_000))
def test_bound__holds_where_experts_share_blocks_or_equal_the_base(budget: int) -> None:
    base, experts = random_arrays(2, 3, DEFAULT_SIZES)
    mixed = {**experts[0], "layers.0.attn.weight": base["layers.0.attn.weight"]}
    for operator, on_omit in (("task_arithmetic", OnOmit.KEEP), ("linear", OnOmit.RENORMALIZE)):
        given = make(operator, arrays=(base, (*experts, mixed)))
        plan = plan_merge(given.problem, ByteBudget(budget), Policy.NORM, PlanningChoices(on_omit=on_omit))
        check(given, plan)


def test_bound__is_tight_for_one_expert() -> None:
    given = make("task_arithmetic", 1)
    plan = plan_merge(given.problem, ShareBudget(Fraction(1, 2)), Policy.NORM, PlanningChoices())
    error, changed = check(given, plan)
    assert plan.bound is not None
    assert plan.bound.absolute == pytest.approx(error, rel=1e-5)
    assert plan.bound.relative == pytest.approx(error / changed, rel=1e-3)


def test_bound__of_everything_read_is_zero() -> None:
    for operator, on_omit in (("task_arithmetic", OnOmit.KEEP), ("linear", OnOmit.RENORMALIZE)):
        plan = plan_merge(
            make(operator).problem, ShareBudget(Fraction(1)), Policy.NORM, PlanningChoices(on_omit=on_omit)
        )
        assert plan.bound is not None
        assert plan.bound.absolute == 0.0


def test_bound__relative_takes_agreement_between_experts_into_account() -> None:
    base, (first, _) = random_arrays(2, 3, DEFAULT_SIZES)
    second = {name: (base[name] + (values - base[name]) * 1.0001).astype(np.float32) for name, values in first.items()}
    given = make("task_arithmetic", arrays=(base, (first, second)))
    plan = plan_merge(given.problem, ShareBudget(Fraction(1, 2)), Policy.NORM, PlanningChoices())
    _, changed = check(given, plan)
    assert plan.bound is not None
    assert plan.bound.relative == pytest.approx(plan.bound.absolute / changed, rel=0.02)


def test_bound__is_claimed_for_additive_operators_only() -> None:
    for operator in ("ties", "dare_linear", "dare_ties"):
        assert plan_merge(make(operator).problem, ByteBudget(0), Policy.NORM, PlanningChoices()).bound is None


@pytest.mark.parametrize("norm", [np.inf, np.nan])
def test_bound__is_not_given_where_an_omitted_delta_is_not_finite(norm: float) -> None:
    given = make("task_arithmetic", 1)
    given.problem.statistics[0]["embed.weight"].blocks_B["norm"][0] = norm
    options = PlanningChoices()
    omitted = plan_merge(given.problem, ByteBudget(0), Policy.NORM, options)
    assert omitted.bound is None
    assert omitted.fallbacks[-1].reason == "an omitted delta is not finite"
    read = plan_merge(given.problem, ByteBudget(20 * 4096), Policy.NORM, options)
    assert read.bound is not None
    assert read.tensors[0].access[0].blocks[0][0] == 0
