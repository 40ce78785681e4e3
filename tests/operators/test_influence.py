"""Influences agree with what the operators do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from mergepipe.operators.base import NOTHING_REDUCED, OperatorInput, Reduced
from mergepipe.operators.elementwise import ElementwiseRule
from mergepipe.operators.registry import operator_named, operator_specs
from mergepipe.operators.spec import Scope

Scalar = float | bool
EXPERTS: tuple[Mapping[str, Scalar], ...] = (
    {"weight": 0.3, "density": 0.25, "gamma": 0.01, "epsilon": 0.1},
    {"weight": -1.2, "density": 0.5, "gamma": 0.01, "epsilon": 0.1},
)


def operator_input(operator: str, **shared: Scalar) -> OperatorInput:
    spec = operator_specs()[operator]
    defaults: dict[str, Scalar] = {
        p.name: p.default for p in spec.parameters if p.scope is Scope.GLOBAL and p.default is not None
    }
    experts = EXPERTS[: 2 if spec.max_experts is None else spec.max_experts]
    return OperatorInput({**defaults, "t": 0.3, **shared}, {"weight": 0.7, "scale": 2.0}, experts, 100, (1, 2))


PRODUCTS_E3 = np.array([[4.0, 1.0, 0.5]])


def rule_of(operator: str, inputs: OperatorInput) -> ElementwiseRule:
    reduced = Reduced(products_E3=PRODUCTS_E3) if operator == "slerp" else NOTHING_REDUCED
    rule = operator_named(operator).block_function(inputs, reduced)
    assert isinstance(rule, ElementwiseRule)
    return rule


@pytest.mark.parametrize("operator", operator_specs())
def test_influence__is_there_for_every_operator(operator: str) -> None:
    found = operator_named(operator).influence(operator_input(operator), None)
    assert found.coefficients_E.shape == found.energy_factor_E.shape == (len(operator_input(operator).experts),)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "dare_linear", "slerp", "passthrough"])
def test_influence__has_the_coefficients_in_force(operator: str, normalize: bool) -> None:
    inputs = operator_input(operator, normalize=normalize)
    found, rule = operator_named(operator).influence(inputs, PRODUCTS_E3), rule_of(operator, inputs)
    assert found.coefficients_E.tolist() == rule.coefficients_E.astype(np.float64).tolist()


def test_influence__says_what_is_trimmed_and_what_can_be_renormalised() -> None:
    found = {name: operator_named(name).influence(operator_input(name), None) for name in operator_specs()}
    assert {name for name, each in found.items() if each.trims} == {"ties"}
    assert {name for name, each in found.items() if each.renormalizes} == {"linear"}
    assert all(each.is_known for each in found.values())
    assert not operator_named("linear").influence(operator_input("linear", normalize=False), None).renormalizes


@pytest.mark.parametrize("operator", ["dare_linear", "dare_ties"])
def test_influence__of_random_dropping_is_its_expected_energy(operator: str) -> None:
    rescaled = operator_named(operator).influence(operator_input(operator), None)
    assert rescaled.energy_factor_E.tolist() == [4.0, 2.0]
    plain = operator_named(operator).influence(operator_input(operator, rescale=False), None)
    assert plain.energy_factor_E.tolist() == [0.25, 0.5]
    rng = np.random.default_rng(0)
    delta = rng.standard_normal(100_000)
    kept = np.where(rng.random(100_000) < 0.25, delta, 0.0)
    assert (kept @ kept) / (delta @ delta) == pytest.approx(plain.energy_factor_E[0], rel=0.03)
    assert (4 * kept) @ (4 * kept) / (delta @ delta) == pytest.approx(rescaled.energy_factor_E[0], rel=0.03)
