"""FSDP checkpoints of Accelerate and the Trainer: composed and averaged as they are, full and sharded."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from composing import Pair, checkpoint_at, edit, make_pair, wrong_values, wrong_weights
from test_pickled_counters import counters
from test_universal import PARITY, from_old

from mergepipe.errors import MergePipeError
from mergepipe.tailor import api
from support.torch_bytes import torch_bytes
from support.training_trees import (
    KnownStates,
    decoder_shapes,
    known_states,
    write_automodel,
    write_fsdp,
    write_trainer_files,
)


def write_of_trainer(folder: Path, known: KnownStates, *, full: bool) -> None:
    write_fsdp(folder, known, full=full)
    files = folder.with_name(f"files-{folder.name}")
    write_trainer_files(files, known)
    for path in files.iterdir():
        path.replace(folder / path.name)


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
