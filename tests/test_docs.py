"""Facts that the documentation states twice agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mergepipe.operators.registry import operator_specs
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec
from mergepipe.recipes.fields import RECIPE_KEYS
from mergepipe.recipes.recipe_files import load_recipes
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location

DOCS = Path(__file__).resolve().parent.parent / "docs"


def section(text: str, title: str) -> str:
    """The text under one second-level title."""
    assert text.count(f"\n## {title}\n") == 1
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of the only table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert set(rows[1]) <= set("|-")
    cells = (re.split(r"(?<!\\)\|", row.removeprefix("|").removesuffix("|")) for row in rows[2:])
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]


@pytest.fixture(scope="module")
def recipes() -> str:
    return (DOCS / "guide" / "recipes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parameters() -> str:
    return (DOCS / "reference" / "parameters.md").read_text(encoding="utf-8")


def default_text(spec: ParameterSpec) -> str:
    if spec.required:
        return "required"
    return f"`{str(spec.default).lower()}`" if isinstance(spec.default, bool) else f"`{spec.default:g}`"


def range_text(spec: ParameterSpec) -> str:
    if spec.is_flag:
        return "`true`, `false`"
    return "any" if spec.range_text() == "(-inf, inf)" else spec.range_text()


def models_text(spec: OperatorSpec) -> str:
    if spec.max_experts == 0:
        return "none: it takes one model"
    if spec.max_experts is not None:
        assert spec.max_experts == spec.min_experts
        return f"exactly {spec.max_experts}"
    return f"at least {spec.min_experts}" if spec.min_experts else "any number"


def parameter_rows() -> list[list[str]]:
    return [
        [f"`{spec.name}`", f"`{p.name}`", p.scope.value, default_text(p), range_text(p), p.help]
        for spec in operator_specs().values()
        for p in spec.parameters
    ]


BASE_TEXT = {
    BaseRole.REQUIRED: "required",
    BaseRole.OPTIONAL: "optional",
    BaseRole.ORIGIN: "optional",
    BaseRole.NONE: "refused",
}


def test_parameters_doc__states_every_operator(parameters: str) -> None:
    assert table(section(parameters, "Parameters")) == parameter_rows()
    assert table(section(parameters, "Operators")) == [
        [f"`{spec.name}`", spec.title, BASE_TEXT[spec.base_role], models_text(spec)]
        for spec in operator_specs().values()
    ]


def test_recipes_doc__states_the_keys(recipes: str) -> None:
    rows = table(section(recipes, "Keys"))
    assert sorted(row[0] for row in rows) == sorted(f"`{key}`" for key in RECIPE_KEYS)


def test_recipes_doc__shows_recipes_that_load(recipes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folders = ("base", "expert-code", "expert-math", "home/models/expert-math")
    for name in (*folders, "fisher-code.safetensors", "math/checkpoint-900"):
        (tmp_path / name).mkdir(parents=True)
    path = tmp_path / "recipe.yml"
    shown = [block.split("```")[0] for block in recipes.split("```yaml\n")[1:]]
    outputs = []
    for text in shown:
        path.write_text(text, encoding="utf-8")
        outputs.append(load_recipes(Location.local(path), LocalStore())[-1])
    names = [recipe.operator.name for recipe in outputs]
    assert names == ["ties", "passthrough", "linear", "ties", "sar", "task_arithmetic", "task_arithmetic"]
    assert [model.text for model in outputs[0].inputs()[1:]] == ["./expert-code", "~/models/expert-math"]
