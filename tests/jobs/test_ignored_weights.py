"""Files of weights in a model's folder that a merge does not read are named: by `check`, in the report, on record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import mergepipe
from support.model_folders import recipe_of, write_model

TENSORS = {"model.embed_tokens.weight": np.ones((4, 3), np.float32), "model.norm.weight": np.ones(3, np.float32)}


def write_sharded(folder: Path) -> Path:
    """A model in two shards and an index."""
    folder.mkdir()
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(TENSORS, 1)}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "model-00003-of-00003.safetensors",
    ],
)
@pytest.mark.parametrize("role", ["base", "expert"])
def test_merge__names_weights_that_it_does_not_read(tmp_path: Path, name: str, role: str) -> None:
    models = {"base": write_model(tmp_path / "base", TENSORS), "expert": write_sharded(tmp_path / "expert")}
    save_file({"other.weight": np.ones(2, np.float32)}, models[role] / name)
    recipe = recipe_of("linear", {models["base"]: {"weight": 1}, models["expert"]: {"weight": 1}})
    checked = mergepipe.check(recipe)
    report = mergepipe.merge(recipe, tmp_path / "out")
    for notices in (checked.recipe_notices, report.recipe_notices):
        (notice,) = [notice for notice in notices if "not read" in str(notice)]
        assert name in str(notice)
        assert role in str(notice)
    assert name in (tmp_path / "out" / "mergepipe.json").read_text()


def test_merge__names_nothing_where_all_weights_are_read(tmp_path: Path) -> None:
    models = {write_model(tmp_path / "base", TENSORS): {"weight": 1}, write_sharded(tmp_path / "expert"): {"weight": 1}}
    (tmp_path / "base" / "training_args.bin").write_bytes(b"")
    (tmp_path / "base" / "model.gguf").write_bytes(b"")
    assert not any("not read" in str(notice) for notice in mergepipe.check(recipe_of("linear", models)).recipe_notices)
