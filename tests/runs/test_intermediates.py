"""Recipes of several documents: intermediates are written, and removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import MergePipeError, RecipeError
from support.model_folders import write_model

LAMBDA = "merge_method: task_arithmetic\nbase_model: base\nparameters: {lambda: 0.7}\nmodels:\n"
SUM = LAMBDA + "  - {model: first, parameters: {weight: 0.5}}\n  - {model: second, parameters: {weight: 0.25}}\n"
TIES = (
    "merge_method: ties\nbase_model: base\nmodels:\n  - {model: first, parameters: {weight: 0.5, density: 0.4}}\n"
    "  - {model: second, parameters: {weight: 0.25, density: 0.3}}\n"
)
DARE = (
    "merge_method: dare_linear\nbase_model: base\nmodels:\n"
    "  - {model: first, parameters: {weight: 0.5, density: 0.4}}\n"
)
OUTER = (
    "merge_method: ties\nbase_model: base\nmodels:\n  - {model: MIDDLE, parameters: {weight: 1.0, density: 0.5}}\n"
    "  - {model: third, parameters: {weight: 0.5, density: 0.5}}\n"
)


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(4)
    shapes = {"embed.weight": (700, 130), "layers.0.weight": (300, 300), "norm.weight": (77,)}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for model in ("base", "first", "second", "third"):
        scale = 0.0 if model == "base" else 0.02
        tensors: dict[str, NDArray[Any]] = {
            n: (a + scale * rng.standard_normal(a.shape)).astype(np.float32) for n, a in base.items()
        }
        tensors["ids"] = np.arange(5)
        write_model(tmp_path / model, tensors, {"model_type": "test"})
    return tmp_path


def recipe(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def weights(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


@pytest.mark.thorough
@pytest.mark.parametrize("middle", [SUM, TIES, DARE])
def test_merge__of_two_documents_is_what_two_merges_are(folder: Path, middle: str) -> None:
    mergepipe.merge(recipe(folder, "middle.yml", middle), folder / "middle", seed=7)
    mergepipe.merge(recipe(folder, "outer.yml", OUTER.replace("MIDDLE", "middle")), folder / "two", seed=7)
    both = recipe(folder, "both.yml", f"name: made\n{middle}---\n{OUTER.replace('MIDDLE', 'made')}")
    report = mergepipe.merge(both, folder / "one", seed=7)
    assert weights(folder / "one") == weights(folder / "two")
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    manifest = json.loads((folder / "one" / "mergepipe.json").read_text())
    assert {Path(each["path"]).name for each in manifest["inputs"]} == {"base", "first", "third"} | (
        {"second"} if "second" in middle else set()
    )
    assert report.expert_bytes > 0
    mergepipe.replay(folder / "one", folder / "again")
    assert weights(folder / "again") == weights(folder / "one")


def test_merge__of_two_documents_leaves_nothing_when_the_second_fails(folder: Path) -> None:
    (folder / "third" / "model.safetensors").write_bytes(b"\0" * 100)
    both = recipe(folder, "both.yml", f"name: made\n{TIES}---\n{OUTER.replace('MIDDLE', 'made')}")
    with pytest.raises(MergePipeError):
        mergepipe.merge(both, folder / "one")
    assert not (folder / "one").exists()
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_check__tells_of_all_documents(folder: Path) -> None:
    both = recipe(folder, "both.yml", f"name: made\n{TIES}---\n{OUTER.replace('MIDDLE', 'made')}")
    report = mergepipe.check(both)
    assert (report.merged_tensors, [copied.tensor for copied in report.copied]) == (3, ["ids"])


@pytest.mark.parametrize("model", ["made+adapter", "{model: {path: made}, lora: {path: adapter}}"])
def test_merge__refuses_an_adapter_on_what_another_document_makes(folder: Path, model: str) -> None:
    inner = "merge_method: linear\nmodels:\n  - {model: MODEL, parameters: {weight: 1.0}}\n".replace("MODEL", model)
    both = recipe(folder, "both.yml", f"name: made\n{SUM}---\n{inner}")
    (folder / "adapter").mkdir()
    with pytest.raises(RecipeError, match="an adapter applies to a stored model, not to what another"):
        mergepipe.merge(both, folder / "out")
    assert not (folder / "out").exists()
