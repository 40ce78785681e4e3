"""Every tensor of every input is used, copied or listed as dropped; what does not fit is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_recipes import Tensors, checkpoint, merging, model, problems, refusal

from mergepipe.core.blocks import BF16, DTYPES, F16, F32, F64, DType, DTypeKind
from mergepipe.core.outcome import DroppedTensor
from mergepipe.recipes.recipe import Case, Cases, Recipe, Scalar
from mergepipe.recipes.resolution import resolve
from mergepipe.recipes.tasks import Action, MergeTask, Resolution, TensorParameters

I64, U8, F8 = DTYPES["I64"], DTYPES["U8"], DTYPES["F8_E8M0"]
BASE = model("base")
TWO_EXPERTS = merging("ties", model("a", weight=0.5), model("b", weight=1.0, density=0.2), base=BASE)
W: Tensors = {"w": (BF16, (2, 3))}


def resolved(recipe: Recipe, *models: Tensors, allow: tuple[str, ...] = ()) -> Resolution:
    return resolve(recipe, [*map(checkpoint, models)], allow)


def refused(recipe: Recipe, *models: Tensors) -> list[str]:
    return problems(recipe, *map(checkpoint, models))


def test_resolve__merges_floats_in_the_bases_storage_order() -> None:
    base: Tensors = {"z": (BF16, (2,)), "a": (F32, (2, 2)), "m": (F16, ())}
    expert: Tensors = {"m": (F32, ()), "a": (F32, (2, 2)), "z": (F16, (2,))}
    result = resolved(replace(TWO_EXPERTS, keeps_dtypes=True), base, expert, expert)
    assert [(t.name, t.action, t.shape, t.dtype, t.reason) for t in result.tasks] == [
        ("z", Action.MERGE, (2,), BF16, ""),
        ("a", Action.MERGE, (2, 2), F32, ""),
        ("m", Action.MERGE, (), F16, ""),
    ]
    assert [[e.dtype for e in t.experts] for t in result.tasks] == [[F16, F16], [F32, F32], [F32, F32]]
    assert (result.dropped, result.notices) == ((), ())


def test_resolve__promotes_mixed_dtypes_where_the_recipe_states_none() -> None:
    base: Tensors = {"same": (BF16, (2,)), "half": (BF16, (2,)), "single": (F16, (2,)), "double": (F32, (2,))}
    expert: Tensors = {"same": (BF16, (2,)), "half": (F16, (2,)), "single": (F32, (2,)), "double": (F64, (2,))}
    result = resolved(TWO_EXPERTS, base, expert, expert)
    assert [t.dtype for t in result.tasks] == [BF16, F32, F32, F64]
    assert [n.code for n in result.notices] == ["recipe.unclear"]
    assert (result.widened_dtype, resolved(TWO_EXPERTS, base, base, base).widened_dtype) == (None, None)


def test_resolution__counts_bytes_and_tensors() -> None:
    base: Tensors = {"w": (BF16, (2, 3)), "ids": (I64, (4,))}
    expert: Tensors = {"w": (F32, (2, 3)), "ids": (I64, (4,)), "x": (F32, (9,))}
    wide = replace(TWO_EXPERTS, out_dtype=F32)
    result = resolved(wide, base, expert, W, allow=("x",))
    assert result.base_bytes == 12 + 32
    assert result.expert_bytes == 24 + 12
    assert result.output_bytes == 24 + 32
    assert (result.n_merged, result.n_copied, result.n_dropped) == (1, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "expected"), [(None, None, BF16), (F16, None, F16), (F16, F32, F32), (None, F32, F32)]
)
def test_resolve__takes_out_dtype_else_dtype_else_the_bases(
    dtype: DType | None, out_dtype: DType | None, expected: DType
) -> None:
    asked = merging("passthrough", model("a"), dtype=dtype, out_dtype=out_dtype)
    result = resolved(asked, {**W, "ids": (I64, (1,))})
    assert [task.dtype for task in result.tasks] == [expected, I64]


def test_resolve__copies_exact_tensors_and_drops_the_experts_own() -> None:
    base: Tensors = {**W, "ids": (I64, (4,))}
    result = resolved(TWO_EXPERTS, base, {**W, "ids": (F32, (2,))}, W)
    copy = result.tasks[1]
    assert (copy.action, copy.dtype, copy.experts, copy.reason) == (Action.COPY, I64, (), "integer or boolean buffer")
    assert result.dropped == (DroppedTensor("./a", "ids", "copied from the base"),)


def test_resolve__refuses_what_the_base_does_not_have() -> None:
    assert refused(TWO_EXPERTS, W, {"extra": (F8, (1,)), **W}, {**W, "more": (I64, (1,))}) == [
        "MismatchError model.unexpected-tensor | extra: './a' has this tensor, the base './base' has not; "
        "to leave it out: --allow-dropped 'extra'"
    ]


def test_resolve__drops_what_it_is_allowed_to_and_buffers() -> None:
    experts: tuple[Tensors, ...] = (
        {"extra.1": (F8, (1,)), **W},
        {
            **W,
            "more": (I64, (1,)),
            "layers.0.rotary_emb.inv_freq": (F32, (8,)),
            "h.0.attn.bias": (F32, (1, 1, 4, 4)),
            "h.0.attn.masked_bias": (F32, ()),
        },
    )
    result = resolved(TWO_EXPERTS, W, *experts, allow=("extra.*",))
    assert result.dropped == (
        DroppedTensor("./a", "extra.1", "not in the base, allowed to be dropped"),
        DroppedTensor("./b", "more", "integer or boolean buffer"),
        DroppedTensor("./b", "layers.0.rotary_emb.inv_freq", "buffer that a model computes itself"),
        DroppedTensor("./b", "h.0.attn.bias", "buffer that a model computes itself"),
        DroppedTensor("./b", "h.0.attn.masked_bias", "buffer that a model computes itself"),
    )


def test_resolve__does_not_take_a_learned_bias_for_a_buffer() -> None:
    (problem,) = refused(TWO_EXPERTS, W, {**W, "h.0.attn.bias": (F32, (4,))}, W)
    assert problem.startswith("MismatchError model.unexpected-tensor | ")


def test_resolve__copies_computed_buffers_that_experts_need_not_have() -> None:
    base: Tensors = {**W, "rotary_emb.inv_freq": (F32, (8,))}
    result = resolved(TWO_EXPERTS, base, W, base)
    copy = result.tasks[1]
    assert (copy.action, copy.reason) == (Action.COPY, "buffer that a model computes itself")
    assert result.dropped == (DroppedTensor("./b", "rotary_emb.inv_freq", "copied from the base"),)


def test_resolve__fills_in_parameters() -> None:
    asked = merging(
        "dare_ties", BASE, model("a"), model("b", weight=2.0, density=0.1), base=BASE, parameters={"weight": 0.5}
    )
    assert resolved(asked, W, W, W).tasks[0].parameters == TensorParameters(
        {"normalize": False, "rescale": True, "lambda": 1.0},
        {},
        ({"weight": 0.5, "density": 1.0}, {"weight": 2.0, "density": 0.1}),
    )


def test_resolve__prefers_the_recipes_globals_to_defaults() -> None:
    asked = merging(
        "task_arithmetic", model("a", weight=1.0), base=BASE,
        parameters={"lambda": 0.3, "normalize": True, "int8_mask": True},
    )  # fmt: skip
    assert resolved(asked, W, W).tasks[0].parameters.globals == {"normalize": True, "lambda": 0.3}


def test_resolve__gives_slerp_its_t() -> None:
    asked = merging("slerp", BASE, model("a"), base=BASE, parameters={"t": 0.25})
    assert resolved(asked, W, W).tasks[0].parameters == TensorParameters({"t": 0.25}, {}, ({},))


def test_resolve__weighs_a_linear_anchor_by_its_entry() -> None:
    models = (model("a", weight=0.7), model("b", weight=0.3))
    first = resolved(merging("linear", *models), W, W).tasks[0].parameters
    assert first == TensorParameters({"normalize": True}, {"weight": 0.7}, ({"weight": 0.3},))
    listed = resolved(merging("linear", *models, base=model("b")), W, W).tasks[0].parameters
    assert listed == TensorParameters({"normalize": True}, {"weight": 0.3}, ({"weight": 0.7},))


@pytest.mark.parametrize(("shared", "weight"), [({"weight": 0.9}, 0.9), ({}, 0.0)])
def test_resolve__gives_an_unlisted_linear_anchor_the_weight_of_all_models(
    shared: dict[str, Scalar], weight: float
) -> None:
    asked = merging("linear", model("a", weight=0.1), model("b", weight=0.3), base=BASE, parameters=shared)
    parameters = resolved(asked, W, W, W).tasks[0].parameters
    assert parameters == TensorParameters({"normalize": True}, {"weight": weight}, ({"weight": 0.1}, {"weight": 0.3}))


@pytest.mark.parametrize(
    ("asked", "anchor"),
    [
        (merging("passthrough", model("a", scale=2.0)), {"scale": 2.0}),
        (merging("passthrough", model("a")), {"scale": 1.0}),
        (merging("linear", model("a", weight=3.0)), {"weight": 3.0}),
    ],
)
def test_resolve__merges_without_experts(asked: Recipe, anchor: Mapping[str, Scalar]) -> None:
    task = resolved(asked, W).tasks[0]
    assert (task.action, task.experts, task.parameters.anchor) == (Action.MERGE, (), anchor)


def test_resolve__refuses_parameters_that_contradict_each_other_in_some_layer() -> None:
    density = Cases((Case("", (0.9, 0.1)),), "recipe.yml:5")
    asked = merging("della", model("a", weight=1.0, density=density), base=BASE)
    layers: Tensors = {f"layers.{i}.w": (BF16, (2, 2)) for i in range(3)}
    assert refused(asked, layers, layers) == [
        "RecipeError recipe.conflict | recipe.yml:1 a: './a': for 'layers.0.w' density 0.9 with epsilon 0.15 gives "
        "probabilities from 0.75 to 1.05, outside (0, 1); change one of the two"
    ]


def test_resolve__tells_what_an_expert_lacks() -> None:
    base: Tensors = {"layers.10.mlp.weight": (BF16, (2,)), **W, "v": (BF16, (1,))}
    expert: Tensors = {"layers.10.mpl.weight": (BF16, (2,)), "layers.1.mlp.weight": (BF16, (2,)), "v": (BF16, (1,))}
    assert refused(TWO_EXPERTS, base, {**W, "v": (BF16, (1,))}, expert)[:3] == [
        "MismatchError model.mismatch | layers.10.mlp.weight: './a' lacks this tensor of the base './base'",
        "MismatchError model.mismatch | layers.10.mlp.weight: './b' lacks this tensor of the base './base'; "
        "did you mean 'layers.10.mpl.weight'?",
        "MismatchError model.mismatch | w: './b' lacks this tensor of the base './base'",
    ]


def test_resolve__tells_in_one_line_what_all_layers_lack_or_have_alone() -> None:
    base: Tensors = {f"layers.{i}.mlp.experts.{j}.w1": (BF16, (2,)) for i in range(3) for j in range(2)}
    expert: Tensors = {f"layers.{i}.bias": (BF16, (2,)) for i in range(3)}
    assert refused(TWO_EXPERTS, {**base, **W}, {**base, **W}, {**expert, **W}) == [
        "MismatchError model.mismatch | layers.*.mlp.experts.*.w1: './b' lacks these 6 tensors of the base './base'",
        "MismatchError model.unexpected-tensor | layers.*.bias: './b' has these 3 tensors, the base './base' has not; "
        "to leave them out: --allow-dropped 'layers.*.bias'",
    ]


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind is not DTypeKind.FLOAT], ids=lambda d: d.name)
def test_resolve__refuses_expert_dtypes_it_cannot_merge(dtype: DType) -> None:
    assert refused(TWO_EXPERTS, W, {"w": (dtype, (2, 3))}, W) == [
        f"UnsupportedError model.unsupported | w: {dtype.name} in './a' cannot be merged, it is BF16 in the base "
        "'./base'; convert the model first"
    ]


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind is DTypeKind.OPAQUE], ids=lambda d: d.name)
def test_resolve__refuses_opaque_base_tensors(dtype: DType) -> None:
    assert refused(merging("passthrough", model("a")), {"w": (dtype, (2,))}) == [
        f"UnsupportedError model.unsupported | w: {dtype.name} in './a' cannot be merged; convert the model first"
    ]


def test_resolve__raises_the_mismatch_first_and_tells_all() -> None:
    base: Tensors = {"q": (F8, (1,)), "w": (BF16, (2,)), "x": (BF16, (2,))}
    assert [line.partition(": ")[0] for line in refused(TWO_EXPERTS, base, {"w": (U8, (3,))}, base)] == [
        "MismatchError model.mismatch | w",
        "MismatchError model.mismatch | x",
        "MismatchError model.unsupported | q",
        "MismatchError model.unsupported | w",
    ]


@pytest.mark.thorough
def test_resolve__lists_at_most_fifty_problems_of_a_large_model() -> None:
    base: Tensors = {**W, **{f"model.layer{i}.mlp.weight": (BF16, (1,)) for i in range(20_000)}}
    expert: Tensors = {**W, **{f"layer{i}.mpl.weight": (BF16, (1,)) for i in range(20_000)}}
    error = refusal(merging("ties", model("a", weight=1.0), base=BASE), checkpoint(base), checkpoint(expert))
    assert len(error.problems) == 51
    assert error.problems[49].hint == "did you mean 'layer49.mpl.weight'?"
    assert str(error.problems[50]) == "and 39950 more"


def test_resolve__refuses_a_wrong_number_of_checkpoints() -> None:
    with pytest.raises(ValueError, match="3 models, 2 were opened"):
        resolved(TWO_EXPERTS, W, W)


def test_merge_task__refuses_what_contradicts_itself() -> None:
    entry = checkpoint(W).tensors["w"]
    none = TensorParameters({}, {}, ())
    with pytest.raises(ValueError, match="shapes differ"):
        MergeTask("w", Action.MERGE, (2,), BF16, entry, (), none)
    with pytest.raises(ValueError, match="keeps its dtype"):
        MergeTask("w", Action.COPY, (2, 3), F32, entry, (), none)
    with pytest.raises(ValueError, match="1 experts, 0 parameter sets"):
        MergeTask("w", Action.MERGE, (2, 3), BF16, entry, (entry,), none, expert_models=(1,))


SPECS = st.tuples(st.sampled_from([BF16, F32, I64, F8]), st.sampled_from([(2,), (1, 2), (0,), ()]))
NAMES = st.sampled_from(["a", "b", "c", "layers.0.w", "layers.1.w", "ids"])
# Experts mostly follow the base, so that many draws fit together.
FAMILIES = st.dictionaries(NAMES, st.tuples(st.sampled_from([BF16, F32, I64]), st.just((2,)))).flatmap(
    lambda base: st.tuples(
        st.just(base),
        st.lists(st.dictionaries(NAMES, SPECS).map(lambda extra: {**extra, **base}), min_size=2, max_size=2),
    )
)
WILD = st.tuples(st.dictionaries(NAMES, SPECS), st.lists(st.dictionaries(NAMES, SPECS), min_size=2, max_size=2))


@settings(deadline=None)
@given(FAMILIES)
def test_resolve__covers_the_base_and_uses_or_drops_every_expert_tensor(family: tuple[Tensors, list[Tensors]]) -> None:
    base, experts = family
    result = resolved(TWO_EXPERTS, base, *experts, allow=("*",))
    assert [task.name for task in result.tasks] == list(base)
    for index, (expert, text) in enumerate(zip(experts, ("./a", "./b"), strict=True)):
        used = [task.experts[index].name for task in result.tasks if task.experts]
        dropped = [drop.tensor for drop in result.dropped if drop.model == text]
        assert sorted(used + dropped) == sorted(expert)


@settings(deadline=None)
@given(WILD)
def test_resolve__succeeds_exactly_when_every_float_of_the_base_fits(wild: tuple[Tensors, list[Tensors]]) -> None:
    base, experts = wild
    floats = {name: shape for name, (dtype, shape) in base.items() if dtype.kind is DTypeKind.FLOAT}
    fits = all(dtype.kind is not DTypeKind.OPAQUE for dtype, _ in base.values()) and all(
        name in expert and expert[name][0].kind is DTypeKind.FLOAT and expert[name][1] == shape
        for expert in experts
        for name, shape in floats.items()
    )
    if fits:
        assert len(resolved(TWO_EXPERTS, base, *experts, allow=("*",)).tasks) == len(base)
    else:
        first, *_ = refused(TWO_EXPERTS, base, *experts)
        assert first.split()[1] in ("model.mismatch", "model.unexpected-tensor", "model.unsupported")


def test_resolve__tells_of_embedding_rows_that_only_the_base_has() -> None:
    def vocabulary(rows: int) -> Tensors:
        return {"model.embed_tokens.weight": (F32, (rows, 3)), "lm_head.weight": (F32, (rows, 3)), **W}

    result = resolved(TWO_EXPERTS, vocabulary(8), vocabulary(6), vocabulary(8))
    (notice,) = result.notices
    assert (notice.code, notice.message) == (
        "recipe.unclear", "'./a' has 6 of the base's 8 embedding rows: the base's rows are used for the others",
    )  # fmt: skip
    assert resolved(TWO_EXPERTS, vocabulary(8), vocabulary(9), vocabulary(8)).notices == ()
