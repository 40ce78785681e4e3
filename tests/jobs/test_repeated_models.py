"""A model that is listed twice counts twice: merged, under budgets, in parts, from packs, replayed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
import pytest

import mergepipe
from mergepipe.options import MergeOptions
from support.families import TINY, write_family

RANDOM = ("dare_linear", "dare_ties", "della")
OPERATORS = ("linear", "task_arithmetic", "ties", "breadcrumbs", *RANDOM)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_family(tmp_path, TINY, 2)
    shutil.copytree(tmp_path / "expert-1", tmp_path / "copy")
    return tmp_path


def recipe(family: Path, operator: str, models: Sequence[str], density: float = 0.5) -> Path:
    path = family / f"{operator}-{'-'.join(name.replace('/', '_') for name in models)}.yml"
    parameters = "" if operator in ("linear", "task_arithmetic") else f", density: {density}"
    listed = "".join(f"- {{model: {name}, parameters: {{weight: 0.3{parameters}}}}}\n" for name in models)
    path.write_text(f"merge_method: {operator}\nbase_model: base\ndtype: float32\nmodels:\n{listed}")
    return path


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def merged(path: Path, out: str, **options: object) -> bytes:
    mergepipe.merge(path, path.parent / out, **options)  # type: ignore[arg-type]
    return weights(path.parent / out)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator not in RANDOM])
@pytest.mark.parametrize("budget", [None, "60%"])
def test_merge__of_a_model_listed_twice_is_that_of_the_model_and_its_copy(
    family: Path, operator: str, budget: str | None
) -> None:
    twice = recipe(family, operator, ["expert-1", "expert-2", "expert-1"])
    report = mergepipe.merge(twice, family / "twice", budget=budget)
    copied = mergepipe.merge(recipe(family, operator, ["expert-1", "expert-2", "copy"]), family / "one", budget=budget)
    if budget is None:
        assert weights(family / "twice") == weights(family / "one")
        assert report.expert_bytes <= copied.expert_bytes  # its blocks may be read once for both
    else:
        assert report.budget_bytes is not None
        assert report.expert_bytes <= report.budget_bytes
    (notice,) = (notice for notice in report.recipe_notices if notice.code == "recipe.unclear")
    assert (notice.line, notice.key, notice.changes_result) == (7, "models[2].model", True)
    assert "'expert-1' is already listed, as models[0]: each entry counts" in notice.text
    assert mergepipe.verify(family / "twice", deep_fraction=1.0).is_sound
    mergepipe.replay(family / "twice", family / "again")
    assert weights(family / "again") == weights(family / "twice")
    inputs = json.loads((family / "twice" / "mergepipe.json").read_text())["inputs"]
    assert [entry["model"] for entry in inputs] == ["base", "expert-1", "expert-2", "expert-1"]
    assert sum(entry["read_bytes"] for entry in inputs if entry["role"] == "expert") == report.expert_bytes


def test_merge__of_a_model_under_two_names_counts_both(family: Path) -> None:
    (family / "link").symlink_to(family / "expert-1")
    named = merged(recipe(family, "task_arithmetic", ["expert-1", "link"]), "named")
    assert named == merged(recipe(family, "task_arithmetic", ["expert-1", "./expert-1"]), "spelt")


@pytest.mark.parametrize("operator", RANDOM)
def test_merge__draws_for_each_entry_by_itself(family: Path, operator: str) -> None:
    from safetensors.numpy import load_file

    once, twice = recipe(family, operator, ["expert-1"]), recipe(family, operator, ["expert-1", "expert-1"])
    merged(once, "once")
    assert merged(twice, "twice") == merged(twice, "again")
    base = load_file(family / "base" / "model.safetensors")
    shares = []
    for name in ("once", "twice"):
        made = load_file(family / name / "model.safetensors")
        changed = [np.mean(made[key] != base[key].astype(np.float32)) for key in base if base[key].size > 4096]
        shares.append(float(np.mean(changed)))
    assert shares[1] > 1.3 * shares[0]  # 0.5 and, of two draws, 0.75 of what the expert changes


@pytest.mark.thorough
@pytest.mark.parametrize("operator", ["ties", "dare_linear"])
def test_run__in_parts_and_by_a_plan_gives_the_same_bytes(family: Path, operator: str) -> None:
    path = recipe(family, operator, ["expert-1", "expert-1", "expert-2"])
    whole = merged(path, "whole", options=MergeOptions(catalog=False))
    plan = mergepipe.plan(path, everything=True)
    mergepipe.store_plan(plan, family / "plan.json")
    for number in (1, 2):
        mergepipe.run_part(family / "plan.json", family / "parts", (number, 2), catalog=False)
    assert weights(family / "parts") == whole
    budgeted = mergepipe.plan(path, "60%")
    mergepipe.run(budgeted, family / "run", catalog=False)
    assert weights(family / "run") == merged(path, "budgeted", budget="60%")


def test_merge__of_a_packed_expert_listed_twice_is_that_of_the_original(family: Path) -> None:
    mergepipe.pack(family / "base", [family / "expert-1"], family / "packed")
    packed = merged(recipe(family, "ties", ["packed/expert-1", "packed/expert-1"]), "from-packs")
    assert packed == merged(recipe(family, "ties", ["expert-1", "expert-1"]), "from-raw")


def test_merge__leaves_out_a_base_that_is_listed_twice(family: Path) -> None:
    alone = merged(recipe(family, "ties", ["expert-1"]), "alone")
    assert alone == merged(recipe(family, "ties", ["base", "expert-1", "base"]), "beside")


def test_merge__of_slices_takes_layers_of_one_model_twice(family: Path) -> None:
    (family / "slices.yml").write_text(
        "merge_method: linear\nparameters: {weight: 0.5}\nslices:\n"
        "- sources:\n  - {model: expert-1, layer_range: [0, 1]}\n  - {model: expert-1, layer_range: [1, 2]}\n"
    )
    text = (family / "slices.yml").read_text()
    (family / "copies.yml").write_text(text.replace("expert-1, layer_range: [1", "copy, layer_range: [1"))
    assert merged(family / "slices.yml", "slices") == merged(family / "copies.yml", "copies")
