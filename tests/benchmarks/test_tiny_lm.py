"""Tests of benchmarks.tiny_lm: a model small enough to train in seconds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.tiny_lm import LmShape, Schedule
from numpy.typing import NDArray

from benchmarks import tiny_lm

pytestmark = [pytest.mark.transformers, pytest.mark.slow]  # `make test-benchmarks`, which CI runs too

SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
BASE = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
EXPERT = replace(BASE, steps=8, peak_rate=2e-3, muon=False)
WORDS = ("one", "two", "three", "four", "five", "six", "apple", "pear", "plum", "for", "if", "else")
TEXT = " ".join(random.Random(0).choices(WORDS, k=3000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    tokenizer = tiny_lm.make_tokenizer([TEXT], SHAPE.vocab)
    trained_model = tiny_lm.new_model(SHAPE, 0)
    tiny_lm.train(trained_model, tiny_lm.tokens_of(tokenizer, TEXT), BASE, lambda *_: None)
    tiny_lm.save_model(trained_model, tokenizer, folder)
    return folder


def test_save_model__stores_bfloat16(model: Path) -> None:
    header = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8 : 8 + length])
    assert {entry["dtype"] for name, entry in entries.items() if name != "__metadata__"} == {"BF16"}


def test_window_losses__are_those_that_transformers_computes_and_training_lowers_them(model: Path) -> None:
    import torch

    windows = tiny_lm.cut_windows({"text": TEXT}, tiny_lm.load_tokenizer(model), 32, 6)
    loaded = tiny_lm.load_model(model)
    ids = torch.tensor(windows["text"])
    with torch.no_grad():
        expected = float(loaded(input_ids=ids, labels=ids).loss)
    losses = tiny_lm.window_losses(loaded, windows)["text"]
    assert np.mean(losses) == pytest.approx(expected, rel=1e-5)
    assert np.mean(losses) < np.mean(tiny_lm.window_losses(tiny_lm.new_model(SHAPE, 0), windows)["text"]) - 0.5


def test_cut_windows__are_equal_in_length_and_need_enough_text(model: Path) -> None:
    tokenizer = tiny_lm.load_tokenizer(model)
    windows = tiny_lm.cut_windows({"text": TEXT}, tokenizer, 32, 6)["text"]
    assert [len(window) for window in windows] == [32] * 6
    assert list(windows[0]) == tiny_lm.tokens_of(tokenizer, TEXT)[:32]
    with pytest.raises(ValueError, match="short: only"):
        tiny_lm.cut_windows({"short": "one two"}, tokenizer, 32, 6)


def test_tokenizer__spells_any_text() -> None:
    tokenizer = tiny_lm.make_tokenizer([TEXT], 300)
    text = "naïve 漢字 \t\n\x00 for"
    assert tokenizer.backend_tokenizer.decode(tiny_lm.tokens_of(tokenizer, text), skip_special_tokens=False) == text


def test_tokenizer__same_text_same_tokenizer() -> None:
    made = {tiny_lm.make_tokenizer([TEXT], 300).backend_tokenizer.to_str() for _ in range(3)}
    assert len(made) == 1


def test_schedule__rises_to_the_peak_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=100, peak_rate=1.0)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_train__same_arguments_same_weights_another_seed_others() -> None:
    first, again, other = trained(EXPERT), trained(EXPERT), trained(replace(EXPERT, seed=1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not all(np.array_equal(first[name], other[name]) for name in first)


def trained(schedule: Schedule) -> dict[str, NDArray[np.float32]]:
    """Train a tiny model."""
    model = tiny_lm.new_model(SHAPE, 0)
    tiny_lm.train(model, list(range(300)) * 4, schedule, lambda *_: None)
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def test_train__of_low_rank_changes_the_layers_matrices_alone_by_that_rank() -> None:
    before = {name: tensor.detach().numpy() for name, tensor in tiny_lm.new_model(SHAPE, 0).state_dict().items()}
    after = trained(replace(EXPERT, lora_rank=2))
    assert after.keys() == before.keys()
    changed = {name for name, tensor in before.items() if not np.array_equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    for name in changed:
        assert np.linalg.matrix_rank(after[name] - before[name], tol=1e-6) <= 2
