"""Models of very large or very small numbers: a merge of scaled models is the scaled merge, or infinities are reported.

A power of two changes no digit of a number, so that the merge of ordinary numbers is the oracle of all others. Rules
with limits on lengths or changes, which their sources set, are asked about large numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from support.model_folders import recipe_of, write_model

SHAPE = (16, 24)
LARGEST = 126  # of the numbers that are drawn, up to 3.9, none is then infinite
Array = NDArray[np.float32]

WEIGHT: Mapping[str, object] = {"weight": 0.5}
CUT: Mapping[str, object] = {"weight": 0.5, "density": 0.5}
RULES: dict[str, tuple[str, Mapping[str, object], int, Mapping[str, object]]] = {
    "linear": ("linear", WEIGHT, 3, {}),
    "sum": ("task_arithmetic", {"weight": 0.3}, 3, {}),
    "ties": ("ties", CUT, 3, {}),
    "breadcrumbs": ("breadcrumbs", CUT, 3, {}),
    "magmax": ("magmax", {}, 3, {}),
    "fisher": ("fisher", WEIGHT, 3, {}),
    "geometric median": ("geometric_median", WEIGHT, 3, {}),
    "geometric median of small weights": ("geometric_median", {"weight": 1e-9}, 3, {}),
    "slerp": ("slerp", {}, 1, {"t": 0.4}),
    "nuslerp": ("nuslerp", WEIGHT, 2, {}),
    "nuslerp of rows": ("nuslerp", WEIGHT, 2, {"nuslerp_flatten": False}),
    "multislerp": ("multislerp", WEIGHT, 3, {}),
    "karcher": ("karcher", {}, 3, {}),
    "model_stock": ("model_stock", {}, 3, {}),
    "sce": ("sce", {}, 3, {}),
    "sce of some elements": ("sce", {}, 3, {"select_topk": 0.3}),
    "consensus": ("consensus", {"weight": 0.5}, 3, {}),
    "ram": ("ram", {}, 3, {}),
    "sar": ("sar", WEIGHT, 3, {"density": 0.5}),
}
OF_ANY_LENGTH = ("linear", "sum", "ties", "breadcrumbs", "magmax", "fisher", "geometric median", "consensus")


def write_models(folder: Path, exponent: int) -> Path:
    """Write a base and three models with other signs here and there."""
    random = np.random.default_rng(1)
    base = random.uniform(1, 3.9, SHAPE) * random.choice([-1, 1], SHAPE)
    write_model(folder / "base", {"l.weight": np.ldexp(base.astype(np.float32), exponent)})
    for number in range(3):
        changed = base * random.choice([-1, 1, 1], SHAPE) * random.uniform(0.5, 1, SHAPE)
        write_model(folder / str(number), {"l.weight": np.ldexp(changed.astype(np.float32), exponent)})
    return folder


def merged(folder: Path, rule: str) -> tuple[Array, str]:
    """Merge the models of a folder; return the numbers, and the notices."""
    method, own, n_models, parameters = RULES[rule]
    models: dict[Any, Mapping[str, object]] = {folder / str(number): own for number in range(n_models)}
    recipe = recipe_of(method, models, folder / "base", dtype="float32", parameters=parameters)
    report = mergepipe.merge(recipe, folder / "out", catalog=False, threads=1, force=True)
    return load_file(folder / "out" / "model.safetensors")["l.weight"], "\n".join(map(str, report.notices))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_merge__of_scaled_models_is_scaled_or_reports_infinities(tmp_path: Path, rule: str) -> None:
    ordinary, notices = merged(write_models(tmp_path / "ordinary", 0), rule)
    assert np.isfinite(ordinary).all()
    assert "infinities" not in notices
    for exponent in (60, LARGEST, *((-70, -93) if rule.startswith(OF_ANY_LENGTH) else ())):
        scaled, notices = merged(write_models(tmp_path / str(exponent), exponent), rule)
        with np.errstate(over="ignore"):
            expected = np.ldexp(ordinary, exponent)
        if exponent == LARGEST and not np.isfinite(scaled).all():
            assert "infinities or NaN in 1 of 1 tensor" in notices
        else:
            np.testing.assert_array_equal(scaled, expected)


def test_sce__selects_the_same_elements_of_models_whose_variances_float32_does_not_hold(tmp_path: Path) -> None:
    ordinary, _ = merged(write_models(tmp_path / "ordinary", 0), "sce of some elements")
    selected = ordinary != load_file(tmp_path / "ordinary" / "base" / "model.safetensors")["l.weight"]
    assert 0.2 < selected.mean() < 0.4
    for exponent in (-60, -93):
        folder = write_models(tmp_path / str(exponent), exponent)
        scaled, _ = merged(folder, "sce of some elements")
        base = load_file(folder / "base" / "model.safetensors")["l.weight"]
        np.testing.assert_array_equal(scaled != base, selected)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "breadcrumbs"])  # drops the largest of each model
def test_merge__reports_what_is_not_a_number_in_one_model(tmp_path: Path, rule: str) -> None:
    folder = write_models(tmp_path / "models", 0)
    tensors = load_file(folder / "0" / "model.safetensors")
    tensors["l.weight"][3, 4] = np.nan
    write_model(folder / "0", tensors)
    values, notices = merged(folder, rule)
    assert np.isnan(values[3, 4])
    assert "infinities or NaN in 1 of 1 tensor" in notices


def test_multislerp__of_tensors_shorter_than_eps_is_their_average(tmp_path: Path) -> None:
    folder = write_models(tmp_path / "models", -93)
    made, _ = merged(folder, "multislerp")
    models = [load_file(folder / name / "model.safetensors")["l.weight"].astype(np.float64) for name in "012"]
    np.testing.assert_allclose(made, np.mean(models, axis=0), rtol=1e-6)


@pytest.mark.parametrize("parameters", [{}, {"select_topk": 0.5}])
def test_sce__reports_an_infinity_that_outweighs_all_else(tmp_path: Path, parameters: Mapping[str, object]) -> None:
    folder = write_models(tmp_path / "models", 0)
    tensors = load_file(folder / "1" / "model.safetensors")
    tensors["l.weight"][3, 4] = np.inf
    write_model(folder / "1", tensors)
    recipe = recipe_of("sce", {folder / "0": {}, folder / "1": {}}, folder / "base", parameters=parameters)
    report = mergepipe.merge(recipe, folder / "out", catalog=False)
    assert "infinities or NaN in 1 of 1 tensor" in "\n".join(map(str, report.notices))
