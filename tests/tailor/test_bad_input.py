"""Checkpoints that do not belong together, are damaged, or are of others: one precise line each, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import FORMATS, Pair, checkpoint_at, edit, make_pair, stored_values, wrong_values, wrong_weights

from mergepipe import tailor
from support.refusals import refusal
from support.torch_bytes import View, torch_bytes
from support.training_trees import KnownStates, decay_groups, decoder_shapes, known_states, write_hf, write_zero3

PARITY = "default: new\ntake: [{from: old, units: [layers even]}]\n"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def trained(tmp_path: Path) -> Pair:
    """Two steps of one run of the Trainer, with what it logs."""
    pair = make_pair(tmp_path, write_hf)
    logged = [{"step": 5, "loss": 2.5, "learning_rate": 0.1}, {"step": 8, "loss": 2.25}]
    edit_json(tmp_path / "old" / "trainer_state.json", log_history=logged[:1])
    edit_json(tmp_path / "new" / "trainer_state.json", log_history=[*logged, {"step": 8, "eval_loss": 2.0}])
    return pair


def test_compose__refuses_checkpoints_of_two_runs(trained: Pair) -> None:
    trained.compose(PARITY)
    shutil.rmtree(trained.out)
    edit_json(trained.folder / "old" / "trainer_state.json", log_history=[{"step": 5, "loss": 2.75}])
    error = trained.refused(PARITY)
    assert (error.code, "its log of step 5" in str(error)) == ("checkpoint.mismatch", True)
    averaged = refusal(lambda: tailor.average([trained.folder / "old", trained.folder / "new"], trained.out))
    assert averaged.code == "checkpoint.mismatch"


def test_compose__refuses_two_architectures_of_the_same_shapes(trained: Pair) -> None:
    edit_json(trained.folder / "old" / "config.json", model_type="mistral")
    error = trained.refused(PARITY)
    assert (error.code, "model_type is mistral" in str(error)) == ("checkpoint.mismatch", True)


@pytest.mark.parametrize("kind", ["hf", "zero2", "zero3", "dcp"])
def test_compose__refuses_a_truncated_file(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    suffix = ".distcp" if kind == "dcp" else ".pt"
    path = max((p for p in (tmp_path / "old").iterdir() if p.suffix == suffix), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1000])
    assert str(path) in str(pair.refused(PARITY))


def test_open__refuses_model_files_of_different_steps_and_misses_them(tmp_path: Path) -> None:
    for name, step in (("a", 7), ("b", 9)):
        known = known_states(decoder_shapes(), seed=1, step=step)
        write_zero3(tmp_path / name, known, decay_groups(known.shapes), 2)
    file = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(tmp_path / "a" / file, tmp_path / "b" / file)
    error = refusal(lambda: checkpoint_at(tmp_path / "b"))
    assert (error.code, "is of step 7" in str(error), "of step 9" in str(error)) == ("checkpoint.damaged", True, True)
    (tmp_path / "b" / file).unlink()
    (tmp_path / "recipe.yml").write_text("default: a\ntake: [{from: b, units: [layer 1]}]\n")
    assert tailor.check(tmp_path / "recipe.yml").plan.assignment.state.step == 7
    error = refusal(lambda: tailor.check(tmp_path / "recipe.yml", state_from=tmp_path / "b"))
    assert (error.code, "/b: lacks the model file of rank 1" in str(error)) == ("checkpoint.mismatch", True)


def test_compose__takes_composites_as_sources(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["zero3"])
    pair.compose(PARITY)
    pair.out.rename(tmp_path / "first")
    pair.compose("default: first\ntake: [{from: old, units: [layer 1]}]\n")
    assert wrong_values(pair.out, pair, [n for n in pair.old.shapes if ".layers." in n]) == []
    manifest = json.loads((pair.out / "mergepipe.json").read_text())
    assert [Path(source["path"]).name for source in manifest["inputs"]] == ["first", "old"]


def _write_optimizer(folder: Path, known: KnownStates, states: Callable[[np.ndarray], dict[str, object]]) -> None:
    """A Trainer checkpoint whose optimizer keeps other states."""
    write_hf(folder, known)
    groups = decay_groups(known.shapes)
    names = [name for group in groups for name in group]
    entries = {i: states(known.arrays[name, "exp_avg"]) for i, name in enumerate(names)}
    numbers = [list(range(len(groups[0]))), list(range(len(groups[0]), len(names)))]
    options = [{"lr": 0.1, "params": members} for members in numbers]
    (folder / "optimizer.pt").write_bytes(torch_bytes({"state": entries, "param_groups": options}))


FOREIGN_STATES: dict[str, Callable[[np.ndarray], dict[str, object]]] = {
    "Adafactor": lambda a: {"step": 7, "RMS": 0.5, "exp_avg_sq_row": a[..., :1].copy(), "exp_avg_sq_col": a[:1].copy()},
    "8-bit": lambda a: {"step": 7, "state1": a.astype(np.float32), "qmap1": np.zeros(256, np.float32)},
    "bitsandbytes": lambda a: {"step": 7, "__bnb_optimizer_quant_state__": {"state1": a.astype(np.float32)}},
    "no tensor and no number": lambda a: {"step": 7, "exp_avg": a, "GG": [a, a]},
}


@pytest.mark.parametrize("name", [*FOREIGN_STATES, "no frozen parameter", "of shape (11, 6)"])
def test_export__takes_the_weights_where_the_optimizer_is_not_read(tmp_path: Path, name: str) -> None:
    known = known_states(decoder_shapes())
    _write_optimizer(tmp_path / "at", known, FOREIGN_STATES.get(name, adam_with_maxima))
    write_hf(tmp_path / "other", known_states(decoder_shapes(width=6)))
    if "shape" in name:
        shutil.copy(tmp_path / "other" / "optimizer.pt", tmp_path / "at" / "optimizer.pt")
    elif name not in FOREIGN_STATES:
        edit(tmp_path / "at" / "optimizer.pt", {("param_groups", 0, "params"): [0, 1]})
    tailor.export(tmp_path / "at", tmp_path / "out")
    assert wrong_weights(tmp_path / "out", known) == []
    (tmp_path / "recipe.yml").write_text("default: at\n")
    error = refusal(lambda: tailor.check(tmp_path / "recipe.yml"))
    assert (error.code, name in str(error)) == ("checkpoint.mismatch", True)


def test_compose__takes_the_states_of_other_optimizers(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, lambda path, known: _write_optimizer(path, known, lambda a: {"momentum_buffer": a}))
    pair.compose("default: new\ntake: [{from: old, units: [norm]}]\n")
    made = checkpoint_at(pair.out).states
    for name, known in (("model.norm.weight", pair.old), ("lm_head.weight", pair.new)):
        assert np.array_equal(stored_values(made[name, "momentum_buffer"]), known.arrays[name, "exp_avg"])


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (("mp_rank_00_001/model_optim_rng.pt",), "Megatron"),
        (("trainer_state.json", "pytorch_model_fsdp_rank0.bin"), "FSDP"),
        (("trainer_state.json", "mergepipe-store.json"), "mergepipe unpack"),
    ],
)
def test_open__names_checkpoints_of_other_programs(tmp_path: Path, files: tuple[str, ...], name: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    error = refusal(lambda: checkpoint_at(tmp_path))
    assert (error.code, name in str(error)) == ("checkpoint.unsupported", True)


def test_open__refuses_flat_groups_with_padding_between_parameters(tmp_path: Path) -> None:
    known = known_states({"layer.weight": (4, 4)})
    optimizer = {"zero_stage": 1, "param_alignment_paddings": [[0, 3]]}
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(
        torch_bytes({"optimizer_state_dict": optimizer})
    )
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(torch_bytes({"global_steps": known.step}))
    error = refusal(lambda: checkpoint_at(tmp_path))
    assert (error.code, "padded between parameters" in str(error)) == ("checkpoint.unsupported", True)


def shared_states(array: np.ndarray) -> dict[str, object]:
    tensor = View(array.reshape(-1), 0, array.shape)
    return {"step": 7, "exp_avg": tensor, "exp_avg_sq": tensor}


def test_compose__refuses_states_that_share_bytes(tmp_path: Path) -> None:
    """As FSDP1 gathers an optimizer on a CPU: what is written for one state would be the other's."""
    known = known_states(decoder_shapes())
    _write_optimizer(tmp_path / "old", replace(known, step=5), shared_states)
    _write_optimizer(tmp_path / "new", replace(known, step=9), shared_states)
    (tmp_path / "recipe.yml").write_text("default: new\ntake: [{from: old, units: [norm]}]\n")
    error = refusal(lambda: tailor.check(tmp_path / "recipe.yml"))
    assert (error.code, "share bytes" in str(error)) == ("checkpoint.damaged", True)


def _ranks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*_optim_states.pt"))


def _of_three_ranks(folder: Path, work: Path) -> None:
    """Put a rank's file of the same step, saved by three ranks, in place of the one that is there."""
    write_zero3(work, KNOWN, decay_groups(KNOWN.shapes), 3)
    shutil.copy(_ranks(work)[1], _ranks(folder)[1])
    shutil.rmtree(work)


def adam_with_maxima(array: np.ndarray) -> dict[str, object]:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return {"step": np.array(7, np.float32), **dict.fromkeys(names, array)}


KNOWN = known_states(decoder_shapes(), step=7)
MIXED: dict[str, tuple[str, Callable[[Path, Path], object], str, str]] = {
    "rank missing": ("zero2", lambda old, _: _ranks(old)[1].unlink(), "checkpoint.mismatch", "file of rank 1"),
    "rank missing, stage 3": ("zero3", lambda old, _: _ranks(old)[1].unlink(), "checkpoint.mismatch", "file of rank 1"),
    "rank of another step": (
        "zero3", lambda old, new: shutil.copy(_ranks(new)[1], _ranks(old)[1]), "checkpoint.damaged",
        "/old/zero_pp_rank_1_mp_rank_00_optim_states.pt: is at optimizer step 9, /",
    ),
    "rank of another size": (
        "zero3", lambda old, new: _of_three_ranks(old, new.parent / "three"), "checkpoint.damaged",
        "/old/zero_pp_rank_1_mp_rank_00_optim_states.pt: optimizer_state_dict.partition_count: the partition counts",
    ),
    "file missing": ("dcp", lambda old, _: (old / "__1_0.distcp").unlink(), "storage.not-found", "__1_0.distcp"),
    "no optimizer": ("hf", lambda old, _: (old / "optimizer.pt").unlink(), "checkpoint.mismatch", "only weights"),
    "maxima": (
        "hf", lambda old, _: _write_optimizer(old, KNOWN, adam_with_maxima), "checkpoint.mismatch",
        "only one has max_exp_avg_sq",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_compose__of_mismatched_runs_is_one_clear_error_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    kind, change, code, reason = MIXED[case]
    pair = make_pair(tmp_path, FORMATS[kind])
    change(tmp_path / "old", tmp_path / "new")
    error = pair.refused(PARITY)
    assert (error.code, reason in str(error), str(tmp_path / "old") in str(error)) == (code, True, True)
