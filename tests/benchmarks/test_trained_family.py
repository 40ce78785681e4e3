"""Tests of benchmarks.trained_family, with benchmarks.tiny_lm under it: a family small enough to train in seconds."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.deltas import read_tensors
from benchmarks.heldout import heldout_losses, read_heldout
from benchmarks.local_text import GENERAL, Domain
from benchmarks.tiny_lm import LmShape, Schedule
from benchmarks.trained_family import (
    FamilyError,
    TrainedRequest,
    add_options,
    finished,
    request_of,
    table,
    train_family,
)
from numpy.typing import NDArray

from benchmarks import tiny_lm

pytestmark = [pytest.mark.transformers, pytest.mark.slow]  # `make test-benchmarks`, which CI runs too

SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
BASE = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
EXPERT = replace(BASE, steps=8, peak_rate=2e-3, muon=False)
REQUEST = TrainedRequest(experts=2, seed=0, shape=SHAPE, base=BASE, expert=EXPERT, threads=1)
FILES = ("model.safetensors", "config.json", "tokenizer.json")


def domain(name: str, words: str) -> Domain:
    """Text of random words, always the same."""
    source = random.Random(name)
    training, heldout = (" ".join(source.choices(words.split(), k=n)) for n in (3000, 1500))
    return Domain(name, training, heldout)


DOMAINS = (
    domain(GENERAL, "one two three four five six seven apple pear plum for if else"),
    domain("fruit", "apple pear plum cherry quince"),
    domain("code", "for while if else return"),
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    train_family(root, REQUEST, DOMAINS)
    return root


def contents(root: Path) -> dict[str, bytes]:
    models = ("base", "expert-1", "expert-2")
    return {f"{model}/{name}": (root / model / name).read_bytes() for model in models for name in FILES}


def test_train_family__experts_are_better_on_their_own_domain(family: Path) -> None:
    members = json.loads((family / "family.json").read_text())["members"]
    assert [member["domain"] for member in members] == [GENERAL, "fruit", "code"]
    for member in members[1:]:
        assert member["losses"][member["domain"]] < members[0]["losses"][member["domain"]] - 0.05


def test_train_family__reports_deltas_of_the_files(family: Path) -> None:
    base, expert = read_tensors(family / "base"), read_tensors(family / "expert-1")
    difference = np.concatenate([(expert[name] - base[name]).ravel() for name in base])
    weights = np.concatenate([tensor.ravel() for tensor in base.values()])
    delta = json.loads((family / "family.json").read_text())["members"][1]["delta"]
    assert delta["relative_norm"] == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(weights))
    assert delta["changed_fraction"] == pytest.approx(np.count_nonzero(difference) / len(weights))
    assert 0 < delta["relative_norm"] < 1


def test_train_family__same_request_same_bytes(family: Path, tmp_path: Path) -> None:
    train_family(tmp_path, REQUEST, DOMAINS)
    assert contents(tmp_path) == contents(family)


def test_train_family__another_seed_gives_other_weights(family: Path, tmp_path: Path) -> None:
    train_family(tmp_path, replace(REQUEST, seed=1), DOMAINS)
    assert contents(tmp_path)["base/model.safetensors"] != contents(family)["base/model.safetensors"]
    assert contents(tmp_path)["expert-1/model.safetensors"] != contents(family)["expert-1/model.safetensors"]


def test_train_family__goes_on_after_an_interruption_with_the_same_bytes(family: Path, tmp_path: Path) -> None:
    train_family(tmp_path, REQUEST, DOMAINS)
    for file in (tmp_path / "expert-2").iterdir():
        file.unlink()
    (tmp_path / "expert-2").rename(tmp_path / "expert-2.partial")
    base_before = (tmp_path / "base/model.safetensors").stat().st_mtime_ns
    members = train_family(tmp_path, REQUEST, DOMAINS)
    assert contents(tmp_path) == contents(family)
    assert (tmp_path / "base/model.safetensors").stat().st_mtime_ns == base_before
    assert "| expert-2 | code |" in table(members)


def test_train_family__refuses_a_folder_with_another_family(family: Path) -> None:
    before = contents(family)
    with pytest.raises(FamilyError, match="made with other options"):
        train_family(family, replace(REQUEST, seed=1), DOMAINS)
    assert contents(family) == before


def test_train_family__makes_only_what_is_asked_from_another_familys_base_with_the_same_bytes(
    family: Path, tmp_path: Path
) -> None:
    members = train_family(tmp_path, REQUEST, DOMAINS, only=[2], base_of=family)
    assert [member.name for member in members] == ["base", "expert-2"]
    assert (tmp_path / "base").is_symlink()
    assert not (tmp_path / "expert-1").exists()
    model = "expert-2/model.safetensors"
    assert (tmp_path / model).read_bytes() == (family / model).read_bytes()


def test_train_family__another_seed_of_the_experts_has_the_same_base(family: Path, tmp_path: Path) -> None:
    request = replace(REQUEST, expert=replace(EXPERT, seed=1))
    train_family(tmp_path, request, DOMAINS, only=[1], base_of=family)
    model = "expert-1/model.safetensors"
    assert (tmp_path / model).read_bytes() != (family / model).read_bytes()


@pytest.mark.parametrize(
    "request_", [replace(REQUEST, seed=1), replace(REQUEST, base=replace(BASE, steps=13))], ids=["seed", "steps"]
)
def test_train_family__refuses_the_base_of_another_request(
    family: Path, tmp_path: Path, request_: TrainedRequest
) -> None:
    with pytest.raises(FamilyError, match="has a base made with other options"):
        train_family(tmp_path, request_, DOMAINS, base_of=family)
    assert not (tmp_path / "base").exists()


def test_train_family__refuses_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=r"holds no family: it has no request\.json"):
        train_family(tmp_path / "new", REQUEST, DOMAINS, base_of=tmp_path)


def test_train_family__refuses_experts_that_the_family_has_not(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=r"experts \[0, 3\] were asked for; the family has 1 to 2"):
        train_family(tmp_path, REQUEST, DOMAINS, only=[3, 0])


def test_finished__is_what_train_family_returned(family: Path, tmp_path: Path) -> None:
    assert finished(tmp_path, REQUEST) is None
    assert finished(family, REQUEST) == train_family(family, REQUEST, DOMAINS)
    with pytest.raises(FamilyError, match="made with other options"):
        finished(family, replace(REQUEST, seed=1))


def test_options__ask_for_the_first_trained_family_by_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    base = Schedule(steps=700, peak_rate=3e-3, batch=8, window_tokens=256, weight_decay=0.1, muon=True, bf16=True)
    expert = replace(base, steps=40, peak_rate=2e-4, weight_decay=0.0, muon=False)
    assert request_of(parser.parse_args(["--bf16"])) == TrainedRequest(8, 0, LmShape(), base, expert, 1)


def test_save_model__stores_bfloat16(family: Path) -> None:
    header = (family / "base/model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8 : 8 + length])
    assert {entry["dtype"] for name, entry in entries.items() if name != "__metadata__"} == {"BF16"}


def test_heldout__has_equal_windows_of_every_domain(family: Path) -> None:
    heldout = read_heldout(family)
    assert list(heldout.windows) == [GENERAL, "fruit", "code"]
    assert all(sum(map(len, windows)) == 6 * 32 for windows in heldout.windows.values())
    assert all(n_bytes >= 6 * 32 for n_bytes in heldout.text_bytes.values())


def test_losses__are_those_that_transformers_computes(family: Path) -> None:
    import torch

    heldout = read_heldout(family)
    model = tiny_lm.load_model(family / "expert-1")
    ids = torch.tensor(heldout.windows["fruit"])
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    assert heldout_losses(family / "expert-1", heldout)["fruit"] == pytest.approx(expected, rel=1e-5)


def test_losses__rounding_changes_nothing_that_is_bfloat16_already(family: Path) -> None:
    heldout = read_heldout(family)
    assert heldout_losses(family / "base", heldout, as_bf16=True) == heldout_losses(family / "base", heldout)


def test_tokenizer__spells_any_text() -> None:
    tokenizer = tiny_lm.make_tokenizer([DOMAINS[0].training], 300)
    text = "naïve 漢字 \t\n\x00 for"
    assert tiny_lm.text_of(tokenizer, tiny_lm.tokens_of(tokenizer, text)) == text


def test_tokenizer__same_text_same_tokenizer() -> None:
    made = {tiny_lm.make_tokenizer((d.training for d in DOMAINS), 300).backend_tokenizer.to_str() for _ in range(3)}
    assert len(made) == 1


def test_schedule__rises_to_the_peak_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=100, peak_rate=1.0)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


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
