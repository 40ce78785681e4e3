"""The bound that a plan prints against the error that was made, measured in float64 on float32 outputs.

The bound is one on exact arithmetic. Two outputs in float32 add their roundings to what is measured: each of the K + 1
terms of an element is rounded when it is made and when it is added, so that an output is off by at most
`(2 K + 3) 2^-24` times the sum of the terms' sizes. Twice the norm of that is allowed on top of the bound.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from budget_cases import CASES, POLICIES, Setting, make_setting, useful_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.planning.plan import Plan
from support.budgets import as_float32, tensor_plans
from support.disk_families import read_snapshot
from support.oracle import MergeCase

WEIGHTS = st.floats(-2, 2).filter(lambda w: w == 0 or abs(w) > 1e-3)
BOUNDED = ("linear", "linear_sum", "task_arithmetic")


def measured_error(setting: Setting, plan: Plan, out: Path) -> float:
    """||M_full - M_A|| over the merged tensors."""
    full, merged = read_snapshot(setting.full()), read_snapshot(out)
    squares = [
        float(np.square(full[tensor.name].astype(np.float64) - merged[tensor.name].astype(np.float64)).sum())
        for tensor in plan.tensors
    ]
    return math.sqrt(math.fsum(squares))


def rounding(setting: Setting, plan: Plan) -> float:
    """What roundings of two float32 outputs can add to the measured error; see the module's docstring."""
    case, total = setting.case, 0.0
    factors = np.abs(np.array(case.weights)) * max(1.0, abs(case.lambda_))
    if case.normalize:
        factors = factors / min(1.0, abs(sum(case.weights) + case.base_weight))
    for tensor in plan.tensors:
        base_N = as_float32(setting.family.models[0], tensor.name).astype(np.float64)
        size_N = np.abs(base_N) * (1 + abs(case.base_weight) + float(factors.sum()))
        for factor, model in zip(factors, setting.family.models[1:], strict=True):
            size_N += factor * np.abs(as_float32(model, tensor.name) - base_N)
        total += float(np.square(size_N).sum())
    return 2 * (2 * len(case.weights) + 3) * 2.0**-24 * math.sqrt(total)


def check_bound(setting: Setting, plan: Plan, name: str) -> tuple[float, float]:
    """The error is within the bound; both are returned."""
    error = measured_error(setting, plan, setting.run(plan, name))
    assert plan.bound is not None
    assert error <= plan.bound.absolute + rounding(setting, plan)
    return error, plan.bound.absolute


@pytest.mark.parametrize(("name", "on_omit"), [*((name, "keep") for name in BOUNDED), ("linear", "renormalize")])
def test_omission_bound__is_never_smaller_than_the_error(tmp_path: Path, name: str, on_omit: str) -> None:
    setting = make_setting(tmp_path, CASES[name], out_dtype="float32")
    setting.analyze()
    errors = []
    for i, budget in enumerate(["0", "15%", "50%", "90%", "100%"]):
        plan = setting.plan(budget, POLICIES[i % 4] if i % 2 else "norm", on_omit=on_omit)
        errors.append(check_bound(setting, plan, f"out-{i}"))
    assert errors[0][0] > 0.1 * errors[0][1] > 0  # the bound is of use
    assert errors[-1] == (0.0, 0.0)


@pytest.mark.parametrize("name", BOUNDED)
def test_omission_bound__of_one_expert_is_the_error(tmp_path: Path, name: str) -> None:
    case = replace(CASES[name], weights=(0.7,), densities=(1.0,))
    setting = make_setting(tmp_path, case, out_dtype="float32")
    setting.analyze()
    for i, budget in enumerate(["0", "30%", "70%"]):
        plan = setting.plan(budget)
        error, bound = check_bound(setting, plan, f"out-{i}")
        assert bound <= error * (1 + 1e-5) + rounding(setting, plan)


def test_omission_bound__is_not_claimed_where_norms_are_missing(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["task_arithmetic"])
    setting.analyze()
    half = setting.forgetful("half", 0.5)
    plan = half.plan("20%")
    assert plan.bound is None
    assert any(fallback.where == "omission bound" for fallback in plan.fallbacks)
    everything = half.plan("100%").bound
    assert everything is not None
    assert everything.absolute == 0


@pytest.mark.parametrize("name", ["ties", "dare_linear", "dare_ties", "slerp"])
def test_omission_bound__is_not_claimed_for_other_operators(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    assert setting.plan("30%").bound is None


@st.composite
def bounded_cases(draw: st.DrawFn) -> tuple[MergeCase, str]:
    """A rule with a bound, and what becomes of omitted weights."""
    weights = tuple(draw(WEIGHTS) for _ in range(draw(st.integers(1, 4))))
    densities = (1.0,) * len(weights)
    if draw(st.booleans()):
        return MergeCase("task_arithmetic", weights, densities, lambda_=draw(st.sampled_from([1.0, 0.3, -1.5]))), "keep"
    base_weight = draw(st.sampled_from([0.0, 0.5, 1.0]))
    normalize = abs(sum(weights) + base_weight) > 0.05 and draw(st.booleans())
    case = MergeCase("linear", weights, densities, base_weight=base_weight, normalize=normalize)
    return case, draw(st.sampled_from(["keep", "renormalize"])) if normalize else "keep"


@given(data=st.data(), case=bounded_cases(), policy=st.sampled_from(POLICIES), share=st.integers(0, 100))
@settings(max_examples=15)
def test_omission_bound__of_any_family_is_never_smaller_than_the_error(
    data: st.DataObject, case: tuple[MergeCase, str], policy: str, share: int
) -> None:
    plans = data.draw(tensor_plans(len(case[0].weights)))
    with tempfile.TemporaryDirectory() as folder:
        setting = make_setting(
            Path(folder), case[0], plans=plans, seed=data.draw(st.integers(0, 999)), out_dtype="float32"
        )
        setting.analyze()
        plan = useful_plan(lambda: setting.plan(f"{share}%", policy, on_omit=case[1]))
        if plan is not None:
            check_bound(setting, plan, "out")
