"""Slices put layers in the order of the recipe: in other positions, twice, in another number, with their optimizer state."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from composing import FORMATS, FULL, SHARED_STEPS, Pair, Write, checkpoint_at, make_pair, stored_values, wrong_values

from support.training_trees import KnownStates, decoder_shapes, write_dcp

Slice = tuple[str, int, int]
TURNED: list[Slice] = [("old", 2, 3), ("new", 1, 2), ("new", 0, 1)]
TWICE: list[Slice] = [("old", 2, 3), ("new", 0, 1), ("old", 2, 3)]
DEEPER: list[Slice] = [("new", 0, 2), ("old", 1, 3), ("new", 2, 3)]
SHALLOWER: list[Slice] = [("old", 2, 3), ("new", 0, 1)]
RESIZABLE = ("hf", "hf-zero2", "zero1", "zero2", "zero3", "zero3-saved", "dcp", "titan")
CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": False}


def slices(stack: list[Slice], rest: str = "base_model: new") -> str:
    entries = ", ".join(f"{{sources: [{{model: {m}, layer_range: [{a}, {b}]}}]}}" for m, a, b in stack)
    return f"merge_method: passthrough\nslices: [{entries}]\n{rest}\n"


def layers_of(stack: list[Slice]) -> list[tuple[str, int]]:
    """The source of each layer of the result, and its number there."""
    return [(model, index) for model, first, last in stack for index in range(first, last)]


def origin_of(name: str, stack: list[Slice], rest: str = "new") -> tuple[str, str]:
    """The source of a parameter of the result, and its name there."""
    words = name.split(".")
    if words[1] != "layers":
        return rest, name
    model, number = layers_of(stack)[int(words[2])]
    return model, ".".join([*words[:2], str(number), *words[3:]])


def configured(write: Write, config: dict[str, object] = CONFIG) -> Write:
    """Write a checkpoint whose configuration, where the format has one, states its layers."""

    def write_both(folder: Path, known: KnownStates) -> None:
        write(folder, known)
        if (folder / "trainer_state.json").exists():
            (folder / "config.json").write_text(json.dumps(config))

    return write_both


def misplaced(pair: Pair, stack: list[Slice], *, shared_steps: bool) -> list[str]:
    """States and step counters of the composite that are not those of the layer that the slices put there."""
    made = checkpoint_at(pair.out)
    known = {"old": pair.old, "new": pair.new}
    steps = {name: counter.value for counter in made.steps for name in counter.parameters}
    assert made.missing == ()
    assert made.units.n_layers == len(layers_of(stack))
    assert {name for name, _ in made.states} == set(made.parameters) == set(steps)
    wrong = []
    for (name, kind), state in made.states.items():
        source, origin = origin_of(name, stack)
        wanted = known[source].arrays[origin, "fp32" if kind in ("weight", "export") else kind]
        wrong += [] if np.array_equal(stored_values(state), wanted) else [f"{kind} of {name}"]
        wanted_step = pair.new.step if shared_steps else known[source].step
        wrong += [] if steps[name] == wanted_step else [f"step of {name}"]
    return wrong


@pytest.mark.parametrize("kind", FORMATS)
def test_compose__puts_layers_in_the_order_of_the_slices(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, configured(FORMATS[kind]))
    before = pair.sources()
    report = pair.compose(slices(TWICE))
    assert misplaced(pair, TWICE, shared_steps=kind in SHARED_STEPS) == []
    assert [unit.origin for unit in report.plan.staleness] == ["", "layer 2", "layer 0", "", "", ""]
    assert pair.sources() == before


@pytest.mark.parametrize("stack", [DEEPER, SHALLOWER], ids=["deeper", "shallower"])
@pytest.mark.parametrize("kind", RESIZABLE)
def test_compose__stacks_more_or_fewer_layers_than_there_were(tmp_path: Path, kind: str, stack: list[Slice]) -> None:
    pair = make_pair(tmp_path, configured(FORMATS[kind]))
    before = pair.sources()
    pair.compose(slices(stack))
    assert misplaced(pair, stack, shared_steps=kind in SHARED_STEPS) == []
    for path in pair.out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    if kind.startswith("hf"):
        assert json.loads((pair.out / "config.json").read_text())["num_hidden_layers"] == len(layers_of(stack))
    assert pair.sources() == before


def test_compose__stacks_again_what_it_has_stacked(tmp_path: Path) -> None:
    """A composite of other layers is a checkpoint like any other: taken back, it is the first one's values."""
    pair = make_pair(tmp_path, configured(FORMATS["hf-zero2"]))
    deeper = tmp_path / "deeper"
    pair.compose(slices([("new", 0, 3), ("new", 0, 3)]), out=deeper)
    back: list[Slice] = [("deeper", 0, 1), ("deeper", 4, 6)]
    pair.compose(slices(back, "base_model: deeper"))
    assert wrong_values(pair.out, pair, []) == []


def test_compose__of_slices_in_order_changes_no_position(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero3"])
    report = pair.compose(slices([("old", 0, 2), ("new", 2, 3)], "base_model: old"))
    assert not any(unit.origin for unit in report.plan.staleness)
    assert wrong_values(pair.out, pair, [n for n in pair.old.shapes if ".2." not in n]) == []


def test_compose__turns_lists_of_the_configuration_with_the_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    pair = make_pair(tmp_path, configured(FORMATS["hf"], {**CONFIG, "layer_types": kinds}))
    pair.compose(slices(TURNED))
    assert json.loads((pair.out / "config.json").read_text())["layer_types"] == kinds[::-1]


def plain_of_groups(known: KnownStates) -> dict[str, object]:
    """What a loop of one's own saves beside tensors: options of groups, which name their parameters."""
    norms = [name for name in known.shapes if "norm" in name]
    others = [name for name in known.shapes if "norm" not in name]
    return {"optim.param_groups.0.params": others, "optim.param_groups.1.params": norms, "step": known.step}


def plain_of_parameters(known: KnownStates) -> dict[str, object]:
    """What `flatten_optimizer_state_dict` makes of the options of groups: those of each parameter."""
    return {f"optim.param_groups.{name}.lr": number for number, name in enumerate(known.shapes)}


def loaded_by_torch(folder: Path) -> dict[str, object]:
    """The state dict of a DCP directory as torch puts it together, with flattened keys."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, object] = {}
    planner = _EmptyStateDictLoadPlanner(allow_partial_load=True)
    planner.flatten_state_dict = False
    _load_state_dict(state, FileSystemReader(folder), planner=planner, no_dist=True)
    return state


def test_compose__stacks_what_dcp_keeps_beside_tensors(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, lambda folder, known: write_dcp(folder, known, 2, plain=plain_of_groups(known)))
    pair.compose(slices(DEEPER))
    state = loaded_by_torch(pair.out)
    assert state["step"] == pair.new.step
    for group, is_norm in ((0, False), (1, True)):
        wanted = [name for name in decoder_shapes(5) if ("norm" in name) == is_norm]
        assert state[f"optim.param_groups.{group}.params"] == wanted


def test_compose__gives_options_of_parameters_to_every_position_of_a_layer(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, lambda folder, known: write_dcp(folder, known, 2, plain=plain_of_parameters(known)))
    pair.compose(slices(DEEPER))
    assert misplaced(pair, DEEPER, shared_steps=False) == []
    state = loaded_by_torch(pair.out)
    options = plain_of_parameters(pair.new)
    for name in decoder_shapes(5):
        _, origin = origin_of(name, DEEPER)
        assert state[f"optim.param_groups.{name}.lr"] == options[f"optim.param_groups.{origin}.lr"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dcp-notes", "holds notes.model.layers.0.self_attn.k_proj.weight for each parameter"),
        ("zero2-regrouped", "has groups of single layers, as that of layer 0"),
        ("zero3-regrouped", "has groups of single layers, as that of layer 0"),
        ("verl", "is of format"),
        ("uncounted", "3, which is their number before"),
    ],
)
def test_compose__refuses_other_numbers_of_layers_by_name(tmp_path: Path, kind: str, words: str) -> None:
    notes = {f"notes.{name}": 0.1 for name in decoder_shapes()}
    others: dict[str, Write] = {
        "dcp-notes": lambda folder, known: write_dcp(folder, known, 2, plain=notes),
        "uncounted": configured(FORMATS["hf"], {"model_type": "llama", "tie_word_embeddings": False}),
    }
    pair = make_pair(tmp_path, others[kind] if kind in others else FORMATS[kind])
    error = pair.refused(slices(DEEPER))
    assert (words in str(error), len(error.problems)) == (True, 1)


def test_compose__exports_layers_in_other_positions_and_refuses_other_numbers(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero2"])
    from dataclasses import replace

    universal = replace(FULL, export="universal")
    pair.compose(slices(TURNED), universal)
    assert misplaced(pair, TURNED, shared_steps=True) == []
