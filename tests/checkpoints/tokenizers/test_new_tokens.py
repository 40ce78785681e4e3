"""Rows of tokens that no merged model has: means of subwords, or matching pursuit over the tokens of two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from vocabulary_cases import EMBED, HEAD, write_model

import mergepipe
from mergepipe.checkpoints.pursued_rows import pursued
from mergepipe.errors import MergePipeError

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
OWN, LENT = [*LETTERS, "ab", "own"], [*LETTERS[::-1], "abc", "lent", "ab", "zz"]
MERGES = ["a b", "ab c", "z z"]


def write_tokenized(folder: Path, tokens: list[str], seed: int) -> None:
    write_model(folder, tokens, seed=seed)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}}
    merges = [merge for merge in MERGES if merge.replace(" ", "") in tokens]
    stored = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level}
    (folder / "tokenizer.json").write_text(json.dumps({**stored, "model": {**model, "merges": merges}}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tokenized(tmp_path / "model", OWN, 1)
    write_tokenized(tmp_path / "expert", OWN, 2)
    monkeypatch.setattr("vocabulary_cases.WIDTH", 12)
    write_tokenized(tmp_path / "donor", LENT, 3)
    return tmp_path


def merged(place: Path, tokenizer: dict[str, Any], **more: Any) -> dict[str, NDArray[Any]]:
    recipe = {"merge_method": "passthrough", "models": [{"model": "./model"}], **more, "tokenizer": tokenizer}
    (place / "recipe.yml").write_text(json.dumps(recipe))
    mergepipe.merge(place / "recipe.yml", place / "out", catalog=False)
    return load_file(place / "out" / "model.safetensors")


def weights_of(donor: NDArray[np.float64], wanted: NDArray[np.float64], n_atoms: int) -> NDArray[np.float64]:
    """The oracle: matching pursuit in float64, a least-squares problem a step; weights of all of the donor's rows."""
    weights, chosen, left = np.zeros(len(donor)), list[int](), wanted
    for _ in range(n_atoms):
        products = np.abs(donor @ left)
        products[chosen] = -1
        chosen.append(int(products.argmax()))
        part = np.linalg.lstsq(donor[chosen].T, wanted, rcond=None)[0]
        left = wanted - part @ donor[chosen]
        weights[chosen] = part
    return weights


@pytest.mark.transformers
def test_subword__gives_new_tokens_the_mean_of_what_the_model_reads_in_them(place: Path) -> None:
    made = merged(place, {"source": "./donor", "new_tokens": "subword"})
    stored = load_file(place / "model" / "model.safetensors")
    words = {"abc": ["ab", "c"], "lent": list("lent"), "zz": ["z", "z"]}
    for name in (EMBED, HEAD):
        of_token = {token: stored[name][n].astype(np.float64) for n, token in enumerate(OWN)}
        of_token |= {token: np.mean([of_token[word] for word in parts], axis=0) for token, parts in words.items()}
        np.testing.assert_allclose(made[name], [of_token[token] for token in LENT], rtol=1e-6, atol=1e-7)
    assert (place / "out" / "tokenizer.json").read_bytes() == (place / "donor" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("is_tied", [False, True])
def test_omp__combines_the_rows_of_common_tokens_as_the_donors_rows_make_up_its_new_ones(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, is_tied: bool
) -> None:
    monkeypatch.setattr("mergepipe.checkpoints.pursued_rows._MOST_BASIS_BYTES", 1)  # a row at a time
    donor = load_file(place / "donor" / "model.safetensors")
    if is_tied:  # its head is its embedding
        del donor[HEAD]
        save_file(donor, place / "donor" / "model.safetensors")
    both = [token for token in LENT if token in OWN]
    tokenizer, models = {"source": "./donor", "new_tokens": "omp", "k": 3}, [{"model": "./expert"}]
    rule: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": "./model", "parameters": {"weight": 0.5}}
    made = merged(place, tokenizer, models=models, **rule)
    base, expert = (load_file(place / each / "model.safetensors") for each in ("model", "expert"))
    for name in (EMBED, HEAD):
        rows = 0.5 * base[name].astype(np.float64) + 0.5 * expert[name]
        of_token = {token: rows[n] for n, token in enumerate(OWN)}
        of_donor = {token: donor.get(name, donor[EMBED])[n].astype(np.float64) for n, token in enumerate(LENT)}
        for token in ("abc", "lent", "zz"):
            weights = weights_of(np.array([of_donor[other] for other in both]), of_donor[token], 3)
            assert np.count_nonzero(weights) == 3
            of_token[token] = weights @ np.array([of_token[other] for other in both])
        np.testing.assert_allclose(made[name], [of_token[token] for token in LENT], rtol=1e-5, atol=1e-6)
    mergepipe.replay(place / "out", place / "again", catalog=False)
    again = load_file(place / "again" / "model.safetensors")
    assert all(np.array_equal(again[name], values) for name, values in made.items())


def test_pursued__is_exact_where_atoms_span_the_target_and_ignores_those_that_add_nothing() -> None:
    rng = np.random.default_rng(0)
    atoms = rng.standard_normal((40, 5)).astype(np.float32)
    atoms[20:] = atoms[:20]  # each twice
    targets = rng.standard_normal((7, 5)).astype(np.float32)
    chosen, weights = pursued(atoms, targets, 12)
    assert [len(set(row)) for row in chosen.tolist()] == [12] * 7
    np.testing.assert_allclose(np.einsum("nk,nkd->nd", weights, atoms[chosen]), targets, atol=1e-5)
    assert (np.count_nonzero(weights, axis=1) <= 5).all()


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        ({"source": "./donor", "new_tokens": "opm"}, "'opm' is unknown; did you mean 'omp'"),
        ({"source": "./donor", "new_tokens": "subword", "k": 3}, "only works together with 'new_tokens: omp'"),
        ({"source": "./donor", "new_tokens": "omp", "k": 0}, "k: .*a whole number of at least 1"),
        ({"source": "./donor"}, "is not one of the models that are merged"),
        (
            {"source": "./other", "new_tokens": "omp"},
            "has no token that '.*other' has, to make the rows of new ones of",
        ),
    ],
)
def test_new_tokens__that_cannot_be_made_are_refused(place: Path, tokenizer: dict[str, Any], text: str) -> None:
    write_tokenized(place / "other", ["A", "B"], 4)
    with pytest.raises(MergePipeError, match=text):
        merged(place, tokenizer)
    assert not (place / "out").exists()


def test_plan__of_pursued_rows_is_refused(place: Path) -> None:
    models = [{"model": str(place / "expert"), "parameters": {"weight": 1}}]
    tokenizer = {"source": str(place / "donor"), "new_tokens": "omp"}
    base = {"merge_method": "task_arithmetic", "base_model": str(place / "model")}
    with pytest.raises(MergePipeError, match="a budget cannot be used with rows that are computed from all others"):
        mergepipe.merge({**base, "models": models, "tokenizer": tokenizer}, place / "out", budget="50%")
