"""A recipe as a mapping is the recipe in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import OutputError, RecipeError
from mergepipe.options import MergeOptions
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
    options = MergeOptions(catalog=False)
    mergepipe.merge(recipe, "out", options=options)
    written = tmp_path / "recipe.yml"
    written.write_text(
        "merge_method: linear\nmodels:\n- {model: family/base, parameters: {weight: 1.0}}\n"
        "- {model: family/expert-1, parameters: {weight: 0.5}}\ndtype: bfloat16\n"
    )
    mergepipe.merge(written, "other", options=options)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()
    assert mergepipe.check(recipe).merged_tensors > 0
    assert mergepipe.verify("out").is_sound
    with pytest.raises(OutputError) as caught:
        mergepipe.merge(recipe, "out", options=options)
    assert str(caught.value).endswith("replace it with force=True")


def test_recipes__as_a_mapping_with_a_value_of_no_recipe_are_refused() -> None:
    with refuses(RecipeError, "recipe.syntax"):
        mergepipe.check({"merge_method": object()})
    with pytest.raises(RecipeError) as caught:
        mergepipe.check({"merge_method": "linaer", "models": []})
    assert "recipe:1 merge_method" in str(caught.value)
