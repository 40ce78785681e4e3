"""`--importance`: what the probabilities of a sample follow, in each of its forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from budget_cases import CASES, Setting, make_setting
from numpy.typing import NDArray
from safetensors.numpy import save_file

import mergepipe
from mergepipe import Plan
from mergepipe.core.blocks import F32
from mergepipe.errors import CorruptError, MergePipeError, MismatchError
from mergepipe.options import PlanOptions
from mergepipe.planning.plan import parse_plan
from support.budgets import GRAIN, TensorPlanOf
from support.training_trees import known_states, write_dcp, write_hf, write_zero12

SHAPES = {"layers.0.wide": (20 * GRAIN,), "layers.1.wide": (10, 2 * GRAIN), "layers.1.norm": (96,)}
PLANS = tuple(TensorPlanOf(name, shape, F32, (F32,)) for name, shape in SHAPES.items())
TOTALS = {"layers.0.wide": 10.0, "layers.1.wide": 30.0, "layers.1.norm": 1.0}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return make_setting(tmp_path, CASES["ties"], plans=PLANS)


def planned(setting: Setting, importance: Path | None, budget: str = "20%") -> Plan:
    options = PlanOptions(select="sample", block_elements=GRAIN, importance=importance)
    return mergepipe.plan(setting.recipe, budget, home=setting.home, options=options)


def probabilities(plan: Plan) -> Mapping[str, float]:
    return {tensor.name: tensor.probability for tensor in plan.tensors}


def write_json(folder: Path, totals: object) -> Path:
    path = folder / "importance.json"
    path.write_text(json.dumps(totals))
    return path


def test_importance__probabilities_are_proportional_to_it(setting: Setting, tmp_path: Path) -> None:
    plan = planned(setting, write_json(tmp_path, TOTALS | {"not.merged": 5}))
    drawn = probabilities(plan)
    assert drawn["layers.1.wide"] == pytest.approx(3 * drawn["layers.0.wide"])
    assert drawn["layers.1.norm"] == 1.0  # small: always read
    assert plan.planned_bytes <= plan.budget_bytes
    alike = probabilities(planned(setting, None))
    assert alike["layers.1.wide"] == alike["layers.0.wide"]


def test_importance__comes_before_norms_on_record(setting: Setting, tmp_path: Path) -> None:
    path = write_json(tmp_path, TOTALS)
    before = planned(setting, path)
    setting.analyze()
    assert probabilities(planned(setting, path)) == probabilities(before)


@pytest.mark.parametrize("none", [0, 1e-30])
def test_importance__tensors_without_any_are_read_after_all_others(
    setting: Setting, tmp_path: Path, none: float
) -> None:
    path = write_json(tmp_path, TOTALS | {"layers.0.wide": none})
    plan = planned(setting, path)
    assert probabilities(plan)["layers.0.wide"] == 0
    told = plan.fallbacks[0]
    assert (told.where, told.decision.partition(":")[0]) == ("1 tensor", "layers.0.wide")
    assert told.reason == "their importance is 0, or next to nothing"
    sampling = plan.sampling
    assert sampling is not None
    assert 0.2 < sampling.least_probability <= 1
    assert "multiplied by 1 to" in str(sampling)
    assert "e+" not in str(sampling)
    explanation = mergepipe.explain(plan, tensor="layers.0.wide", home=setting.home)
    assert {use.use for use in explanation.tensors[0].uses} == {"omitted"}
    drawn = probabilities(planned(setting, path, "80%"))
    assert drawn["layers.1.wide"] == 1
    assert 0 < drawn["layers.0.wide"] < 1


def element_file(folder: Path) -> Path:
    """Importance by element whose sums are the totals."""
    arrays = {name: np.full(shape, TOTALS[name] / np.prod(shape), np.float64) for name, shape in SHAPES.items()}
    save_file(arrays, folder / "elements.safetensors")
    return folder / "elements.safetensors"


def test_importance__one_number_a_tensor_or_an_element_are_the_same(setting: Setting, tmp_path: Path) -> None:
    save_file({name: np.array(total) for name, total in TOTALS.items()}, tmp_path / "scalars.safetensors")
    expected = probabilities(planned(setting, write_json(tmp_path, TOTALS)))
    assert probabilities(planned(setting, tmp_path / "scalars.safetensors")) == expected
    assert probabilities(planned(setting, element_file(tmp_path))) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["hf", "zero", "dcp"])
def test_importance__of_a_training_checkpoint_is_the_size_of_its_gradients(tmp_path: Path, kind: str) -> None:
    shapes = {
        "model.embed_tokens.weight": (3, 4 * GRAIN),
        "model.layers.0.mlp.up_proj.weight": (5, 4 * GRAIN),
        "model.norm.weight": (4 * GRAIN,),
        "lm_head.weight": (3, 4 * GRAIN),
    }
    known = known_states(shapes)
    moments = {name: np.square(known.arrays[name, "exp_avg_sq"]) * (i + 1) for i, name in enumerate(shapes)}
    for name, moment in moments.items():
        known.arrays[name, "exp_avg_sq"][...] = moment
    folder = tmp_path / "checkpoint"
    if kind == "zero":
        write_zero12(folder, known, [list(shapes)], world_size=2)
    else:
        folder.mkdir()
        write_hf(folder, known) if kind == "hf" else write_dcp(folder, known, world_size=2)
    plans = tuple(TensorPlanOf(name, shape, F32, (F32,)) for name, shape in shapes.items())
    setting = make_setting(tmp_path, CASES["linear_sum"], plans=plans)
    drawn = probabilities(planned(setting, folder, "10%"))
    for name, moment in moments.items():
        ratio = np.sqrt(moment.mean(dtype=np.float64) / moments["model.norm.weight"].mean(dtype=np.float64))
        assert drawn[name] == pytest.approx(ratio * drawn["model.norm.weight"])


def test_importance__is_stated_by_plan_and_manifest_without_paths_of_this_machine(
    setting: Setting, tmp_path: Path
) -> None:
    path = write_json(tmp_path, TOTALS)
    plan = planned(setting, path)
    assert plan.importance is not None
    assert plan.importance.path == str(path)
    assert parse_plan(plan.to_json()) == plan
    (tmp_path / "elsewhere").mkdir()
    moved = write_json(tmp_path / "elsewhere", TOTALS)
    assert planned(setting, moved).digest == plan.digest
    assert planned(setting, write_json(tmp_path / "elsewhere", TOTALS | {"layers.0.wide": 11})).digest != plan.digest
    out = tmp_path / "out"
    mergepipe.run(plan, out, home=setting.home)
    manifest = (out / "mergepipe.json").read_text()
    assert json.loads(manifest)["plan"]["importance"] == {
        "path": "../importance.json", "digest": plan.importance.digest,
    }  # fmt: skip
    assert str(tmp_path) not in manifest
    sampling = mergepipe.explain(out, home=setting.home).sampling
    assert sampling is not None
    assert sampling.importance == str(path)
    path.unlink()
    mergepipe.replay(out, tmp_path / "again", home=setting.home)


def without(name: str) -> dict[str, float]:
    return {other: total for other, total in TOTALS.items() if other != name}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ([1, 2], CorruptError, "a JSON object is needed"),
        (
            without("layers.1.wide"),
            MismatchError,
            "says nothing of 1 tensor of 3 that are merged: 'layers.1.wide'; did",
        ),
        ({"other": 1}, MismatchError, "says nothing of 3 tensors of 3 that are merged"),
        (TOTALS | {"layers.0.wide": -1}, MismatchError, "tensor 'layers.0.wide' needs numbers from 0 up, all finite"),
        (TOTALS | {"layers.0.wide": "many"}, MismatchError, "tensor 'layers.0.wide' needs numbers from 0 up"),
        (TOTALS | {"layers.0.wide": True}, MismatchError, "tensor 'layers.0.wide' needs numbers from 0 up"),
        (dict.fromkeys(TOTALS, 0), MismatchError, "says that no tensor is important: all are zero"),
    ],
)
def test_importance__a_file_that_does_not_fit_is_refused(
    setting: Setting, tmp_path: Path, content: object, error: type[MergePipeError], message: str
) -> None:
    path = write_json(tmp_path, content)
    with pytest.raises(error, match=message) as caught:
        planned(setting, path)
    assert caught.value.code == ("importance.damaged" if error is CorruptError else "importance.mismatch")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (np.ones((5, 4 * GRAIN), np.float32), r"has the shape \[5, 65536\], it is merged as \[10, 32768\]"),
        (np.full((10, 2 * GRAIN), np.nan, np.float32), "needs numbers from 0 up, all finite"),
        (np.full((10, 2 * GRAIN), -1, np.float32), "needs numbers from 0 up, all finite"),
        (np.full((10, 2 * GRAIN), np.inf, np.float32), "needs numbers from 0 up, all finite"),
    ],
)
def test_importance__tensors_that_do_not_fit_are_refused(
    setting: Setting, tmp_path: Path, changed: NDArray[np.float32], message: str
) -> None:
    arrays = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(arrays | {"layers.1.wide": changed}, tmp_path / "elements.safetensors")
    with pytest.raises(MismatchError, match=f"tensor 'layers.1.wide' {message}") as caught:
        planned(setting, tmp_path / "elements.safetensors")
    assert caught.value.code == "importance.mismatch"
