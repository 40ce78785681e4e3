"""Recipes in published forms are taken as mergekit takes them, by `mergepipe-yaml`; what has no effect is told once."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_recipes import load, make_models

from mergepipe.core.outcome import Notice, notice_at, told_once
from mergepipe.errors import MergePipeError, RecipeError
from mergepipe.recipes.fields import MAX_LISTED, Findings
from mergepipe.recipes.recipe_files import reload_recipe
from mergepipe.recipes.references import reference_text
from mergepipe.storage.local import LocalStore
from support.published_forms import CLAMPED, DELTAS, FORMS, LINEAR, STOCK, TIES, Form


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("recipes"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_load_recipes__takes_or_refuses_published_forms(folder: Path, form: Form) -> None:
    if form.refused:
        with pytest.raises(MergePipeError) as caught:
            load(folder, form.recipe)
        assert [problem.code for problem in caught.value.problems] == [form.refused]
    else:
        recipe = load(folder, form.recipe)
        assert tuple(notice.code for notice in recipe.notices) == form.notices
        assert all(notice.line and notice.key for notice in recipe.notices)
        again = reload_recipe(form.recipe, LocalStore(), {m.text: reference_text(m) for m in recipe.inputs()})
        assert [model.key for model in again.inputs()] == [model.key for model in recipe.inputs()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            STOCK + "parameters:\n  lambda: 1.2\n",
            "recipe.yml:7 parameters.lambda: model_stock has no parameter 'lambda': it has no effect; to "
            "task_arithmetic and 11 more it is: scale of the merged delta",
        ),
        (
            TIES.replace("{weight: ", "{lambda: 1, weight: "),
            "recipe.yml:3 models[0].parameters.lambda: lambda applies to the whole merge: under a model it has no "
            "effect; under the parameters at the top level it is: scale of the merged delta (also in line 5)",
        ),
        (
            LINEAR.replace("expert-2", "expert-2@v2"),
            "recipe.yml:4 models[1].model: the revision 'v2' of a local path has no effect; a revision is a version of "
            "a model on the Hub; a local folder has none",
        ),
        (
            TIES + "parameters: {density: 1.5}\n",
            "recipe.yml:8 parameters.density: density is 1.5, read as 1; it is in [0, 1]",
        ),
        (
            LINEAR + "residual_weight: 1\n",
            "recipe.yml:7 residual_weight: the key 'residual_weight' has no effect here; mergekit does not use it "
            "either: an option of older versions, or of a fork",
        ),
        (
            LINEAR + "weight: 1\n",
            "recipe.yml:7 weight: the key 'weight' has no effect here; parameters belong under 'parameters:'",
        ),
    ],
)  # fmt: skip
def test_notices__name_line_and_key_what_is_ignored_and_what_it_means_elsewhere(
    folder: Path, text: str, expected: str
) -> None:
    (notice,) = load(folder, text).notices
    assert str(notice) == expected


@pytest.mark.parametrize("form", [form for form in FORMS if CLAMPED in form.notices], ids=lambda form: form.name)
def test_load_recipes__warns_of_shares_that_it_takes_as_the_nearest(folder: Path, form: Form) -> None:
    assert all(notice.changes_result for notice in load(folder, form.recipe).notices)


@pytest.mark.parametrize("share", ["5", "40", "100", "[0.2, 33]", "[{filter: mlp, value: 20}, {value: 1}]"])
def test_load_recipes__refuses_percentages_for_shares_unless_lenient(folder: Path, share: str) -> None:
    text = TIES + f"parameters: {{density: {share}}}\n"
    with pytest.raises(RecipeError) as caught:
        load(folder, text)
    (problem,) = caught.value.problems
    assert (problem.code, "did you mean 0." in problem.hint or "did you mean 1?" in problem.hint) == (
        "recipe.value", True,
    )  # fmt: skip
    assert [notice.code for notice in load(folder, text, lenient=True).notices] == [CLAMPED]


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.name.startswith("misspelt")], ids=lambda form: form.name
)
def test_load_recipes__takes_misspelt_names_leniently(folder: Path, form: Form) -> None:
    (notice,) = load(folder, form.recipe, lenient=True).notices
    assert notice.code == form.refused
    assert "did you mean '" in notice.elsewhere


def test_clamping__happens_after_interpolation(folder: Path) -> None:
    """As in mergekit: halfway between 0.5 and 1.5 is 1, not 0.75."""
    from mergepipe.recipes.parameters import model_values

    recipe = load(folder, DELTAS + "merge_method: ties\nparameters: {density: [0.5, 1.5]}\n")
    chain = (recipe.models[0].parameters, recipe.parameters)
    densities = [model_values(recipe.operator, chain, "w", depth)["density"] for depth in (0.0, 0.5, 1.0)]
    assert densities == [0.5, 1.0, 1.0]


def test_notices__are_told_once_and_at_most_so_many() -> None:
    notices = [notice_at("c", f"r.yml:{line} a[{line}]", "m", "e") for line in (3, 5, 5, 9)]
    assert told_once(notices) == (Notice("c", "r.yml", 3, "a[3]", "m", "e", (5, 9)),)
    assert str(told_once(notices)[0]) == "r.yml:3 a[3]: m; e (also in lines 5, 9)"
    findings = Findings(RecipeError)
    for line in range(MAX_LISTED + 3):
        findings.add_notice("c", f"r.yml:{line + 1} k", f"m{line}")
    assert (len(findings.notices), str(findings.notices[-1])) == (MAX_LISTED + 1, "and 3 more notices")
