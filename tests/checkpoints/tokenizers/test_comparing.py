"""What is said where tokenizers differ and a recipe does not align them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vocabulary_cases import EMBED, HEAD, write_model

from mergepipe.api import check, merge
from mergepipe.checkpoints.embedding_rows import unaligned_notices
from mergepipe.options import MergeOptions
from mergepipe.storage.local import LocalStore

TOKENS = ["<unk>", "a", "b", "c"]


def notices(folder: Path, tokens: list[str], *, n_rows: int | None = None, n_base_rows: int | None = None) -> list[str]:
    base = write_model(folder / "base", TOKENS, seed=0, n_rows=n_base_rows)
    other = write_model(folder / "other", tokens, seed=1, n_rows=n_rows)
    return list(unaligned_notices([base, other], ["./base", "./other"], {0, 1}, LocalStore()))


def test_unaligned_notices__are_none_where_tokenizers_agree(tmp_path: Path) -> None:
    assert notices(tmp_path, TOKENS) == []


def test_unaligned_notices__tell_rows_that_belong_to_other_tokens(tmp_path: Path) -> None:
    assert notices(tmp_path, ["<unk>", "b", "a", "c"]) == [
        "2 rows of embeddings: './other' has other tokens there than './base', and they are merged by number; "
        "`tokenizer: {source: union}` in the recipe merges them by token"
    ]


def test_unaligned_notices__name_tokens_that_the_output_lacks(tmp_path: Path) -> None:
    assert notices(tmp_path, [*TOKENS, "d", "e"]) == [
        "2 tokens of './other' not in the output's tokenizer: 'd', 'e'; "
        "`tokenizer: {source: union}` in the recipe adds them"
    ]


def test_unaligned_notices__count_rows_that_no_token_explains(tmp_path: Path) -> None:
    assert notices(tmp_path, TOKENS, n_rows=8) == [
        "embeddings have 8 rows in './other', 4 in './base': the rest is left out"
    ]


def test_unaligned_notices__say_nothing_of_rows_that_only_the_base_has(tmp_path: Path) -> None:
    assert notices(tmp_path, TOKENS[:3], n_base_rows=8) == []


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


@pytest.mark.parametrize("text", ["", "tokenizer_source: base\n"], ids=["by number", "by token"])
def test_check__tells_tokens_that_the_output_lacks(tmp_path: Path, text: str) -> None:
    write_model(tmp_path / "base", TOKENS, seed=0)
    write_model(tmp_path / "other", [*TOKENS, "d"], seed=1)
    recipe = tmp_path / "recipe.yml"
    models = "models: [{model: other, parameters: {weight: 1}}]\nbase_model: base\nmerge_method: task_arithmetic\n"
    recipe.write_text(models + text)
    *_, notice = check(recipe).recipe_notices
    assert (notice.code, notice.changes_result) == ("recipe.unclear", True)
    assert notice.text.startswith("1 token of 'other' not in the output's tokenizer")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 row beyond the output's last one"),
        ("tokenizer_source: base\n", "1 row of tokens that the output's tokenizer lacks"),
    ],
    ids=["by number", "by token"],
)
def test_merge__the_manifest_lists_rows_that_are_left_out(tmp_path: Path, text: str, reason: str) -> None:
    write_model(tmp_path / "base", TOKENS, seed=0)
    write_model(tmp_path / "other", [*TOKENS, "d"], seed=1)
    recipe = tmp_path / "recipe.yml"
    models = "models: [{model: other, parameters: {weight: 1}}]\nbase_model: base\nmerge_method: task_arithmetic\n"
    recipe.write_text(models + text)
    report = merge(recipe, tmp_path / "out", options=MergeOptions(catalog=False))
    assert report.dropped_tensors == 0
    dropped = json.loads((tmp_path / "out" / "mergepipe.json").read_text())["dropped"]
    assert [(each["model"], each["tensor"], each["reason"]) for each in dropped] == [
        ("other", name, reason) for name in (HEAD, EMBED)
    ]
