"""Slices stack layers in the order of the recipe: in other places, twice, weights and optimizer state alike."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from composing import FORMATS, FULL, SHARED_STEPS, Pair, make_pair, stored_values, wrong_values

from mergepipe.checkpoints.formats.inert_values import Record
from mergepipe.checkpoints.formats.torch_zip import read_torch_zip
from mergepipe.checkpoints.formats.zip_directory import Window
from mergepipe.errors import MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT
from mergepipe.tailor.composition.compose import ComposeOptions
from mergepipe.tailor.composition.request.restack import restacked_names
from mergepipe.tailor.composition.self_check import Thoroughness
from mergepipe.tailor.formats.dcp_metadata import read_dcp_metadata
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint
from mergepipe.tailor.formats.pickle_node import Node
from mergepipe.tailor.units import at_layer, model_units
from support.stores import MetadataStore
from support.training_trees import KnownStates, decoder_shapes, write_dcp, write_hf

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


DEEPER: list[Slice] = [("new", 0, 2), ("old", 1, 3), ("new", 2, 3)]
RESIZABLE = ("hf", "hf-zero2", "zero1", "zero2", "zero3", "zero3-saved", "dcp")


@pytest.mark.parametrize("kind", RESIZABLE)
def test_compose__stacks_more_or_fewer_layers_than_there_were(tmp_path: Path, kind: str) -> None:
    stack = DEEPER if kind != "zero1" else [("old", 2, 3), ("new", 0, 1)]

    def write(folder: Path, known: KnownStates) -> None:
        FORMATS[kind](folder, known)
        if (folder / "config.json").exists():
            config = {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": False}
            (folder / "config.json").write_text(json.dumps(config))

    pair = make_pair(tmp_path, write)
    pair.compose(slices(stack))
    assert_restacked(pair, stack, shared_steps=kind in SHARED_STEPS)
    for path in pair.out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    if kind.startswith("hf"):
        assert json.loads((pair.out / "config.json").read_text())["num_hidden_layers"] == len(origins_of(stack))


def test_compose__stacks_for_another_number_of_ranks(tmp_path: Path) -> None:
    for kind, stack in (("zero3", DEEPER), ("zero2", DEEPER), ("zero2-regrouped", TURNED)):
        pair = make_pair(tmp_path / kind, FORMATS[kind])
        pair.compose(slices(stack), replace(FULL, world_size=1))
        assert_restacked(pair, stack, shared_steps=kind in SHARED_STEPS)


def options_in_one_place(known: KnownStates) -> dict[str, object]:
    """What a loop of one's own saves beside tensors; the optimizer names the parameters of its groups."""
    norms = [name for name in known.shapes if "norm" in name]
    others = [name for name in known.shapes if "norm" not in name]
    return {"optim.param_groups.0.params": others, "optim.param_groups.1.params": norms, "step": known.step}


def options_by_parameter(known: KnownStates) -> dict[str, object]:
    """What `flatten_optimizer_state_dict` makes of the options of groups: those of each parameter."""
    return {f"optim.param_groups.{name}.lr": number for number, name in enumerate(known.shapes)}


def notes_by_parameter(known: KnownStates) -> dict[str, object]:
    return {f"notes.{name}": 0.1 for name in known.shapes}


def test_compose__stacks_what_dcp_keeps_beside_tensors(tmp_path: Path) -> None:
    """Tied weights, lists of parameters and values of the run."""
    shapes, tied = decoder_shapes(tied=True), {"lm_head.weight": "model.embed_tokens.weight"}

    def write(folder: Path, known: KnownStates) -> None:
        write_dcp(folder, known, 2, tied=tied, plain=options_in_one_place(known))

    pair = make_pair(tmp_path, write, shapes)
    pair.compose(slices(DEEPER))
    store, out = MetadataStore(), Location.local(pair.out)
    made = open_training_checkpoint(store, out)
    assert made.units.tied == tied
    values = plain_values(store, out)
    assert len(values.keys) == 4 * len(made.parameters) + len(tied) + 3
    assert values.of["step"] == pair.new.step
    deeper = decoder_shapes(5, tied=True)
    for group, is_norm in ((0, False), (1, True)):
        assert values.of[f"optim.param_groups.{group}.params"] == [n for n in deeper if ("norm" in n) == is_norm]


def test_compose__gives_options_of_parameters_to_every_place_of_a_layer(tmp_path: Path) -> None:
    def write(folder: Path, known: KnownStates) -> None:
        write_dcp(folder, known, 2, plain=options_by_parameter(known))

    pair = make_pair(tmp_path, write)
    pair.compose(slices(DEEPER))
    assert_restacked(pair, DEEPER)
    options = options_by_parameter(pair.new)
    layers = [index for _, index in origins_of(DEEPER)]
    wanted = {
        f"optim.param_groups.{name}.lr": options[
            f"optim.param_groups.{at_layer(name, layers[int(name.split('.')[2])]) if '.layers.' in name else name}.lr"
        ]
        for name in decoder_shapes(5)
    }
    assert plain_values(MetadataStore(), Location.local(pair.out)).of == wanted


class PlainValues(NamedTuple):
    """The keys that a DCP directory describes, and the values of those that are no tensors of the model."""

    keys: frozenset[object]
    of: Mapping[str, object]


def plain_values(store: MetadataStore, folder: Location) -> PlainValues:
    root = Node(read_dcp_metadata(store, folder), "").fields("Metadata")
    described = root.get("state_dict_metadata").mapping()
    values = {}
    for index, node in root.get("storage_data").items():
        key, place = Node(index, "").fields("MetadataIndex").get("fqn").text(), node.fields("_StorageInfo")
        if isinstance(entry := described[key], Record) and entry.kind.name == "BytesStorageMetadata":
            file = folder / place.get("relative_path").text()
            window = Window(file, place.get("offset").integer(), place.get("length").integer())
            values[key] = read_torch_zip(store, file, window).root
    return PlainValues(frozenset(described), values)


@pytest.mark.parametrize("kind", ["dcp-notes", "zero2-regrouped", "zero3-regrouped"])
def test_compose__refuses_other_numbers_of_layers_by_name(tmp_path: Path, kind: str) -> None:
    def write(folder: Path, known: KnownStates) -> None:
        write_dcp(folder, known, 2, plain=notes_by_parameter(known))

    pair = make_pair(tmp_path, FORMATS.get(kind, write))
    with pytest.raises(UnsupportedError) as caught:
        pair.compose(slices(DEEPER))
    assert caught.value.code == ("tailor.restack.groups" if kind in FORMATS else "tailor.restack.resized")
    assert not pair.out.exists()


def test_compose__links_layers_in_other_places(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["dcp"])
    pair.compose(slices(TURNED), ComposeOptions(32 << 20, linked=True, thoroughness=Thoroughness.FULL))
    assert_restacked(pair, TURNED)


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
        (slices([("new", 1, 5)]), "tailor.units.no_layer", "has no layer 3"),
        (slices([("new", 0, 3)], ""), "tailor.uncovered", "embed, norm, lm_head"),
        ("default: new\ntake: [{from: old, units: [\"layers 1,1\"]}]", "tailor.units.layers", "names layer 1 twice"),
        ("default: new\ntake: [{from: old, units: [layers 1, layers odd]}]", "tailor.recipe.overlap", "once more"),
    ],
)  # fmt: skip
def test_compose__says_what_cannot_be_stacked(tmp_path: Path, text: str, code: str, words: str) -> None:
    pair = make_pair(tmp_path, FORMATS["zero2"])
    with pytest.raises(MergePipeError, match=words) as caught:
        pair.compose(text, FULL)
    assert (caught.value.code, pair.out.exists()) == (code, False)


def test_restacked_names__keeps_what_stands_around_the_layers() -> None:
    names = [*decoder_shapes(2)]
    pairs = restacked_names([n for n in names if "norm" in n], model_units(names), (1, 0, 1))
    assert [new for new, _ in pairs][-1] == "model.norm.weight"
    assert [before.split(".")[2] for _, before in pairs[:-1]] == ["1", "1", "0", "0", "1", "1"]
    assert [new.split(".")[2] for new, _ in pairs[:-1]] == ["0", "0", "1", "1", "2", "2"]
