"""Checkpoints of verl: shards of FSDP joined in the order of their ranks, or refused by the name of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from composing import checkpoint_at, model_values, refuses_export, stored_values

from mergepipe import tailor
from support.torch_bytes import Call, Named, View, torch_bytes
from support.training_trees import d_tensor, decoder_shapes, known_states, write_verl

MODEL, OPTIMIZER = "model_world_size_2_rank_1.pt", "optim_world_size_2_rank_1.pt"


@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (16, 1), (2, 2)])
def test_open__joins_the_rows_of_all_ranks(tmp_path: Path, world_size: int, replicas: int) -> None:
    known = known_states(decoder_shapes())
    write_verl(tmp_path / "a", known, world_size, replicas=replicas)
    opened = checkpoint_at(tmp_path / "a")
    values = {key: stored_values(state) for key, state in opened.states.items()}
    wanted = {(name, "weight" if kind == "fp32" else kind): array for (name, kind), array in known.arrays.items()}
    assert [key for key, array in wanted.items() if not np.array_equal(values[key], array)] == []
    assert (values.keys(), opened.step, opened.world_size) == (wanted.keys(), known.step, world_size * replicas)
    assert opened.missing == ()


def test_export__takes_files_that_lie_in_the_folder_of_the_model(tmp_path: Path) -> None:
    write_verl(tmp_path / "actor", known_states(decoder_shapes()))
    (tmp_path / "actor" / "huggingface").mkdir()
    (tmp_path / "actor" / "huggingface" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tailor.export(tmp_path / "actor", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_export__makes_a_model_of_weights_alone(tmp_path: Path) -> None:
    """Tied weights are written once, and a buffer, which every rank holds whole."""
    table, counts = np.arange(15, dtype=np.float32).reshape(5, 3), np.ones(4, np.float32)
    folder = tmp_path / "global_step_40" / "actor"
    folder.mkdir(parents=True)
    for rank in range(2):
        model = {"model.embed_tokens.weight": d_tensor(table, rank, 2), "model.counts": counts}
        model["lm_head.weight"] = model["model.embed_tokens.weight"]
        (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(torch_bytes(model))
    report = tailor.export(folder, tmp_path / "out")
    made = model_values(tmp_path / "out")
    assert (report.plan.assignment.skeleton.step, set(made)) == (40, {"model.embed_tokens.weight", "model.counts"})
    assert np.array_equal(made["model.embed_tokens.weight"], table)
    assert np.array_equal(made["model.counts"], counts)


def sharded(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], rank: int) -> Call:
    """A tensor as FSDP1 without a mesh pickles it: a list of shards, and the name of a class inside a class."""
    module = "torch.distributed._shard.sharded_tensor"
    kind = Named(f"{module}.api", "ShardedTensor")
    rows = np.split(array, 2)[rank]
    shard = Call(
        Named(f"{module}.shard", "Shard"), state=(None, {"tensor": View(rows.reshape(-1), 0, rows.shape)}), new=True
    )
    group = Call(Named("__builtin__", "getattr"), (kind, "ProcessGroupState"))
    arguments = (kind, Named("torch", "float32"), array.shape)
    wrapper = Named("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Named("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, arguments, ([shard], None, group)))


def test_export__reads_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    """Their optimizer's flat buffers have no names: the checkpoint gives weights alone."""
    array = np.arange(24, dtype=np.float32).reshape(8, 3)
    for rank in range(2):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"model_world_size_2_rank_{rank}.pt").write_bytes(torch_bytes({"w": sharded(array, rank)}))
        flat = {"step": np.array(3, np.float32), "exp_avg": np.zeros(12, np.float32)}
        optimizer = torch_bytes({"state": {0: flat}, "param_groups": []})
        (tmp_path / "a" / f"optim_world_size_2_rank_{rank}.pt").write_bytes(optimizer)
    opened = checkpoint_at(tmp_path / "a")
    assert opened.missing == ("the optimizer's state by parameter",)
    tailor.export(tmp_path / "a", tmp_path / "out")
    assert np.array_equal(model_values(tmp_path / "out")["w"], array)


def _remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _cut(folder: Path) -> None:
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-50])


def _other_step(folder: Path) -> None:
    write_verl(folder.with_name("other"), known_states(decoder_shapes(), step=8))
    (folder / OPTIMIZER).write_bytes((folder.with_name("other") / OPTIMIZER).read_bytes())


def _other_model(folder: Path) -> None:
    write_verl(folder.with_name("other"), known_states(decoder_shapes(width=7)))
    (folder / MODEL).write_bytes((folder.with_name("other") / MODEL).read_bytes())


def _other_ranks(folder: Path) -> None:
    (folder / "model_world_size_4_rank_0.pt").write_bytes(b"")


def _other_optimizer_ranks(folder: Path) -> None:
    for path in folder.glob("optim*"):
        path.unlink()
    write_verl(folder.with_name("other"), known_states(decoder_shapes()), 1)
    (folder.with_name("other") / "optim_world_size_1_rank_0.pt").rename(folder / "optim_world_size_1_rank_0.pt")


def _model_of(value: Callable[[int], object], folder: Path) -> None:
    for rank in range(2):
        (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(torch_bytes({"w": value(rank)}))


COLUMNS = np.arange(24, dtype=np.float32).reshape(4, 6)
REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "rank": (partial(_remove, MODEL), "checkpoint.incomplete", f"there is no {MODEL}: the files of all 2 ranks"),
    "optimizer": (partial(_remove, OPTIMIZER), "checkpoint.incomplete", f"there is no {OPTIMIZER}"),
    "cut": (_cut, "checkpoint.damaged", MODEL),
    "step": (_other_step, "checkpoint.damaged", f"{OPTIMIZER}: is at optimizer step 8, /"),
    "model": (_other_model, "checkpoint.damaged", f"{MODEL}: model.embed_tokens.weight: has shape"),
    "mixed": (_other_ranks, "checkpoint.damaged", "holds model files of 2 and of 4 ranks"),
    "mixed-kinds": (_other_optimizer_ranks, "checkpoint.damaged", "model files of 2 ranks and optim files of 1"),
    "columns": (
        partial(_model_of, lambda rank: d_tensor(COLUMNS, rank, 2, dimension=1)), "checkpoint.unsupported",
        "model_world_size_2_rank_0.pt: w: is not cut into rows",
    ),
    "short": (
        partial(_model_of, lambda _: d_tensor(COLUMNS, 1, 4)), "checkpoint.damaged",
        "model_world_size_2_rank_0.pt: w: all ranks hold 12 elements of (4, 6)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_export__refuses_in_one_line_and_writes_nothing(tmp_path: Path, name: str) -> None:
    damage, code, message = REFUSED[name]
    write_verl(tmp_path / "a", replace(known_states(decoder_shapes()), step=7))
    damage(tmp_path / "a")
    refuses_export(tmp_path / "a", code, message)
