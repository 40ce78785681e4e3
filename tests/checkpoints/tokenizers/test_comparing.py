"""Tokenizers compared, and chat templates chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from vocabulary_cases import EMBED, HEAD, write_model

from mergepipe import check, merge
from mergepipe.checkpoints.embedding_rows import unaligned_notices
from mergepipe.errors import RecipeError
from mergepipe.options import MergeOptions
from mergepipe.runs.small_files import AUTO, NAMED, chosen_template, template_of
from mergepipe.storage.local import LocalStore
from support.local_models import open_local

TOKENS = ["<unk>", "a", "b", "c"]


@pytest.mark.parametrize(
    ("tokens", "rows", "told"),
    [
        (TOKENS, {}, []),
        (
            ["<unk>", "b", "a", "c"],
            {},
            [
                "2 rows of embeddings: './other' has other tokens there than './base', and they are merged by number; "
                "`tokenizer: {source: union}` in the recipe merges them by token"
            ],
        ),
        (
            [*TOKENS, "d", "e"],
            {},
            [
                "2 tokens of './other' not in the output's tokenizer: 'd', 'e'; "
                "`tokenizer: {source: union}` in the recipe adds them"
            ],
        ),
        (TOKENS, {"other": 8}, ["embeddings have 8 rows in './other', 4 in './base': the rest is left out"]),
        (TOKENS[:3], {"base": 8}, []),  # rows that only the base has
    ],
)
def test_unaligned_notices__tell_rows_of_other_tokens_and_what_is_left_out(
    tmp_path: Path, tokens: list[str], rows: dict[str, int], told: list[str]
) -> None:
    base = write_model(tmp_path / "base", TOKENS, seed=0, n_rows=rows.get("base"))
    other = write_model(tmp_path / "other", tokens, seed=1, n_rows=rows.get("other"))
    assert list(unaligned_notices([base, other], ["./base", "./other"], {0, 1}, LocalStore())) == told


def test_unaligned_notices__leave_out_models_whose_embeddings_are_not_merged(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", TOKENS, seed=0)
    other = write_model(tmp_path / "other", TOKENS[::-1], seed=1)
    assert unaligned_notices([base, other], ["./base", "./other"], {0}, LocalStore()) == ()


def test_unaligned_notices__a_tokenizer_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", TOKENS, seed=0)
    other = write_model(tmp_path / "other", TOKENS, seed=1)
    (tmp_path / "other" / "tokenizer.json").write_text("{")
    (notice,) = unaligned_notices([base, other], ["./base", "./other"], {0, 1}, LocalStore())
    assert notice.startswith("the tokens of './other' and './base' cannot be compared: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 row beyond the output's last one"),
        ("tokenizer_source: base\n", "1 row of tokens that the output's tokenizer lacks"),
    ],
    ids=["by number", "by token"],
)
def test_merge__tells_rows_that_are_left_out_in_notices_and_in_the_manifest(
    tmp_path: Path, text: str, reason: str
) -> None:
    write_model(tmp_path / "base", TOKENS, seed=0)
    write_model(tmp_path / "other", [*TOKENS, "d"], seed=1)
    recipe = tmp_path / "recipe.yml"
    models = "models: [{model: other, parameters: {weight: 1}}]\nbase_model: base\nmerge_method: task_arithmetic\n"
    recipe.write_text(models + text)
    *_, notice = check(recipe).recipe_notices
    assert (notice.code, notice.changes_result) == ("recipe.unclear", True)
    assert notice.text.startswith("1 token of 'other' not in the output's tokenizer")
    report = merge(recipe, tmp_path / "out", options=MergeOptions(catalog=False))
    assert report.dropped_tensors == 0
    dropped = json.loads((tmp_path / "out" / "mergepipe.json").read_text())["dropped"]
    assert [(each["model"], each["tensor"], each["reason"]) for each in dropped] == [
        ("other", name, reason) for name in (HEAD, EMBED)
    ]


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
    "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\n"
    "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>\n"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>\n"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>\n<|start_header_id|>assistant<|end_header_id|>\n\n",
    "alpaca": "Be brief.\n\n### Instruction:\nHi?\n\n### Response:\nYes.\n\n### Instruction:\nWhy?### Response:\n",
    "exaone": "    [|system|]Be brief.\n        [|endofturn|]\n\n    [|user|]Hi?\n        \n\n"
    "    [|assistant|]Yes.\n        [|endofturn|]\n\n    [|user|]Why?\n        \n\n    [|assistant|]\n",
    "mistral": "<s> [INST] Be brief.\n\nHi? [/INST] Yes.</s> [INST] Why? [/INST]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_templates__render_a_conversation(name: str) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as loaders set it up
    template = environment.from_string(NAMED[name])
    text = template.render(messages=MESSAGES, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
    assert text == RENDERED[name]


@pytest.mark.parametrize(
    ("name", "turns", "text"),
    [
        ("llama3", "u", "<s><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>\n"),
        ("llama3", "", ""),
        ("alpaca", "ua", "\n\n### Instruction:\nHi?\n\n### Response:\nYes."),
        ("alpaca", "us", "Be brief.\n\n### Instruction:\nHi?\n\n"),
        ("exaone", "u", "        [|system|][|endofturn|]\n\n    [|user|]Hi?\n        \n\n"),
        ("mistral", "s", "<s>"),
        ("mistral", "uau", "<s> [INST] Hi? [/INST] Yes.</s> [INST] Hi? [/INST]"),
    ],
)
def test_named_templates__render_parts_of_conversations_as_mergekit_does(name: str, turns: str, text: str) -> None:
    messages = [MESSAGES["sua".index(turn)] for turn in turns]
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(NAMED[name])
    assert template.render(messages=messages, add_generation_prompt=False, bos_token="<s>", eos_token="</s>") == text


def write_settings(directory: Path, template: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_chosen_template__auto_is_the_most_common_one(tmp_path: Path) -> None:
    for n, template in enumerate(["{a}", "{b}", None, "{b}", "{a}", "{b} "]):
        write_model(tmp_path / str(n), ["x"], seed=n)
        if template is not None:
            write_settings(tmp_path / str(n), template)

    models = [open_local(tmp_path / str(n)) for n in range(6)]
    assert chosen_template(AUTO, models, LocalStore(), where="r") == "{b}"
    assert chosen_template(AUTO, models[:5], LocalStore(), where="r") == "{a}"
    assert chosen_template(AUTO, models[2:3], LocalStore(), where="r") is None


def test_template_of__a_file_of_its_own_comes_first_and_a_list_has_a_default(tmp_path: Path) -> None:

    write_model(tmp_path / "m", ["x"], seed=0)
    write_settings(tmp_path / "m", [{"name": "tool", "template": "{t}"}, {"name": "default", "template": "{d}"}])
    assert template_of(open_local(tmp_path / "m"), LocalStore()) == "{d}"
    (tmp_path / "m" / "chat_template.jinja").write_text("{j}\n")
    assert template_of(open_local(tmp_path / "m"), LocalStore()) == "{j}"


def test_chosen_template__is_jinja_text_or_a_name() -> None:
    assert chosen_template("{{ x }}", [], LocalStore(), where="r") == "{{ x }}"
    assert chosen_template("gemma", [], LocalStore(), where="r") == NAMED["gemma"]


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{% if a %}" * 500 + "{% endif %}" * 500,
        "{{ " + "not " * 2000 + "a }}",
        "{{ " + "7" * 5000 + " }}",
    ],
    ids=lambda text: text[:12],
)
def test_chosen_template__refuses_text_that_no_parser_can_take(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^recipe\.yml: the chat_template cannot be parsed: ") as caught:
        chosen_template(text, [], LocalStore(), where="recipe.yml")
    assert caught.value.code == "recipe.value"


@pytest.mark.parametrize(
    "text", ["{% generation %}{{ x }}{% endgeneration %}", "{% for x in y %}{% break %}{% endfor %}"]
)
def test_chosen_template__leaves_tags_of_loaders_to_them(text: str) -> None:
    assert chosen_template(text, [], LocalStore(), where="recipe.yml") == text
