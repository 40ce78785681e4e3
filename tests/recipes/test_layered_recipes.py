"""Slices, modules, filters, gradients, tokenizers and documents: what is read, what is refused, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_recipes import load, load_all, make_models, said

from mergepipe.checkpoints.embedding_rows import TokenRule
from mergepipe.errors import NotFoundError, RecipeError
from mergepipe.recipes.recipe import Case, Cases, Recipe, Setting, value_at
from mergepipe.recipes.recipe_files import reload_recipe, reload_recipes
from mergepipe.recipes.references import reference_text
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("recipes"))


SLERP = """\
slices:
  - sources:
      - model: base
        layer_range: [0, 32]
      - model: a
        layer_range: [0, 32]
merge_method: slerp
base_model: base
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
"""

STACK = """\
slices:
  - sources: [{model: a, layer_range: [0, 24]}]
  - sources: [{model: b, layer_range: [8, 32], parameters: {scale: 0.5}}]
merge_method: passthrough
dtype: auto
"""


def setting(recipe: Recipe, name: str) -> Setting:
    return recipe.parameters[name]


def test_load_recipe__reads_slices_with_filters_and_gradients(folder: Path) -> None:
    recipe = load(folder, SLERP)
    assert [(s.model.text, s.start, s.stop) for s in recipe.slices[0].sources] == [("base", 0, 32), ("a", 0, 32)]
    assert [model.text for model in recipe.inputs()] == ["base", "a"]
    t = setting(recipe, "t")
    assert t == Cases(
        (Case("self_attn", (0.0, 0.5, 0.3, 0.7, 1.0)), Case("mlp", (1.0, 0.5, 0.7, 0.3, 0.0)), Case("", (0.5,))),
        "recipe.yml:10 parameters.t",
    )
    assert value_at(t, "model.layers.3.mlp.up_proj.weight", 1.0) == 0.0
    assert value_at(t, "model.layers.3.self_attn.q_proj.weight", 0.125) == 0.25
    assert value_at(t, "model.norm.weight", 0.7) == 0.5


def test_load_recipe__reads_a_stack_of_slices(folder: Path) -> None:
    recipe = load(folder, STACK)
    assert [piece.n_layers for piece in recipe.slices] == [24, 24]
    assert [model.text for model in recipe.inputs()] == ["a", "b"]
    assert (recipe.dtype, recipe.models) == (None, ())


def test_load_recipe__lets_passthrough_slices_have_a_base_that_lends_the_rest(folder: Path) -> None:
    recipe = load(folder, STACK + "base_model: base\n")
    assert [model.text for model in recipe.inputs()] == ["base", "a", "b"]


def test_load_recipe__reads_modules(folder: Path) -> None:
    text = """\
modules:
  text_decoder:
    slices:
      - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]
        parameters: {weight: 0.5}
  vision_tower:
    models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 0}}]
    parameters: {normalize: false}
merge_method: linear
"""
    recipe = load(folder, text)
    modules = [(module.name, len(module.slices), len(module.models)) for module in recipe.modules]
    assert modules == [("text_decoder", 1, 0), ("vision_tower", 0, 2)]
    assert [model.text for model in recipe.inputs()] == ["a", "b"]


def test_load_recipe__reads_numbers_as_flags_as_mergekits_examples_have_them(folder: Path) -> None:
    text = "models: [{model: a, parameters: {weight: 1}}]\nmerge_method: ties\nbase_model: base\n"
    recipe = load(folder, text + "parameters: {normalize: 1.0, int8_mask: 0}\n")
    assert dict(recipe.parameters) == {"normalize": True}


@pytest.mark.parametrize("written", ["a+lora", "{model: {path: a}, lora: {path: lora}}", "{path: a, lora: lora}"])
def test_load_recipe__reads_adapters(folder: Path, written: str) -> None:
    text = f"models: [{{model: {written}, parameters: {{weight: 1}}}}]\nmerge_method: ties\nbase_model: a\n"
    recipe = load(folder, text)
    expert = recipe.inputs()[1]
    assert (expert.text, *expert.key) == ("a+lora", Location.local(folder / "a"), Location.local(folder / "lora"), 0)
    assert len(recipe.inputs()) == 2


def test_reload_recipe__finds_adapters_where_they_are_said_to_be(folder: Path) -> None:
    text = "models: [{model: a+lora, parameters: {weight: 1}}]\nmerge_method: ties\nbase_model: a\n"
    recipe = load(folder, text)
    places = {model.text: reference_text(model) for model in recipe.inputs()}
    again = reload_recipe(recipe.source_text, LocalStore(), places)
    assert [model.key for model in again.inputs()] == [model.key for model in recipe.inputs()]


def test_reload_recipe__does_not_forget_an_adapter(folder: Path) -> None:
    text = "models: [{model: a+lora, parameters: {weight: 1}}]\nmerge_method: ties\nbase_model: b\n"
    with pytest.raises(NotFoundError) as caught:
        reload_recipe(text, LocalStore(), {"b": str(folder / "b"), "a+lora": str(folder / "a")})
    assert str(caught.value.problems[0]) == (
        "recipe:1 models[0].model: the location of the adapter of 'a+lora' is not recorded; merge again with the recipe"
    )


TOKENS = """\
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
merge_method: linear
base_model: base
tokenizer:
  source: b
  pad_to_multiple_of: 64.0
  tokens:
    <|im_start|>: {source: {kind: model_token, model: a, token: <s>}, force: 'true'}
    <|im_end|>: {source: b}
    <pad>: {source: {kind: zero}}
    x:
chat_template: chatml
"""


def test_load_recipe__reads_the_tokenizer_that_is_wanted(folder: Path) -> None:
    recipe = load(folder, TOKENS)
    wanted = recipe.tokenizer
    assert wanted is not None
    assert (wanted.is_union, wanted.model, wanted.pad_to_multiple_of) == (False, 2, 64)
    assert wanted.tokens == {
        "<|im_start|>": TokenRule(1, "<s>", force=True),
        "<|im_end|>": TokenRule(2),
        "<pad>": TokenRule(),
        "x": TokenRule(is_usual=True),
    }
    assert recipe.chat_template == "chatml"


@pytest.mark.parametrize(("written", "is_union", "model"), [("union", True, 0), ("base", False, 0), ("./a", False, 1)])
def test_load_recipe__reads_a_tokenizer_source(folder: Path, written: str, is_union: bool, model: int) -> None:
    text = TOKENS.split("tokenizer:")[0] + f"tokenizer_source: {written}\n"
    wanted = load(folder, text).tokenizer
    assert wanted is not None
    assert (wanted.is_union, wanted.model) == (is_union, model)


CHAIN = """\
# two experts into one
name: first
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
merge_method: linear
---
models: [{model: first+lora, parameters: {weight: 1}}, {model: first, parameters: {weight: 1}}]
merge_method: task_arithmetic
base_model: second
---
name: second
models: [{model: first, parameters: {scale: 2}}]
merge_method: passthrough
"""


def test_load_recipes__puts_documents_in_the_order_of_their_needs(folder: Path) -> None:
    recipes = load_all(folder, CHAIN)
    assert [recipe.name for recipe in recipes] == ["first", "second", None]
    last = recipes[-1]
    assert [(m.text, m.intermediate, m.adapter) for m in last.inputs()] == [
        ("second", "second", None),
        ("first+lora", "first", Location.local(folder / "lora")),
        ("first", "first", None),
    ]
    assert last.intermediates() == ("second", "first")


def test_recipe__text_of_a_document_reloads_to_it(folder: Path) -> None:
    recipes = load_all(folder, CHAIN)
    assert recipes[0].source_text.startswith("# two experts into one\nname: first\n")
    a, b, lora = (Location.local(folder / name) for name in ("a", "b", "lora"))
    places = {"second": str(b), "first": str(a), "first+lora": f"{a}+{lora}"}
    again = reload_recipe(recipes[-1].source_text, LocalStore(), places)
    assert [model.key for model in again.inputs()] == [(b, None, 0), (a, lora, 0), (a, None, 0)]
    joined = "---\n".join(recipe.source_text for recipe in recipes)
    everywhere = {name: str(folder / name) for name in ("a", "b", "lora")}
    assert [recipe.name for recipe in reload_recipes(joined, LocalStore(), everywhere)] == ["first", "second", None]


def test_reload_recipe__wants_a_single_document(folder: Path) -> None:
    places = {name: str(folder / name) for name in ("a", "b", "lora")}
    with pytest.raises(RecipeError, match=r"one recipe is expected here, found 3 documents") as caught:
        reload_recipe(CHAIN, LocalStore(), places)
    assert caught.value.code == "recipe.syntax"


AT_SOURCE = "2 slices[0].sources"
# A recipe, and of each problem: the code (below `recipe.` unless it has a dot), the line, where, and what is said.
BAD: list[tuple[str, ...]] = [
    (
        STACK + "models: [{model: a}]\n",
        "conflict 1 slices: cannot be combined with 'models'; a recipe has one of models, slices and modules",
    ),
    (
        "slices: []\nmerge_method: passthrough\n",
        "value 1 slices: needs a list of slices, found an empty list; write '- sources: [...]'",
    ),
    (
        STACK.replace("[0, 24]", "[24, 0]"),
        f"value {AT_SOURCE}[0].layer_range: [24, 0] contains no layer; write 'layer_range: [FIRST, END]', END is not "
        "included",
    ),
    (
        STACK.replace("[0, 24]", "0-24"),
        f"value {AT_SOURCE}[0].layer_range: needs two whole numbers; write 'layer_range: [FIRST, END]', END is not "
        "included",
    ),
    (
        STACK.replace(", layer_range: [0, 24]", ""),
        f"incomplete {AT_SOURCE}[0].layer_range: the source has no layer_range; write 'layer_range: [FIRST, END]', "
        "END is not included",
    ),
    (
        STACK.replace("layer_range: [0, 24]", "layer_rnage: [0, 24], layer_range: [0, 24]"),
        f"unknown-name {AT_SOURCE}[0].layer_rnage: unknown key 'layer_rnage'; did you mean 'layer_range'?",
    ),
    (
        SLERP.replace("layer_range: [0, 32]\nmerge", "layer_range: [0, 24]\nmerge"),
        "conflict 6 slices[0].sources[1].layer_range: 24 layers of 'a' cannot be merged with 32 of 'base'; give all "
        "sources of a slice the same number of layers",
    ),
    (
        SLERP.replace("- model: base\n", "- model: b\n"),
        f"conflict {AT_SOURCE}: base_model 'base' is not among the sources of this slice; list it with the "
        "layer_range that the others are compared with",
    ),
    (
        SLERP.replace("model: a\n", "model: ./base\n"),
        f"value {AT_SOURCE}: slerp takes exactly 1 model besides base_model, found 0",
    ),
    (
        SLERP.replace("base_model: base", "residual: 1"),
        "incomplete 1 base_model: slerp needs base_model; name the model the others were fine-tuned from",
    ),
    (
        "modules: {text: {}}\nmerge_method: linear\n",
        "conflict 1 modules.text: a module needs either 'models' or 'slices', found neither",
    ),
    (
        TOKENS + "tokenizer_source: union\n",
        "conflict 13 tokenizer_source: cannot be combined with 'tokenizer'; write it as 'source:' under 'tokenizer:'",
    ),
    (
        TOKENS.replace("source: b\n", "source: c\n"),
        "incomplete 5 tokenizer.source: 'c' is not one of the models that are merged; name one of: base, a, b; or "
        "write union or base",
    ),
    (
        TOKENS.replace("base_model: base", "").replace("source: b\n", "source: base\n"),
        "incomplete 5 tokenizer.source: there is no base_model; name base_model, or give the model's path here",
    ),
    (
        TOKENS.replace("pad_to_multiple_of: 64", "pad_to_multiple: 64"),
        "unknown-name 6 tokenizer.pad_to_multiple: unknown key 'pad_to_multiple'; did you mean 'pad_to_multiple_of'?",
    ),
    (
        TOKENS.replace("token: <s>", "token: <s>, token_id: 3"),
        "incomplete 8 tokenizer.tokens.'<|im_start|>'.source: needs either 'token' or 'token_id', found both",
    ),
    (
        CHAIN.replace("name: second", "name: first"),
        "conflict 10 name: the name 'first' is already used, by recipe.yml:2; choose another name",
        "model.not-found 8 base_model: there is no folder 'second'; looked for {folder}/second",
    ),
    (
        CHAIN.replace("models: [{model: a,", "models: [{model: second,"),
        "conflict 2 name: documents depend on each other: 'first' -> 'second' -> 'first'; a document can only "
        "merge documents that do not depend on it",
    ),
    (
        CHAIN.replace("base_model: second", "base_model: base"),
        "no-effect 10 name: no other document uses the result of this one; name it as a model of the output, or move "
        "it to its own file",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{i}-{bad[1].split()[0]}" for i, bad in enumerate(BAD)])
def test_load_recipes__tells_exactly_what_is_wrong(folder: Path, bad: tuple[str, ...]) -> None:
    text, *expected = bad
    assert said(folder, text) == expected


NUMBERS = st.floats(-1e6, 1e6)


@given(st.lists(NUMBERS, min_size=2, max_size=6), st.floats(0, 1))
def test_case__stays_between_the_values_around_it(values: list[float], depth: float) -> None:
    found = Case("", tuple(values)).at(depth)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


@given(st.lists(NUMBERS, min_size=2, max_size=6))
def test_case__begins_with_the_first_value_and_ends_with_the_last(values: list[float]) -> None:
    case = Case("", tuple(values))
    assert (case.at(0.0), case.at(1.0)) == (values[0], values[-1])


def test_case__switches_flags() -> None:
    case = Case("", (True, False, True))
    assert [case.at(depth) for depth in (0.0, 0.49, 0.5, 0.99, 1.0)] == [True, True, False, False, True]
