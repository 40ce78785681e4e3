"""Every format: the bytes at the ranges are the values that were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import checkpoint_at, stored_values
from hypothesis import given
from hypothesis import strategies as st

from mergepipe import tailor
from mergepipe.errors import CorruptError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor import formats
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat
from mergepipe.tailor.formats.dcp import read_dcp, unpack_piece
from mergepipe.tailor.formats.deepspeed import read_zero
from support.local_models import open_training
from support.refusals import refuses
from support.stores import MetadataStore
from support.torch_bytes import Call, Named, torch_bytes
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_trainer_files,
    write_zero3,
    write_zero12,
)

GROUPS = st.lists(
    st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5), min_size=1, max_size=3
)


def wrong(checkpoint: TrainingCheckpoint, known: KnownStates, *kinds: str) -> list[tuple[str, str]]:
    """States whose bytes are not the known values; `weight` and `export` are compared with the masters."""
    return [
        (name, kind)
        for name in known.shapes
        for kind in kinds
        if not np.array_equal(
            stored_values(checkpoint.states[name, kind]),
            known.arrays[name, "fp32" if kind in ("weight", "export") else kind],
        )
    ]


def named_groups(shapes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[KnownStates, list[list[str]]]:
    """Parameters `model.layers.G.P` of the given shapes, group by group."""
    named = {f"model.layers.{g}.p{i}": s for g, group in enumerate(shapes) for i, s in enumerate(group)}
    return known_states(named), [[n for n in named if n.startswith(f"model.layers.{g}.")] for g in range(len(shapes))]


@given(GROUPS, st.integers(1, 5))
def test_read_zero__every_stage_gives_what_was_partitioned(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[tuple[int, ...]]], world_size: int
) -> None:
    folder = tmp_path_factory.mktemp("zero")
    known, groups = named_groups(shapes)
    write_zero12(folder / "two", known, groups, world_size)
    write_zero3(folder / "three", known, groups, world_size)
    two, three = checkpoint_at(folder / "two"), checkpoint_at(folder / "three")
    assert wrong(two, known, "fp32", "exp_avg", "exp_avg_sq", "weight") == []
    assert wrong(three, known, "fp32", "exp_avg", "exp_avg_sq") == []
    assert (two.missing, two.world_size, two.step, two.flat_groups) == ((), world_size, 7, tuple(map(tuple, groups)))
    assert (three.missing, three.stage, "weight" in three.kinds) == ((), 3, False)


@pytest.fixture
def known() -> KnownStates:
    return known_states(decoder_shapes())


def zero(folder: Path, known: KnownStates, *, world_size: int = 3) -> Path:
    write_zero12(folder, known, decay_groups(known.shapes), world_size)
    return folder


@pytest.mark.parametrize(
    ("tag", "code"),
    [
        *((tag, "checkpoint.damaged") for tag in ("", "..", "../other", "/etc", "a/b")),
        ("gone", "checkpoint.incomplete"),
        ("n" * 5000, "storage.too-large"),
    ],
)
def test_open_training_checkpoint__refuses_a_latest_that_leads_elsewhere(tmp_path: Path, tag: str, code: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with refuses((CorruptError, NotFoundError), code):
        checkpoint_at(tmp_path)


def test_open_training_checkpoint__names_the_trainers_that_it_reads(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        checkpoint_at(tmp_path)
    trainers = ("Trainer", "DeepSpeed", "FSDP", "torch DCP", "Megatron-Core", "verl")
    assert [trainer for trainer in trainers if trainer not in str(caught.value)] == []


def open_inside(store: Store, path: Location, _home: Location) -> TrainingCheckpoint:
    return replace(read_zero(store, path / "inside"), path=path, format="one-file")


MARKED = TrainingFormat("one-file", "mark.one", lambda store, path: is_file(store, path / "mark.one"), open_inside)
"""A format of a file of its own: a ZeRO directory under another mark."""


def test_training_format__of_one_file_is_recognised_opened_and_composed(
    tmp_path: Path, known: KnownStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero(tmp_path / "run" / "inside", known)
    (tmp_path / "run" / "mark.one").touch()
    monkeypatch.setattr(formats, "TRAINING_FORMATS", (MARKED, *formats.TRAINING_FORMATS))
    recipe, out = tmp_path / "composition.yml", tmp_path / "out"
    recipe.write_text("default: run\n")
    report = tailor.compose(recipe, out)
    assert report.plan.assignment.skeleton.format == "one-file"
    made = checkpoint_at(out)
    assert (made.format, wrong(made, known, "fp32", "exp_avg", "exp_avg_sq", "weight")) == ("one-file", [])


def test_read_zero__reads_steps_and_no_other_tensor_byte(tmp_path: Path) -> None:
    known = known_states(decoder_shapes(width=41, vocabulary=200))
    folder = zero(tmp_path / "tag", known)
    store = MetadataStore()
    checkpoint = open_training(folder, store)
    pieces = [p for s in checkpoint.states.values() for p in s.pieces if p.nbytes > 1000]
    overlapping = [
        (piece, read)
        for piece in pieces
        for read in store.reads
        if read.path == piece.file
        and read.offset < piece.offset + piece.nbytes
        and piece.offset < read.offset + read.nbytes
    ]
    assert (overlapping, [s.value for s in checkpoint.steps]) == ([], [7.0, 7.0])
    assert [len(s.cells) for s in checkpoint.steps] == [3, 3]


def test_read_zero__refuses_partitions_of_another_length(tmp_path: Path, known: KnownStates) -> None:
    folder = zero(tmp_path / "a", known)
    other = zero(tmp_path / "b", known_states(decoder_shapes(n_layers=4)))
    name = "mp_rank_00_model_states.pt"
    (folder / name).write_bytes((other / name).read_bytes())
    with refuses(CorruptError, "checkpoint.damaged"):
        checkpoint_at(folder)


def test_read_zero__refuses_model_parallel_files(tmp_path: Path, known: KnownStates) -> None:
    folder = zero(tmp_path / "a", known)
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="tensor, pipeline or expert parallel"):
        checkpoint_at(folder)


@pytest.mark.parametrize("stage", [0, 4, "2", None, 3])
def test_read_zero__refuses_a_stage_that_does_not_fit(tmp_path: Path, known: KnownStates, stage: object) -> None:
    folder = zero(tmp_path / "a", known, world_size=1)
    enum = Call(Named("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))
    content = torch_bytes({"optimizer_state_dict": {"zero_stage": enum, "single_partition_of_fp32_groups": []}})
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(content)
    with pytest.raises(UnsupportedError):
        checkpoint_at(folder)


def test_open_training_checkpoint__says_that_weights_have_no_optimizer(tmp_path: Path, known: KnownStates) -> None:
    write_trainer_files(tmp_path, known)
    opened = checkpoint_at(tmp_path)
    assert (opened.format, opened.step) == ("weights-only", known.step)
    assert opened.missing == ("the optimizer's state: only weights are here",)


def test_open_training_checkpoint__refuses_two_different_steps(tmp_path: Path, known: KnownStates) -> None:
    write_trainer_files(tmp_path, replace(known, step=8))
    zero(tmp_path / "global_step7", known)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CorruptError, match="the Trainer is at step 8, DeepSpeed at step 7"):
        checkpoint_at(tmp_path)


@given(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6), st.integers(1, 4))
def test_read_dcp__gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], world_size: int
) -> None:
    folder = tmp_path_factory.mktemp("dcp") / "step"
    known, _ = named_groups([shapes])
    write_dcp(folder, known, world_size)
    checkpoint = checkpoint_at(folder)
    assert wrong(checkpoint, known, "weight", "exp_avg", "exp_avg_sq") == []
    assert ({s.value for s in checkpoint.steps}, checkpoint.missing, checkpoint.step) == ({7.0}, (), 7)


@pytest.mark.parametrize(
    "name", ["/etc/passwdd", "../b/__0_0.distcp", "../../abc.distcp", "..\0__0_0.distcp", "n" * 5000, "a//b", ""]
)
def test_read_dcp__refuses_files_outside_of_the_checkpoint(tmp_path: Path, known: KnownStates, name: str) -> None:
    write_dcp(tmp_path / "run" / "a", known, 1)
    metadata = tmp_path / "run" / "a" / ".metadata"
    old = b"X" + len("__0_0.distcp").to_bytes(4, "little") + b"__0_0.distcp"
    new = b"X" + len(name).to_bytes(4, "little") + name.encode()
    metadata.write_bytes(metadata.read_bytes().replace(old, new))
    with pytest.raises(CorruptError, match="outside the checkpoint"):
        checkpoint_at(tmp_path / "run" / "a")


def test_unpack_piece__refuses_another_items_place(tmp_path: Path, known: KnownStates) -> None:
    write_dcp(tmp_path / "a", known, 2)
    checkpoint = read_dcp(MetadataStore(), Location.local(tmp_path / "a"))
    ours, other = (checkpoint.states[n, "exp_avg"] for n in ("model.norm.weight", "lm_head.weight"))
    swapped = replace(other.pieces[0], span=ours.pieces[0].span)
    with pytest.raises(CorruptError):
        unpack_piece(MetadataStore(), swapped, ours.dtype)
