"""The output of an applied adapter has the tokenizer next to the adapter, where it fits, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import MismatchError, RecipeError
from support.late_modules import transformers
from support.model_folders import recipe_of, write_adapter, write_model

pytestmark = pytest.mark.transformers
N_ROWS = 12
WORDS = ["<unk>", "<end>", "zero", "one", "two"]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": N_ROWS, "eos_token_id": 1}


def write_tokenizer(folder: Path, words: list[str], *, eos: str = "<end>", template: str = "") -> None:
    """Write a tokenizer as transformers saves it."""
    import tokenizers

    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token=eos)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base with a tokenizer and two adapters without one, in the working folder."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": draw.normal(size=(N_ROWS, 8)).astype(np.float32),
        "model.layers.0.self_attn.q_proj.weight": draw.normal(size=(8, 8)).astype(np.float32),
        "lm_head.weight": draw.normal(size=(N_ROWS, 8)).astype(np.float32),
    }
    write_model(tmp_path / "base", tensors, CONFIG)
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [1]}')
    write_tokenizer(tmp_path / "base", WORDS, template="base {{ messages }}")
    for name in ("adapter", "other"):
        factors = {
            "model.layers.0.self_attn.q_proj.lora_A.weight": draw.normal(size=(4, 8)).astype(np.float32),
            "model.layers.0.self_attn.q_proj.lora_B.weight": draw.normal(size=(8, 4)).astype(np.float32),
        }
        write_adapter(tmp_path / name, factors)
    return tmp_path


def document(path: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(Path(path).read_text())
    return content


def messages(report: mergepipe.MergeReport) -> list[str]:
    return [notice.message for notice in report.recipe_notices]


def test_apply_lora__gives_the_output_the_tokenizer_template_and_eos_of_the_adapter(folder: Path) -> None:
    write_tokenizer(folder / "adapter", [*WORDS, "<turn>"], eos="<turn>", template="adapter {{ messages }}")
    report = mergepipe.apply_lora("base", ["adapter"], "out")
    assert messages(report) == ["the output gets the tokenizer and chat template next to the adapter"]
    ours = transformers.AutoTokenizer.from_pretrained("out")
    assert ours("one <turn>")["input_ids"] == [3, 5]
    assert ours.eos_token == "<turn>"
    assert ours.chat_template == "adapter {{ messages }}"
    assert document("out/config.json")["eos_token_id"] == 5
    assert document("out/generation_config.json")["eos_token_id"] == [5, 1]
    assert mergepipe.verify("out", deep_fraction=1.0).is_sound


def test_merge__gives_base_plus_adapter_the_tokenizer_of_the_adapter_too(folder: Path) -> None:
    write_tokenizer(folder / "adapter", [*WORDS, "<turn>"])
    report = mergepipe.merge(recipe_of("linear", {"base+adapter": {"weight": 1.0}, "base": {"weight": 1.0}}), "out")
    assert messages(report) == ["the output gets the tokenizer and chat template next to the adapter"]
    assert "<turn>" in transformers.AutoTokenizer.from_pretrained("out").get_vocab()


def test_apply_lora__has_nothing_to_say_of_the_tokenizer_of_the_base_next_to_an_adapter(folder: Path) -> None:
    write_tokenizer(folder / "adapter", WORDS, template="base {{ messages }}")
    assert not mergepipe.apply_lora("base", ["adapter"], "out", strict=True).recipe_notices


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_apply_lora__uses_the_tokenizer_that_is_asked_for(folder: Path, name: str) -> None:
    write_tokenizer(folder / "adapter", [*WORDS, "<turn>"])
    assert not mergepipe.apply_lora("base", ["adapter"], "out", tokenizer_of=name, strict=True).recipe_notices
    ours = transformers.AutoTokenizer.from_pretrained("out").get_vocab()
    assert ours == transformers.AutoTokenizer.from_pretrained(name).get_vocab()
    assert mergepipe.verify("out", deep_fraction=1.0).is_sound


def test_apply_lora__keeps_the_tokenizer_of_the_base_where_the_embedding_lacks_rows(folder: Path) -> None:
    write_tokenizer(folder / "adapter", [*WORDS, *(f"word-{index}" for index in range(N_ROWS))])
    reason = "it has 17 tokens, the embedding 12 rows"
    with pytest.warns(mergepipe.MergePipeWarning, match=reason):
        report = mergepipe.apply_lora("base", ["adapter"], "out")
    assert messages(report) == [f"the tokenizer next to the adapter is not used: {reason}"]
    assert len(transformers.AutoTokenizer.from_pretrained("out")) == len(WORDS)
    with pytest.raises(MismatchError, match=reason):
        mergepipe.apply_lora("base", ["adapter"], "other-out", tokenizer_of="adapter")


def test_apply_lora__adds_a_chat_template_that_is_alone_next_to_the_adapter(folder: Path) -> None:
    (folder / "adapter" / "chat_template.jinja").write_text("adapter {{ messages }}")
    mergepipe.apply_lora("base", ["adapter"], "out")
    ours = transformers.AutoTokenizer.from_pretrained("out")
    assert ours.chat_template == "adapter {{ messages }}"
    assert len(ours) == len(WORDS)


def test_apply_lora__adds_the_tokenizer_of_the_adapter_where_the_base_has_none(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "base" / name).unlink(missing_ok=True)
    write_tokenizer(folder / "adapter", WORDS)
    mergepipe.apply_lora("base", ["adapter"], "out")
    assert len(transformers.AutoTokenizer.from_pretrained("out")) == len(WORDS)


def test_apply_lora__uses_the_tokenizer_that_several_adapters_share(folder: Path) -> None:
    write_tokenizer(folder / "adapter", [*WORDS, "<turn>"])
    write_tokenizer(folder / "other", [*WORDS, "<turn>"])
    mergepipe.apply_lora("base", ["adapter", "other"], "out")
    assert "<turn>" in transformers.AutoTokenizer.from_pretrained("out").get_vocab()
    write_tokenizer(folder / "other", [*WORDS, "<step>"])
    with pytest.warns(mergepipe.MergePipeWarning, match="have different tokenizers"):
        mergepipe.apply_lora("base", ["adapter", "other"], "apart")
    assert len(transformers.AutoTokenizer.from_pretrained("apart")) == len(WORDS)


def test_apply_lora__refuses_the_tokenizer_of_an_adapter_that_has_none(folder: Path) -> None:
    with pytest.raises(MismatchError, match="there is no tokenizer next to an adapter"):
        mergepipe.apply_lora("base", ["adapter"], folder / "out", tokenizer_of="adapter")


def test_merge__refuses_another_choice_of_tokenizer(folder: Path) -> None:
    recipe = recipe_of("passthrough", {"base+adapter": {}}, adapter_tokenizer="both")
    with pytest.raises(RecipeError, match="base or adapter"):
        mergepipe.merge(recipe, folder / "out")
