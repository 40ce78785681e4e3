"""The small files of a snapshot say what its tensors are, and loaders take them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mergepipe
from mergepipe.core.blocks import BF16, F32
from mergepipe.errors import MismatchError
from mergepipe.recipes.output_config import with_dtype, with_layers
from mergepipe.recipes.tasks import LayerCount
from mergepipe.runs.small_files import NAMED, with_chat_template, with_token_ids, with_vocab_size
from support.families import TINY_LLAMA, write_family
from support.late_modules import transformers

LINEAR = (
    "merge_method: linear\nmodels:\n- {model: one, parameters: {weight: 1}}\n- {model: two, parameters: {weight: 1}}\n"
)
NEW_TOKEN = "<|new|>"


def raw(content: object) -> bytes:
    return json.dumps(content).encode()


def write_models(root: Path) -> None:
    """Two models; the second has a token more, and another end of text."""
    for number, name in enumerate(("one", "two")):
        n_tokens = 257 + number
        write_family(root / f"of-{name}", replace(TINY_LLAMA, vocab=n_tokens), 1, seed=number, dtype=F32).base.rename(
            root / name
        )
    path = root / "two" / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 257, "content": NEW_TOKEN})
    path.write_text(json.dumps(document, ensure_ascii=False))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((root / "two" / name).read_text())
        (root / "two" / name).write_text(json.dumps({**content, "eos_token_id": 257}))


def merged(root: Path, text: str) -> Path:
    (root / "recipe.yml").write_text(text)
    mergepipe.merge(root / "recipe.yml", root / "out")
    return root / "out"


def document_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_merge__a_union_states_its_size_and_has_every_token(tmp_path: Path) -> None:
    write_models(tmp_path)
    out = merged(tmp_path, LINEAR + "tokenizer: {source: union, pad_to_multiple_of: 8}\nchat_template: chatml\n")
    assert document_of(out / "config.json")["vocab_size"] == 264
    assert document_of(out / "config.json")["eos_token_id"] == 256
    tokenizer = document_of(out / "tokenizer.json")
    assert [(each["content"], each["id"]) for each in tokenizer["added_tokens"]][1:] == [(NEW_TOKEN, 257)]
    assert document_of(out / "tokenizer_config.json")["chat_template"] == NAMED["chatml"]
    assert (out / "chat_template.jinja").read_text() == NAMED["chatml"]


def test_merge__the_lender_of_the_tokenizer_lends_the_ids_of_special_tokens(tmp_path: Path) -> None:
    write_models(tmp_path)
    out = merged(tmp_path, LINEAR + "tokenizer_source: two\n")
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    assert document_of(out / "config.json")["eos_token_id"] == 257
    assert document_of(out / "generation_config.json")["eos_token_id"] == 257


def test_merge__slices_state_how_many_layers_there_are(tmp_path: Path) -> None:
    write_models(tmp_path)
    slices = "- sources: [{model: one, layer_range: [0, 2]}]\n- sources: [{model: one, layer_range: [1, 2]}]\n"
    out = merged(tmp_path, f"merge_method: passthrough\nslices:\n{slices}")
    assert document_of(out / "config.json")["num_hidden_layers"] == 3


def test_merge__tokens_that_are_left_out_are_noticed(tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "recipe.yml").write_text(LINEAR + "tokenizer_source: one\n")
    report = mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "out")
    assert [notice.text for notice in report.recipe_notices if NEW_TOKEN in notice.text] == [
        f"1 token of 'two' not in the output's tokenizer, embeddings left out: '{NEW_TOKEN}'"
    ]


def test_merge__the_card_has_the_hubs_metadata(tmp_path: Path) -> None:
    write_models(tmp_path)
    out = merged(tmp_path, LINEAR + "tokenizer_source: two\n")
    card = (out / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    sid = document_of(out / "mergepipe.json")["sid"]
    assert metadata == {
        "library_name": "transformers",
        "tags": ["merge", "mergepipe"],
        "merge": {"method": "linear", "tool": f"mergepipe {mergepipe.__version__}", "snapshot": sid},
    }
    assert f"```yaml\n{LINEAR}tokenizer_source: two\n```\n" in card


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", ["union", "two"])
def test_merge__transformers_loads_what_was_aligned(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_models(tmp_path)
    out = merged(tmp_path, LINEAR + f"tokenizer_source: {source}\nchat_template: chatml\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_tokens_to_ids(NEW_TOKEN) == 257
    assert tokenizer("a" + NEW_TOKEN)["input_ids"] == [ord("a"), 257]
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    stored = _embedding(tmp_path / "two")
    row = model.get_input_embeddings().weight[257].detach().float().numpy()
    assert np.array_equal(row, stored[257])  # both models have the row of the only one that knows the token
    assert model.get_output_embeddings().weight.shape[0] == 258


def _embedding(model: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


TEXT = LayerCount("model.layers.", 3, (0, 1, 1, 2))


def test_with_layers__draws_lists_of_one_entry_a_layer() -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "rope": [1, 2], "vision_config": {"n_layer": 3}}
    changed = json.loads(with_layers(raw(config), TEXT, where="c"))
    assert changed == {**config, "num_hidden_layers": 4, "layer_types": ["a", "b", "b", "c"]}
    assert with_layers(raw(config), replace(TEXT, origins=(0, 1, 2)), where="c") == raw(config)
    stated_twice = {"num_layers": 3, "num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
    turned = json.loads(with_layers(raw(stated_twice), replace(TEXT, origins=(1, 2, 0)), where="c"))
    assert turned == {**stated_twice, "layer_types": ["b", "c", "a"]}


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_layers", "n_layers"])
def test_with_layers__knows_every_spelling_in_nested_text_models_too(key: str) -> None:
    assert json.loads(with_layers(raw({key: 3}), TEXT, where="c")) == {key: 4}
    nested = {"text_config": {key: 3}, "vision_config": {key: 3}}
    expected = {"text_config": {key: 4}, "vision_config": {key: 3}}
    assert json.loads(with_layers(raw(nested), TEXT, where="c")) == expected
    vision = replace(TEXT, prefix="model.vision_tower.layers.")
    expected = {"text_config": {key: 3}, "vision_config": {key: 4}}
    assert json.loads(with_layers(raw(nested), vision, where="c")) == expected


@pytest.mark.parametrize(("own", "other"), [("num_decoder_layers", "num_layers"), ("decoder_layers", "encoder_layers")])
def test_with_layers__tells_the_layers_of_encoder_and_decoder_apart(own: str, other: str) -> None:
    config = raw({own: 3, other: 3})
    decoder = replace(TEXT, prefix="decoder.block.", origins=(0, 1))
    encoder = replace(TEXT, prefix="encoder.block.", origins=(0, 1, 2, 2))
    changed = with_layers(with_layers(config, encoder, where="c"), decoder, where="c")
    assert json.loads(changed) == {own: 2, other: 4}
    assert with_layers(with_layers(config, decoder, where="c"), encoder, where="c") == changed


@pytest.mark.parametrize("config", [b"{}", raw({"num_hidden_layers": 5})])
def test_with_layers__a_configuration_without_layers_is_refused(config: bytes) -> None:
    with pytest.raises(MismatchError, match=r"^config\.json: 4 layers 'model\.layers\.\*' cannot be stated: none of"):
        with_layers(config, TEXT, where="config.json")


def test_with_vocab_size__changes_what_is_stated_and_nothing_else() -> None:
    config = raw({"vocab_size": 3, "text_config": {"vocab_size": 3}, "vision_config": {"vocab_size": 7}})
    changed = {"vocab_size": 4, "text_config": {"vocab_size": 4}, "vision_config": {"vocab_size": 7}}
    assert json.loads(with_vocab_size(config, 4)) == changed
    for same in (config, b"{}", b"no json", b"[1]"):
        assert with_vocab_size(same, 3) == same


def test_with_dtype__changes_nothing_where_nothing_is_to_be_changed() -> None:
    config = raw({"torch_dtype": "bfloat16", "text_config": {"dtype": "float32"}})
    assert json.loads(with_dtype(config, BF16)) == {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
    for same in (raw({"torch_dtype": "bfloat16"}), b"{}", b"no json", b"[" * 100_000):
        assert with_dtype(same, BF16) == same


def test_with_token_ids__leaves_no_id_of_another_vocabulary() -> None:
    text = {"eos_token_id": 2, "pad_token_id": 900}
    config = raw({"bos_token_id": 1, "pad_token_id": 900, "image_token_id": 3, "hidden": 3, "text_config": text})
    lent = raw({"eos_token_id": [4, 5], "mask_token_id": 6, "hidden": 9})
    ids = {"eos_token_id": [4, 5], "mask_token_id": 6}
    assert json.loads(with_token_ids(config, lent)) == {**ids, "image_token_id": 3, "hidden": 3, "text_config": ids}
    assert with_token_ids(lent, lent) == lent


def test_with_chat_template__replaces_every_other_one() -> None:
    contents = {"chat_template.json": b"{}", "chat_template.jinja": b"old", "tokenizer_config.json": raw({"a": 1})}
    changed = with_chat_template(contents, "{new}")
    assert set(changed) == {"chat_template.jinja", "tokenizer_config.json"}
    assert changed["chat_template.jinja"] == b"{new}"
    assert json.loads(changed["tokenizer_config.json"]) == {"a": 1, "chat_template": "{new}"}
