"""Recipes as mergekit's users write them, and every way one can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_recipes import load, load_refusal, make_models, said

from mergepipe.core.blocks import BF16, F16, F32
from mergepipe.errors import NotFoundError, RecipeError, did_you_mean
from mergepipe.operators.registry import operator_specs
from mergepipe.recipes.model_location import ModelName, resolve_model_name
from mergepipe.recipes.recipe_files import load_recipes
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores
from support.refusals import refuses

METHODS = did_you_mean("", list(operator_specs()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("recipes"))


LINEAR = """\
models:
  - model: a
    parameters:
      weight: 1.0
  - model: ./b
    parameters:
      weight: 0.3
merge_method: linear
dtype: float16
"""

TIES = """\
models:
  - model: base
    # no parameters necessary for base model
  - model: a
    parameters:
      density: 0.5
      weight: 0.5
  - model: b
    parameters:
      density: 0.5
      weight: 3e-1
merge_method: ties
base_model: base
parameters:
  normalize: false
  int8_mask: true
dtype: bfloat16
out_dtype: float32
"""

DARE = """\
models:
  - model: a
    parameters: {weight: 0.4, density: 0.53}
  - model: b
  - model: c
    parameters:
merge_method: dare_ties
base_model: base
parameters: {weight: 0.25, lambda: 1, rescale: false}
"""

SLERP = """\
models:
  - model: base
  - model: a
merge_method: slerp
base_model: base
parameters:
  t: 0.5
dtype: bfloat16
"""


def test_load_recipe__reads_linear(folder: Path) -> None:
    recipe = load(folder, LINEAR)
    assert recipe.operator is operator_specs()["linear"]
    assert [(m.text, m.path.local_path, dict(m.parameters), m.where) for m in recipe.models] == [
        ("a", folder / "a", {"weight": 1.0}, "recipe.yml:2 models[0]"),
        ("./b", folder / "b", {"weight": 0.3}, "recipe.yml:5 models[1]"),
    ]
    assert (recipe.base, recipe.dtype, recipe.out_dtype, dict(recipe.parameters)) == (None, F16, None, {})
    assert recipe.inputs()[0] is recipe.models[0]
    assert recipe.inputs()[1:] == recipe.models[1:]
    assert recipe.inputs() == recipe.models
    assert recipe.path.local_path == folder / "recipe.yml"
    assert recipe.source_text == LINEAR


def test_load_recipe__reads_ties_with_the_base_listed(folder: Path) -> None:
    recipe = load(folder, TIES)
    assert recipe.operator.name == "ties"
    assert recipe.base is not None
    named = (recipe.base.text, recipe.base.path.local_path, recipe.base.where)
    assert named == ("base", folder / "base", "recipe.yml:13 base_model")
    assert [m.text for m in recipe.inputs()[1:]] == ["a", "b"]
    assert dict(recipe.inputs()[1:][1].parameters) == {"density": 0.5, "weight": 0.3}
    assert dict(recipe.parameters) == {"normalize": False}
    assert (recipe.dtype, recipe.out_dtype) == (BF16, F32)


def test_load_recipe__reads_dare_with_global_defaults(folder: Path) -> None:
    recipe = load(folder, DARE)
    assert [m.text for m in recipe.inputs()[1:]] == ["a", "b", "c"]
    assert dict(recipe.parameters) == {"weight": 0.25, "lambda": 1.0, "rescale": False}
    assert [m.text for m in recipe.inputs()] == ["base", "a", "b", "c"]


def test_load_recipe__reads_slerp_and_passthrough(folder: Path) -> None:
    recipe = load(folder, SLERP)
    assert [m.text for m in recipe.inputs()[1:]] == ["a"]
    assert dict(recipe.parameters) == {"t": 0.5}
    alone = load(folder, "models: [{model: a, parameters: {scale: 2}}]\nmerge_method: passthrough\n")
    assert (alone.inputs()[0].text, alone.inputs()[1:]) == ("a", ())


def test_load_recipes__takes_the_default_of_a_parameter_that_has_only_one_value(folder: Path) -> None:
    assert dict(load(folder, TIES.replace("int8_mask: true", "rescale: false")).parameters)["rescale"] is False


@pytest.mark.parametrize("form", ["{path: a}", "{model: {path: a, revision: null}, lora: null}", "one.safetensors"])
def test_load_recipe__reads_long_references_and_files(folder: Path, form: str) -> None:
    recipe = load(folder, f"models: [{{model: {form}, parameters: {{weight: 1}}}}]\nmerge_method: linear\n")
    assert recipe.models[0].path.local_path == folder / recipe.models[0].text


def test_load_recipe__expands_home_and_keeps_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    recipe = load(folder, LINEAR.replace("model: a", "model: ~/a").replace("./b", str(folder / "b")))
    assert [m.path.local_path for m in recipe.models] == [folder / "a", folder / "b"]
    assert recipe.models[0].text == "~/a"


def test_load_recipes__takes_paths_from_the_recipes_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "recipe.yml").write_text(LINEAR, encoding="utf-8")
    monkeypatch.chdir(folder.parent)
    (recipe,) = load_recipes(Location.local(Path(folder.name) / "recipe.yml"), Stores())
    assert [m.path.local_path for m in recipe.models] == [folder / "a", folder / "b"]


def test_load_recipe__accepts_a_plus_in_a_path_that_exists(folder: Path) -> None:
    recipe = load(folder, LINEAR.replace("model: a", "model: org/with+plus"))
    assert recipe.models[0].path.local_path == folder / "org/with+plus"


def test_load_recipe__knows_the_base_by_another_name(folder: Path) -> None:
    text = LINEAR.replace("model: a", "model: link") + "base_model: a\n"
    recipe = load(folder, text)
    assert [m.text for m in recipe.inputs()[1:]] == ["./b"]
    listed = recipe.models[0]
    assert listed.key == recipe.inputs()[0].key
    assert (listed.text, listed.path.local_path, dict(listed.parameters)) == ("link", folder / "a", {"weight": 1.0})


def test_load_recipe__lets_linear_anchor_outside_its_models(folder: Path) -> None:
    recipe = load(folder, LINEAR + "base_model: base\n")
    assert (recipe.inputs()[0].text, len(recipe.inputs()[1:]), len(recipe.models)) == ("base", 2, 2)


def with_weight(value: str) -> str:
    return LINEAR.replace("weight: 0.3", f"weight: {value}")


AT_WEIGHT = "7 models[1].parameters.weight"

# A recipe, and of each problem: the code below `recipe.`, the line, where, and what is said.
BAD: list[tuple[str, ...]] = [
    # the whole
    ("5\n", "value 1: a recipe is a mapping of names to values, found the number 5"),
    ("- a\n", "value 1: a recipe is a mapping of names to values, found a list"),
    (
        "dtype: float32\n",
        f"incomplete 1 merge_method: the recipe has no merge_method; {METHODS}",
        "incomplete 1 models: the recipe has no models",
    ),
    (
        "base_model: base\ngate_mode: hidden\nexperts: [{source_model: a}, {source_model: b, positive_prompts: [x]}]\n",
        "incomplete 3 experts[0]: the expert has no positive_prompts, from which its router is computed; write some, "
        "or gate_mode: random",
    ),
    # keys
    (LINEAR + "dytpe: float32\n", "unknown-name 10 dytpe: unknown key 'dytpe'; did you mean 'dtype'?"),
    (
        LINEAR.replace("    parameters:\n      weight: 0.3", "    weight: 0.3"),
        "incomplete 5 models[1].parameters.weight: linear needs the parameter weight; 'weight' is written in the entry "
        "itself: put it below 'parameters:'",
    ),
    (
        LINEAR.replace("    parameters:\n      weight: 0.3", "    parameters:\n    weight: 0.3"),
        "incomplete 6 models[1].parameters.weight: linear needs the parameter weight; 'weight' is written next to "
        "'parameters:', not below it: indent it by two more spaces",
    ),
    (
        LINEAR.replace("  - model: ./b\n    parameters:", "  - model: ./b\n    paramters: {}\n    parameters:"),
        "unknown-name 6 models[1].paramters: unknown key 'paramters'; did you mean 'parameters'?",
    ),
    # operator
    (
        LINEAR.replace("linear", "dare-ties"),
        "unknown-name 8 merge_method: unknown merge method 'dare-ties'; did you mean 'dare_ties'?",
    ),
    (LINEAR.replace("linear", "[linear]"), "value 8 merge_method: needs text, found a list"),
    # dtypes
    (
        LINEAR.replace("dtype: float16", "out_dtype: flaot16"),
        "unknown-name 9 out_dtype: unknown dtype 'flaot16'; did you mean 'float16'?",
    ),
    # models
    (
        "models: []\nmerge_method: linear\n",
        "value 1 models: needs a list of models, found an empty list; write '- model: PATH'",
    ),
    (
        "models: {model: a}\nmerge_method: linear\n",
        "value 1 models: needs a list of models, found a mapping; write '- model: PATH'",
    ),
    (
        "models: [a]\nmerge_method: linear\n",
        "value 1 models[0]: needs a mapping with the key 'model', found the text 'a'; write '- model: PATH'",
    ),
    (
        "models: [{parameters: {weight: 1}}]\nmerge_method: linear\n",
        "incomplete 1 models[0].model: the entry has no model; write '- model: PATH'",
    ),
    (
        LINEAR.replace("model: ./b", "model: 2024"),
        "value 5 models[1].model: needs text, found the number 2024; put it in quotes if it is meant as text",
    ),
    (LINEAR.replace("model: ./b", "model: ' '"), "value 5 models[1].model: needs text, found empty text"),
    (
        LINEAR.replace("model: ./b", "model: {path: b+c, lora: a}"),
        "value 5 models[1].model.lora: needs one adapter at most, found 'b+c' and 'a'",
    ),
    (
        LINEAR.replace("model: ./b", "model: {paht: b}"),
        "unknown-name 5 models[1].model.paht: unknown key 'paht'; did you mean 'path'?",
        "incomplete 5 models[1].model: the model reference has no path",
    ),
    (
        LINEAR.replace("model: ./b", "model: {path: b, model: b}"),
        "value 5 models[1].model: needs either 'path' or 'model', found both",
    ),
    # parameters
    (
        LINEAR.replace("weight: 0.3", "weihgt: 0.3"),
        "unknown-name 7 models[1].parameters.weihgt: linear has no parameter 'weihgt'; did you mean 'weight'?",
        "incomplete 6 models[1].parameters.weight: linear needs the parameter weight; write 'weight: ...' under "
        "its parameters, or under the top-level ones for all models",
    ),
    (
        LINEAR.replace("    parameters:\n      weight: 0.3", "    parameters: [1]"),
        "value 6 models[1].parameters: needs names with values, found a list",
    ),
    (
        with_weight("[]"),
        f"value {AT_WEIGHT}: a list of values over the layers needs at least 1, found 0; give values, or one number",
    ),
    (with_weight("[0.5, x]"), f"value {AT_WEIGHT}[1]: needs a number, found the text 'x'"),
    (
        with_weight("[{value: 1, filter: mlp}, 2]"),
        f"value {AT_WEIGHT}: needs either values or entries with 'filter' and 'value', found both; write '- value: "
        "...' for every entry",
    ),
    (
        with_weight("[{fitler: mlp, value: 2}, {value: 1}]"),
        f"unknown-name {AT_WEIGHT}[0].fitler: unknown key 'fitler'; did you mean 'filter'?",
    ),
    (with_weight("{filter: mlp}"), f"incomplete {AT_WEIGHT}.value: the entry has no value; write 'value: ...'"),
    (with_weight(""), f"value {AT_WEIGHT}: needs a number, found nothing"),
    (with_weight("much"), f"value {AT_WEIGHT}: needs a number, found the text 'much'"),
    (with_weight("1e999"), f"value {AT_WEIGHT}: needs a finite number, found inf"),
    (with_weight("1e39"), f"value {AT_WEIGHT}: weight is the number 1e+39, beyond float32"),
    (with_weight("9" * 64), f"value {AT_WEIGHT}: weight is the number 1e+64, beyond float32"),
    (
        TIES.replace("ties", "breadcrumbs").replace("density: 0.5", "gamma: 1.5", 1),
        "value 6 models[1].parameters.gamma: gamma is 1.5, must be in [0, 1]",
    ),
    (
        SLERP.replace("  t: 0.5", "  {}"),
        "incomplete 6 parameters.t: slerp needs the parameter t; write 't: ...' under the top-level parameters",
    ),
    (
        TIES.replace("normalize: false", "normalize: 2"),
        "value 15 parameters.normalize: needs true or false, found the number 2",
    ),
    (
        with_weight("-1.0"),
        "value 1 models: the weights sum to 0 and cannot be normalized; change a weight, or set normalize: false",
    ),
    # base and number of models
    (
        SLERP.replace("base_model: base\n", ""),
        "incomplete 1 base_model: slerp needs base_model; name the model the others were fine-tuned from",
    ),
    (
        "models: [{model: a}]\nmerge_method: passthrough\nbase_model: base\n",
        "conflict 3 base_model: passthrough has no base model; remove base_model",
    ),
    (
        "models: [{model: a}, {model: b}]\nmerge_method: model_stock\nbase_model: base\n"
        "parameters: {int8_mask: true, filter_wse: true}\n",
        "unknown-name 4 parameters.filter_wse: model_stock has no parameter 'filter_wse'; did you mean 'filter_wise'?",
    ),
    (
        "models: [{model: a}, {model: b}]\nmerge_method: karcher\nparameters: {max_iter: 2.5}\n",
        "value 3 parameters.max_iter: needs a whole number, found the number 2.5",
    ),
    (
        TIES.replace("ties", "della").replace("density: 0.5", "density: 0.1", 1),
        "conflict 5 models[1].parameters: density 0.1 with epsilon 0.15 gives probabilities from -0.05 to 0.25, "
        "outside (0, 1); change one of the two",
    ),
    (
        "models: [{model: a}, {model: b}]\nmerge_method: passthrough\n",
        "value 1 models: passthrough takes exactly 1 model, found 2",
    ),
    (SLERP.replace("  - model: a\n", ""), "value 1 models: slerp takes exactly 1 model besides base_model, found 0"),
    (
        "models: [{model: base}]\nmerge_method: model_stock\nbase_model: base\n",
        "value 1 models: model_stock takes at least 2 models besides base_model, found 0",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{i}-{bad[1].split()[0]}" for i, bad in enumerate(BAD)])
def test_load_recipe__tells_exactly_what_is_wrong(folder: Path, bad: tuple[str, ...]) -> None:
    text, *expected = bad
    assert type(load_refusal(folder, text)) is RecipeError
    assert said(folder, text) == expected


@pytest.mark.parametrize(
    ("name", "revision"), [("hub/name", ""), ("hub/name@v1", " --revision v1"), ("hub/name:folder", "")]
)
def test_load_recipe__says_how_to_get_a_hub_id_without_a_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, revision: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = load_refusal(folder, LINEAR.replace("./b", name))
    assert type(error) is NotFoundError
    assert [f"{p.code} | {p}" for p in error.problems] == [
        f"hub.offline | recipe.yml:5 models[1].model: there is no folder '{name}', and on the "
        "Hub: HF_HUB_OFFLINE is set, and it is not in the local cache of the Hub; where there is a network, run "
        f"`hf download hub/name{revision} --local-dir name`, and name that folder"
    ]


def test_load_recipe__says_where_it_looked(folder: Path) -> None:
    error = load_refusal(folder, LINEAR.replace("./b", "./none/b") + "base_model: one.safetensors/x\n")
    assert type(error) is NotFoundError
    assert [p.code for p in error.problems] == ["model.not-found"] * 2
    assert error.problems[1].message == "there is no folder './none/b'"
    assert error.problems[1].hint == f"looked for {folder}/none/b"


def test_load_recipe__says_how_a_hub_id_below_a_folder_of_that_name_is_written(folder: Path) -> None:
    problem = load_refusal(folder, LINEAR.replace("./b", "org/name@v1:sub")).problems[-1]
    assert problem.hint.endswith("/org/ holds with+plus; a model on the Hub is written hf://org/name@v1/sub")


def test_load_recipe__lists_the_neighbours_of_a_missing_folder_those_like_it_first(tmp_path: Path) -> None:
    for name in ("math", *"abcdefgh"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models" / ".cache").mkdir()
    (tmp_path / "models" / "notes.txt").touch()
    error = load_refusal(tmp_path, LINEAR.replace("./b", "models/maths"))
    assert str(error.problems[-1]).endswith(
        f"there is no folder 'models/maths'; {tmp_path}/models/ holds math, a, b, c, d, e, f, g and 1 more"
    )


def test_load_recipe__says_that_the_working_folder_has_what_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "math").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    problem = load_refusal(tmp_path / "recipes", LINEAR.replace("./b", "models/math")).problems[-1]
    assert problem.message == "there is no folder 'models/math'"
    assert problem.hint == (
        "paths are relative to the recipe's folder, and the working folder has one: write ../models/math"
    )


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "x" * 5000, "loop"])
def test_load_recipe__treats_odd_paths_as_missing(folder: Path, name: str) -> None:
    loop = folder / "loop"
    if not loop.is_symlink():
        loop.symlink_to("loop")
    assert load_refusal(folder, LINEAR.replace("./b", name)).code == "model.not-found"


def test_load_recipe__tells_all_problems_at_once_missing_models_last(folder: Path) -> None:
    text = (
        TIES.replace("model: b\n", "model: org/none\n")
        .replace("density: 0.5", "density: much")
        .replace("dtype", "dtpye", 1)
    )
    error = load_refusal(folder, text + "slices: 1\n")
    assert type(error) is RecipeError
    assert [p.code for p in error.problems] == [
        "recipe.unknown-name",
        "recipe.conflict",
        "recipe.value",
        "recipe.value",
        "model.not-found",
    ]


def test_load_recipe__still_checks_the_rest_of_a_recipe_without_operator(folder: Path) -> None:
    text = LINEAR.replace("linear", "x").replace("float16", "x").replace("./b", "none").replace("model: a", "mode: a")
    codes = [p.code for p in load_refusal(folder, text + "parameters: 1\n").problems]
    assert codes == [
        "recipe.unknown-name",
        "recipe.unknown-name",
        "recipe.value",
        "recipe.unknown-name",
        "recipe.incomplete",
        "model.not-found",
    ]


def test_load_recipe__lists_at_most_fifty_problems(folder: Path) -> None:
    error = load_refusal(folder, LINEAR + "".join(f"dtype{i}: 1\n" for i in range(60)))
    assert len(error.problems) == 51
    assert str(error.problems[-1]) == "and 10 more"


def test_load_recipe__allows_cancelling_weights_that_are_not_normalized(folder: Path) -> None:
    recipe = load(folder, with_weight("-1.0") + "parameters: {normalize: false}\n")
    assert dict(recipe.parameters) == {"normalize": False}


def test_load_recipe__allows_a_negative_sum_of_weights(folder: Path) -> None:
    assert dict(load(folder, with_weight("-3.0")).models[1].parameters) == {"weight": -3.0}


def test_load_recipe__checks_the_sum_with_global_weights(folder: Path) -> None:
    text = "models: [{model: a}, {model: b, parameters: {weight: -2}}]\nmerge_method: linear\nparameters: {weight: 2}\n"
    assert load_refusal(folder, text).code == "recipe.value"


@pytest.mark.parametrize("name", ["./a", "link"])
def test_load__numbers_a_model_that_is_listed_again(folder: Path, name: str) -> None:
    recipe = load(folder, LINEAR.replace("model: ./b", f"model: {name}"))
    first, second = recipe.models
    assert (first.path, first.repeat, second.repeat) == (second.path, 0, 1)
    assert len(recipe.inputs()) == 2
    (notice,) = recipe.notices
    assert (notice.code, notice.line, notice.changes_result) == ("recipe.unclear", 5, True)
    assert notice.message == f"'{name}' is already listed, as models[0]: each entry counts"


# --- names of models: a path where that exists, an address by its scheme, and else a Hub id


def resolve(text: str, *paths: str) -> ModelName:
    return resolve_model_name(text, lambda path: path in paths)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("org/name", "hf://org/name"),
        ("org/name@main", "hf://org/name@main"),
        ("org/name@refs/pr/7", "hf://org/name@refs/pr/7"),
        ("org/name:sub/folder", "hf://org/name/sub/folder"),
        ("org/name@v1.0:sub", "hf://org/name@v1.0/sub"),
        ("gpt2", "hf://openai-community/gpt2"),
        ("gpt2@main:sub", "hf://openai-community/gpt2@main/sub"),
        ("TheOrg/Some-Model_7B.v2", "hf://TheOrg/Some-Model_7B.v2"),
    ],
)
def test_resolve_model_name__takes_a_hub_id_where_no_such_path_exists(text: str, location: str) -> None:
    assert resolve(text) == ModelName(remote=Location.parse(location), is_hub_id=True)
    assert resolve(text, text) == ModelName(path=text)


@pytest.mark.parametrize(
    ("text", "path", "revision"),
    [
        ("org/name@main", "org/name", "main"),
        ("org/name:sub", "org/name/sub", ""),
        ("/data/model@abc", "/data/model", "abc"),
        ("./model@v1:sub", "./model/sub", "v1"),
        ("mo@del@v1", "mo@del", "v1"),
    ],
)
def test_resolve_model_name__ignores_the_revision_of_a_path(text: str, path: str, revision: str) -> None:
    assert resolve(text, path.removesuffix("/sub")) == ModelName(path=path, ignored_revision=revision)


@pytest.mark.parametrize(
    "text", ["./org/name", "/org/name", "~/name", "name", "a/b/c", "../a", "org/name@", "org/na me"]
)
def test_resolve_model_name__leaves_what_is_no_hub_id_a_path(text: str) -> None:
    assert resolve(text) == ModelName(path=text)


@pytest.mark.parametrize("text", ["models/maths", "models/maths@main", "models/maths:sub"])
def test_resolve_model_name__leaves_a_name_below_a_folder_that_exists_a_path(text: str) -> None:
    assert resolve(text, "models") == ModelName(path=text)


@pytest.mark.parametrize(
    ("address", "kind"),
    [("hf://buckets/org/name/x", "a bucket"), ("hf://datasets/org/x", "a dataset"), ("hf://spaces/org/x", "a space")],
)
def test_resolve_model_name__refuses_what_is_no_model_of_the_hub(address: str, kind: str) -> None:
    with refuses(RecipeError, "location.invalid", f"is {kind} of the Hub, which is not read here"):
        resolve(address)


@pytest.mark.parametrize("text", ["hf://org/name@v1/sub", "s3://bucket/prefix", "https://host/folder"])
def test_resolve_model_name__takes_addresses_whatever_exists(text: str) -> None:
    assert resolve(text, text) == ModelName(remote=Location.parse(text))


def test_resolve_model_name__refuses_a_subfolder_that_leads_out() -> None:
    with refuses(RecipeError, "location.invalid"):
        resolve("org/name:../other")


@given(st.text(alphabet="ab/@:.~+ ", max_size=12))
def test_resolve_model_name__a_path_that_exists_is_that_path(text: str) -> None:
    assert resolve(text, text) == ModelName(path=text or ".")
