"""Partial saving under the real frameworks, on two gloo ranks. Needs the environment of requirements/train.txt."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.api import compose
from mergepipe.tailor.checkpoint import WEIGHT, Framework, Packing, StoredState, TrainingCheckpoint, differences
from mergepipe.tailor.formats.dcp import DCP_FORMAT, unpack_piece
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT
from mergepipe.tailor.formats.hf_trainer import HF_FORMAT
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.run_recipes import composition_from_log_file
from mergepipe.tailor.saving.unit_choice import LOG_NAME, read_journal
from support.adam_steps import step_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", ROOT / ".venv-train" / "bin" / "python"))
NUMPY_TYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
ZERO = (ZERO_FORMAT, Framework.TRANSFORMERS)
ORIGINS = {
    "hf": (HF_FORMAT, Framework.TRANSFORMERS, None, 1),
    "hf-ddp": (HF_FORMAT, Framework.TRANSFORMERS, None, 2),
    "hf-zero1": (*ZERO, 1, 2),
    "hf-zero2": (*ZERO, 2, 2),
    "hf-zero3": (*ZERO, 3, 2),
    "hf-zero2-bf16": (*ZERO, 2, 2),
    "hf-zero2-tied": (*ZERO, 2, 2),
    "plain": (DCP_FORMAT, Framework.TORCH, None, 2),
    "fsdp2": (DCP_FORMAT, Framework.TORCH, None, 2),
    "fsdp2-tied": (DCP_FORMAT, Framework.TORCH, None, 2),
}
needs_frameworks = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no environment for training: requirements/train.txt"
)


def train(out: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), str(HERE / "train_partially.py"), kind, str(out), *options]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.fixture(scope="module", params=ORIGINS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind = str(request.param)
    out = tmp_path_factory.mktemp("partial") / kind
    finished = train(out, kind)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return kind, out


def stored_values(state: StoredState, store: LocalStore) -> npt.NDArray[np.float32]:
    flat = np.full(state.n_elements, np.nan, np.float32)
    for piece in state.pieces:
        found = unpack_piece(store, piece, state.dtype) if piece.packing is Packing.TORCH_ZIP else piece
        raw = read_whole(found.file.local_path)[found.offset : found.offset + found.nbytes]
        flat[found.span.start : found.span.stop] = np.frombuffer(raw, NUMPY_TYPES[state.dtype.name]).astype(np.float32)
    return flat.reshape(state.shape)


@cache
def read_whole(path: Path) -> bytes:
    return path.read_bytes()


def wrong_values(checkpoint: TrainingCheckpoint, truth_file: Path, names: set[str]) -> tuple[list[str], int]:
    """Which of the named parameters' values differ from what the engine held, and how many were compared."""
    store, truth = LocalStore(), np.load(truth_file)
    wrong, compared = [], 0
    for key in truth.files:
        kind, _, name = key.partition("/")
        if name not in names:
            continue
        if kind == "step":
            counter = step_of(checkpoint, name)
            matches = counter is not None and counter.value == truth[key]
        elif kind == WEIGHT and checkpoint.stage == 3:  # computed from the masters
            matches = (name, kind) not in checkpoint.states
        else:
            matches = np.array_equal(stored_values(checkpoint.states[name, kind], store), truth[key])
        compared += 1
        wrong += [] if matches else [key]
    return wrong, compared


@needs_frameworks
def test_partial_saving__holds_every_value_of_the_engine(trained: tuple[str, Path]) -> None:
    check_values(*trained)


@needs_frameworks
@pytest.mark.parametrize("kind", ["hf-zero2", "fsdp2"])
def test_partial_saving__in_the_background_holds_every_value_of_its_step(tmp_path: Path, kind: str) -> None:
    finished = train(tmp_path, kind, "--background")
    assert finished.returncode == 0, finished.stderr[-3000:]
    check_values(kind, tmp_path)


def check_values(kind: str, out: Path) -> None:
    log = read_journal(out / "run")
    assert [(r.step, r.is_full) for r in log.records] == [(2, True), (4, False), (6, False)]
    for record in log.records:
        checkpoint = open_training_checkpoint(LocalStore(), Location.local(out / "run" / str(record.folder)))
        found = (checkpoint.format, checkpoint.framework, checkpoint.stage, checkpoint.world_size)
        assert found == ORIGINS[kind]
        names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
        wrong, compared = wrong_values(checkpoint, out / f"truth-{record.step}.npz", names)
        kinds = 3 if checkpoint.stage == 3 else 4
        assert (wrong, compared, checkpoint.step) == ([], kinds * len(names), record.step)
        if not record.is_full:
            assert {name for name, _ in checkpoint.states} == names
            not_saved = [f"{unit}: not saved" for unit in checkpoint.units.parameters if unit not in record.units]
            assert list(checkpoint.missing) == not_saved
        assert {s.value for n in names if (s := step_of(checkpoint, n))} == {record.step}


@needs_frameworks
def test_partial_saving__fits_its_full_checkpoint(trained: tuple[str, Path]) -> None:
    full, *partial = read_journal(trained[1] / "run").records
    base = open_training_checkpoint(LocalStore(), Location.local(trained[1] / "run" / str(full.folder)))
    for record in partial:
        other = open_training_checkpoint(LocalStore(), Location.local(trained[1] / "run" / str(record.folder)))
        reasons = [r for r in differences(base, other) if "only one has export" not in r]
        assert (reasons, base.missing, dict(base.units.tied)) == ([], (), dict(other.units.tied))


@needs_frameworks
def test_partial_saving__is_composed_from_the_log(trained: tuple[str, Path]) -> None:
    run = trained[1] / "run"
    units = read_journal(run).records[0].model_units
    found = composition_from_log_file(LocalStore(), Location.local(run / LOG_NAME), Location.local(run), 6)
    assert {s.step for s in found.sources} == {4, 6}
    assert [s.unit for s in found.sources] == sorted(units)


@needs_frameworks
def test_partial_saving__composes_to_what_the_engine_held_at_each_units_step(
    trained: tuple[str, Path], tmp_path: Path
) -> None:
    run = trained[1] / "run"
    found = composition_from_log_file(LocalStore(), Location.local(run / LOG_NAME), Location.local(run), 6)
    (tmp_path / "recipe.yml").write_text(found.to_yaml(Location.local(tmp_path)))
    compose(tmp_path / "recipe.yml", tmp_path / "composite")
    checkpoint = open_training_checkpoint(LocalStore(), Location.local(tmp_path / "composite"))
    shared_step = checkpoint.format == ZERO_FORMAT  # one counter serves units of different age
    for source in found.sources:
        names = set(checkpoint.units.parameters[source.unit])
        wrong, compared = wrong_values(checkpoint, trained[1] / f"truth-{source.step}.npz", names)
        assert compared >= 3 * len(names)
        assert [key for key in wrong if not (shared_step and key.startswith("step/"))] == []


@needs_frameworks
@pytest.mark.parametrize("strategy", ["filter", "latest-changed"])
def test_partial_saving__agrees_between_ranks_on_what_to_save(tmp_path: Path, strategy: str) -> None:
    finished = train(tmp_path, "hf-zero2", "--strategy", strategy)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for record in read_journal(tmp_path / "run").records[1:]:
        checkpoint = open_training_checkpoint(LocalStore(), Location.local(tmp_path / "run" / str(record.folder)))
        names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
        wrong, compared = wrong_values(checkpoint, tmp_path / f"truth-{record.step}.npz", names)
        assert (wrong, compared) == ([], 4 * len(names))
        assert 0 < len(record.units) < len(record.model_units)
        if strategy == "latest-changed":
            assert sum(state.nbytes for state in checkpoint.states.values()) <= 60_000


@needs_frameworks
@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        ("hf-zero2", "shard", ()),
        ("hf-zero2", "publish", ()),
        ("fsdp2", "shard", ()),
        ("fsdp2", "publish", ("--background",)),
    ],
)
def test_partial_saving__killed_in_the_middle_leaves_what_was_saved_before(
    tmp_path: Path, kind: str, place: str, options: tuple[str, ...]
) -> None:
    finished = train(tmp_path, kind, "--crash-at", "6", "--crash-in", place, *options)
    run = tmp_path / "run"
    assert finished.returncode != 0
    assert (tmp_path / "truth-6.npz").is_file()  # it came as far as the save it died in
    visible = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    full = "full-2" if kind == "fsdp2" else "checkpoint-2"
    assert visible == sorted([full, "partial-4", LOG_NAME])
    hidden = list(run.glob(".partial-6.*"))  # swept away by the next save of that step
    assert len(hidden) == 1 or (place == "shard" and not hidden)  # if rank 0 lived on, it cleaned up
    record = read_journal(run).records[-1]
    checkpoint = open_training_checkpoint(LocalStore(), Location.local(run / "partial-4"))
    names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
    wrong, _ = wrong_values(checkpoint, tmp_path / "truth-4.npz", names)
    assert (record.step, wrong) == (4, [])
