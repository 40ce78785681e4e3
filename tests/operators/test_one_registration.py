"""An operator of one file: recipes name it, merges run it, plans and explanations know what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import UnsupportedError
from mergepipe.operators.base import Influence, Operator, OperatorInput, Plain, Products, Reduced, unknown_influence
from mergepipe.operators.elementwise import ElementwiseRule
from mergepipe.operators.registry import add_operator, operator_named, operator_specs, remove_operator
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.testing.contracts import check_operator
from support.families import TINY, write_family

SHAPE = replace(TINY, vocab=2048)  # embeddings of four blocks
BLOCK_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Halfway(Plain):
    """`M_0 + share sum_i delta_i`: all that MergePipe knows of the operator is in this class."""

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "halfway",
        "towards every model",
        "this test",
        BaseRole.REQUIRED,
        (ParameterSpec("share", Scope.GLOBAL, "how far", default=0.5),),
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        share_E = np.full(len(inputs.experts), np.float32(inputs.globals["share"]), np.float64)
        return Influence(share_E, np.ones(len(inputs.experts)))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(np.full(len(inputs.experts), inputs.globals["share"], np.float32))


@dataclass(frozen=True, slots=True)
class Untold(Halfway):
    """The same rule, which does not tell what part of a delta does."""

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "untold", "no word", "this test", BaseRole.REQUIRED, Halfway.spec.parameters
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return unknown_influence(len(inputs.experts))


class Silent(Plain):
    """Not an operator: it has no influence."""

    spec: ClassVar[OperatorSpec] = OperatorSpec("silent", "", "this test", BaseRole.REQUIRED, ())


@pytest.fixture(params=[Halfway(), Untold()], ids=["halfway", "untold"])
def toy(request: pytest.FixtureRequest) -> Iterator[Operator]:
    operator: Operator = request.param
    add_operator(operator)
    yield operator
    remove_operator(operator.spec.name)


def write_recipe(path: Path, method: str, shared: dict[str, float], own: dict[str, float]) -> Path:
    models = [{"model": f"family/expert-{e}", "parameters": own} for e in (1, 2)]
    recipe = {"merge_method": method, "base_model": "family/base", "models": models, "parameters": shared}
    path.write_text(json.dumps(recipe))
    return path


def test_operator__of_one_file_is_checked_merged_planned_and_explained(tmp_path: Path, toy: Operator) -> None:
    name, home = toy.spec.name, tmp_path / "home"
    check_operator(toy)
    paths = write_family(tmp_path / "family", SHAPE, 2)
    recipe = write_recipe(tmp_path / "recipe.yml", name, {"share": 0.5}, {})
    reference = write_recipe(tmp_path / "sum.yml", "task_arithmetic", {"lambda": 0.5}, {"weight": 1.0})

    mergepipe.merge(recipe, tmp_path / "merged", options=MergeOptions(home=home))
    mergepipe.merge(reference, tmp_path / "reference", options=MergeOptions(home=home))
    assert shard(tmp_path / "merged") == shard(tmp_path / "reference")

    mergepipe.analyze(paths.base, paths.experts, block_elements=BLOCK_ELEMENTS, options=RunOptions(home=home))
    plan = mergepipe.plan(recipe, "40%", home=home, options=PlanOptions(select="norm", block_elements=BLOCK_ELEMENTS))
    explained = mergepipe.explain(plan, home=home)
    assert (plan.operator, explained.operator) == (name, name)
    assert 0 < plan.planned_bytes <= plan.budget_bytes
    reasons = {each.reason for each in plan.fallbacks}
    if name == "halfway":
        assert reasons == set()
    else:
        assert "the rule does not say what a part of a delta does" in reasons
    report = mergepipe.run(plan, tmp_path / "planned", options=RunOptions(home=home))
    assert report.operator == name


def shard(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def test_add_operator__refuses_one_that_does_not_say_what_a_planner_may_know() -> None:
    with pytest.raises(UnsupportedError, match="no method `influence`"):
        add_operator(Silent())  # type: ignore[arg-type]
    assert "silent" not in operator_specs()


@dataclass(frozen=True, slots=True)
class Boastful(Halfway):
    """Claims that only the first model counts."""

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(np.eye(len(inputs.experts))[0], np.ones(len(inputs.experts)))


def test_check_operator__finds_an_influence_that_is_not_true() -> None:
    with pytest.raises(AssertionError, match="the influence must be that of the experts on the result"):
        check_operator(Boastful())


def test_remove_operator__keeps_those_of_mergepipe() -> None:
    with pytest.raises(KeyError):
        remove_operator("ties")
    assert operator_named("ties").spec.name == "ties"
