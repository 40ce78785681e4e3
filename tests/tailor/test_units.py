"""Parameters sorted into units, and the selection grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import RecipeError
from mergepipe.tailor.selection import ModelUnits, model_units, parse_selector
from support.training_trees import decoder_shapes

DECODER = model_units(decoder_shapes(12))
GPT2 = (
    "transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight",
    "transformer.h.11.mlp.c_proj.bias", "transformer.ln_f.weight", "lm_head.weight",
)  # fmt: skip
BERT = (
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.LayerNorm.weight",
    "bert.encoder.layer.1.attention.output.LayerNorm.weight",
    "bert.pooler.dense.weight",
    "cls.predictions.bias",
)


def by_unit(units: ModelUnits) -> dict[str, tuple[str, ...]]:
    return {str(unit): names for unit, names in units.parameters.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "base_model.model."])
def test_model_units__sorts_gpt2_names_under_any_prefix(prefix: str) -> None:
    units = [str(model_units([prefix + n for n in GPT2]).unit_of(prefix + n)) for n in GPT2]
    assert units == ["embed", "embed", "layer 0", "layer 11", "norm", "lm_head"]


def test_model_units__sorts_bert_names() -> None:
    units = model_units(BERT)
    found = [str(units.unit_of(n)) for n in BERT]
    assert found == ["embed", "embed", "layer 1", "other:bert.pooler.dense", "lm_head"]


def test_model_units__orders_units_as_the_model_runs() -> None:
    shuffled = sorted(decoder_shapes(12), key=hash)
    expected = ["embed", *(f"layer {i}" for i in range(12)), "norm", "lm_head"]
    assert list(by_unit(model_units(shuffled))) == expected


def test_model_units__counts_an_expert_number_as_part_of_its_layer() -> None:
    units = model_units(["model.layers.3.mlp.experts.5.w1.weight", "model.layers.3.self_attn.q_proj.weight"])
    assert list(by_unit(units)) == ["layer 3"]


def test_model_units__keeps_a_second_stack_apart() -> None:
    names = [f"model.layers.{i}.{m}.weight" for i in range(2) for m in "abc"]
    units = by_unit(model_units([*names, "vision.layers.0.a.weight", "vision.layers.1.a.weight"]))
    assert list(units) == ["layer 0", "layer 1", "other:vision.layers.0", "other:vision.layers.1"]


def test_model_units__gives_an_alias_its_owners_unit() -> None:
    units = model_units(
        [*decoder_shapes(2, tied=True), "lm_head.weight"], {"lm_head.weight": "model.embed_tokens.weight"}
    )
    assert str(units.unit_of("lm_head.weight")) == "embed"
    assert "lm_head.weight" not in units.names


@given(
    st.lists(
        st.from_regex(r"([a-z_]{1,6}|layers|[0-9]{1,2})(\.([a-z_]{1,6}|layers|norm|[0-9]{1,2})){0,5}", fullmatch=True)
    )
)
def test_model_units__puts_every_parameter_in_exactly_one_unit(names: list[str]) -> None:
    assert sorted(model_units(names).names) == sorted(set(names))


def names_of(selector: str, units: ModelUnits = DECODER) -> tuple[str, ...]:
    names, alias = parse_selector(selector).find(units, "units")
    assert alias is None
    return names


def chosen(selector: str, units: ModelUnits = DECODER) -> list[str]:
    names = names_of(selector, units)
    return list(dict.fromkeys(str(units.unit_of(n)) for n in names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embed", ["embed"]),
        ("norm", ["norm"]),
        ("lm_head", ["lm_head"]),
        ("layer 3", ["layer 3"]),
        ("layers 3,7-9", ["layer 3", "layer 7", "layer 8", "layer 9"]),
        ("  layers   0 - 1 ", ["layer 0", "layer 1"]),
        ("layers even", [f"layer {i}" for i in range(0, 12, 2)]),
        ("layers odd", [f"layer {i}" for i in range(1, 12, 2)]),
        ("layers all", [f"layer {i}" for i in range(12)]),
        ("name:*.11.mlp.*", ["layer 11"]),
        ("name:*norm.weight", [*(f"layer {i}" for i in range(12)), "norm"]),
    ],
)
def test_parse_selector__means_what_the_grammar_says(text: str, expected: list[str]) -> None:
    assert chosen(text) == expected


def test_parse_selector__selects_other_units_by_pattern() -> None:
    assert chosen("other:bert.*", units=model_units(BERT)) == ["other:bert.pooler.dense"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embbed", "did you mean 'embed'"),
        ("layers evn", "did you mean 'even'"),
        ("layers", "names no unit"),
        ("layers 9-7", "runs backwards"),
        ("layers 3,,4", "neither a layer nor a range"),
        ("layers -1", "neither a layer nor a range"),
        ("layers 3;4", "neither a layer nor a range"),
        ("name:", "has no pattern"),
        ("", "names no unit"),
        ("layers 12", "no layer 12; its layers are 0 to 11"),
        ("layers 11-999999", "no layer 12, 13, 14, 15, 16, ...;"),
        ("other:*", "its units: embed, layer 0"),
        ("name:model.layers.0.mlp.up_prj.weight", "did you mean 'model.layers.0.mlp.up_proj.weight'"),
    ],
)
def test_parse_selector__explains_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        names_of(text)


def test_parse_selector__explains_that_a_head_is_tied() -> None:
    units = model_units(decoder_shapes(1, tied=True), {"lm_head.weight": "model.embed_tokens.weight"})
    with pytest.raises(RecipeError, match="take embed instead"):
        names_of("lm_head", units)
