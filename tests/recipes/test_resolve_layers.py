"""Layers, names and rows: which tensors make up the output, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from small_recipes import checkpoint, merging, model, problems

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Unchanged
from mergepipe.checkpoints.gathered_rows import GatheredRows
from mergepipe.core.blocks import BF16, F32, DType
from mergepipe.core.outcome import DroppedTensor
from mergepipe.recipes.fields import Strictness
from mergepipe.recipes.layer_names import is_before_layers, layer_lists
from mergepipe.recipes.recipe import Case, Cases, LayerSource, ModelInput, OutputModule, OutputSlice, Recipe, Setting
from mergepipe.recipes.resolution import resolve
from mergepipe.recipes.tasks import Action, Resolution

Shapes = Mapping[str, tuple[int, ...]]


def shaped(shapes: Shapes, kind: CheckpointKind = CheckpointKind.FULL, dtype: DType = BF16) -> Checkpoint:
    return checkpoint({name: (dtype, shape) for name, shape in shapes.items()}, kind)


def llama(n_layers: int, *, prefix: str = "model.", head: bool = True, vocab: int = 8) -> dict[str, tuple[int, ...]]:
    layers = {
        f"{prefix}layers.{i}.{rest}": (4,) for i in range(n_layers) for rest in ("mlp.up.weight", "self_attn.q.weight")
    }
    around: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, 4)}
    last: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (4,)}
    return {**around, **layers, **last, **({"lm_head.weight": (vocab, 4)} if head else {})}


def slicing(
    operator: str, *slices: OutputSlice, base: ModelInput | None = None, parameters: Mapping[str, Setting] | None = None
) -> Recipe:
    recipe = merging(operator, model("x"), base=base, parameters=parameters)
    return replace(recipe, models=(), slices=slices)


def piece(*sources: tuple[ModelInput, int, int], **parameters: Setting) -> OutputSlice:
    read = tuple(LayerSource(m, start, stop, f"recipe.yml:2 {m.text}.layer_range") for m, start, stop in sources)
    return OutputSlice(read, None, parameters, "recipe.yml:2 slices[0]")


A, B, BASE = model("a"), model("b"), model("base")
TIES = merging("ties", model("a", weight=1.0), base=BASE)


def origins(resolution: Resolution) -> dict[str, tuple[str, ...]]:
    """Each output tensor with the tensors it is made of, `model:name`."""
    texts = [given.text.removeprefix("./") for given in resolution.models]
    return {
        task.name: tuple(
            f"{texts[index]}:{source.name}"
            for index, source in zip((task.base_model, *task.expert_models), (task.base, *task.experts), strict=True)
        )
        for task in resolution.tasks
    }


def test_resolve__numbers_the_layers_of_slices_anew() -> None:
    recipe = slicing("passthrough", piece((A, 0, 2)), piece((B, 1, 3)))
    result = resolve(recipe, [shaped(llama(2)), shaped(llama(3))])
    found = origins(result)
    assert list(found)[:2] == ["model.embed_tokens.weight", "model.layers.0.mlp.up.weight"]
    assert list(found)[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert found["model.embed_tokens.weight"] == ("a:model.embed_tokens.weight",)
    assert found["model.layers.1.mlp.up.weight"] == ("a:model.layers.1.mlp.up.weight",)
    assert found["model.layers.2.mlp.up.weight"] == ("b:model.layers.1.mlp.up.weight",)
    assert found["model.layers.3.self_attn.q.weight"] == ("b:model.layers.2.self_attn.q.weight",)
    assert found["lm_head.weight"] == ("b:lm_head.weight",)
    assert (result.n_layers, result.layer_counts[0].origins) == (4, (0, 1, 1, 2))


def test_resolve__says_why_slices_leave_tensors_out() -> None:
    recipe = slicing("passthrough", piece((A, 0, 2)), piece((B, 1, 3)))
    result = resolve(recipe, [shaped(llama(2)), shaped(llama(3))])
    assert result.dropped == (
        DroppedTensor("./a", "model.norm.weight", "outside the layers, taken from another slice"),
        DroppedTensor("./a", "lm_head.weight", "outside the layers, taken from another slice"),
        DroppedTensor("./b", "model.embed_tokens.weight", "outside the layers, taken from another slice"),
        DroppedTensor("./b", "model.layers.0.mlp.up.weight", "in a layer that no slice takes"),
        DroppedTensor("./b", "model.layers.0.self_attn.q.weight", "in a layer that no slice takes"),
    )


def test_resolve__merges_layers_of_different_depths() -> None:
    sources = ((BASE, 0, 2), (model("a", weight=1.0), 2, 4))
    result = resolve(slicing("ties", piece(*sources), base=BASE), [shaped(llama(2)), shaped(llama(4))])
    assert origins(result)["model.layers.1.mlp.up.weight"] == (
        "base:model.layers.1.mlp.up.weight",
        "a:model.layers.3.mlp.up.weight",
    )


def test_resolve__evaluates_gradients_over_the_layers_of_a_slice() -> None:
    ramp = Cases((Case("self_attn", (9.0,)), Case("", (0.0, 1.0))), "recipe.yml:3")
    whole = resolve(slicing("passthrough", piece((model("a", scale=ramp), 0, 3))), [shaped(llama(3))])
    scales = {task.name: task.parameters.anchor["scale"] for task in whole.tasks}
    assert [scales[f"model.layers.{i}.mlp.up.weight"] for i in range(3)] == [0.0, 0.5, 1.0]
    assert scales["model.layers.1.self_attn.q.weight"] == 9.0
    assert (scales["model.embed_tokens.weight"], scales["lm_head.weight"]) == (0.0, 0.0)
    single = resolve(slicing("passthrough", piece((model("a", scale=ramp), 1, 2))), [shaped(llama(3))])
    assert single.tasks[1].parameters.anchor["scale"] == 1.0


def test_resolve__prefers_the_parameters_nearest_to_a_source() -> None:
    by_name = Cases((Case("mlp", (0.25,)),), "recipe.yml:3")
    sources = ((BASE, 0, 1), (model("a", weight=by_name), 0, 1))
    recipe = slicing("ties", piece(*sources, weight=0.5), base=BASE, parameters={"weight": 2.0, "density": 0.5})
    result = resolve(recipe, [shaped(llama(1)), shaped(llama(1))])
    found = {task.name: task.parameters.experts[0] for task in result.tasks}
    assert found["model.layers.0.mlp.up.weight"] == {"weight": 0.25, "density": 0.5}
    assert found["model.norm.weight"] == {"weight": 0.5, "density": 0.5}


def test_resolve__says_that_there_are_no_layers_or_too_many_kinds() -> None:
    recipe = slicing("passthrough", piece((A, 0, 1)))
    assert problems(recipe, shaped({"w": (2,)})) == [
        "RecipeError recipe.conflict | recipe.yml:2 slices[0]: './a' has no numbered layers to slice; "
        "use 'models:' instead"
    ]
    both = {f"{part}.block.{i}.w": (2,) for part in ("encoder", "decoder") for i in range(2)}
    assert problems(recipe, shaped(both)) == [
        "RecipeError recipe.conflict | recipe.yml:2 slices[0]: './a' has several lists of layers of the same length: "
        "'encoder.block.0.' to 'encoder.block.1.' and 'decoder.block.0.' to 'decoder.block.1.'; "
        "choose one with 'modules:'"
    ]


def test_resolve__says_that_models_have_different_numbers_of_layers_unless_they_may_be_dropped() -> None:
    assert problems(TIES, shaped(llama(2)), shaped(llama(3))) == [
        "MismatchError model.mismatch | recipe.yml:1 a: './a' has 3 layers, 2 has './base' "
        "('model.layers.0.' to 'model.layers.1.'); merge the same number of layers of each with slices"
    ]
    result = resolve(TIES, [shaped(llama(2)), shaped(llama(3))], ("model.layers.2.*",))
    last = [f"model.layers.2.{rest}.weight" for rest in ("mlp.up", "self_attn.q")]
    assert [drop.tensor for drop in result.dropped] == last


def test_resolve__refuses_misspelt_filters_and_notes_others_that_match_nothing() -> None:
    weight = Cases((Case("mpl", (0.5,)), Case("vision", (2.0,)), Case("", (1.0,))), "recipe.yml:7 models[0].weight")
    recipe = merging("ties", model("a", weight=weight), base=BASE)
    lenient = resolve(recipe, [shaped(llama(1)), shaped(llama(1))], strictness=Strictness(lenient=True))
    found = [(notice.code, notice.line) for notice in lenient.notices]
    assert found == [("recipe.unknown-name", 7), ("recipe.no-effect", 7)]
    assert problems(recipe, shaped(llama(1)), shaped(llama(1))) == [
        "RecipeError recipe.unknown-name | recipe.yml:7 models[0].weight: "
        "the filter 'mpl' matches no tensor's name; did you mean 'mlp'?"
    ]


def test_resolve__takes_a_filter_for_the_head_of_a_model_with_tied_weights() -> None:
    weight = Cases((Case("lm_head", (0.5,)), Case("", (1.0,))), "recipe.yml:7")
    recipe = merging("ties", model("a", weight=weight), base=BASE)
    tied = shaped(llama(1, head=False))
    assert resolve(recipe, [tied, tied]).n_merged == 4


@pytest.mark.parametrize(("operator", "name"), [("slerp", "t"), ("linear", "weight")])
def test_resolve__says_which_tensor_a_parameter_has_no_value_for(operator: str, name: str) -> None:
    cases = Cases((Case("mlp", (0.5,)), Case("self_attn", (0.5,))), "recipe.yml:7")
    recipe = merging(operator, A, base=BASE, parameters={name: cases})
    message = f"{name} has no value for 'model.embed_tokens.weight'; end the list with '- value: ...'"
    wanted = [f"RecipeError recipe.incomplete | recipe.yml:7: {message}"]
    assert problems(recipe, shaped(llama(1)), shaped(llama(1))) == wanted


def test_resolve__checks_the_sum_of_weights_that_depend_on_the_tensor() -> None:
    weight = Cases((Case("mlp", (-1.0,)), Case("", (1.0,))), "recipe.yml:7")
    recipe = merging("linear", model("a", weight=1.0), model("b", weight=weight))
    assert problems(recipe, shaped(llama(1)), shaped(llama(1))) == [
        "RecipeError recipe.value | model.layers.0.mlp.up.weight: the weights sum to 0 and cannot be "
        "normalized; change a weight, or set normalize: false"
    ]


@pytest.mark.parametrize(("reference", "other"), [("model.", ""), ("", "model."), ("model.language_model.", "model.")])
def test_resolve__pairs_names_that_differ_by_a_prefix(reference: str, other: str) -> None:
    result = resolve(TIES, [shaped(llama(12, prefix=reference)), shaped(llama(12, prefix=other))])
    assert result.dropped == ()
    assert origins(result)[f"{reference}layers.11.mlp.up.weight"][1] == f"a:{other}layers.11.mlp.up.weight"
    assert origins(result)["lm_head.weight"][1] == "a:lm_head.weight"


def test_resolve__pairs_names_of_two_prefixes_at_once() -> None:
    base = {**llama(2), **{f"visual.blocks.{i}.w": (3,) for i in range(3)}}
    expert = {**llama(2, prefix="model.language_model."), **{f"model.visual.blocks.{i}.w": (3,) for i in range(3)}}
    result = resolve(TIES, [shaped(base), shaped(expert)])
    assert origins(result)["visual.blocks.2.w"][1] == "a:model.visual.blocks.2.w"


def test_resolve__pairs_a_text_model_with_the_text_part_of_a_model_that_sees() -> None:
    layers = {name.removeprefix("model."): shape for name, shape in llama(2).items() if ".layers." in name}
    vision = {f"vision_tower.encoder.{name}": shape for name, shape in layers.items()}
    base = {**{f"language_model.{name}": shape for name, shape in llama(2).items()}, **vision}
    module = OutputModule("text_decoder", (BASE, A), (), {"weight": 1.0}, "recipe.yml:2")
    recipe = replace(merging("task_arithmetic", A, base=BASE), models=(), modules=(module,))
    found = origins(resolve(recipe, [shaped(base), shaped(llama(2))]))
    for name in llama(2):
        assert found[f"language_model.{name}"][1] == f"a:{name}"
    assert all(len(found[name]) == 1 for name in vision)


def test_resolve__names_modules_where_a_text_model_meets_one_that_sees() -> None:
    base = {**llama(2, prefix="model.language_model."), **{f"model.visual.blocks.{i}.w": (3,) for i in range(2)}}
    recipe = merging("ties", model("a", weight=1.0), model("b", weight=1.0), base=BASE)
    (found,) = problems(recipe, shaped(base), shaped(llama(2)), shaped(base))
    assert "'./a' lacks these 2 tensors of the base './base'" in found
    assert "it has no vision tensors: list the models under `modules:` for 'text' only" in found
    (found,) = problems(TIES, shaped({**base, "model.visual.norm.w": (3,)}), shaped(base))
    assert "model.visual.norm.w" in found
    other = {name: shape for name, shape in llama(2).items() if "mlp" not in name}
    assert all("modules:" not in line for line in problems(TIES, shaped(llama(2)), shaped(other)))


def test_resolve__keeps_the_eyes_of_the_base_where_all_experts_are_text_models() -> None:
    base = {**llama(2, prefix="model.language_model."), **{f"model.visual.blocks.{i}.w": (3,) for i in range(2)}}
    recipe = merging("ties", model("a", weight=1.0), model("b", weight=1.0), base=BASE)
    result = resolve(recipe, [shaped(base), shaped(llama(2)), shaped(llama(2))])
    actions = {task.name: task.action for task in result.tasks}
    copied = {name for name, action in actions.items() if action is Action.COPY}
    assert copied == {name for name in base if "visual" in name}
    notices = [str(notice) for notice in result.notices]
    assert [n for n in notices if "has no vision tensors: those of './base' are kept" in n] == notices
    assert len(notices) == 2


def test_resolve__does_not_pair_names_by_guessing() -> None:
    base = {"left.w": (2,), "right.w": (2,), "x": (1,)}
    expert = {"one.w": (2,), "two.w": (2,), "x": (1,)}
    codes = [line.split(" | ")[0].split()[1] for line in problems(TIES, shaped(base), shaped(expert))]
    assert codes == ["model.mismatch"] * 2 + ["model.unexpected-tensor"] * 2


def test_resolve__takes_the_embedding_for_the_head_that_tied_weights_leave_out() -> None:
    result = resolve(TIES, [shaped(llama(1)), shaped(llama(1, head=False))])
    assert origins(result)["lm_head.weight"] == ("base:lm_head.weight", "a:model.embed_tokens.weight")


def test_resolve__refuses_a_head_that_a_tied_base_has_no_place_for() -> None:
    assert problems(TIES, shaped(llama(1, head=False)), shaped(llama(1))) == [
        "MismatchError model.unexpected-tensor | lm_head.weight: './a' has this tensor, the base './base' has not; "
        "to leave it out: --allow-dropped 'lm_head.weight' (nothing is lost where it equals the embedding); to keep "
        "it, give the base a head of its own: store its embedding as 'lm_head.weight', too"
    ]
    left_out = resolve(TIES, [shaped(llama(1, head=False)), shaped(llama(1))], ("lm_head.weight",))
    assert [dropped.tensor for dropped in left_out.dropped] == ["lm_head.weight"]


@pytest.mark.parametrize("vocab", [6, 11])
def test_resolve__merges_the_rows_that_vocabularies_share(vocab: int) -> None:
    result = resolve(TIES, [shaped(llama(1)), shaped(llama(1, vocab=vocab))])
    rows = {task.name: task.experts[0] for task in result.tasks if isinstance(task.experts[0], GatheredRows)}
    shapes = {name: source.shape for name, source in rows.items()}
    assert shapes == {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}


def test_resolve__does_not_cut_rows_of_other_tensors() -> None:
    wide = {**llama(1), "model.layers.0.mlp.up.weight": (5,)}
    assert [line.split(" | ")[0] for line in problems(TIES, shaped(llama(1)), shaped(wide))] == [
        "MismatchError model.mismatch"
    ]


@pytest.mark.parametrize("kind", [CheckpointKind.ADAPTER, CheckpointKind.DELTA])
def test_resolve__takes_what_a_difference_does_not_touch_for_unchanged(kind: CheckpointKind) -> None:
    touched = {"model.layers.0.mlp.up.weight": (4,)}
    result = resolve(TIES, [shaped(llama(1)), shaped(touched, kind, F32)])
    unchanged = {task.name for task in result.tasks if isinstance(task.experts[0], Unchanged)}
    assert unchanged == set(llama(1)) - set(touched)
    assert result.expert_bytes == 16


def test_resolve__refuses_differences_in_place_of_weights() -> None:
    recipe = slicing("passthrough", piece((A, 0, 1)), piece((B, 0, 1)))
    found = problems(recipe, shaped(llama(1)), shaped(llama(1), CheckpointKind.DELTA))
    assert found == [
        "UnsupportedError model.unsupported | recipe.yml:1 b: './b' holds differences from a base, but weights "
        "are needed here; name its base as base_model too, and a method that takes one"
    ]


def test_resolve__counts_a_model_that_lends_its_configuration_only() -> None:
    result = resolve(slicing("passthrough", piece((A, 0, 1)), base=BASE), [shaped(llama(1)), shaped(llama(1))])
    assert {drop.reason for drop in result.dropped} == {"lends its configuration only"}
    assert {task.base_model for task in result.tasks} == {1}


def modular(*modules: OutputModule) -> Recipe:
    return replace(merging("linear", A, parameters={"weight": 1.0}), models=(), modules=modules)


def test_resolve__merges_modules_and_copies_the_rest() -> None:
    shapes = {**llama(2), "visual.blocks.0.w": (3,), "visual.blocks.1.w": (3,), "visual.merger.mlp.0.w": (2,)}
    text = OutputModule("text_decoder", (), (piece((A, 0, 1), (B, 1, 2)),), {}, "recipe.yml:2 modules.text_decoder")
    vision = OutputModule("vision_tower", (A, B), (), {}, "recipe.yml:5 modules.vision_tower")
    result = resolve(modular(text, vision), [shaped(shapes), shaped(shapes)])
    found = origins(result)
    assert found["model.layers.0.mlp.up.weight"] == ("a:model.layers.0.mlp.up.weight", "b:model.layers.1.mlp.up.weight")
    assert found["visual.blocks.1.w"] == ("a:visual.blocks.1.w", "b:visual.blocks.1.w")
    assert [(task.name, task.reason) for task in result.tasks if task.action is Action.COPY] == [
        ("visual.merger.mlp.0.w", "in no module of the recipe")
    ]
    assert result.n_layers == 1


def test_resolve__names_the_modules_there_are() -> None:
    unknown = OutputModule("text_decoderr", (A,), (), {}, "recipe.yml:2 modules.text_decoderr")
    assert problems(modular(unknown), shaped(llama(1))) == [
        "RecipeError recipe.unknown-name | recipe.yml:2 modules.text_decoderr: './a' has no module 'text_decoderr'; "
        "did you mean 'text_decoder'?"
    ]
    twice = OutputModule("model", (A,), (), {}, "recipe.yml:3 modules.model")
    text = OutputModule("text_decoder", (A,), (), {}, "recipe.yml:2 modules.text_decoder")
    assert problems(modular(text, twice), shaped(llama(1))) == [
        "RecipeError recipe.conflict | recipe.yml:3 modules.model: 'model.embed_tokens.weight' belongs to this "
        "module and to 'text_decoder'; keep one of the two"
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.0.a", "model.layers.1.a", "model.norm"], {"model.layers.": 2}),
        (["h.0.attn.w", "h.1.attn.w"], {"h.": 2}),
        (["0.w", "1.w"], {"": 2}),
        (["model.layers.0.experts.7.w", "model.layers.1.experts.0.w"], {"model.layers.": 2}),
        (["visual.merger.mlp.0.w", "visual.merger.mlp.2.w"], {}),
        (["layers.1.w"], {}),
        (["block1.w", "w.1"], {}),
    ],
)
def test_layer_lists__are_numbered_without_a_gap(names: list[str], expected: dict[str, int]) -> None:
    assert {prefix: found.n_layers for prefix, found in layer_lists(names).items()} == expected


def test_is_before_layers__tells_embeddings_from_heads() -> None:
    before = ["model.embed_tokens", "transformer.wpe", "bert.embeddings.LayerNorm", "gpt_neox.embed_in"]
    after = ["embed_out", "model.norm", "transformer.ln_f", "lm_head", "bert.pooler.dense"]
    assert [name for name in (*before, *after) if is_before_layers(f"{name}.weight")] == before
