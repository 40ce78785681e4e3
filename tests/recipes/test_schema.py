"""The schema for editors takes what the loader takes, and refuses what editors can know to be wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from test_layered_recipes import CHAIN, SLERP, STACK, TOKENS
from test_load import DARE, LINEAR, TIES
from test_load import SLERP as SLERP_OF_MODELS

from mergepipe.operators.registry import operator_specs
from mergepipe.recipes.schema import recipe_schema, schema_text
from support.published_forms import FORMS

DOCS = Path(__file__).resolve().parents[2] / "docs"
VALIDATOR = Draft202012Validator(recipe_schema())
IN_DOCS = re.findall(r"```yaml\n(.*?)```", (DOCS / "guide" / "recipes.md").read_text(encoding="utf-8"), re.DOTALL)
SILENT_FORMS = [form.recipe for form in FORMS if not form.refused and not form.notices]  # no notice: no warning
MIXTURE = """base_model: ./base
gate_mode: hidden
experts:
- {source_model: ./a, positive_prompts: [code], noise_scale: 0.1}
- {source_model: {path: ./b}, positive_prompts: [maths]}
"""
CHOSEN = "base_model: ./moe\nexperts: [0, 3, 3]\ndtype: bfloat16\n"
MIXTURES = [MIXTURE, CHOSEN, CHOSEN.replace("[0, 3, 3]", "3")]
GOOD = [
    *MIXTURES, *SILENT_FORMS, LINEAR, TIES, DARE, SLERP_OF_MODELS, SLERP, STACK, TOKENS, *CHAIN.split("---\n"),
    *IN_DOCS,
]  # fmt: skip


def problems(text: str) -> list[str]:
    text = text.replace("3e-1", "0.3").replace(
        "6E-1", "0.6"
    )  # a number to the loader, text to other readers of YAML 1.1
    return [error.message for document in yaml.safe_load_all(text) for error in VALIDATOR.iter_errors(document)]


def test_recipe_schema__is_a_schema() -> None:
    Draft202012Validator.check_schema(recipe_schema())


def test_recipe_schema__is_the_one_in_the_docs() -> None:
    assert (DOCS / "recipe.schema.json").read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_recipe_schema__accepts_recipes_that_load(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (LINEAR, "merge_method", "merge_metod"),
        (LINEAR, "linear", "linaer"),
        (LINEAR, "weight: 0.3", "wieght: 0.3"),
        (LINEAR, "weight: 0.3", "weight: 'high'"),
        (LINEAR, "weight: 0.3", "weight: []"),
        (LINEAR, "weight: 0.3", "weight: {fitler: mlp, value: 1}"),
        (LINEAR, "dtype: float16", "dtype: flaot16"),
        (TIES, "density: 0.5", "density: 1.5"),
        (TIES, "density: 0.5", "normalize: true"),
        (STACK, "layer_range: [0, 24]", "layer_range: [0]"),
        (STACK, "layer_range: [0, 24]", "layers: [0, 24]"),
        (STACK, "slices:", "slice:"),
        (TOKENS, "pad_to_multiple_of: 64", "pad_to_multiple_of: 0"),
        (TOKENS, "kind: zero", "kind: zeros"),
        (MIXTURE, "gate_mode: hidden", "gate_mode: hiden"),
        (MIXTURE, "source_model", "model"),
        (CHOSEN, "[0, 3, 3]", "[0, -3]"),
        (CHOSEN, "base_model", "base"),
    ],
)
def test_recipe_schema__refuses_typos(text: str, old: str, new: str) -> None:
    assert old in text
    assert problems(text.replace(old, new, 1)) != []


def test_recipe_schema__knows_every_operator_and_parameter() -> None:
    text = schema_text()
    for spec in operator_specs().values():
        assert f'"const": "{spec.name}"' in text
        assert [each.name for each in spec.parameters if f'"{each.name}": {{' not in text] == []
