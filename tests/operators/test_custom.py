"""A user's own operator, and the contract that all operators keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.core.blocks import F32, RawBlock
from mergepipe.errors import UnsupportedError
from mergepipe.operators import custom
from mergepipe.operators.base import (
    BlockFunction,
    Influence,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    Scalar,
    unknown_influence,
)
from mergepipe.operators.custom import Given, load_entry_points, operator, parameter
from mergepipe.operators.registry import operator_named, operator_specs, remove_operator
from mergepipe.operators.spec import BaseRole, OperatorSpec
from mergepipe.testing.contracts import StoredTensor, check_operator, make_family
from support.merge_in_memory import apply_operator

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
