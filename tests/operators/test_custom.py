"""A user's own operator, the contract that all keep, one registration, and influences that agree with what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import mergepipe
from mergepipe.core.blocks import F32, RawBlock
from mergepipe.errors import UnsupportedError
from mergepipe.operators import custom
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    BlockFunction,
    Influence,
    Operator,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    Scalar,
    unknown_influence,
)
from mergepipe.operators.custom import Given, load_entry_points, operator, parameter
from mergepipe.operators.elementwise import ElementwiseRule
from mergepipe.operators.registry import add_operator, operator_named, operator_specs, remove_operator
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope
from mergepipe.testing import StoredTensor, check_operator, make_family
from support.families import TINY, write_family
from support.merge_in_memory import apply_operator
from support.model_folders import recipe_of

MODELS: tuple[dict[str, Scalar], ...] = (
    {"weight": 0.6, "density": 0.4, "gamma": 0.05, "epsilon": 0.1},
    {"weight": 0.3, "density": 0.7, "gamma": 0.01, "epsilon": 0.15},
    {"weight": 0.8, "density": 0.2, "gamma": 0.0, "epsilon": 0.05},
)
Values = NDArray[np.float32]


def clipped(base_N: Values, deltas_EN: Values, inputs: Given) -> Values:
    """Sum of deltas, each element clipped."""
    weights_E = np.asarray(inputs["weight"], np.float32)
    limit = np.float32(inputs["limit"])
    return np.asarray(base_N + np.clip(weights_E @ deltas_EN, -limit, limit))


@pytest.fixture
def clip_operator() -> Iterator[custom.CustomOperator]:
    parameters = (
        parameter("weight", "coefficient of this model", per_model=True),
        parameter("limit", "largest step", default=1e-2),
    )
    yield operator("clip", parameters=parameters)(clipped)
    remove_operator("clip")


def test_operator__makes_a_function_a_merge_method(clip_operator: custom.CustomOperator) -> None:
    assert operator_named("clip").spec is clip_operator.spec
    spec = operator_specs()["clip"]
    assert spec.title == "Sum of deltas, each element clipped."
    assert [(p.name, p.required, p.default) for p in spec.parameters] == [
        ("weight", True, None),
        ("limit", False, 1e-2),
    ]
    family = make_family(np.random.default_rng(0), 100_000, F32, (F32, F32), 0.0)
    inputs = OperatorInput({"limit": 1e-2}, {}, ({"weight": 0.5}, {"weight": 2.0}), 100_000, ())
    found_N = apply_operator(clip_operator, inputs, StoredTensor(family, F32), [70_000])
    deltas_EN = family.experts_EN - family.base_N
    wanted_N = family.base_N + np.clip(0.5 * deltas_EN[0] + 2.0 * deltas_EN[1], -1e-2, 1e-2)
    np.testing.assert_allclose(found_N, wanted_N, atol=1e-7)


def test_operator__keeps_the_contract(clip_operator: custom.CustomOperator) -> None:
    check_operator(clip_operator)


def test_operator__refuses_a_name_that_is_taken() -> None:
    with pytest.raises(UnsupportedError, match="ties: there is a merge method of that name already"):
        operator("ties")(clipped)
    assert operator_specs()["ties"].title == "trim, elect sign, disjoint merge"


def test_operator__refuses_a_result_of_another_kind() -> None:
    def doubles(base_N: Values, deltas_EN: Values, _: Given) -> Any:
        return (base_N + deltas_EN.sum(axis=0)).astype(np.float64)

    made = operator("doubles")(doubles)
    try:
        family = make_family(np.random.default_rng(0), 9, F32, (F32,), 0.0)
        inputs = OperatorInput({}, {}, ({},), 9, ())
        with pytest.raises(UnsupportedError, match=r"returned float64 of shape \[9\], float32 of"):
            apply_operator(made, inputs, StoredTensor(family, F32), [])
    finally:
        remove_operator("doubles")


def test_load_entry_points__registers_what_packages_offer(
    clip_operator: custom.CustomOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_operator("clip")
    module = type("module", (), {"made": clip_operator})
    monkeypatch.setitem(__import__("sys").modules, "some_package", module)
    point = EntryPoint("clip", "some_package:made", custom.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == custom.ENTRY_POINTS else [])
    assert load_entry_points() == ("clip",)
    assert operator_named("clip").spec is clip_operator.spec
    assert load_entry_points() == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(operator_specs()) - {"passthrough"}))
def test_contract__is_kept_by_every_operator(name: str) -> None:
    spec = operator_specs()[name]
    n_experts = len(MODELS) if spec.max_experts is None else spec.max_experts
    if spec.base_role is BaseRole.OPTIONAL:
        pytest.skip("its anchor takes part: see test_model_rules and test_against_oracle")
    check_operator(operator_named(name), {"t": 0.3}, MODELS[:n_experts])


def by_place(base_N: Values, _: Values, __: Given) -> Values:
    """Breaks the contract: what it adds depends on where a block begins."""
    return np.asarray(base_N + np.arange(len(base_N), dtype=np.float32))


@dataclass(frozen=True, slots=True)
class ByThoseRead(Plain):
    """Breaks the contract: divides by the number of experts that are read."""

    spec: OperatorSpec

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return unknown_influence(len(inputs.experts))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        return ByThoseReadRule()


class ByThoseReadRule:
    """See `ByThoseRead`."""

    copies_base = False

    def __call__(self, block: RawBlock) -> None:
        n_present = np.float32(len(block.present_E))

        def merge(base_N: Values, deltas_EN: Values, _: Given) -> Values:
            return np.asarray(base_N + deltas_EN.sum(axis=0) / n_present)

        custom.CustomRule("by_those_read", merge, {}, 3)(block)


def test_check_operator__finds_what_depends_on_cuts() -> None:
    made = custom.CustomOperator(OperatorSpec("by_place", "", "", BaseRole.REQUIRED, ()), by_place)
    with pytest.raises(AssertionError, match="by_place: the result must not depend on how the tensor is cut: element"):
        check_operator(made)


def test_check_operator__finds_what_depends_on_omission() -> None:
    wrong = ByThoseRead(OperatorSpec("by_those_read", "", "", BaseRole.REQUIRED, ()))
    with pytest.raises(AssertionError, match="by_those_read: an omitted expert must count as one that equals the base"):
        check_operator(wrong)


def test_operators_doc__names_every_operator_with_its_defaults_and_shows_one_that_works() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "reference" / "operators.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    assert set(rows) == set(operator_specs())
    inherited = {"dare_ties": "dare_linear", "breadcrumbs_ties": "breadcrumbs", "della_linear": "della"}
    for name, spec in operator_specs().items():
        shown = rows[name] + rows.get(inherited.get(name, ""), "")
        named = [p for p in spec.parameters if not p.ignored]
        assert [p.name for p in named if f"`{p.name}`" not in shown] == []
    guide = (docs / "guide" / "own-operators.md").read_text(encoding="utf-8")
    example = guide.split("```python\n")[1].split("```")[0]
    try:
        exec(compile(example, "docs/guide/own-operators.md", "exec"), {})
        assert operator_specs()["median"].title == "Median of the deltas."
    finally:
        remove_operator("median")


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
    models = {f"family/expert-{e}": own for e in (1, 2)}
    path.write_text(json.dumps(recipe_of(method, models, "family/base", parameters=shared)))
    return path


def test_operator__of_one_file_is_checked_merged_planned_and_explained(tmp_path: Path, toy: Operator) -> None:
    name, home = toy.spec.name, tmp_path / "home"
    check_operator(toy)
    paths = write_family(tmp_path / "family", SHAPE, 2)
    recipe = write_recipe(tmp_path / "recipe.yml", name, {"share": 0.5}, {})
    reference = write_recipe(tmp_path / "sum.yml", "task_arithmetic", {"lambda": 0.5}, {"weight": 1.0})

    mergepipe.merge(recipe, tmp_path / "merged", home=home)
    mergepipe.merge(reference, tmp_path / "reference", home=home)
    assert shard(tmp_path / "merged") == shard(tmp_path / "reference")

    mergepipe.analyze(paths.base, paths.experts, block_elements=BLOCK_ELEMENTS, home=home)
    plan = mergepipe.plan(recipe, "40%", home=home, select="norm", block_elements=BLOCK_ELEMENTS)
    explained = mergepipe.explain(plan, home=home)
    assert (plan.operator, explained.operator) == (name, name)
    assert 0 < plan.planned_bytes <= plan.budget_bytes
    reasons = {each.reason for each in plan.fallbacks}
    if name == "halfway":
        assert reasons == set()
    else:
        assert "the rule does not say what a part of a delta does" in reasons
    report = mergepipe.run(plan, tmp_path / "planned", home=home)
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


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "dare_linear", "slerp", "passthrough"])
def test_influence__has_the_coefficients_in_force(operator: str, normalize: bool) -> None:
    inputs = operator_input(operator, normalize=normalize)
    found, rule = operator_named(operator).influence(inputs, PRODUCTS_E3), rule_of(operator, inputs)
    assert found.coefficients_E.tolist() == rule.coefficients_E.astype(np.float64).tolist()


def test_influence__says_what_is_trimmed_and_what_can_be_renormalised() -> None:
    found = {name: operator_named(name).influence(operator_input(name), None) for name in operator_specs()}
    assert {name for name, each in found.items() if each.trims} == {"ties"}
    assert {name for name, each in found.items() if each.divided is not None} == {"linear"}
    additive = {name for name, each in found.items() if each.is_additive}
    assert additive == {"linear", "task_arithmetic", "passthrough"} & found.keys()
    for name, each in found.items():
        assert each.is_known
        assert len(each.coefficients_E) == len(each.energy_factor_E) == len(operator_input(name).experts)
    assert not operator_named("linear").influence(operator_input("linear", normalize=False), None).divided


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
