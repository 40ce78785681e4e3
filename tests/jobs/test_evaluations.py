"""Measures by libraries: the importance of tensors to a text, losses, retrieval, and tasks of a harness."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mergepipe
from mergepipe.errors import RecipeError, UnsupportedError
from mergepipe.jobs.evaluate import (
    MEASURES,
    parse_evaluation,
    parse_objective,
    retrieval_on_pairs,
    tasks_of_lm_eval,
    write_text_importance,
)
from mergepipe.storage.location import Location
from support.families import TINY, write_family
from support.late_modules import torch, transformers
from support.model_folders import recipe_of

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def family(tmp_path: Path) -> Path:
    write_family(tmp_path, TINY, 2)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def measured(family: Path, *experts: str) -> dict[str, float]:
    out = family / "importance.json"
    places = [family / expert for expert in experts]
    write_text_importance(family / "base", places, Location.of(family / "text.txt"), out, threads=1)
    totals: dict[str, float] = json.loads(out.read_text())
    return totals


@pytest.mark.transformers
def test_text__sums_gradient_times_delta_of_each_tensor(family: Path) -> None:
    models: dict[str, Any] = {
        name: transformers.AutoModelForCausalLM.from_pretrained(family / name, dtype=torch.float32)
        for name in ("base", "expert-1", "expert-2")
    }
    tokens = transformers.AutoTokenizer.from_pretrained(family / "base")(TEXT, return_tensors="pt").input_ids
    models["base"](input_ids=tokens, labels=tokens).loss.backward()
    totals = measured(family, "expert-1", "expert-2")
    for name, parameter in models["base"].named_parameters():
        deltas = (dict(models[e].named_parameters())[name] - parameter for e in ("expert-1", "expert-2"))
        expected = sum(float((parameter.grad * delta.detach()).abs().sum()) for delta in deltas)
        assert totals[name] == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert set(totals) >= {name for name, _ in models["base"].named_parameters()}


@pytest.mark.transformers
def test_text_loss__is_the_mean_over_predicted_tokens(family: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(family / "base", dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(family / "base")(TEXT * 9, return_tensors="pt").input_ids
    windows = [tokens[:, start : start + 512] for start in range(0, tokens.shape[1], 512)]
    assert len(windows) > 1
    assert windows[-1].shape[1] > 1
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(window).logits[0, :-1], window[0, 1:], reduction="sum")
            for window in windows
        ]
    expected = float(sum(losses)) / sum(window.shape[1] - 1 for window in windows)
    (family / "long.txt").write_text(TEXT * 9)
    *_, measure, folder, text = parse_evaluation(f"loss:{family / 'long.txt'}").words  # of a process of its own
    assert (measure, folder, text) == ("loss", "{}", str(family / "long.txt"))
    assert MEASURES[measure][0](family / "base", text) == {"loss": pytest.approx(expected, rel=1e-5)}


@pytest.mark.transformers
def test_text__analyze_writes_a_file_that_is_an_importance(family: Path) -> None:
    experts, out = [family / "expert-1", family / "expert-2"], family / "importance.json"
    mergepipe.analyze(family / "base", experts, text=family / "text.txt", importance_out=out)
    recipe = recipe_of("task_arithmetic", {place: {"weight": 0.5} for place in experts}, family / "base")
    plan = mergepipe.plan(recipe, "50%", select="sample", block_elements=16384, importance=out)
    assert plan.importance is not None
    assert plan.importance.path == str(out)


@pytest.mark.transformers
def test_text__without_transformers_says_what_to_install(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UnsupportedError, match=r'needs transformers, which is not installed; pip install "\.\[torch\]"'
    ):
        measured(family, "expert-1")
    assert not (family / "importance.json").exists()


@pytest.mark.transformers
def test_text__a_base_that_transformers_cannot_load_is_refused(family: Path) -> None:
    (family / "base" / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(UnsupportedError, match="transformers cannot load it") as caught:
        measured(family, "expert-1")
    assert caught.value.code == "importance.text"


@pytest.mark.transformers
def test_text__a_text_without_tokens_is_refused(family: Path) -> None:
    (family / "text.txt").write_text("a")
    with pytest.raises(UnsupportedError, match="fewer than two tokens"):
        measured(family, "expert-1")


LM_EVAL = """#!{python}
import json, pathlib, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert arguments["--model"] == "hf" and pathlib.Path(arguments["--model_args"].removeprefix("pretrained=")).is_dir()
tasks = {{"arc_easy": {{"acc,none": 0.25, "acc_norm,none": 0.5}}, "gsm8k": {{"exact_match,strict": 0.75}}, "odd": {{}}}}
out = pathlib.Path(arguments["--output_path"], "model")
out.mkdir()
results = {{name: tasks[name] for name in arguments["--tasks"].split(",")}}
(out / "results_1.json").write_text(json.dumps({{"results": results}}))
print("| tasks | 17 |")
"""


@pytest.mark.thorough
def test_lm_eval__gives_the_accuracy_of_each_task_and_their_mean_error(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = family / "lm_eval"
    program.write_text(LM_EVAL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(family))
    evaluation = parse_evaluation("lm-eval:arc_easy,gsm8k")
    assert evaluation.loss_of(family / "base") == pytest.approx(1 - (0.5 + 0.75) / 2)
    objectives = [parse_objective(text) for text in ("arc_easy:max", "error")]
    assert evaluation.values_of(family / "base", objectives) == pytest.approx((0.5, 0.375))
    with pytest.raises(RecipeError, match="failed with exit code 1"):
        parse_evaluation("lm-eval:odd").loss_of(family / "base")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="no command lm_eval here"):
        tasks_of_lm_eval(family / "base", "arc_easy")


def test_retrieval__is_the_rank_of_the_text_that_belongs_to_a_query(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a stand-in with known vectors; `make smoke-frameworks` runs sentence-transformers itself."""
    vectors = {"a": (1, 0), "b": (0, 1), "A": (0.6, 0.8), "B": (0.8, 0.6), "c": (1, 0), "C": (1, 0)}

    class Encoder:
        def __init__(self, folder: str) -> None:
            assert folder == str(family / "base")

        def encode(self, texts: list[str], *, normalize_embeddings: bool) -> list[tuple[float, float]]:
            assert normalize_embeddings
            return [vectors[text] for text in texts]

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Encoder))
    pairs = family / "pairs.tsv"
    pairs.write_text("a\tA\nb\tB\n\nc\tC\n")
    measured = retrieval_on_pairs(family / "base", str(pairs))  # ranks: A 3rd of a, B 2nd of b, C first of c
    assert measured == pytest.approx({"recall@1": 1 / 3, "mrr": 11 / 18, "error": 7 / 18})
    pairs.write_text("a A\n")
    with pytest.raises(UnsupportedError, match="lines of a query, a tab and a text"):
        retrieval_on_pairs(family / "base", str(pairs))
    with pytest.raises(RecipeError, match="there is no file of pairs"):
        parse_evaluation(f"retrieval:{family / 'none.tsv'}")
