"""Explanations: runs of blocks in words, counts that add up, from plans and from full merges."""

from __future__ import annotations

from pathlib import Path

import mergepipe
from mergepipe.errors import NotFoundError
from mergepipe.jobs.explain import explanation_of
from mergepipe.planning.plan import Access, Plan, PlannedModel, PlannedTensor
from mergepipe.recipes.tasks import TensorParameters
from mergepipe.reports import BlockUse, Explanation
from support.refusals import refuses


def model(role: str, name: str, planned_bytes: int) -> PlannedModel:
    return PlannedModel(role, name, f"/models/{name}", "ab" * 16, None, (), 4096, planned_bytes)


def make_plan(planned_bytes: int = 8192) -> Plan:
    """Two experts over two tensors of ten blocks and one block."""
    first = (Access(((0, 4),), free=((8, 10),)), Access(((5, 7),), free=((9, 10),)))
    second = (Access(()), Access(((0, 1),)))
    return Plan(
        operator="linear",
        block_elements=100,
        seed=0,
        policy="norm",
        on_omit="keep",
        budget_bytes=10_000,
        planned_bytes=planned_bytes,
        full_cost_bytes=20_000,
        recipe="",
        models=(model("base", "base", 0), model("expert", "a", 4096), model("expert", "b", 4096)),
        parameters=(TensorParameters({}, {}, ({}, {})),),
        tensors=(
            PlannedTensor("model.layers.3.w", 950, 0, (0, 1), first, (0, 1)),
            PlannedTensor("model.norm.weight", 10, 0, (0, 1), second, (0, 1)),
        ),
    )


def explained(plan: Plan, pattern: str | None = None) -> Explanation:
    return explanation_of(Path("plan.json"), plan, None, pattern)


def test_explanation__counts_blocks_by_use() -> None:
    a, b = explained(make_plan()).experts
    assert (a.read, a.free, a.omitted) == (4, 2, 5)
    assert (b.read, b.free, b.omitted) == (3, 1, 7)


def test_explanation__counts_what_is_touched() -> None:
    found = explained(make_plan())
    assert (found.blocks, found.touched) == (11, 7)
    assert [(layer.layer, layer.blocks, layer.touched, layer.taking_part) for layer in found.layers] == [
        ("3", 10, 6, (6, 3)),
        ("", 1, 1, (0, 1)),
    ]


def test_explanation__tells_of_every_block_of_a_tensor_once_and_why() -> None:
    (tensor,) = explained(make_plan(), "*layers.3*").tensors
    assert tensor.touched == "0-3,5-6"
    spent = "the budget of 10000 bytes was spent first, by policy 'norm'"
    equal = "equal to the base's, known without reading"
    assert tensor.uses == (
        BlockUse("a", "read", "0-3", "chosen by policy 'norm'"),
        BlockUse("a", "free", "8-9", equal),
        BlockUse("a", "omitted", "4-7", spent),
        BlockUse("b", "read", "5-6", "chosen by policy 'norm'"),
        BlockUse("b", "free", "9", equal),
        BlockUse("b", "omitted", "0-4,7-8", spent),
    )


def test_explanation__tensors_are_left_out_unless_asked_for() -> None:
    assert explained(make_plan()).tensors == ()
    assert len(explained(make_plan(), "*").tensors) == 2


def test_explanation__a_pattern_without_a_match_is_an_error() -> None:
    with refuses(NotFoundError, "tensor.not-found") as caught:
        explained(make_plan(), "model.layers.4.w")
    assert "model.layers.3.w" in str(caught.value)


def test_explain__takes_a_plan_as_a_value() -> None:
    assert mergepipe.explain(make_plan()).touched == 7
