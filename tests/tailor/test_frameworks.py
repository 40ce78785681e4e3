"""Checkpoints of real frameworks, read, composed, saved in part, and resumed by the frameworks themselves.

Needs the environment of requirements/train.txt.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import FULL, NUMPY_TYPES, checkpoint_at, step_of, stored_values
from frameworks import folder_name as folder

from mergepipe import tailor
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive
from mergepipe.options import ComposeOptions
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework, TrainingCheckpoint, differences
from mergepipe.tailor.composition import CompositionReport
from mergepipe.tailor.formats.hf_trainer import ORDERS, defined_order, trainer_order
from mergepipe.tailor.saving.save_log import LOG_NAME, read_journal
from support.local_models import torch_archive
from support.public_names import DCP_FORMAT, HF_FORMAT, ZERO_FORMAT

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", HERE.parents[1] / ".venv-train" / "bin" / "python"))
SETTINGS = {"PYTHONPATH": str(HERE.parents[1] / "src"), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no environment for training: requirements/train.txt"),
]

RESUMED_KINDS = (
    "zero1-bf16", "zero2", "zero2-robin", "zero2-tied", "zero3", "zero3-bf16", "zero2-fp16", "zero3-fp16",
    "zero2-offload", "zero3-offload", "zero2-layers", "zero3-layers", "hf", "hf-zero2", "hf-zero3", "dcp", "dcp-tied",
    "dcp-flat", "accelerate-full", "accelerate-sharded",
)  # fmt: skip
KINDS = ("zero1", "zero2-bf16", "verl", *RESUMED_KINDS)
OLD, NEW = 2, 4
TWIN, ITSELF, MIXED, OTHER = 50, 91, 92, 93  # "steps" that only name folders
UNITS = "layers even, norm"
Truth = Mapping[str, Any]


def run(*arguments: object, ranks: int = 2, layers: int = 3, is_universal: bool = False, fails: bool = False) -> str:
    """Run `frameworks.py`, or another script, with the interpreter for training; return what it prints."""
    environment = os.environ | SETTINGS | {"MERGEPIPE_TEST_RANKS": str(ranks), "MERGEPIPE_TEST_LAYERS": str(layers)}
    environment |= {"MERGEPIPE_TEST_UNIVERSAL": "1"} if is_universal else {}
    finished = subprocess.run(
        [str(PYTHON), *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert (finished.returncode != 0) == fails, finished.stderr[-3000:]
    return finished.stdout


SCRIPT = HERE / "frameworks.py"


def resume(
    kind: str, out: Path, *steps: int, ranks: int = 2, layers: int = 3, is_universal: bool = False
) -> list[Truth]:
    """What the framework loads from each checkpoint, the losses of its next steps, and the states after them."""
    run(SCRIPT, "resume", kind, out, *steps, ranks=ranks, layers=layers, is_universal=is_universal)
    return [dict(np.load(out / f"resumed-{step}.npz")) for step in steps]


@pytest.fixture(scope="module", name="trained")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Truth, Truth]]:
    """A run really trained by the framework, and what it loads from its two checkpoints."""

    @cache
    def train(kind: str) -> tuple[Path, Truth, Truth]:
        out = tmp_path_factory.mktemp("runs") / kind
        run(SCRIPT, "train", kind, out)
        old, new = resume(kind, out, OLD, NEW)
        return out, old, new

    return train


@pytest.fixture(name="copied")
def copy_run(trained: Callable[[str], tuple[Path, Truth, Truth]], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: shutil.copytree(trained(kind)[0], tmp_path / "run")


def is_state(key: str) -> bool:
    return "/" in key and not key.startswith(("after/", "loss/"))


def wrong_values(
    checkpoint: TrainingCheckpoint, truth: Truth, names: Collection[str] | None = None
) -> tuple[list[str], int]:
    """Which values of all parameters, or of some, are not what the framework held, and how many were compared."""
    wrong, compared = [], 0
    for key in filter(is_state, truth):
        kind, _, name = key.partition("/")
        owner = checkpoint.units.tied.get(name, name)
        if names is not None and name not in names:
            continue
        if kind == "step":
            counter = step_of(checkpoint, owner)
            matches = counter is not None and counter.value == truth[key]
        elif (owner, kind) in checkpoint.states:
            matches = np.array_equal(stored_values(checkpoint.states[owner, kind]), truth[key])
        else:
            matches = kind == WEIGHT and checkpoint.stage == 3  # computed from the masters
        compared += 1
        wrong += [] if matches else [key]
    return wrong, compared


# --- checkpoints as the framework saves them ---


@pytest.mark.parametrize("kind", KINDS)
def test_open_training_checkpoint__holds_what_the_framework_loads(
    trained: Callable[[str], tuple[Path, Truth, Truth]], kind: str
) -> None:
    out, *truths = trained(kind)
    for step, truth in zip((OLD, NEW), truths, strict=True):
        checkpoint = checkpoint_at(out / folder(kind, step))
        wrong, compared = wrong_values(checkpoint, truth)
        assert (wrong, compared >= 87, checkpoint.step, checkpoint.missing) == ([], True, step, ())
        is_tied = kind.endswith("-tied")
        units = ["embed", "layer 0", "layer 1", "layer 2", "norm", *([] if is_tied else ["lm_head"])]
        assert ([str(u) for u in checkpoint.units.parameters], bool(checkpoint.units.tied)) == (units, is_tied)
    states = checkpoint.states
    both = [name for name in checkpoint.parameters if {(name, FP32), (name, WEIGHT)} <= states.keys()]
    assert bool(both) == kind.startswith(("zero1", "zero2", "hf-zero2"))
    for name in both:  # stored weights are the masters, cast
        master, weight = stored_values(states[name, FP32]), states[name, WEIGHT]
        cast = master.astype(NUMPY_TYPES[weight.dtype.name]).astype(np.float32)
        assert np.array_equal(cast, stored_values(weight)), name


def test_trainer_order__is_that_of_transformers() -> None:
    orders = json.loads(run(HERE / "list_parameters.py"))
    for case, (decayed, plain, model_type) in orders.items():
        defined = defined_order(model_type, sorted(decayed + plain))
        assert defined is not None, case
        assert trainer_order(defined) == (tuple(decayed), tuple(plain)), case
    assert {model_type for _, _, model_type in orders.values()} == set(ORDERS)


def test_unknown_architecture__is_asked_from_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from mergepipe.storage.location import Location;"
        "from mergepipe.tailor.formats.hf_trainer import ask_transformers as ask;"
        "print(*map(len, ask(Location.of(sys.argv[1]), 'gpt_neox')))"
    )
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": 2,
              "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # 4 matrices a layer, both embeddings; 4 biases and 2 norms a layer, the last norm
    assert run("-c", script, tmp_path).split() == ["10", "18"]


# --- composites and averages of them ---


def compose_as(kind: str, out: Path, step: int, text: str, options: ComposeOptions = FULL) -> CompositionReport:
    recipe = out / f"recipe-{step}.yml"
    recipe.write_text(text)
    return tailor.compose(recipe, out / folder(kind, step), options=options)


def recipe(default: str, source: str) -> str:
    return f"default: {default}\ntake: [{{from: {source}, units: [{UNITS}]}}]\n"


def is_old(name: str) -> bool:
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) % 2 == 0 if layer else name.endswith("model.norm.weight")


def misplaced(loaded: Truth, old: Truth, new: Truth, kind: str) -> tuple[list[str], int]:
    """States that are not those that the framework loads from their source, and how many were compared.

    DeepSpeed and the Trainer with it have one counter a flat group, which is the newest.
    """
    keys = [*filter(is_state, loaded)]
    wrong = [k for k in keys if not np.array_equal(loaded[k], (old if is_old(k.partition("/")[2]) else new)[k])]
    assert "zero" not in kind or not any(k.startswith("step/") for k in keys)
    return wrong, len(keys)


@pytest.mark.parametrize("kind", RESUMED_KINDS)
def test_composite__resumes_with_the_values_of_its_sources(
    trained: Callable[[str], tuple[Path, Truth, Truth]], copied: Callable[[str], Path], kind: str
) -> None:
    out = copied(kind)
    shutil.copytree(out / folder(kind, NEW), out / folder(kind, TWIN))
    compose_as(kind, out, ITSELF, recipe(folder(kind, NEW), folder(kind, TWIN)))
    compose_as(kind, out, MIXED, recipe(folder(kind, NEW), folder(kind, OLD)))
    same, mix = resume(kind, out, ITSELF, MIXED)
    _, old, original = trained(kind)
    different = [key for key in original if not np.array_equal(original[key], same[key])]
    assert (different, original.keys()) == ([], same.keys())
    assert sum(key.startswith("loss/") for key in original) == (1 if kind == "hf" else 2)
    wrong, compared = misplaced(mix, old, original, kind)
    assert (wrong, compared >= 87) == ([], True)
    assert not np.array_equal(mix["loss/0"], original["loss/0"])


TURNED = [(OLD, 2), (NEW, 0), (OLD, 1)]
DEEPER = [(NEW, 0), (OLD, 2), (NEW, 1), (OLD, 2), (OLD, 2)]
STACKS = [
    *((kind, TURNED) for kind in ("hf", "zero1-bf16", "zero2", "zero3", "zero2-layers", "zero3-layers", "dcp")),
    *((kind, DEEPER) for kind in ("hf", "zero1-bf16", "zero2", "zero2-tied", "zero3", "zero3-bf16", "zero2-fp16")),
    *((kind, DEEPER) for kind in ("hf-zero2", "hf-zero3", "dcp", "dcp-tied", "dcp-flat")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stack"), STACKS, ids=[f"{kind}-{len(stack)}" for kind, stack in STACKS])
def test_composite__of_layers_in_other_positions_resumes_with_the_values_of_its_sources(
    trained: Callable[[str], tuple[Path, Truth, Truth]],
    copied: Callable[[str], Path],
    kind: str,
    stack: list[tuple[int, int]],
) -> None:
    """The framework builds a model with as many layers as were stacked, and trains on."""
    out = copied(kind)
    entries = [f"{{sources: [{{model: {folder(kind, s)}, layer_range: [{i}, {i + 1}]}}]}}" for s, i in stack]
    text = f"merge_method: passthrough\nbase_model: {folder(kind, NEW)}\nslices: [{', '.join(entries)}]\n"
    compose_as(kind, out, OTHER, text)
    (loaded,) = resume(kind, out, OTHER, layers=len(stack))
    _, old, new = trained(kind)
    keys = [*filter(is_state, loaded)]
    wrong = []
    for key in keys:
        layer = re.search(r"layers\.(\d+)\.", key)
        step, number = stack[int(layer[1])] if layer else (NEW, 0)
        before = re.sub(r"layers\.\d+\.", f"layers.{number}.", key)
        wrong += [] if np.array_equal(loaded[key], (old if step == OLD else new)[before]) else [key]
    assert (wrong, len(keys) >= 87) == ([], True)
    losses = [value for key, value in loaded.items() if key.startswith("loss/")]
    assert losses
    assert all(np.isfinite(loss).all() for loss in losses)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("hf", "last"), ("zero2-bf16", "last"), ("zero3-bf16", "last"), ("hf-zero3", "last"), ("dcp", "last"),
        ("zero1", "average"), ("hf", "average"),
    ],
)  # fmt: skip
def test_average__resumes_with_averaged_weights_and_moments(
    trained: Callable[[str], tuple[Path, Truth, Truth]], copied: Callable[[str], Path], kind: str, optimizer: str
) -> None:
    """A quarter of step 2 and three of step 4, in float64 of what the framework loads; or the newest moments."""
    out = copied(kind)
    sources = [out / folder(kind, step) for step in (OLD, NEW)]
    tailor.average(sources, out / folder(kind, OTHER), weights=(1, 3), optimizer=optimizer, self_check="full")
    (loaded,) = resume(kind, out, OTHER)
    _, old, new = trained(kind)
    keys = [*filter(is_state, loaded)]
    averaged = ("fp32", "weight", *(("exp_avg", "exp_avg_sq") if optimizer == "average" else ()))
    for key in keys:
        state, _, name = key.partition("/")
        if state not in averaged:
            assert np.array_equal(loaded[key], new[key]), key
            continue
        is_master = state in ("fp32", "weight") and f"fp32/{name}" in old
        first, second = (truth[f"fp32/{name}" if is_master else key].astype(np.float64) for truth in (old, new))
        tolerance = 2.0**-8 if state == "weight" and kind.endswith("-bf16") else 1e-6
        distances = np.abs(loaded[key] - (0.25 * first + 0.75 * second))
        assert (distances <= tolerance * np.maximum(np.abs(first), np.abs(second))).all(), key
    assert len(keys) >= 87
    assert {key.partition("/")[0] for key in keys} >= {"exp_avg", "exp_avg_sq"}
    assert all(np.isfinite(loaded[key]).all() for key in loaded if key.startswith("loss/"))


def convert(folder: Path) -> Path:
    """DeepSpeed's own universal form of a tag directory, beside it."""
    out = folder.with_name(f"{folder.name}-converted")
    options = ("--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1")
    folders = (f"--input_folder={folder}", f"--output_folder={out}")
    run("-m", "deepspeed.checkpoint.ds_to_universal", *folders, *options)
    return out


def universal_files(folder: Path) -> dict[str, object]:
    """The values of a universal checkpoint's files by their names.

    Of the optimizer's options, DeepSpeed repeats one rank's flat tensors in stage 3, which no loader reads.
    """

    def plain(archive: TorchArchive, value: object) -> object:
        if isinstance(value, PickledTensor):
            tensor = archive.locate(value, "")
            raw = tensor.file.local_path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
            return tensor.dtype.name, tensor.shape, raw
        if isinstance(value, dict):
            return {key: plain(archive, item) for key, item in value.items() if key != "fp32_flat_groups"}
        if isinstance(value, list | tuple):
            return [plain(archive, item) for item in value]
        return (value.kind.name, plain(archive, value.state)) if isinstance(value, Record) else value

    files = {}
    for path in folder.glob("zero/**/*.pt"):
        archive = torch_archive(path)
        root = archive.root
        if isinstance(root, dict) and "optimizer_state_dict" in root:
            base = root["optimizer_state_dict"]
            root = {**root, "optimizer_state_dict": {**base, "state": {0: {"step": base["state"][0]["step"]}}}}
        files[str(path.relative_to(folder))] = plain(archive, root)
    return files


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero2-fp16", "zero3-fp16"])
def test_universal_checkpoint__is_exported_and_composed_as_deepspeed_converts_and_loads(
    trained: Callable[[str], tuple[Path, Truth, Truth]], copied: Callable[[str], Path], kind: str
) -> None:
    out = copied(kind)
    old, new = (convert(out / folder(kind, step)) for step in (OLD, NEW))
    exported = replace(FULL, export="universal")
    compose_as(kind, out, ITSELF, f"default: {folder(kind, NEW)}\n", exported)
    theirs, ours = (universal_files(folder) for folder in (new, out / folder(kind, ITSELF)))
    assert [name for name in theirs | ours if theirs.get(name) != ours.get(name)] == []
    assert len(theirs) == (91 if kind.startswith("zero3") else 121)
    compose_as(kind, out, MIXED, recipe(folder(kind, NEW), folder(kind, OLD)), exported)
    compose_as(kind, out, OTHER, recipe(new.name, old.name))
    for loaded in resume(kind, out, MIXED, OTHER, ranks=3, is_universal=True):
        wrong, compared_states = misplaced(loaded, *trained(kind)[1:], kind)
        assert (wrong, compared_states >= 87, int(loaded["global_steps"])) == ([], True, NEW)
        assert all(np.isfinite(loaded[key]).all() for key in loaded if key.startswith("loss/"))


def test_universal_checkpoint__of_the_trainer_resumes(
    trained: Callable[[str], tuple[Path, Truth, Truth]], copied: Callable[[str], Path]
) -> None:
    kind = "hf-zero2"
    out = copied(kind)
    compose_as(kind, out, MIXED, recipe(folder(kind, NEW), folder(kind, OLD)), replace(FULL, export="universal"))
    (loaded,) = resume(kind, out, MIXED, ranks=3, is_universal=True)
    wrong, compared = misplaced(loaded, *trained(kind)[1:], kind)
    assert (wrong, compared >= 87, int(loaded["global_steps"])) == ([], True, NEW)


# --- partial saves: full at step 2, in part at 4 and 6 ---


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
PARTIAL_KINDS = ("hf", "hf-zero1", "hf-zero2", "hf-zero3", "fsdp2", "fsdp2-tied", "plain", "hf-fp16", "hf-zero2-fp16")
ENGINE = {"scheduled": 4, "global_steps": 4, "global_samples": 16}
LOOP = {"global_steps": 4}
COUNTS = {
    "hf": {"scheduled": 4}, "hf-fp16": {"scheduled": 4, "loss_scale": 1024},
    "hf-zero2-fp16": ENGINE | {"loss_scale": 512}, "fsdp2": LOOP, "fsdp2-tied": LOOP, "plain": LOOP,
    **dict.fromkeys(PARTIAL_KINDS[1:4], ENGINE),
}  # fmt: skip


@pytest.fixture(scope="module", name="saved")
def save_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(kind: str) -> Path:
        out = tmp_path_factory.mktemp("partial") / kind
        run(SCRIPT, "partial", kind, out)
        return out

    return save


def compose_log(kind: str, run: Path, at: int) -> CompositionReport:
    """Compose what the log of partial saves says of a step."""
    return compose_as(kind, run, 99, tailor.recipe(run, from_log=run / LOG_NAME, at=at, folder=run))


@pytest.mark.parametrize("kind", ORIGINS)
def test_partial_saving__holds_every_value_of_the_engine(saved: Callable[[str], Path], kind: str) -> None:
    check_values(kind, saved(kind))


@pytest.mark.parametrize("kind", ["hf-zero2", "fsdp2"])
def test_partial_saving__in_the_background_holds_every_value_of_its_step(tmp_path: Path, kind: str) -> None:
    run(SCRIPT, "partial", kind, tmp_path, "--background")
    check_values(kind, tmp_path)


def check_values(kind: str, out: Path) -> None:
    log = read_journal(out / "run")
    assert [(r.step, r.is_full) for r in log.records] == [(2, True), (4, False), (6, False)]
    full = checkpoint_at(out / "run" / str(log.records[0].folder))
    for record in log.records:
        checkpoint = checkpoint_at(out / "run" / str(record.folder))
        found = (checkpoint.format, checkpoint.framework, checkpoint.stage, checkpoint.world_size)
        assert found == ORIGINS[kind]
        names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
        wrong, compared = wrong_values(checkpoint, np.load(out / f"truth-{record.step}.npz"), names)
        kinds = 3 if checkpoint.stage == 3 else 4
        assert (wrong, compared, checkpoint.step) == ([], kinds * len(names), record.step)
        if not record.is_full:
            assert {name for name, _ in checkpoint.states} == names
            not_saved = [f"{unit}: not saved" for unit in checkpoint.units.parameters if unit not in record.units]
            assert list(checkpoint.missing) == not_saved
        assert {s.value for n in names if (s := step_of(checkpoint, n))} == {record.step}
        reasons = [r for r in differences(full, checkpoint) if "only one has export" not in r]
        assert (reasons, full.missing, dict(full.units.tied)) == ([], (), dict(checkpoint.units.tied))


@pytest.mark.parametrize("kind", ORIGINS)
def test_partial_saving__composes_to_what_the_engine_held_at_each_units_step(
    saved: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    out = saved(kind)
    shutil.copytree(out / "run", tmp_path / "run")
    report = compose_log(kind, tmp_path / "run", 6)
    checkpoint = checkpoint_at(tmp_path / "run" / folder(kind, 99))
    shared_step = checkpoint.format == ZERO_FORMAT  # one counter serves units of different age
    steps = {unit.unit: unit.sources[0].step for unit in report.plan.staleness}
    assert ([*steps], {*steps.values()}) == ([str(unit) for unit in checkpoint.units.parameters], {4, 6})
    for unit, names in checkpoint.units.parameters.items():
        wrong, compared = wrong_values(checkpoint, np.load(out / f"truth-{steps[str(unit)]}.npz"), names)
        assert compared >= 3 * len(names)
        assert [key for key in wrong if not (shared_step and key.startswith("step/"))] == []


@pytest.mark.parametrize("strategy", ["filter", "latest-changed"])
def test_partial_saving__agrees_between_ranks_on_what_to_save(tmp_path: Path, strategy: str) -> None:
    run(SCRIPT, "partial", "hf-zero2", tmp_path, "--strategy", strategy)
    for record in read_journal(tmp_path / "run").records[1:]:
        checkpoint = checkpoint_at(tmp_path / "run" / str(record.folder))
        names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
        wrong, compared = wrong_values(checkpoint, np.load(tmp_path / f"truth-{record.step}.npz"), names)
        assert (wrong, compared) == ([], 4 * len(names))
        assert 0 < len(record.units) < len(record.model_units)
        if strategy == "latest-changed":
            assert sum(state.nbytes for state in checkpoint.states.values()) <= 60_000


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
    run(SCRIPT, "partial", kind, tmp_path, "--crash-at", "6", "--crash-in", place, *options, fails=True)
    saves = tmp_path / "run"
    assert (tmp_path / "truth-6.npz").is_file()  # it came as far as the save it died in
    visible = sorted(path.name for path in saves.iterdir() if not path.name.startswith("."))
    full = "full-2" if kind == "fsdp2" else "checkpoint-2"
    assert visible == sorted([full, "partial-4", LOG_NAME])
    hidden = list(saves.glob(".partial-6.*"))  # swept away by the next save of that step
    assert len(hidden) == 1 or (place == "shard" and not hidden)  # if rank 0 lived on, it cleaned up
    record = read_journal(saves).records[-1]
    checkpoint = checkpoint_at(saves / "partial-4")
    names = {name for unit in record.units for name in checkpoint.units.parameters[unit]}
    wrong, _ = wrong_values(checkpoint, np.load(tmp_path / "truth-4.npz"), names)
    assert (record.step, wrong) == (4, [])


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_composite__of_partial_checkpoints_resumes_at_their_step(
    saved: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Every state is that of its source, and whatever is of no unit is that of the partial save."""
    out = shutil.copytree(saved(kind), tmp_path / "saves")
    report = compose_log(kind, out / "run", 4)
    newer = {unit.unit for unit in report.plan.staleness if unit.sources[0].age == 0}
    assert (0 < len(newer) < len(report.plan.staleness), report.plan.assignment.state.step) == (True, 4)

    (loaded,) = resume(kind, out / "run", 99)
    truths = {step: np.load(out / f"truth-{step}.npz") for step in (2, 4)}
    units = report.plan.assignment.skeleton.units
    keys = [*filter(is_state, loaded)]
    wrong = [
        key
        for key in keys
        if not np.array_equal(loaded[key], truths[4 if str(units.unit_of(key.partition("/")[2])) in newer else 2][key])
    ]
    assert (wrong, len(keys) >= 87) == ([], True)
    scheduled = 1e-2 * 2 / 6 if kind.startswith("hf") else 1e-2 / 5  # what each schedule gives after step 4 (of 6)
    assert loaded["lr"] == pytest.approx([scheduled, scheduled], rel=1e-6)
    counters = ("scheduled", "global_steps", "global_samples", "loss_scale")
    assert {key: int(loaded[key]) for key in counters if key in loaded} == COUNTS[kind]
    if kind.startswith("hf-zero"):
        made = out / "run" / folder(kind, 99)
        assert (made / "latest").read_text() == "global_step4"
        assert [path.name for path in made.glob("gl*")] == ["global_step4"]


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_composite__of_one_save_in_parts_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: str) -> None:
    """All units were saved at step 4: what comes after equals the run that was not interrupted, to the last bit."""
    run(SCRIPT, "partial", kind, tmp_path, "--strategy", "everything")
    report = compose_log(kind, tmp_path / "run", 4)
    assert (report.plan.assignment.skeleton.step, report.plan.assignment.state.step) == (2, 4)
    (loaded,) = resume(kind, tmp_path / "run", 99)
    truth = np.load(tmp_path / "truth-6.npz")
    wrong = [key for key in truth.files if not np.array_equal(loaded[f"after/{key}"], truth[key])]
    assert (wrong, len(truth.files) >= 87) == ([], True)
