"""Budgets for rules that look at whole tensors: nothing, everything, and what lies between, one rule of each kind."""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_cases import Setting
from safetensors.numpy import load_file

import mergepipe
from mergepipe import Plan
from support.budgets import AWKWARD, make_budget_models
from support.disk_families import read_snapshot, weights_digest, write_family
from support.model_folders import recipe_of, write_model
from support.oracle import MergeCase
from support.slow_cases import slow_unless

Each = tuple[dict[str, float], dict[str, float], dict[str, float]]
NOTHING: Each = ({}, {}, {})
BANDS: Each = (
    {"weight": 0.7, "density": 0.4, "gamma": 0.02},
    {"weight": 0.5, "density": 0.6, "gamma": 0.1},
    {"weight": -0.3, "density": 0.2, "gamma": 0.0},
)
SPREADS: Each = (
    {"weight": 0.7, "density": 0.4, "epsilon": 0.1},
    {"weight": 0.5, "density": 0.6, "epsilon": 0.2},
    {"weight": 0.3, "density": 1.0, "epsilon": 0.1},
)
METHODS: dict[str, tuple[Each, dict[str, float | bool]]] = {
    "karcher": (NOTHING, {}), "geometric_median": (NOTHING, {}), "model_stock": (NOTHING, {"filter_wise": True}),
    "breadcrumbs": (BANDS, {"rescale": True}), "della": (SPREADS, {}), "sce": (NOTHING, {"select_topk": 0.3}),
    "ramplus_tl": (NOTHING, {}),
}  # fmt: skip
BUDGETS = ("0", "30%", "70%")


def make_method_setting(folder: Path, method: str) -> Setting:
    """A family of three experts and a recipe of the method."""
    each, shared = METHODS[method]
    family = write_family(folder / "models", make_budget_models(len(each), 0, AWKWARD), 0)
    base, *experts = (str(place) for place in family.places)
    models = [{"model": path, "parameters": own} for path, own in zip(experts, each, strict=True)]
    recipe = folder / "recipe.yml"
    content = {"merge_method": method, "base_model": base, "models": models, "parameters": shared, "dtype": "auto"}
    recipe.write_text(json.dumps(content))
    densities = tuple(own.get("density", 1.0) for own in each)
    return Setting(folder, MergeCase("ties", (1.0,) * len(each), densities), family, recipe, folder / "home")


def experts_read(plan: Plan) -> dict[str, list[int]]:
    """By tensor how many blocks of each expert are read."""
    return {t.name: [sum(stop - start for start, stop in a.blocks) for a in t.access] for t in plan.tensors}


def check_bytes(plan: Plan, out: Path) -> int:
    """Bytes requested <= planned <= budget, for every expert and all of them; how many were requested."""
    manifest = json.loads((out / "mergepipe.json").read_text())
    read = [record["read_bytes"] for record in manifest["inputs"][1:]]
    for nbytes, model in zip(read, plan.models[1:], strict=True):
        assert nbytes <= model.planned_bytes
    assert manifest["realized"]["expert"] + manifest["realized"]["analysis"] == sum(read)
    assert sum(read) <= plan.planned_bytes <= plan.budget_bytes
    return sum(read)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_budget__that_holds_everything_gives_the_full_merge_by_any_method(tmp_path: Path, method: str) -> None:
    setting = make_method_setting(tmp_path, method)
    wanted = weights_digest(setting.full(seed=3))
    assert wanted != weights_digest(setting.family.places[0])
    for name in ("unknown", "analysed"):
        plan = setting.plan("100%", seed=3)
        out = setting.run(plan, name)
        assert weights_digest(out) == wanted
        assert check_bytes(plan, out) > 0
        setting.analyze()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "budget"),
    slow_unless(set(zip(METHODS, cycle(BUDGETS), strict=False)).__contains__, product(METHODS, BUDGETS)),
)
def test_budgeted_merge__by_any_method_requests_no_more_than_was_planned(
    tmp_path: Path, method: str, budget: str
) -> None:
    setting = make_method_setting(tmp_path, method)
    setting.analyze()
    plan = setting.plan(budget, seed=5)
    out = setting.run(plan, "out")
    assert (check_bytes(plan, out) > 0) == (budget != "0")
    merged, full, base = read_snapshot(out), read_snapshot(setting.full(seed=5)), setting.family.models[0]
    whole = experts_read(setting.plan("100%", seed=5))
    unread = [name for name, blocks in experts_read(plan).items() if not any(blocks)]
    everything = [name for name, blocks in experts_read(plan).items() if blocks == whole[name]]
    assert unread
    for name in unread:
        if any(whole[name]):
            assert merged[name].tobytes() == base[name].tobytes()
    for name in everything:
        assert merged[name].tobytes() == full[name].tobytes()


@pytest.mark.parametrize("method", slow_unless({"model_stock", "della"}.__contains__, METHODS))
def test_budgeted_merge__by_a_method_that_looks_at_whole_tensors_reads_them_whole(tmp_path: Path, method: str) -> None:
    setting = make_method_setting(tmp_path, method)
    setting.analyze()
    whole = experts_read(setting.plan("100%"))
    some = experts_read(setting.plan("50%"))
    partial = [(t, e) for t, blocks in some.items() for e, n in enumerate(blocks) if n not in (0, whole[t][e])]
    assert partial == []
    assert 0 < sum(map(sum, some.values())) < sum(map(sum, whole.values()))


# --- rules that need whole rows: rows and blocks seldom end together, and memory may be small


ROW_METHODS = {"della": {"epsilon": 0.1}, "breadcrumbs": {"gamma": 0.1}}


@pytest.fixture(name="folder", params=[0, 4088], ids=["at any place", "on a page"])
def make_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    shapes = {"a.weight": (301, 1300), "b.weight": (64, 4096), "c.norm": (333,)}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for model in ("base", "one", "two"):
        scale = np.float32(0.0 if model == "base" else 0.02)
        tensors = {
            name: array + scale * rng.standard_normal(array.shape).astype(np.float32) for name, array in base.items()
        }
        path = write_model(tmp_path / model, tensors) / "model.safetensors"
        if request.param:  # the header is filled up with spaces, so that the tensors begin on a page
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = raw[8 : 8 + length].ljust(request.param)
            path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("memory_bytes", [40 << 20, 1 << 30])
@pytest.mark.parametrize("method", ["della", "breadcrumbs"])
def test_merge__of_whole_rows_keeps_its_budget(folder: Path, method: str, memory_bytes: int) -> None:
    parameters = {"weight": 0.5, "density": 0.5, **ROW_METHODS[method]}
    recipe = recipe_of(method, {folder / "one": {}, folder / "two": {}}, folder / "base", parameters=parameters)
    options: dict[str, Any] = {"catalog": False, "seed": 3, "memory_bytes": memory_bytes}
    mergepipe.merge(recipe, folder / "full", **options)
    options |= {"block_elements": 16384, "select": "norm" if method == "della" else "sample"}
    for budget in ("0%", "60%", "100%"):
        report = mergepipe.merge(recipe, folder / budget, budget=budget, **options)
        assert report.planned_bytes is not None
        assert report.budget_bytes is not None
        assert report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes
    full, planned = (load_file(folder / name / "model.safetensors") for name in ("full", "100%"))
    assert {name: array.tobytes() for name, array in full.items()} == {n: a.tobytes() for n, a in planned.items()}
