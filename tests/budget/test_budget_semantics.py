"""What a budget makes of a merge: nothing, everything, and what lies between, block by block."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_cases import CASES, POLICIES, make_setting
from hypothesis import given, settings
from hypothesis import strategies as st

import mergepipe
from mergepipe import Plan
from mergepipe.core.blocks import BlockGrid
from mergepipe.engine.planned_access import FREE, OMITTED, level_of_blocks
from support.budgets import GRAIN, planned_tensor
from support.disk_families import Model, read_snapshot, weights_digest, write_single
from support.slow_cases import slow_unless

EVERY_OPERATOR = ("linear", "linear_sum", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")
BASE_ANCHORED = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties")


def same_bytes(one: Model, two: Model, name: str) -> bool:
    """Whether a tensor is the same in both, bit for bit."""
    return one[name].dtype == two[name].dtype and one[name].tobytes() == two[name].tobytes()


def blocks_of(model: Model, name: str, block_elements: int) -> list[bytes]:
    """The stored bytes of each block of a tensor."""
    stored = model[name].reshape(-1)
    grid = BlockGrid(len(stored), block_elements)
    return [stored[span.start : span.stop].tobytes() for span in grid.spans()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "known"),
    slow_unless(
        lambda case: case in {("linear", False), ("ties", True), ("dare_ties", True)},
        product(BASE_ANCHORED, (True, False)),
    ),
)
def test_budget__of_nothing_gives_the_base(tmp_path: Path, name: str, known: bool) -> None:
    setting = make_setting(tmp_path, CASES[name])
    if known:
        setting.analyze()
    plan = setting.plan("0")
    out = setting.run(plan, "out")
    merged, base = read_snapshot(out), setting.family.models[0]
    assert [tensor for tensor in base if not same_bytes(merged, base, tensor)] == []
    manifest = json.loads((out / "mergepipe.json").read_text())
    assert plan.planned_bytes == manifest["realized"]["expert"] == manifest["realized"]["analysis"] == 0
    assert manifest["coverage"]["touched"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless({"linear", "dare_ties", "slerp"}.__contains__, EVERY_OPERATOR))
def test_budget__that_holds_everything_gives_the_full_merge(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name], layout=list(CASES).index(name))
    wanted = weights_digest(setting.full(seed=3))
    assert weights_digest(setting.run(setting.plan("100%", seed=3), "unknown")) == wanted
    setting.analyze()
    half_known = setting.forgetful("half", 0.5)
    for policy in (*POLICIES, "sample"):
        plan = setting.plan("100%", policy, seed=3)
        assert {tensor.probability for tensor in plan.tensors} == {1.0}
        assert weights_digest(setting.run(plan, policy)) == wanted
    ample = setting.plan(f"{1 << 40}B", seed=3)
    assert ample.planned_bytes == ample.full_cost_bytes
    assert weights_digest(setting.run(ample, "ample")) == wanted
    assert weights_digest(half_known.run(half_known.plan("100%", seed=3), "half-known")) == wanted


@pytest.mark.parametrize("name", slow_unless({"ties"}.__contains__, ("linear", "ties", "dare_ties")))
def test_merge__with_a_budget_does_what_plan_and_run_do(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name])
    wanted = weights_digest(setting.full(seed=4))
    report = mergepipe.merge(setting.recipe, tmp_path / "all", seed=4, budget="100%", home=setting.home)
    assert weights_digest(tmp_path / "all") == wanted
    assert report.planned_bytes is not None
    assert report.expert_bytes + report.analysis_bytes <= report.planned_bytes
    mergepipe.merge(setting.recipe, tmp_path / "some", seed=4, budget="30%", home=setting.home, select="random")
    plan = mergepipe.plan(setting.recipe, "30%", seed=4, home=setting.home, select="random")
    mergepipe.run(plan, tmp_path / "planned", home=setting.home)
    assert weights_digest(tmp_path / "some") == weights_digest(tmp_path / "planned")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "policy", "share"),
    slow_unless(
        {("ties", "norm", "30%"), ("dare_ties", "conflict", "75%"), ("task_arithmetic", "random", "50%")}.__contains__,
        [
            (name, policy, share)
            for name in ("ties", "dare_linear", "dare_ties", "task_arithmetic")
            for policy, share in (("norm", "30%"), ("conflict", "75%"), ("random", "50%"))
        ],
    ),
)
def test_budgeted_block__equals_the_full_one_or_the_base(tmp_path: Path, name: str, policy: str, share: str) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    plan = setting.plan(share, policy, seed=5)
    merged, full = read_snapshot(setting.run(plan, "out")), read_snapshot(setting.full(seed=5))
    base = setting.family.models[0]
    complete = untouched = 0
    for tensor in plan.tensors:
        blocks = blocks_of(merged, tensor.name, GRAIN)
        levels_EB = level_of_blocks(tensor, len(blocks))
        for b, block in enumerate(blocks):
            if (levels_EB[:, b] != OMITTED).all():  # read, or known to equal the base
                assert block == blocks_of(full, tensor.name, GRAIN)[b]
                complete += 1
            if (levels_EB[:, b] <= OMITTED).all():
                assert block == blocks_of(base, tensor.name, GRAIN)[b]
                untouched += 1
    assert complete > 0
    assert untouched > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless({"linear", "dare_ties", "slerp"}.__contains__, EVERY_OPERATOR))
def test_frozen_block__is_never_read(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    plan = setting.plan("100%", seed=6)
    models, n_free = setting.family.models, 0
    for tensor in plan.tensors:
        stored = [blocks_of(model, tensor.name, GRAIN) for model in models]
        values = [blocks_of({"x": model[tensor.name].astype(np.float32)}, "x", GRAIN) for model in models]
        levels_EB = level_of_blocks(planned_tensor(plan, tensor.name), len(stored[0]))
        for b in range(len(stored[0])):
            for e in range(len(models) - 1):
                is_frozen = values[e + 1][b] == values[0][b]
                assert (levels_EB[e, b] == FREE) == is_frozen
                n_free += is_frozen
    assert n_free > 0
    assert weights_digest(setting.run(plan, "out")) == weights_digest(setting.full(seed=6))
    unknown = setting.with_home("unknown").plan("100%", seed=6)
    assert plan.planned_bytes < unknown.planned_bytes


@pytest.mark.parametrize(
    ("name", "policy"),
    slow_unless(
        {("linear", "norm"), ("ties", "random"), ("dare_ties", "conflict")}.__contains__,
        zip(EVERY_OPERATOR, [*POLICIES, *POLICIES], strict=False),
    ),
)
def test_manifest__says_what_was_planned_and_covered(tmp_path: Path, name: str, policy: str) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    plan = setting.plan("45%", policy)
    out = tmp_path / "out"
    report = mergepipe.run(plan, out, home=setting.home)
    manifest = json.loads((out / "mergepipe.json").read_text())
    assert manifest["plan_digest"] == plan.digest == manifest["plan"]["digest"]
    planned = json.loads(plan.to_json())
    for model in planned["models"]:
        model["path"] = os.path.relpath(model["path"], out)
    assert manifest["plan"] == planned
    for model, record in zip(plan.models, manifest["inputs"], strict=True):
        assert model.role == "base" or record["read_bytes"] <= model.planned_bytes
        assert model.planned_bytes > 0 or record["read_bytes"] == 0
    assert sum(record["read_bytes"] for record in manifest["inputs"][1:]) == report.expert_bytes + report.analysis_bytes
    levels = [
        level_of_blocks(tensor, BlockGrid(tensor.n_elements, plan.block_elements).n_blocks) for tensor in plan.tensors
    ]
    coverage = manifest["coverage"]
    assert coverage["blocks"] == sum(each.shape[1] for each in levels)
    assert coverage["touched"] == sum(int((each > OMITTED).any(axis=0).sum()) for each in levels)
    for e in range(len(plan.models) - 1):
        assert coverage["read"][e] == sum(tensor.access[e].n_blocks for tensor in plan.tensors)
        assert coverage["free"][e] == sum(int((each[e] == FREE).sum()) for each in levels)
    if name in BASE_ANCHORED:
        assert 0 < _changed_blocks(read_snapshot(out), setting.family.models[0], plan) <= coverage["touched"]


def _changed_blocks(merged: Model, base: Model, plan: Plan) -> int:
    pairs = [
        (blocks_of(merged, tensor.name, plan.block_elements), blocks_of(base, tensor.name, plan.block_elements))
        for tensor in plan.tensors
    ]
    return sum(one != two for ones, twos in pairs for one, two in zip(ones, twos, strict=True))


# --- the same bytes: they follow from what is asked for and on record, not from other merges


N_EXPERTS = 3
THREE_OPERATORS = {
    "ties": "parameters: {weight: 1.0, density: 0.2}",
    "dare_linear": "parameters: {weight: 0.5, density: 0.4}",
    "task_arithmetic": "parameters: {weight: 0.4}",
}
EVENTS = ("full", "other budget", "other recipe", "other operator", "sweep", "explain", "plan", "same")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and experts whose tensors moved by very different amounts, and recipes of three operators."""
    folder = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(11)
    base = {f"layers.{t}.w": rng.standard_normal(6 * GRAIN + 100 * t).astype(np.float32) for t in range(5)}
    write_single(folder / "base", base)
    for e in range(N_EXPERTS):
        moved = {
            name: (values + rng.lognormal(-6, 1.5) * rng.standard_normal(len(values))).astype(np.float32)
            for name, values in base.items()
        }
        write_single(folder / f"expert-{e}", moved)
    for operator, parameters in THREE_OPERATORS.items():
        for name, experts in (("", (0, 1, 2)), ("-other", (2, 1))):
            models = "".join(f"  - model: expert-{e}\n" for e in experts)
            text = f"merge_method: {operator}\nbase_model: base\nmodels:\n{models}{parameters}\n"
            (folder / f"{operator}{name}.yml").write_text(text)
    return folder


def merge(recipe: Path, out: Path, home: Path, budget: str | None, **plan: Any) -> Any:
    return mergepipe.merge(recipe, out, budget=budget, home=home, threads=2, block_elements=GRAIN, **plan)


def published(out: Path) -> tuple[str, str]:
    """The digest of the weights and that of the plan."""
    weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return weights, json.loads((out / "mergepipe.json").read_text())["plan_digest"]


def happen(event: str, family: Path, operator: str, place: Path, number: int) -> None:
    recipe, out, home = family / f"{operator}.yml", place / f"earlier-{number}", place / "home"
    match event:
        case "full":
            merge(recipe, out, home, None)
        case "other budget":
            merge(recipe, out, home, "60%")
        case "other recipe":
            merge(family / f"{operator}-other.yml", out, home, "40%")
        case "other operator":
            merge(family / "dare_linear-other.yml", out, home, None)
        case "sweep":
            mergepipe.sweep(recipe, ["25%", "50%"], work=place, home=home, threads=2)
        case "explain":
            merge(recipe, out, home, "30%")
            mergepipe.explain(out, home=home)
        case "plan":
            mergepipe.plan(recipe, "35%", home=home, block_elements=GRAIN)
        case "same":
            merge(recipe, out, home, "25%")


@pytest.mark.thorough
@settings(max_examples=settings.default.max_examples // 5, deadline=None)  # type: ignore[union-attr]
@given(data=st.data())
@pytest.mark.parametrize("operator", THREE_OPERATORS)
def test_merge__gives_the_same_bytes_and_the_same_plan_after_any_other_merges(
    operator: str, family: Path, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3))
    budget, select = data.draw(st.sampled_from(["25%", "50%"])), data.draw(st.sampled_from(["norm", "sample"]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        merge(family / f"{operator}.yml", place / "first", place / "home-of-nothing", budget, select=select)
        for number, event in enumerate(history):
            happen(event, family, operator, place, number)
        merge(family / f"{operator}.yml", place / "second", place / "home", budget, select=select)
        assert published(place / "second") == published(place / "first")
