"""Weights from norms (`nan`) or from a file, and values that follow from depth (`lines`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from mergepipe.operators.registry import operator_specs
from mergepipe.options import MergeOptions
from support.disk_families import weights_digest
from support.model_folders import recipe_of, write_model
from support.training_trees import known_states, write_dcp, write_hf, write_zero12

N_LAYERS, N_EXPERTS = 4, 3
SHAPES = {
    "embed.weight": (40, 30),
    **{f"layers.{i}.mlp.weight": (200, 150) for i in range(N_LAYERS)},
    "norm.weight": (77,),
}
WEIGHTED = [name for name, spec in operator_specs().items() if spec.is_weighted]
OWN = {"density": 0.5, "gamma": 0.05, "epsilon": 0.1}
Tensors = Mapping[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and experts whose deltas have unlike norms, one of them a tensor without any."""
    folder, rng = tmp_path_factory.mktemp("family"), np.random.default_rng(3)
    base = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    for e in range(N_EXPERTS + 1):
        sizes = {
            name: 0.0 if e in (0, 2) * (name == "norm.weight") else 0.01 * e * rng.uniform(0.5, 2) for name in SHAPES
        }
        tensors = {n: (x + sizes[n] * rng.standard_normal(x.shape)).astype(np.float32) for n, x in base.items()}
        write_model(folder / str(e), base if e == 0 else tensors)
    return folder


def read(family: Path, model: int) -> Tensors:
    return load_file(family / str(model) / "model.safetensors")


def write_recipe(
    path: Path, family: Path, method: str, weight: Callable[[int], object], shared: Mapping[str, object] | None = None
) -> Path:
    names = {parameter.name for parameter in operator_specs()[method].parameters}
    own = {name: value for name, value in OWN.items() if name in names}
    experts = range(1, 1 + (operator_specs()[method].max_experts or N_EXPERTS))
    models = {family / str(e): {**own, "weight": weight(e)} for e in experts}
    path.write_text(json.dumps(recipe_of(method, models, family / "0", parameters=dict(shared or {}))))
    return path


def by_norm(family: Path, method: str) -> Callable[[int], object]:
    """The numbers that `nan` stands for, as the filters of a recipe."""
    base = read(family, 0)
    experts = range(1, 1 + (operator_specs()[method].max_experts or N_EXPERTS))
    norms = {e: {n: np.linalg.norm(x - base[n].astype(float)) for n, x in read(family, e).items()} for e in experts}
    inverse = {e: {n: 1 / norm if norm else 0.0 for n, norm in norms[e].items()} for e in experts}
    total = {name: sum(inverse[e][name] for e in experts) for name in SHAPES}
    return lambda e: [{"filter": name, "value": float(inverse[e][name] / total[name])} for name in SHAPES]


@pytest.mark.thorough
@pytest.mark.parametrize("method", WEIGHTED)
def test_weight_nan__is_the_inverse_norm_of_each_tensors_delta(tmp_path: Path, family: Path, method: str) -> None:
    options = MergeOptions(home=tmp_path / "home", seed=5)
    written = write_recipe(tmp_path / "numbers.yml", family, method, by_norm(family, method))
    by_numbers = mergepipe.merge(written, tmp_path / "numbers", options=options)
    recipe = write_recipe(tmp_path / "nan.yml", family, method, lambda _: "nan")
    made = mergepipe.merge(recipe, tmp_path / "nan", options=options)
    assert (made.expert_bytes, made.analysis_bytes) == (by_numbers.expert_bytes, by_numbers.analysis_bytes)
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("numbers", "nan"))
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=4e-7 * float(np.abs(tensor).max()))


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_weight_nan__with_norms_on_record_and_under_a_budget(tmp_path: Path, family: Path, method: str) -> None:
    home, recipe = tmp_path / "home", write_recipe(tmp_path / "nan.yml", family, method, lambda _: "nan")
    mergepipe.merge(recipe, tmp_path / "plain", home=home)
    sampled = mergepipe.merge(recipe, tmp_path / "half", budget="50%", home=home)
    assert 0 < sampled.expert_bytes <= (sampled.budget_bytes or 0)
    experts = [family / str(e) for e in range(1, N_EXPERTS + 1)]
    mergepipe.analyze(family / "0", experts, home=home)
    recorded = mergepipe.merge(recipe, tmp_path / "recorded", home=home)
    assert weights_digest(tmp_path / "recorded") == weights_digest(tmp_path / "plain")
    assert recorded.expert_bytes == N_EXPERTS * sum(tensor.nbytes for tensor in read(family, 1).values())
    plan = mergepipe.plan(recipe, "100%", home=home, select="norm")
    mergepipe.run(plan, tmp_path / "planned", home=home)
    assert weights_digest(tmp_path / "planned") == weights_digest(tmp_path / "plain")


def test_lambda_lines__grows_from_the_first_layer_to_the_last(tmp_path: Path, family: Path) -> None:
    shared = {"lambda": {"lines": [0.3, 0.6]}}
    recipe = write_recipe(tmp_path / "recipe.yml", family, "task_arithmetic", lambda e: 0.2 * e, shared)
    made = mergepipe.merge(recipe, tmp_path / "out", home=tmp_path / "home")
    base, found = read(family, 0), load_file(tmp_path / "out" / "model.safetensors")
    assert made.expert_bytes == N_EXPERTS * sum(tensor.nbytes for tensor in base.values())
    for name, tensor in base.items():
        depth = int(name.split(".")[1]) / (N_LAYERS - 1) if name.startswith("layers") else 0.0
        deltas = [0.2 * e * (read(family, e)[name].astype(float) - tensor) for e in range(1, N_EXPERTS + 1)]
        np.testing.assert_allclose(found[name], tensor + (0.3 + 0.6 * depth) * sum(deltas), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def importances(family: Path) -> list[Path]:
    """A number for each element of each expert."""
    rng, paths = np.random.default_rng(4), [family / f"fisher{e}.safetensors" for e in range(N_EXPERTS + 1)]
    for path in paths:
        numbers = {name: (rng.random(shape) ** 8 * 1e-9).astype(np.float32) for name, shape in SHAPES.items()}
        save_file(numbers, path)
    return paths


def test_weight_file__weighs_each_element_within_the_budget(
    tmp_path: Path, family: Path, importances: list[Path]
) -> None:
    def weight(e: int) -> object:
        return {"file": str(importances[e]), "value": 0.5 * e} if e > 1 else 1e-10

    recipe, options = write_recipe(tmp_path / "fisher.yml", family, "fisher", weight), MergeOptions(home=tmp_path)
    full = mergepipe.merge(recipe, tmp_path / "full", options=options)
    n_bytes = sum(tensor.nbytes for tensor in read(family, 1).values())
    assert full.expert_bytes >= (N_EXPERTS + 2) * n_bytes
    base, found = read(family, 0), load_file(tmp_path / "full" / "model.safetensors")
    files = [load_file(path) for path in importances]
    for name, tensor in base.items():
        deltas = [read(family, e)[name].astype(float) - tensor for e in (1, 2, 3)]
        weights = [np.full(tensor.shape, 1e-10), files[2][name].astype(float), 1.5 * files[3][name].astype(float)]
        wanted = tensor + sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-6)
    half = mergepipe.merge(recipe, tmp_path / "half", budget="50%", options=options)
    limit = 0.55 * (N_EXPERTS + 2) * n_bytes  # half, in whole pages
    assert 0 < half.expert_bytes <= (half.budget_bytes or 0) <= limit
    mergepipe.merge(recipe, tmp_path / "all", budget="100%", options=options)
    assert weights_digest(tmp_path / "all") == weights_digest(tmp_path / "full")
    with pytest.raises(UnsupportedError, match="weights by element are read with the elements they weigh"):
        mergepipe.plan(recipe, "50%", home=tmp_path, select="norm")


def test_weight_file__is_refused_where_it_does_not_fit(tmp_path: Path, family: Path, importances: list[Path]) -> None:
    def refused(method: str, weight: object, error: type[MergePipeError], message: str) -> None:
        recipe = write_recipe(tmp_path / "recipe.yml", family, method, lambda _: weight)
        with pytest.raises(error, match=message):
            mergepipe.check(recipe)

    tensors = load_file(importances[1])
    save_file({name: tensors[name] for name in list(SHAPES)[1:]}, tmp_path / "lacking.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"][1:]}, tmp_path / "smaller.safetensors")
    file = {"file": str(importances[1])}
    refused("ties", file, UnsupportedError, "ties accepts one weight per tensor")
    refused("fisher", {**file, "scale": 2}, RecipeError, "scale")
    refused("fisher", {"file": str(tmp_path / "none.safetensors")}, NotFoundError, "there is no file")
    refused("fisher", {"file": str(tmp_path / "lacking.safetensors")}, MismatchError, "has no weights of it")
    refused("fisher", {"file": str(tmp_path / "smaller.safetensors")}, MismatchError, "shape")


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("method", ["ties", "task_arithmetic", "fisher"])
def test_weight_file__with_one_number_a_tensor_goes_with_any_rule(
    tmp_path: Path, family: Path, method: str, suffix: str
) -> None:
    numbers = {name: 0.25 * (i - 1) for i, name in enumerate(SHAPES)}
    path, cases = tmp_path / f"layers.{suffix}", [{"filter": name, "value": 0.5 * n} for name, n in numbers.items()]
    if suffix == "json":
        path.write_text(json.dumps(numbers), encoding="utf-8")
    else:
        save_file({name: np.array(n, np.float32) for name, n in numbers.items()}, path)
    weights: dict[str, Any] = {"file": {"file": str(path), "value": 0.5}, "filter": [*cases, {"value": 0.5}]}
    for name in weights:
        recipe = write_recipe(tmp_path / f"{name}.yml", family, method, [0.5, 0.5, weights[name], 0.5].__getitem__)
        mergepipe.merge(recipe, tmp_path / name, home=tmp_path / "home")
    assert weights_digest(tmp_path / "file") == weights_digest(tmp_path / "filter")
    mergepipe.replay(tmp_path / "file", tmp_path / "again")
    (tmp_path / "lacking.json").write_text(json.dumps({"norm.weight": 1.0}), encoding="utf-8")
    lacking = write_recipe(tmp_path / "recipe.yml", family, method, lambda _: {"file": str(tmp_path / "lacking.json")})
    with pytest.raises(RecipeError, match="weight has no value for"):
        mergepipe.check(lacking)


@pytest.mark.parametrize("kind", ["hf", "zero", "dcp"])
def test_weight_file__may_be_the_second_moments_of_a_training_checkpoint(tmp_path: Path, kind: str) -> None:
    shapes = {
        "model.embed_tokens.weight": (30, 20),
        "model.layers.0.mlp.up_proj.weight": (50, 20),
        "lm_head.weight": (30, 20),
    }
    known, rng, folder = known_states(shapes), np.random.default_rng(6), tmp_path / "checkpoint"
    models = [{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(3)]
    for e, tensors in enumerate(models):
        write_model(tmp_path / str(e), tensors)
    moments = {name: np.square(known.arrays[name, "exp_avg_sq"], dtype=float) for name in shapes}
    for name, moment in moments.items():
        known.arrays[name, "exp_avg_sq"][...] = moment
    if kind == "zero":
        write_zero12(folder, known, [list(shapes)], world_size=2)
    else:
        folder.mkdir()
        write_hf(folder, known) if kind == "hf" else write_dcp(folder, known, world_size=2)

    def weight(e: int) -> object:
        return {"file": str(folder)} if e == 1 else 0.25

    recipe = write_recipe(tmp_path / "recipe.yml", tmp_path, "fisher", weight)
    content = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**content, "models": content["models"][:2]}))
    mergepipe.merge(recipe, tmp_path / "out", home=tmp_path / "home")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, moment in moments.items():
        base, *deltas = (models[0][name].astype(float), *(m[name] - models[0][name].astype(float) for m in models[1:]))
        wanted = base + (moment * deltas[0] + 0.25 * deltas[1]) / (moment + 0.25)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=2e-6)
