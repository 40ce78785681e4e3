"""The spectral step after a merge, against float64 SVDs: alone, in recipes, in little memory, under budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from mergepipe.operators import spectral
from mergepipe.operators.spectral import calibrate
from mergepipe.reports import Progress
from support.model_folders import write_model
from support.slow_cases import slow_unless

MATRIX, WIDE, EMBEDDING = "model.layers.0.a.weight", "model.layers.1.a.weight", "model.embed_tokens.weight"
SHAPES = {MATRIX: [96, 64], WIDE: [64, 1024], EMBEDDING: [80, 64], "model.norm.weight": [64], "model.conv.w": [4, 8, 6]}
Array = NDArray[Any]


def oracle(merged: Array, experts: list[Array], alpha: float | None) -> Array:
    """The definition, by a whole SVD in float64."""
    left, values, right = np.linalg.svd(merged.astype(np.float64), full_matrices=False)
    if alpha is None:
        kept = values > 1e-5 * np.linalg.norm(values)
        return np.asarray((left[:, kept] @ right[kept]) * values.mean())
    inflation = np.zeros(len(values))
    for expert in experts:
        merged_part, part = left.T @ merged, left.T @ expert.astype(np.float64)
        square = (part * part).sum(axis=1)
        inflation += np.maximum((merged_part * part).sum(axis=1) / np.where(square > 0, square, np.inf), alpha)
    return np.asarray((left * (values * len(experts) / inflation)) @ right)


def relative(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("alpha", [1.0, 0.1, None])
@pytest.mark.parametrize("rank", [64, 3])
@pytest.mark.parametrize("shape", [(90, 140), (140, 90), (64, 64)])
def test_calibrate__is_what_a_whole_decomposition_gives(
    shape: tuple[int, int], rank: int, alpha: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    shared = rng.standard_normal((shape[0], 2)) @ rng.standard_normal((2, shape[1]))
    own = [rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1])) for _ in range(3)]
    experts: list[Array] = [(0.01 * (shared + one)).astype(np.float32) for one in own]
    merged = np.asarray(sum(experts))
    wanted, tried = oracle(merged, experts, alpha), []
    for exact_side in (512, 16):  # then by a sketch, where it holds everything: of low ranks
        monkeypatch.setattr(spectral, "EXACT_SIDE", exact_side)
        tried.append(merged.copy())
        calibrate(tried[-1], experts, alpha)
        assert relative(tried[-1], wanted) < 2e-5  # 1e-3 is what is stated
        assert relative(tried[-1], merged) > 0.01
    assert (tried[0].tobytes() == tried[1].tobytes()) is (rank == 64)  # what no sketch holds is done exactly


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("alpha", [1.0, None])
def test_calibrate__leaves_what_has_no_decomposition(value: float, alpha: float | None) -> None:
    merged = np.full((20, 30), value, np.float32)
    before = merged.tobytes()
    calibrate(merged, [merged.copy()], alpha)
    assert merged.tobytes() == before


# --- in recipes ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three experts of it, whose changes have a part in common."""
    folder, rng = tmp_path_factory.mktemp("spectral"), np.random.default_rng(2)
    base, shared = ({name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for model, scale in {"base": 0.0, "a": 0.1, "b": 0.1, "c": 0.1}.items():
        tensors = {n: base[n] + scale * (shared[n] + rng.standard_normal(shape)) for n, shape in SHAPES.items()}
        write_model(folder / model, {n: x.astype(np.float32) for n, x in tensors.items()})
    return folder


def recipe_of(models: Path, operator: str, post: object, base: str = "base", **parameters: float) -> dict[str, object]:
    listed = [{"model": str(models / m), "parameters": {"weight": 0.7, **parameters}} for m in "abc"]
    content = {"merge_method": operator, "models": listed, "post": post, "base_model": base and str(models / base)}
    return {key: value for key, value in content.items() if value}


def tensors_of(folder: Path) -> dict[str, Array]:
    return load_file(folder / "model.safetensors")


def merged(recipe: dict[str, object], out: Path, **options: Any) -> dict[str, Array]:
    mergepipe.merge(recipe, out, home=out.parent / "home", **options)
    return tensors_of(out)


POSTS = ({"svc": 1.0}, {"svc": 0.2}, {"isotropic": True})
RULES = ("task_arithmetic", "ties", "karcher")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("operator", "post"), slow_unless([*zip(RULES, POSTS, strict=True)].__contains__, product(RULES, POSTS))
)
def test_post__changes_the_matrices_of_any_rule_and_nothing_else(
    models: Path, tmp_path: Path, operator: str, post: dict[str, Any]
) -> None:
    plain = merged(recipe_of(models, operator, None, density=0.5), tmp_path / "plain")
    found = merged(recipe_of(models, operator, post, density=0.5), tmp_path / "found")
    base, *experts = (tensors_of(models / m) for m in ("base", *"abc"))
    for name in SHAPES:
        if name not in (MATRIX, WIDE):
            assert found[name].tobytes() == plain[name].tobytes()
            continue
        delta, *parts = (model[name].astype(np.float64) - base[name] for model in (plain, *experts))
        assert relative(found[name].astype(np.float64) - base[name], oracle(delta, parts, post.get("svc"))) < 1e-4


def test_post__is_the_same_in_little_memory_and_holds_by_filter(models: Path, tmp_path: Path) -> None:
    recipe = recipe_of(models, "ties", {"svc": [{"filter": "layers.1", "value": 0.2}]}, density=0.5)
    found = merged(recipe, tmp_path / "found")
    again = merged(recipe, tmp_path / "again", threads=1, memory_bytes=10 << 20)
    plain = merged(recipe_of(models, "ties", None, density=0.5), tmp_path / "plain")
    assert {name for name in SHAPES if found[name].tobytes() != plain[name].tobytes()} == {WIDE}
    assert all(found[name].tobytes() == again[name].tobytes() for name in SHAPES)
    assert mergepipe.verify(tmp_path / "found", deep_fraction=1.0, home=tmp_path / "home").is_sound


def test_post__under_a_budget_takes_what_is_read_by_the_same_plan(models: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"select": "norm", "block_elements": 16384, "home": tmp_path / "home"}
    mergepipe.analyze(models / "base", [models / m for m in "abc"], home=tmp_path / "home", block_elements=16384)
    recipes = [recipe_of(models, "task_arithmetic", post) for post in (None, {"isotropic": True})]
    plain_plan, plan = (mergepipe.plan(recipe, "60%", **options) for recipe in recipes)
    assert plain_plan.planned_bytes == plan.planned_bytes < plan.full_cost_bytes
    assert [tensor.reads for tensor in plain_plan.tensors] == [tensor.reads for tensor in plan.tensors]
    mergepipe.run(plain_plan, tmp_path / "plain"), mergepipe.run(plan, tmp_path / "found")
    base, plain, found = (tensors_of(place) for place in (models / "base", tmp_path / "plain", tmp_path / "found"))
    delta = plain[WIDE].astype(np.float64) - base[WIDE]
    assert relative(found[WIDE].astype(np.float64) - base[WIDE], oracle(delta, [], None)) < 1e-4


def test_post__tells_its_cost_before_it_starts(models: Path, tmp_path: Path) -> None:
    recipe, seen = recipe_of(models, "task_arithmetic", {"svc": 1}), list[Progress]()
    text = mergepipe.check(recipe).spectral
    assert text.startswith("spectral step on 2 of 5 tensors: at most ")
    mergepipe.merge(recipe, tmp_path / "out", home=tmp_path / "home", on_progress=seen.append)
    told = next(progress for progress in seen if progress.notices)
    assert told.notices[0].split(", about")[0] == text.split(", about")[0]
    assert told.done_bytes == seen[0].done_bytes
    assert mergepipe.check(recipe_of(models, "task_arithmetic", None)).spectral == ""


WITH_BLAS_THREADS = """
import sys
import mergepipe

for recipe in sys.argv[2:]:
    mergepipe.merge(f"{recipe}.yml", f"{recipe}-{sys.argv[1]}")
"""


@pytest.mark.thorough
def test_post__gives_the_same_bytes_with_any_number_of_blas_threads(tmp_path: Path) -> None:
    rng, shape = np.random.default_rng(3), (400, 300)  # large enough for BLAS to split it
    base = rng.standard_normal(shape).astype(np.float32)
    for model, scale in {"base": 0.0, "a": 0.1, "b": 0.1, "c": 0.1}.items():
        delta = (scale * rng.standard_normal(shape)).astype(np.float32)
        write_model(tmp_path / model, {MATRIX: base + delta})
    posts: dict[str, dict[str, Any]] = {"svc": {"svc": 1.0}, "isotropic": {"isotropic": True}}
    for name, post in posts.items():
        (tmp_path / f"{name}.yml").write_text(json.dumps(recipe_of(tmp_path, "task_arithmetic", post)))
    for n_threads in ("1", "2", "4"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": n_threads, "MERGEPIPE_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", WITH_BLAS_THREADS, n_threads, *posts]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=tmp_path)
    for name in posts:
        one, two, four = (tensors_of(tmp_path / f"{name}-{n_threads}")[MATRIX].tobytes() for n_threads in (1, 2, 4))
        assert one == two == four
        assert mergepipe.verify(tmp_path / f"{name}-4", deep_fraction=1.0, home=tmp_path / "home").is_sound


def test_post__names_the_builds_where_another_linear_algebra_gives_other_bits(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(recipe_of(models, "task_arithmetic", {"svc": 1.0}), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "mergepipe.json").read_text())
    built = manifest["run"]["linear_algebra"]
    assert built.startswith(f"numpy {np.__version__}, ")
    monkeypatch.setattr(np, "__version__", "0.1")  # another build ...
    monkeypatch.setattr(spectral, "NEGLIGIBLE", 0.2)  # ... that gives other values
    report = mergepipe.verify(tmp_path / "out", deep_fraction=1.0, home=tmp_path / "home")
    assert report.damages
    assert {damage.tensor for damage in report.damages} <= {MATRIX, WIDE}
    for damage in report.damages:
        assert f"made with {built}; this is numpy 0.1, " in damage.message
    with pytest.raises(mergepipe.MergePipeError, match="the last bits of a spectral step depend on that"):
        mergepipe.replay(tmp_path / "out", tmp_path / "again", home=tmp_path / "home")
    merged(recipe_of(models, "task_arithmetic", None), tmp_path / "plain")
    assert "linear_algebra" not in (tmp_path / "plain" / "mergepipe.json").read_text()
