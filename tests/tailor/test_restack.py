"""Slices stack layers in the order of the recipe: in other places, twice, weights and optimizer state alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import FORMATS, FULL, SHARED_STEPS, Pair, make_pair, stored_values, wrong_values

from mergepipe.errors import MergePipeError
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.selection import at_layer
from support.stores import MetadataStore
from support.training_trees import KnownStates, write_hf

Slice = tuple[str, int, int]
TURNED: list[Slice] = [("old", 2, 3), ("new", 1, 2), ("new", 0, 1)]
TWICE: list[Slice] = [("old", 2, 3), ("new", 0, 1), ("old", 2, 3)]


def slices(stack: list[Slice], rest: str = "base_model: new") -> str:
    entries = ", ".join(f"{{sources: [{{model: {m}, layer_range: [{a}, {b}]}}]}}" for m, a, b in stack)
    return f"merge_method: passthrough\nslices: [{entries}]\n{rest}\n"


def origins_of(stack: list[Slice]) -> list[tuple[str, int]]:
    """Source and layer behind each layer of the result."""
    return [(model, index) for model, first, last in stack for index in range(first, last)]


def assert_restacked(pair: Pair, stack: list[Slice], *, rest: str = "new", shared_steps: bool = False) -> None:
    """Every state, number and step of the composite is that of the layer the slices put there."""
    made = open_training_checkpoint(MetadataStore(), Location.local(pair.out))
    known = {"old": pair.old, "new": pair.new}
    places = origins_of(stack)
    steps = {name: counter.value for counter in made.steps for name in counter.parameters}
    assert made.missing == ()
    assert made.units.n_layers == len(places)
    assert {name for name, _ in made.states} == set(made.parameters) == set(steps)
    for (name, kind), state in made.states.items():
        words = name.split(".")
        source, origin = (known[rest], name)
        if words[1] == "layers":
            model, index = places[int(words[2])]
            source, origin = known[model], at_layer(name, index)
        wanted = source.arrays[origin, FP32 if kind in (WEIGHT, EXPORT) else kind]
        assert np.array_equal(stored_values(state), wanted), f"{kind} of {name}"
        assert steps[name] == (pair.new.step if shared_steps else source.step), name


@pytest.mark.parametrize("kind", FORMATS)
def test_compose__stacks_layers_in_the_order_of_the_slices(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    report = pair.compose(slices(TWICE))
    assert_restacked(pair, TWICE, shared_steps=kind in SHARED_STEPS)
    assert [unit.origin for unit in report.plan.staleness] == ["", "layer 2", "layer 0", "", "", ""]


@pytest.mark.parametrize("kind", ["hf", "zero2", "zero3", "dcp"])
def test_compose__refuses_another_number_of_layers(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    for options in (FULL, replace(FULL, export="universal")):
        with pytest.raises(MergePipeError, match="stack 4 layers on a model of 3: ") as caught:
            pair.compose(slices([("new", 0, 2), ("old", 1, 3)]), options)
        assert (caught.value.code, pair.out.exists()) == ("recipe.conflict", False)


def test_compose__of_slices_in_order_changes_no_place(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero3"])
    report = pair.compose(slices([("old", 0, 2), ("new", 2, 3)], "base_model: old"))
    assert report.plan.assignment.layers is None
    assert wrong_values(pair.out, pair, [n for n in pair.old.shapes if ".2." not in n]) == []


def test_compose__turns_lists_of_the_configuration_with_the_layers(tmp_path: Path) -> None:
    def write(folder: Path, known: KnownStates) -> None:
        write_hf(folder, known)
        config = {"model_type": "llama", "num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    pair = make_pair(tmp_path, write)
    pair.compose(slices(TURNED))
    assert json.loads((pair.out / "config.json").read_text())["layer_types"] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (slices([("new", 1, 5)]), "recipe.units", "has no layer 3"),
        (slices([("new", 0, 3)], ""), "recipe.incomplete", "embed, norm, lm_head"),
        ("default: new\ntake: [{from: old, units: [\"layers 1,1\"]}]", "recipe.units", "names layer 1 twice"),
        ("default: new\ntake: [{from: old, units: [layers 1, layers odd]}]", "recipe.conflict", "once more"),
    ],
)  # fmt: skip
def test_compose__says_what_cannot_be_stacked(tmp_path: Path, text: str, code: str, words: str) -> None:
    pair = make_pair(tmp_path, FORMATS["zero2"])
    with pytest.raises(MergePipeError, match=words) as caught:
        pair.compose(text, FULL)
    assert (caught.value.code, pair.out.exists()) == (code, False)
