"""Merges that are not written: the same tensors as in the files, in bounded memory, and nothing left behind."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import mergepipe
from mergepipe.errors import ConflictError, MismatchError, RecipeError
from support.families import TINY, write_family
from support.late_modules import torch
from support.model_folders import recipe_of
from support.refusals import refuses
from support.small_merges import RECIPES, Bench, make_bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("merges"))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own folder for temporary files, in which nothing may be left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def written(folder: Path) -> list[tuple[str, Any]]:
    """The tensors of a merge in the order of its files and of their bytes."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found += [(name, file.get_tensor(name)) for name in file.offset_keys()]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("operator", ["linear", "ties", "dare_ties", "breadcrumbs", "model_stock"])
@pytest.mark.parametrize("budget", [None, "20%"])
def test_merged_tensors__are_those_that_a_merge_writes(
    bench: Bench, operator: str, budget: str | None, tmp_path: Path
) -> None:
    path = bench.write(RECIPES[operator])
    options: dict[str, Any] = {"seed": 3, "shard_bytes": 400_000, "catalog": False, "budget": budget}
    mergepipe.merge(path, tmp_path / "out", **options)
    expected, found = written(tmp_path / "out"), list(mergepipe.merged_tensors(path, **options))
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, wanted) in zip(found, expected, strict=True):
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        assert tensor.tobytes() == wanted.tobytes(), name


def test_merged_tensors__are_made_as_they_are_taken_and_closing_ends_the_merge(bench: Bench) -> None:
    before = threading.active_count()
    tensors = mergepipe.merged_tensors(bench.write(RECIPES["linear"]), catalog=False)
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_merged_tensors__only_some_of_them(bench: Bench) -> None:
    path = bench.write(RECIPES["ties"])
    found = dict(mergepipe.merged_tensors(path, catalog=False))
    some = dict(mergepipe.merged_tensors(path, catalog=False, only=iter(("norm.weight", "ids"))))  # type: ignore[arg-type]
    assert some.keys() == {"norm.weight", "ids"}
    assert all(np.array_equal(tensor, found[name]) for name, tensor in some.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"only": ["norm.weight", "nurm.weight"]}, "1 of its 2 names .*nurm.weight"),
        ({"framework": "jax"}, "'jax' was given"),
        ({"target_loss": 2.0, "evaluate": "echo 1"}, "target_loss"),
        ({"budget": "many"}, "many"),
    ],
)
def test_merged_tensors__wrong_arguments_are_refused(bench: Bench, given: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        list(mergepipe.merged_tensors(bench.write(RECIPES["linear"]), catalog=False, **given))


def test_merged_tensors__an_input_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "models")
    tensors = mergepipe.merged_tensors(bench.write(RECIPES["linear"]), catalog=False)
    weights = bench.only_file("expert1")
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x00\x01")
    with refuses(ConflictError, "input.changed"):
        list(tensors)


@pytest.mark.transformers
def test_merge_into__writes_what_one_weight_changes(bench: Bench) -> None:
    first = {**json.loads(RECIPES["linear"].text()), "parameters": {"normalize": False}}
    for model in first["models"]:
        model["model"] = str(bench.folder / model["model"])
    first["base_model"] = str(bench.folder / "base")
    second = json.loads(json.dumps(first))
    second["models"][0]["parameters"]["weight"] = [{"filter": "norm", "value": 0.9}, {"value": 0.6}]
    module = torch.nn.Module()
    for name, tensor in mergepipe.merged_tensors(first, framework="torch", catalog=False):
        owner = module
        for part in name.split(".")[:-1]:
            if part not in dict(owner.named_children()):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(name.rpartition(".")[2], tensor)
    assert mergepipe.merge_into(module, second, changed_from=first, catalog=False) == 1
    expected = dict(mergepipe.merged_tensors(second, framework="torch", catalog=False))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    assert mergepipe.merge_into(module, second, catalog=False) == len(expected)
    with refuses(RecipeError, "option.invalid"):
        mergepipe.merge_into(module, second, changed_from=first, only=["nurm.weight"], catalog=False)
    del module.norm.weight
    with refuses(MismatchError, "model.mismatch"):
        mergepipe.merge_into(module, second, catalog=False)
    with refuses(MismatchError, "model.mismatch"):
        mergepipe.merge_into(module.to("meta"), second, only=["ids"], catalog=False)


def test_merged_tensors__of_a_rule_that_needs_whole_tensors_fit_into_little_memory(bench: Bench) -> None:
    recipe = replace(RECIPES["ties"], out_dtype="float32")
    path = bench.write(recipe)
    whole = dict(mergepipe.merged_tensors(path, catalog=False))
    little = dict(mergepipe.merged_tensors(path, catalog=False, memory_bytes=64 << 20, threads=1))
    assert all(np.array_equal(tensor, little[name]) for name, tensor in whole.items())


@pytest.mark.transformers
def test_merged_tensors__fill_a_model_by_load_weights_as_serving_engines_call_it(tmp_path: Path) -> None:
    """vLLM and SGLang pass one iterator of names and torch tensors, once; models put matrices of one input together."""
    write_family(tmp_path, TINY, 2)
    recipe = recipe_of("linear", {tmp_path / f"expert-{n}": {"weight": 0.5} for n in (1, 2)}, dtype="bfloat16")
    mergepipe.merge(recipe, tmp_path / "out", catalog=False)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stacked = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}

    class Served(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[str, dict[int, Any]] = {}

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
            for name, weight in weights:
                *stem, module, kind = name.split(".")
                target, part = stacked.get(module, (module, 0))
                parts = self.held.setdefault(".".join((*stem, target, kind)), {})
                parts[part] = weight  # kept: no later tensor may write over it
            return set(self.held)

    served = Served()
    loaded = served.load_weights(mergepipe.merged_tensors(recipe, framework="torch", catalog=False))
    first = "model.layers.0.self_attn."
    assert len(loaded) == len(expected) - 2 * TINY.layers
    whole = torch.cat([expected[f"{first}{module}.weight"] for module in stacked])
    parts = served.held[f"{first}qkv_proj.weight"]
    assert torch.equal(torch.cat([parts[part] for part in range(3)]), whole)
    assert torch.equal(served.held["model.norm.weight"][0], expected["model.norm.weight"])
