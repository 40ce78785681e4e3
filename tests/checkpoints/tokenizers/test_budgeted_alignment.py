"""A merge of models with different vocabularies keeps its budget; planned in full it is the full merge."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from vocabulary_cases import write_model

import mergepipe
from mergepipe.errors import ConflictError

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
