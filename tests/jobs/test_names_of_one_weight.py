"""Weights that releases of libraries, wrappers of training and other tasks store under other names merge as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import CorruptError, MismatchError, NotFoundError
from support.model_folders import recipe_of, write_adapter, write_model

Model = dict[str, NDArray[np.float32]]
ENCODER = "encoder.layer.0.output.LayerNorm"


def drawn(*names: str, seed: int = 0, shape: tuple[int, ...] = (4, 4)) -> Model:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name in names}


def mean_of(tmp_path: Path, first: Model, second: Model) -> tuple[Model, mergepipe.MergeReport]:
    models = [write_model(tmp_path / "first", first), write_model(tmp_path / "second", second)]
    recipe = recipe_of("linear", {str(model): {"weight": 1.0} for model in models}, models[0])
    report = mergepipe.merge(recipe, tmp_path / "out", catalog=False)
    return load_file(tmp_path / "out" / "model.safetensors"), report


def reasons(out: Path) -> dict[str, str]:
    """Return why tensors were left out, as the record says."""
    dropped = json.loads((out / "mergepipe.json").read_text())["dropped"]
    return {entry["tensor"]: entry["reason"] for entry in dropped}


def assert_is_mean(merged: Model, first: Model, second: Model) -> None:
    """Compare weights in the order of their names, which the two models need not share."""
    assert list(merged) == list(first)
    for (name, own), other in zip(first.items(), second.values(), strict=True):
        np.testing.assert_allclose(merged[name], (own + other) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ((f"{ENCODER}.beta", f"{ENCODER}.gamma"), (f"{ENCODER}.bias", f"{ENCODER}.weight")),
        (
            ("conv.weight_g", "conv.weight_v"),
            ("conv.parametrizations.weight.original0", "conv.parametrizations.weight.original1"),
        ),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_merge__pairs_the_spellings_of_two_releases(
    tmp_path: Path, older: tuple[str, ...], newer: tuple[str, ...], is_reversed: bool
) -> None:
    names, others = (newer, older) if is_reversed else (older, newer)
    first = drawn("a.weight", *names)
    second = drawn("a.weight", *others, seed=1)
    merged, _ = mean_of(tmp_path, first, second)
    assert_is_mean(merged, first, second)


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
)
def test_merge__takes_wrappers_of_training_out_of_names(tmp_path: Path, wrapper: str) -> None:
    names = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    first = drawn(*names)
    second = drawn(*names, seed=1)
    wrapped = {name.replace("layers.0.", f"layers.0.{wrapper}."): values for name, values in second.items()}
    for base, other in ((first, wrapped), (wrapped, first)):
        merged, _ = mean_of(tmp_path / str(base is first), base, other)
        assert_is_mean(merged, first, second)


def test_merge__refuses_two_tensors_that_are_one_without_wrappers(tmp_path: Path) -> None:
    model = drawn("a.weight", "_orig_mod.a.weight")
    with pytest.raises(CorruptError, match=r"are both 'a\.weight'"):
        mean_of(tmp_path, model, model)


SHARED = [
    ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
]


@pytest.mark.parametrize("names", SHARED)
def test_merge__pairs_copies_of_a_shared_embedding_with_the_embedding(tmp_path: Path, names: tuple[str, ...]) -> None:
    alone = drawn("a.weight", names[0])
    other = drawn("a.weight", names[0], seed=1)
    copied = other | dict.fromkeys(names, other[names[0]])
    merged, _ = mean_of(tmp_path / "without", alone, copied)
    assert_is_mean(merged, alone, other)
    assert reasons(tmp_path / "without" / "out") == dict.fromkeys(names[1:], "copy of the shared embedding")
    merged, _ = mean_of(tmp_path / "with", copied, alone)
    for name in names:
        np.testing.assert_allclose(merged[name], (alone[names[0]] + other[names[0]]) / 2, rtol=1e-6)


def test_merge__pairs_the_head_of_whisper_with_the_embedding(tmp_path: Path) -> None:
    own = drawn("model.decoder.embed_tokens.weight")
    other = drawn("model.decoder.embed_tokens.weight", seed=1)
    embedding = own["model.decoder.embed_tokens.weight"]
    merged, _ = mean_of(tmp_path, own | {"proj_out.weight": embedding}, other)
    np.testing.assert_array_equal(merged["proj_out.weight"], merged["model.decoder.embed_tokens.weight"])


def test_merge__says_what_to_do_about_a_head_of_whisper_that_the_base_has_not(tmp_path: Path) -> None:
    """The two may differ: transformers ties them only where they are equal in a file."""
    own = drawn("model.decoder.embed_tokens.weight")
    other = drawn("model.decoder.embed_tokens.weight", "proj_out.weight", seed=1)
    with pytest.raises(MismatchError, match="nothing is lost where it equals the embedding"):
        mean_of(tmp_path, own, other)
    embedding = own["model.decoder.embed_tokens.weight"]
    merged, _ = mean_of(tmp_path, own | {"proj_out.weight": embedding}, other)
    np.testing.assert_allclose(merged["proj_out.weight"], (embedding + other["proj_out.weight"]) / 2, rtol=1e-6)


@pytest.mark.parametrize("head", ["score.weight", "classifier.weight", "v_head.summary.weight"])
def test_merge__names_the_head_of_another_task(tmp_path: Path, head: str) -> None:
    plain = drawn("model.norm.weight")
    with_head = drawn("model.norm.weight", head, seed=1)
    for base, other, way in ((plain, with_head, "to leave it out"), (with_head, plain, "merge models of one task")):
        with pytest.raises(MismatchError, match="it is the head of another task") as caught:
            mean_of(tmp_path / str(base is plain), base, other)
        assert way in str(caught.value)
        assert "did you mean" not in str(caught.value)


def test_merge__names_the_adapters_in_the_folder_of_a_model(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", drawn("a.weight"))
    for name in ("math", "code"):
        write_adapter(tmp_path / "adapters" / name, drawn("a.lora_A.weight", "a.lora_B.weight"))
    recipe = recipe_of("linear", {str(tmp_path / "adapters"): {"weight": 1.0}}, base)
    with pytest.raises(NotFoundError, match="name one of the adapters in it: 'code', 'math'"):
        mergepipe.merge(recipe, tmp_path / "out", catalog=False)


def test_merge__keeps_the_pooler_of_the_base_and_leaves_out_that_of_others(tmp_path: Path) -> None:
    plain = drawn("encoder.a.weight")
    other = drawn("encoder.a.weight", seed=1)
    pooler = drawn("pooler.dense.weight", seed=2)
    merged, report = mean_of(tmp_path / "base", plain | pooler, other)
    np.testing.assert_array_equal(merged["pooler.dense.weight"], pooler["pooler.dense.weight"])
    assert "has no pooler tensors" in "".join(map(str, report.recipe_notices))
    merged, _ = mean_of(tmp_path / "other", plain, other | pooler)
    assert_is_mean(merged, plain, other)
    assert list(reasons(tmp_path / "other" / "out")) == ["pooler.dense.weight"]


@pytest.mark.parametrize("name", ["layers.0.q_proj.lora_A.weight", "layers.0.input_layernorm.weight"])
def test_merge__never_advises_to_leave_out_what_a_model_needs(tmp_path: Path, name: str) -> None:
    with pytest.raises(MismatchError) as caught:
        mean_of(tmp_path, drawn("a.weight"), drawn("a.weight", name))
    assert "--allow-dropped" not in str(caught.value)
    assert "is the base of its architecture" in str(caught.value)


def test_merge__reads_headers_whose_metadata_are_null(tmp_path: Path) -> None:
    model = drawn("a.weight")
    folder = write_model(tmp_path / "model", model)
    record: dict[str, Any] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    header = json.dumps({"__metadata__": None, "a.weight": record}).encode()
    content = len(header).to_bytes(8, "little") + header + model["a.weight"].tobytes()
    (folder / "model.safetensors").write_bytes(content)
    mergepipe.merge(recipe_of("passthrough", {str(folder): {}}), tmp_path / "out", catalog=False)
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], model["a.weight"])


def test_merge__copies_the_tokenizer_of_mistral(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", drawn("a.weight"))
    (folder / "tekken.json").write_text("{}")
    mergepipe.merge(recipe_of("passthrough", {str(folder): {}}), tmp_path / "out", catalog=False)
    assert (tmp_path / "out" / "tekken.json").read_text() == "{}"
