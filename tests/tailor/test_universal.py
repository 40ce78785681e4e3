"""DeepSpeed universal checkpoints: ZeRO checkpoints exported as such, and sources of compositions and averages."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from composing import (
    FORMATS,
    FULL,
    Pair,
    checkpoint_at,
    edit,
    make_pair,
    model_values,
    stored_values,
    wrong_values,
    wrong_weights,
)

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from mergepipe.options import ComposeOptions
from mergepipe.tailor import api
from mergepipe.tailor.checkpoint import FP32, PicklePath
from mergepipe.tailor.formats.contract import Node
from mergepipe.tailor.formats.deepspeed import base_optimizer_path
from support.local_models import torch_archive
from support.refusals import refusal
from support.torch_bytes import torch_bytes
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_automodel,
    write_fsdp,
    write_hf,
    write_trainer_files,
    write_zero3,
    write_zero12,
)

UNIVERSAL = replace(FULL, export="universal")
KINDS = ("zero1", "zero2", "zero2-regrouped", "zero3", "zero3-regrouped", "zero3-saved", "hf-zero2")
EMBED = "model.embed_tokens.weight"
PARITY = "default: new\ntake: [{from: old, units: [layers even, embed]}]\n"


def from_old(pair: Pair) -> list[str]:
    return [n for n in pair.old.shapes if any(part in n for part in ("embed_tokens", ".layers.0.", ".layers.2."))]


def write_universal(kind: str) -> Callable[[Path, KnownStates], None]:
    def write(folder: Path, known: KnownStates) -> None:
        native = folder.with_name(f"native-{folder.name}")
        FORMATS[kind](native, known)
        recipe = folder.with_name("export.yml")
        recipe.write_text(f"default: {native.name}\n")
        tailor.compose(recipe, folder, options=UNIVERSAL)

    return write


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_compose__exports_a_universal_checkpoint_and_takes_such_sources(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    pair.compose(PARITY, UNIVERSAL)
    made = checkpoint_at(pair.out)
    assert (made.format, made.step, wrong_values(pair.out, pair, from_old(pair))) == ("deepspeed-universal", 9, [])
    assert not (pair.out / "latest").exists()
    assert (pair.out / "latest_universal").exists() == (made.root != made.path)
    for path in pair.out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    universal = Pair(tmp_path / "universal", pair.old, pair.new)
    universal.folder.mkdir()
    for name in ("old", "new"):
        pair.compose(f"default: {name}\n", UNIVERSAL, universal.folder / name)
    universal.compose(PARITY)
    assert wrong_values(universal.out, pair, from_old(pair)) == []
    assert counters(universal) == counters(pair)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
def test_compose__exports_counters_that_are_numbers(tmp_path: Path, stage: int) -> None:
    pair = make_pair(tmp_path, lambda folder, known: write_fused(folder, known, stage))
    pair.compose("default: new\ntake: [{from: old, units: [layers all, norm, embed]}]\n", UNIVERSAL)
    norms = 9.0 if stage == 3 else 7.0  # stage 3 has one counter for all
    assert counters(pair) == {name: norms if "norm" in name else 9.0 for name in pair.old.shapes}
    second = Pair(tmp_path / "again", pair.old, pair.new)
    second.folder.mkdir()
    second.compose("default: ../out\n")
    assert counters(second) == counters(pair)


@pytest.mark.parametrize("options", [FULL, UNIVERSAL])
def test_compose__keeps_what_stage_3_does_not_train(tmp_path: Path, options: ComposeOptions) -> None:
    """A frozen embedding, which the Trainer's safetensors have too, stays the newest; a head tied to it is no unit."""

    def write(folder: Path, known: KnownStates) -> None:
        write_trainer_files(folder, known)
        trained = replace(known, shapes={name: shape for name, shape in known.shapes.items() if name != EMBED})
        frozen = {EMBED: known.arrays[EMBED, FP32]}
        write_zero3(folder / "step", trained, decay_groups(trained.shapes), 2, frozen=frozen)
        for path in (folder / "step").glob("*_model_states.pt"):
            edit(path, {("shared_params",): {"lm_head.weight": EMBED}})
        (folder / "latest").write_text("step")

    pair = make_pair(tmp_path, write, decoder_shapes(tied=True))
    with pytest.raises(MergePipeError, match="'lm_head' matches nothing"):
        pair.compose("default: new\ntake: [{from: old, units: [lm_head]}]\n")
    pair.compose("default: new\ntake: [{from: old, units: [layers even]}]\n", options)
    assert wrong_values(pair.out, pair, [name for name in from_old(pair) if name != EMBED]) == []
    api.export(pair.out, tmp_path / "model")
    assert np.array_equal(model_values(tmp_path / "model")[EMBED], pair.new.arrays[EMBED, FP32])


def test_compose__exports_no_count_as_a_master(tmp_path: Path) -> None:
    """A buffer of integers and a frozen weight, which stages 1 and 2 keep among the module's weights."""
    seen = {"model.seen": np.array([3]), "projector.weight": np.ones((2, 3), np.float32)}
    pair = make_pair(tmp_path, lambda f, known: write_zero12(f, known, decay_groups(known.shapes), 2, buffers=seen))
    pair.compose("default: new\n", UNIVERSAL)
    assert not (pair.out / "zero" / "model.seen").exists()
    assert (checkpoint_at(pair.out).states["projector.weight", FP32].shape, checkpoint_at(pair.out).missing) == (
        (2, 3),
        (),
    )
    api.export(pair.out, tmp_path / "model")
    assert np.array_equal(model_values(tmp_path / "model")["model.seen"], seen["model.seen"])
    (other,) = (unit for unit in api.diff(tmp_path / "old", tmp_path / "new").units if unit.unit == "other:model")
    assert other.weights is None


def test_average__reads_universal_checkpoints(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, write_universal("zero2"))
    api.average([tmp_path / "old", tmp_path / "new"], pair.out, weights=(1, 3), optimizer="last", self_check="full")
    made = checkpoint_at(pair.out)
    for name in pair.new.shapes:
        mean = 0.25 * pair.old.arrays[name, FP32].astype(np.float64) + 0.75 * pair.new.arrays[name, FP32]
        np.testing.assert_allclose(stored_values(made.states[name, FP32]), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_average__of_native_checkpoints_becomes_universal(tmp_path: Path, kind: str) -> None:
    """The way of an average to another number of ranks: weights, moments and step stay what was averaged."""
    pair = make_pair(tmp_path, FORMATS[kind])
    api.average([tmp_path / "old", tmp_path / "new"], tmp_path / "mean", weights=(1, 3), optimizer="average")
    pair.compose("default: mean\n", UNIVERSAL)
    native, made = (checkpoint_at(path) for path in (tmp_path / "mean", pair.out))
    assert (made.format, made.step, made.missing) == ("deepspeed-universal", native.step, ())
    for (name, of_kind), state in made.states.items():
        assert np.array_equal(stored_values(state), stored_values(native.states[name, of_kind])), (name, of_kind)
    assert {kind for _, kind in made.states} >= {FP32, "exp_avg", "exp_avg_sq"}


def test_export__is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["hf"])
    recipe = pair.recipe("default: new\n")
    assert refusal(lambda: api.check(recipe, export="universal")).code == "checkpoint.unsupported"
    assert refusal(lambda: api.check(recipe, export="parquet")).code == "option.invalid"


def test_open__refuses_universal_checkpoints_that_lie(tmp_path: Path) -> None:
    make_pair(tmp_path, write_universal("zero2"))
    states = tmp_path / "new" / "zero" / "model.norm.weight"
    edit(states / "fp32.pt", {("param",): None})
    assert refusal(lambda: api.inspect(tmp_path / "new")).code == "checkpoint.damaged"
    (states / "fp32.pt").unlink()
    assert checkpoint_at(tmp_path / "new").missing == ("fp32 of model.norm.weight",)
    edit(tmp_path / "old" / "zero" / "model.norm.weight" / "step.pt", {(): 8})
    assert refusal(lambda: api.inspect(tmp_path / "old")).code == "checkpoint.damaged"


# --- step counters that are numbers in the pickle itself, as fused optimizers keep them


TAKE_NORMS = "default: new\ntake: [{from: old, units: [layers all, norm, embed]}]\n"


def write_hf_with_numbers(folder: Path, known: KnownStates) -> None:
    write_hf(folder, known)
    edit(folder / "optimizer.pt", {("state", i, "step"): known.step for i in range(len(known.shapes))})


def write_fused(folder: Path, known: KnownStates, stage: int) -> None:
    """ZeRO around a fused optimizer: the counter is an option of the parameter group."""
    groups = decay_groups(known.shapes)
    if stage == 3:
        write_zero3(folder, known, groups, 2)
    else:
        write_zero12(folder, known, groups, 2, stage=stage)
    for path in folder.glob("*optim_states.pt"):
        edit(path, dict(fused(Node(torch_archive(path).root, path.name), known, stage)))


def fused(root: Node, known: KnownStates, stage: int) -> Iterator[tuple[PicklePath, object]]:
    base = base_optimizer_path(stage)
    for number, entry in root.at((*base, "state")).items():
        assert isinstance(number, int)
        yield (*base, "state", number), {k: v for k, v in entry.mapping().items() if k != "step"}
    options = [{"lr": 0.1, "step": known.step, "params": [i]} for i in range(2)]
    yield (*base, "param_groups"), options


def counters(pair: Pair) -> dict[str, float]:
    made = checkpoint_at(pair.out)
    return {name: step.value for step in made.steps for name in step.parameters}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_compose__writes_counters_of_optimizer_pt_and_of_fused_optimizers(tmp_path: Path, stage: int | None) -> None:
    pair = make_pair(tmp_path, write_hf_with_numbers if stage is None else partial(write_fused, stage=stage))
    pair.compose(TAKE_NORMS)
    old = [name for name in pair.old.shapes if name != "lm_head.weight"]
    assert wrong_values(pair.out, pair, old) == []
    taken = old if stage is None else [name for name in old if "norm" in name]  # others share a counter with lm_head
    assert counters(pair) == {name: 7.0 if name in taken else 9.0 for name in pair.old.shapes}


# --- FSDP of Accelerate and the Trainer, full and sharded; NeMo Automodel


def write_of_trainer(folder: Path, known: KnownStates, *, full: bool) -> None:
    write_fsdp(folder, known, full=full)
    files = folder.with_name(f"files-{folder.name}")
    write_trainer_files(files, known)
    for path in files.iterdir():
        path.replace(folder / path.name)


@pytest.mark.thorough
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("of_trainer", [True, False])
def test_compose__takes_fsdp_checkpoints(tmp_path: Path, *, full: bool, of_trainer: bool) -> None:
    pair = make_pair(tmp_path, partial(write_of_trainer if of_trainer else write_fsdp, full=full))
    pair.compose(PARITY)
    old = from_old(pair)
    made = checkpoint_at(pair.out)
    assert (made.format, made.step, wrong_values(pair.out, pair, old)) == ("accelerate-fsdp", 9, [])
    assert (str(made.framework), "export" in made.kinds) == (("transformers", True) if of_trainer else ("torch", False))
    assert counters(pair) == {name: 7.0 if name in old else 9.0 for name in pair.new.shapes}


def test_compose__takes_automodel_checkpoints(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, write_automodel)
    pair.compose(PARITY)
    assert wrong_values(pair.out, pair, from_old(pair)) == []
    assert (pair.out / "model" / ".hf_metadata" / "config.json").is_file()


@pytest.mark.parametrize("name", ["automodel", "accelerate"])
def test_export__needs_no_optimizer(tmp_path: Path, name: str) -> None:
    known = known_states(decoder_shapes())
    write = write_automodel if name == "automodel" else partial(write_fsdp, full=False)
    write(tmp_path / "at-7", known)
    shutil.rmtree(tmp_path / "at-7" / ("optim" if name == "automodel" else "optimizer_0"))
    report = api.export(tmp_path / "at-7", tmp_path / "out")
    assert (report.plan.assignment.skeleton.step, wrong_weights(tmp_path / "out", known)) == (7, [])
    assert (tmp_path / "out" / "config.json").exists() == (name == "automodel")
    assert report.plan.assignment.skeleton.missing == ("the optimizer's state: only weights are here",)


def test_open__refuses_an_optimizer_of_other_parameters(tmp_path: Path) -> None:
    pair: Pair = make_pair(tmp_path, partial(write_fsdp, full=True))
    state = {"state": {"other": {"step": 1}}, "param_groups": []}
    (pair.folder / "new" / "optimizer.bin").write_bytes(torch_bytes(state))
    with pytest.raises(MergePipeError, match="'other' of the optimizer is not among the weights"):
        api.inspect(pair.folder / "new")


def test_open__misses_optimizer_state_of_trained_parameters_alone(tmp_path: Path) -> None:
    """Buffers and frozen weights are in no group of the optimizer."""
    write_fsdp(tmp_path / "at", known_states(decoder_shapes()), full=True)
    for trained, missing in ((["lm_head.weight"], ("optimizer state of lm_head.weight",)), ([], ())):
        edit(tmp_path / "at" / "optimizer.bin", {("param_groups", 0, "params"): trained, ("state",): {}})
        assert checkpoint_at(tmp_path / "at").missing == missing
