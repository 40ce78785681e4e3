"""Slices put layers and their optimizer state in the order of the recipe: in other positions, or another number."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import FORMATS, FULL, SHARED_STEPS, Pair, Write, checkpoint_at, make_pair, stored_values, wrong_values

from mergepipe import MergePipeError
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    write_dcp,
    write_fsdp,
    write_zero3,
)

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


def misplaced(pair: Pair, stack: list[Slice], *, shared_steps: bool | None) -> list[str]:
    """States and step counters of the composite that are not those of the layer that the slices put there.

    Shared counters are the newest; with None they are not looked at.
    """
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
        wrong += [] if shared_steps is None or steps[name] == wanted_step else [f"step of {name}"]
    return wrong


WRITERS: dict[str, Write] = FORMATS | {
    "fsdp-full": partial(write_fsdp, full=True),
    "fsdp-sharded": partial(write_fsdp, full=False),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_compose__puts_layers_in_the_order_of_the_slices(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, configured(WRITERS[kind]))
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


def test_compose__cuts_parameter_groups_into_flat_groups_by_the_size_that_stage_3_has(tmp_path: Path) -> None:
    """A part of 60 elements ends a flat group: three of weights with decay, of two ranks, and one of norms."""
    decayed, norms = decay_groups(decoder_shapes())
    groups = [decayed[:4], decayed[4:9], decayed[9:], norms]

    def write(folder: Path, known: KnownStates) -> None:
        sizes = {"zero_optimization": {"stage": 3, "sub_group_size": 60}}
        write_zero3(folder, known, groups, 2, members=[[0, 1, 2], [3]], config=sizes)

    pair = make_pair(tmp_path, write)
    pair.compose(slices(DEEPER))
    assert misplaced(pair, DEEPER, shared_steps=None) == []
    deeper, norms = decay_groups(decoder_shapes(5))
    made = checkpoint_at(pair.out)
    assert [list(group) for group in made.flat_groups] == [deeper[:4], deeper[4:9], deeper[9:13], deeper[13:], norms]
    steps = {"old": pair.old.step, "new": pair.new.step}
    for counter in made.steps:
        assert counter.value == max(steps[origin_of(name, DEEPER)[0]] for name in counter.parameters)


@pytest.mark.parametrize("size", [61, None])
def test_compose__refuses_flat_groups_that_are_not_cut_as_the_configuration_says(
    tmp_path: Path, size: int | None
) -> None:
    decayed, norms = decay_groups(decoder_shapes())
    groups = [decayed[:3], decayed[3:], norms]
    config = {} if size is None else {"zero_optimization": {"sub_group_size": size}}

    def write(folder: Path, known: KnownStates) -> None:
        write_zero3(folder, known, groups, 2, members=[[0, 1], [2]], config=config)

    error = make_pair(tmp_path, write).refused(slices(DEEPER))
    assert "has flat groups that are not cut by a sub_group_size" in str(error)


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


def saved_by_torch(folder: Path, known: KnownStates, *, by_parameter: bool) -> None:
    """A loop's own state, saved by torch: options of groups or, with `flatten_optimizer_state_dict`, of parameters."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemWriter, save

    def tensor(name: str, kind: str) -> object:
        return torch.from_numpy(known.arrays[name, kind].copy())

    states = {
        name: {"exp_avg": tensor(name, "exp_avg"), "exp_avg_sq": tensor(name, "exp_avg_sq")} for name in known.shapes
    }
    for state in states.values():
        state["step"] = torch.tensor(float(known.step))
    norms = [name for name in known.shapes if "norm" in name]
    others = [name for name in known.shapes if "norm" not in name]
    optimizer: dict[str, object] = {"state": states, "param_groups": [{"lr": 0.1, "params": others}, {"params": norms}]}
    if by_parameter:
        flat = {f"state.{name}.{kind}": value for name, state in states.items() for kind, value in state.items()}
        rates = {f"param_groups.{name}.lr": number for number, name in enumerate(known.shapes)}
        optimizer = {**flat, **rates}
    model = {name: tensor(name, "fp32") for name in known.shapes}
    state = {"model": model, "optim": optimizer, "step": known.step}
    with pytest.warns(UserWarning, match="single process"):
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def loaded_by_torch(folder: Path, out: Path) -> dict[str, Any]:
    """The state dict of a DCP directory as torch puts it together."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, out)
    loaded: dict[str, Any] = torch.load(out, weights_only=True)
    return loaded


@pytest.mark.parametrize("by_parameter", [False, True], ids=["groups", "parameters"])
def test_compose__stacks_what_torch_saves_of_a_loop_of_ones_own(tmp_path: Path, *, by_parameter: bool) -> None:
    pair = make_pair(tmp_path, lambda folder, known: saved_by_torch(folder, known, by_parameter=by_parameter))
    pair.compose(slices(DEEPER))
    assert misplaced(pair, DEEPER, shared_steps=False) == []
    state = loaded_by_torch(pair.out, tmp_path / "state.pt")
    names = [*decoder_shapes(5)]
    assert (state["step"], [*state["model"]]) == (pair.new.step, names)
    if by_parameter:
        rates = {name: number for number, name in enumerate(pair.new.shapes)}
        wanted = {f"param_groups.{name}.lr": rates[origin_of(name, DEEPER)[1]] for name in names}
        assert {key: value for key, value in state["optim"].items() if key.endswith(".lr")} == wanted
    else:
        others, norms = state["optim"]["param_groups"]
        assert others == {"lr": 0.1, "params": [name for name in names if "norm" not in name]}
        assert norms == {"params": [name for name in names if "norm" in name]}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dcp-notes", "k_proj.weight for each parameter"),
        ("zero2-regrouped", "has groups of single layers, as that of layer 0"),
        ("zero3-regrouped", "has groups of single layers, as that of layer 0"),
        ("verl", "is of format verl-fsdp"),
        ("fsdp-full", "is of format accelerate-fsdp"),
        ("fsdp-sharded", "is of format accelerate-fsdp"),
        ("uncounted", "3, which is their number before"),
    ],
)
def test_compose__refuses_other_numbers_of_layers_by_name(tmp_path: Path, kind: str, words: str) -> None:
    notes = {f"notes.{name}": 0.1 for name in decoder_shapes()}
    others: dict[str, Write] = {
        "dcp-notes": lambda folder, known: write_dcp(folder, known, 2, plain=notes),
        "uncounted": configured(FORMATS["hf"], {"model_type": "llama", "tie_word_embeddings": False}),
    }
    pair = make_pair(tmp_path, others[kind] if kind in others else WRITERS[kind])
    error = pair.refused(slices(DEEPER))
    assert (words in str(error), len(error.problems)) == (True, 1)


def test_compose__exports_layers_in_other_positions_and_another_number_in_two_steps(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero2"])
    universal = replace(FULL, export="universal")
    pair.compose(slices(TURNED), universal)
    assert misplaced(pair, TURNED, shared_steps=True) == []
    deeper = tmp_path / "deeper"
    with pytest.raises(MergePipeError, match="compose it first, and export the composite"):
        pair.compose(slices(DEEPER), universal, out=deeper)
    pair.compose(slices(DEEPER), out=deeper)
    exported = replace(pair, folder=tmp_path / "exported")
    exported.folder.mkdir()
    exported.compose("default: ../deeper\n", universal)
    assert misplaced(exported, DEEPER, shared_steps=True) == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("model.layers.1.self_attn.mask", "is frozen or a buffer, and ZeRO-3 keeps it apart"),
        ("rope.frequencies", ""),
    ],
)
def test_compose__refuses_to_move_layers_without_all_that_is_theirs(tmp_path: Path, part: str, words: str) -> None:
    buffers = {part: np.ones(3, np.float32)}

    def write(folder: Path, known: KnownStates) -> None:
        write_zero3(folder, known, decay_groups(known.shapes), 2, buffers=buffers)

    pair = make_pair(tmp_path, write)
    if words:
        assert words in str(pair.refused(slices(TURNED)))
    else:
        pair.compose(slices(DEEPER))
        assert misplaced(pair, DEEPER, shared_steps=True) == []
