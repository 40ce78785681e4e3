"""Aligned embeddings: row for row what the rule says, by token, whatever the order of ids."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from vocabulary_cases import EMBED, HEAD, WIDTH, embedding, fast_tokenizer, values_of, write_model

import mergepipe
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.embedding_rows import TokenRows, TokenRule, model_rows, no_rows
from mergepipe.checkpoints.vocabulary import Vocabulary
from mergepipe.core.blocks import BF16, F32
from mergepipe.errors import ConflictError, MismatchError, NotFoundError, RecipeError
from mergepipe.recipes.recipe import TokenizerRequest
from mergepipe.recipes.vocabulary_alignment import Alignment, align_vocabulary
from mergepipe.storage.local import LocalStore
from support.refusals import refuses

UNION = TokenizerRequest(is_union=True)
BASE = TokenizerRequest()
WORDS = ("a", "b", "c", "d", "e", "f", "g", "h")
Table = dict[str, NDArray[np.float64]]


def table(tokens: list[str], seed: int) -> Table:
    return dict(zip(tokens, embedding(len(tokens), seed).astype(np.float64), strict=True))


def expected_rows(tables: list[Table], output: list[str], *, has_base: bool) -> list[NDArray[np.float64]]:
    """The rule in words: own row; else the only one there is; else the base's; else the mean; else zero."""
    found = []
    for own in tables:
        rows = []
        for token in output:
            having = [each[token] for each in tables if token in each]
            if token in own:
                rows.append(own[token])
            elif has_base and token in tables[0]:
                rows.append(tables[0][token])
            else:
                rows.append(np.mean(having, axis=0) if having else np.zeros(WIDTH))
        found.append(np.stack(rows))
    return found


def union_of(models: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(token for tokens in models for token in tokens))


vocabularies = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, unique=True), min_size=3, max_size=3)


@given(models=vocabularies, has_base=st.booleans(), source=st.sampled_from([UNION, BASE]), head=st.booleans())
def test_align_vocabulary__gives_the_rows_of_the_rule(
    models: list[list[str]],
    has_base: bool,
    source: TokenizerRequest,
    head: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("models")
    checkpoints = [write_model(root / str(n), tokens, seed=n) for n, tokens in enumerate(models)]
    aligned = align_vocabulary(source, checkpoints, LocalStore(), has_base=has_base)
    output = union_of(models) if source is UNION else models[0]
    tables = [table(tokens, n + 1000 * head) for n, tokens in enumerate(models)]
    assert aligned.n_rows == len(output)
    for checkpoint, rows in zip(aligned.checkpoints, expected_rows(tables, output, has_base=has_base), strict=True):
        found = values_of(checkpoint.tensors[HEAD if head else EMBED])
        assert np.array_equal(found.astype(np.float32), rows.astype(np.float32))


@given(order=st.permutations(range(8)))
def test_align_vocabulary__a_permutation_is_undone(order: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("models")
    base = write_model(root / "base", WORDS, seed=0)
    expert = write_model(root / "expert", [WORDS[n] for n in order], seed=1)
    aligned = align_vocabulary(BASE, [base, expert], LocalStore(), has_base=True).checkpoints[1].tensors[EMBED]
    assert np.array_equal(values_of(aligned)[order], embedding(8, 1).astype(np.float64))


def test_align_vocabulary__equal_tokenizers_leave_every_tensor_and_its_padding_alone(tmp_path: Path) -> None:
    models = [write_model(tmp_path / str(n), WORDS, seed=n, n_rows=16) for n in range(3)]
    aligned = align_vocabulary(UNION, models, LocalStore(), has_base=True)
    assert aligned == Alignment(tuple(models), 16, 0, {}, {}, aligned.digest)


def test_align_vocabulary__its_digest_tells_one_order_of_tokens_from_another(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS, seed=0)
    digests = set()
    for order in (WORDS, WORDS[::-1], WORDS):
        (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(fast_tokenizer(order)))
        digests.add(align_vocabulary(BASE, [base], LocalStore(), has_base=True).digest)
    assert len(digests) == 2


def test_align_vocabulary__equal_tokenizers_keep_what_padding_they_share(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS, seed=0, n_rows=12)
    expert = write_model(tmp_path / "expert", WORDS, seed=1, n_rows=10)
    aligned = align_vocabulary(BASE, [base, expert], LocalStore(), has_base=True)
    assert aligned.checkpoints[0] == base
    found = values_of(aligned.checkpoints[1].tensors[EMBED])
    assert np.array_equal(found, np.concatenate([embedding(10, 1), embedding(12, 0)[10:]]).astype(np.float64))


def test_align_vocabulary__tokens_that_join_take_the_place_of_padding(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS[:4], seed=0, n_rows=8)
    expert = write_model(tmp_path / "expert", WORDS[:6], seed=1)
    aligned = align_vocabulary(UNION, [base, expert], LocalStore(), has_base=True)
    assert aligned.n_rows == 8
    assert "2 ordinary tokens of other models ('e', 'f')" in aligned.notices([])[0]
    found = [values_of(each.tensors[EMBED]) for each in aligned.checkpoints]
    base_rows, expert_rows = embedding(8, 0).astype(np.float64), embedding(6, 1).astype(np.float64)
    assert np.array_equal(found[0], np.concatenate([base_rows[:4], expert_rows[4:], base_rows[6:]]))
    assert np.array_equal(found[1], np.concatenate([expert_rows, base_rows[6:]]))


def test_align_vocabulary__a_model_without_tokenizer_has_the_first_ones(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS, seed=0)
    expert = write_model(tmp_path / "expert", WORDS, seed=1, has_tokenizer=False)
    assert align_vocabulary(BASE, [base, expert], LocalStore(), has_base=True).checkpoints == (base, expert)
    with refuses(NotFoundError, "checkpoint.incomplete", "no tokenizer file found"):
        align_vocabulary(BASE, [expert, base], LocalStore(), has_base=True)


def test_align_vocabulary__another_models_tokenizer_lends_order_and_files(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", ["a", "b", "c"], seed=0)
    expert = write_model(tmp_path / "expert", ["c", "x", "a"], seed=1)
    request = TokenizerRequest(model=1)
    aligned = align_vocabulary(request, [base, expert], LocalStore(), has_base=True)
    assert (aligned.lender, aligned.n_rows, dict(aligned.files)) == (1, 3, {})
    assert aligned.dropped == {0: ("b",)}
    notice = "1 token of 'BASE' not in the output's tokenizer, embeddings left out: 'b'"
    assert aligned.notices(["BASE", "EXPERT"]) == (notice,)
    found = values_of(aligned.checkpoints[0].tensors[EMBED])
    base_rows, expert_rows = embedding(3, 0), embedding(3, 1)
    assert np.array_equal(found, np.stack([base_rows[2], expert_rows[1], base_rows[0]]).astype(np.float64))


def test_align_vocabulary__pads_with_the_mean_of_all_rows(tmp_path: Path) -> None:
    models = [write_model(tmp_path / str(n), WORDS[: 5 + n], seed=n) for n in range(2)]
    request = TokenizerRequest(is_union=True, pad_to_multiple_of=4)
    aligned = align_vocabulary(request, models, LocalStore(), has_base=True)
    assert aligned.n_rows == 8
    for checkpoint in aligned.checkpoints:
        rows = values_of(checkpoint.tensors[EMBED])
        mean = rows[:6].mean(axis=0).astype(np.float32)
        assert np.array_equal(rows[6:].astype(np.float32), np.stack([mean, mean]))


def test_align_vocabulary__single_tokens_come_from_where_the_recipe_says(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", ["a", "b"], seed=0)
    expert = write_model(tmp_path / "expert", ["a", "b", "c"], seed=1)
    tokens = {
        "a": TokenRule(model=1, force=True),
        "b": TokenRule(),
        "c": TokenRule(),
        "new": TokenRule(model=1, token="c"),
        "id": TokenRule(model=1, token_id=1),
    }
    request = TokenizerRequest(is_union=True, tokens=tokens)
    aligned = align_vocabulary(request, [base, expert], LocalStore(), has_base=True)
    base_rows, expert_rows = embedding(2, 0), embedding(3, 1)
    shared = [expert_rows[2], expert_rows[1]]
    zero = np.zeros(WIDTH)
    found = [values_of(each.tensors[EMBED]) for each in aligned.checkpoints]
    assert np.array_equal(found[0], np.stack([expert_rows[0], base_rows[1], zero, *shared]).astype(np.float64))
    assert np.array_equal(found[1], np.stack([expert_rows[0], expert_rows[1], expert_rows[2], *shared]))
    written = json.loads(aligned.files["tokenizer.json"])
    assert [(each["content"], each["id"]) for each in written["added_tokens"]] == [("c", 2), ("new", 3), ("id", 4)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (TokenRule(model=0), "{base}' has no token 'c'"),
        (TokenRule(model=1, token="zz"), "{expert}' has no token 'zz'"),
        (TokenRule(model=1, token_id=3), "row 3 of '{expert}' is needed, its '"),
    ],
)
def test_align_vocabulary__a_source_that_is_not_there_is_named(wanted: TokenRule, message: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", ["a", "b"], seed=0)
    expert = write_model(tmp_path / "expert", ["a", "b", "c"], seed=1)
    request = TokenizerRequest(is_union=True, tokens={"c": wanted}, where="recipe.yml:7")
    with refuses(RecipeError, "recipe.value") as caught:
        align_vocabulary(request, [base, expert], LocalStore(), has_base=True)
    assert "recipe.yml:7: token 'c': " in str(caught.value)
    assert message.format(base=base.path, expert=expert.path) in str(caught.value)


def test_align_vocabulary__the_first_model_keeps_its_dtype_and_others_meet_it_exactly(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", ["a", "b"], seed=0, dtype="bfloat16")
    expert = write_model(tmp_path / "expert", ["b", "c"], seed=1)
    aligned = align_vocabulary(UNION, [base, expert], LocalStore(), has_base=True)
    first, second = (each.tensors[EMBED] for each in aligned.checkpoints)
    assert (first.dtype, second.dtype) == (BF16, F32)
    assert np.array_equal(values_of(first)[0], values_of(second)[0])
    assert np.array_equal(values_of(second)[1:], embedding(2, 1).astype(np.float64))
    assert np.array_equal(values_of(first)[2], embedding(2, 1)[1].astype("bfloat16").astype(np.float64))


def test_align_vocabulary__too_few_rows_for_a_tokenizer_are_named(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS, seed=0)
    expert = write_model(tmp_path / "expert", WORDS, seed=1, n_rows=5)
    (expert.root / "config.json").local_path.write_text("{}")
    with refuses(MismatchError, "model.mismatch", r"5 rows in '.*expert', its tokenizer\.json needs 8"):
        align_vocabulary(BASE, [base, expert], LocalStore(), has_base=True)


def test_align_vocabulary__tokens_beyond_a_models_rows_are_unknown_to_it(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", WORDS[:6], seed=0)
    expert = write_model(tmp_path / "expert", WORDS, seed=1, n_rows=5)
    aligned = align_vocabulary(UNION, [base, expert], LocalStore(), has_base=True)
    assert aligned.n_rows == 6
    assert np.array_equal(values_of(aligned.checkpoints[1].tensors[EMBED])[5], embedding(6, 0)[5].astype(np.float64))


def test_align_vocabulary__names_may_differ_in_their_prefix(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", ["a", "b"], seed=0)
    expert = write_model(tmp_path / "expert", ["b", "a"], seed=1)
    path = tmp_path / "expert" / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"model.embed_tokens.weight"', b'"other.embed_tokens.weight"'))
    expert = open_checkpoint(LocalStore(), expert.path)
    aligned = align_vocabulary(BASE, [base, expert], LocalStore(), has_base=True).checkpoints[1]
    assert np.array_equal(values_of(aligned.tensors["other.embed_tokens.weight"]), embedding(2, 1)[::-1])


def test_model_rows__deltas_are_zero_for_tokens_they_do_not_know() -> None:
    output = Vocabulary({"a": 0, "b": 1, "c": 2}, {}, "x")
    rows = TokenRows.of(output, [output, Vocabulary({"c": 0, "a": 1}, {}, "y")], 4)
    found = model_rows(rows, 1, no_rows(4), [], {})
    assert found.origin_R.tolist() == [1, -1, 1, -1]
    assert found.row_R.tolist()[0::2] == [1, 0]


# --- budgets of models with different vocabularies; planned in full it is the full merge


N_TOKENS = 9000  # 8 columns each: several blocks


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts of other token orders, one with more tokens."""
    root = tmp_path_factory.mktemp("budgeted")
    tokens = [f"token{n}" for n in range(N_TOKENS)]
    for seed, name in enumerate(("base", "one", "two")):
        write_model(root / name, tokens, seed=seed)
        random.Random(seed).shuffle(tokens)
        tokens += [f"of-{name}-{n}" for n in range(50)]
    path = root / "recipe.yml"
    path.write_text(
        "merge_method: ties\nbase_model: base\nparameters: {density: 0.5}\ntokenizer: {source: union}\n"
        "models: [{model: one, parameters: {weight: 0.6}}, {model: two, parameters: {weight: 0.5}}]\n"
    )
    return path


def merged(recipe: Path, out: Path, budget: str | None) -> tuple[bytes, mergepipe.MergeReport]:
    report = mergepipe.merge(recipe, out, budget=budget, block_elements=None if budget is None else 16384)
    return (out / "model.safetensors").read_bytes(), report


def test_merge__of_aligned_vocabularies_planned_in_full_is_the_full_merge(recipe: Path, tmp_path: Path) -> None:
    full, _ = merged(recipe, tmp_path / "full", None)
    planned, report = merged(recipe, tmp_path / "planned", "100%")
    assert planned == full
    assert report.planned_bytes is not None
    assert 0 < report.expert_bytes + report.analysis_bytes <= report.planned_bytes


@pytest.mark.parametrize("budget", ["40%", "80%"])
def test_merge__of_aligned_vocabularies_reads_at_most_its_budget(recipe: Path, tmp_path: Path, budget: str) -> None:
    _, report = merged(recipe, tmp_path / "out", budget)
    assert report.budget_bytes is not None
    assert report.planned_bytes is not None
    assert 0 < report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes


def test_run__refuses_tokenizers_that_changed_since_the_plan_was_made(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(recipe.parent, folder)
    plan = mergepipe.plan(folder / "recipe.yml", budget="60%", home=tmp_path / "home")
    stored = tmp_path / "plan.json"
    stored.write_bytes(plan.to_json())
    tokenizer = folder / "one" / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace('"token7"', '"token-7"'))
    with pytest.raises(ConflictError) as caught:
        mergepipe.run(stored, tmp_path / "out", home=tmp_path / "home")
    assert [problem.code for problem in caught.value.problems] == ["input.changed"]
    tokenizer.write_text(text)
    mergepipe.run(stored, tmp_path / "out", home=tmp_path / "home")
