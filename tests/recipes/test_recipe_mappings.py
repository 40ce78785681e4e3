"""A recipe as a mapping is the recipe in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import OutputError, RecipeError
from support.families import TINY, write_family
from support.refusals import refuses


def test_recipes__as_a_mapping_merge_as_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path / "family", TINY, 2)
    monkeypatch.chdir(tmp_path)
    recipe = {
        "merge_method": "linear",
        "models": [
            {"model": Path("family/base"), "parameters": {"weight": 1.0}},
            {"model": np.str_("family/expert-1"), "parameters": {"weight": np.full(2, np.float32(0.5))}},
        ],
        "dtype": "bfloat16",
    }
    mergepipe.merge(recipe, "out", catalog=False)
    written = tmp_path / "recipe.yml"
    written.write_text(
        "merge_method: linear\nmodels:\n- {model: family/base, parameters: {weight: 1.0}}\n"
        "- {model: family/expert-1, parameters: {weight: 0.5}}\ndtype: bfloat16\n"
    )
    mergepipe.merge(written, "other", catalog=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()
    assert mergepipe.check(recipe).merged_tensors > 0
    assert mergepipe.verify("out").is_sound
    with pytest.raises(OutputError, match=r"replace it with force=True$"):
        mergepipe.merge(recipe, "out", catalog=False)


def test_recipes__as_a_mapping_with_a_value_of_no_recipe_are_refused() -> None:
    endless: dict[str, object] = {}
    endless["models"] = endless
    for recipe in ({"merge_method": object()}, endless):
        with refuses(RecipeError, "recipe.syntax"):
            mergepipe.check(recipe)
    with pytest.raises(RecipeError, match="recipe:1 merge_method"):
        mergepipe.check({"merge_method": "linaer", "models": []})
