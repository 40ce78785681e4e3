"""Composites resumed by the frameworks themselves. Needs the environment of requirements/train.txt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import FULL

from mergepipe.options import ComposeOptions
from mergepipe.storage.location import Location
from mergepipe.tailor import api
from mergepipe.tailor.composition import CompositionReport, compose

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", HERE.parents[1] / ".venv-train" / "bin" / "python"))
TORCH_KINDS = ("dcp", "dcp-tied", "dcp-flat", "accelerate-full", "accelerate-sharded", "fsdp2", "fsdp2-tied", "plain")
KINDS = (
    "zero1-bf16", "zero2", "zero2-robin", "zero2-tied", "zero3", "zero3-bf16", "zero2-fp16", "zero3-fp16",
    "zero2-offload", "zero3-offload", "zero2-layers", "zero3-layers", "hf", "hf-zero2", "hf-zero3", *TORCH_KINDS[:5],
)  # fmt: skip
OLD, NEW = 2, 4
PARTIAL_KINDS = ("hf", "hf-zero1", "hf-zero2", "hf-zero3", "fsdp2", "fsdp2-tied", "plain", "hf-fp16", "hf-zero2-fp16")
ENGINE = {"scheduled": 4, "global_steps": 4, "global_samples": 16}
LOOP = {"global_steps": 4}
COUNTS = {
    "hf": {"scheduled": 4}, "hf-fp16": {"scheduled": 4, "loss_scale": 1024},
    "hf-zero2-fp16": ENGINE | {"loss_scale": 512}, "fsdp2": LOOP, "fsdp2-tied": LOOP, "plain": LOOP,
    **dict.fromkeys(PARTIAL_KINDS[1:4], ENGINE),
}  # fmt: skip
SOURCE_ENVIRONMENT = dict(os.environ, PYTHONPATH=str(HERE.parents[1] / "src"))
TWIN, ITSELF, MIXED, OTHER = 50, 91, 92, 93  # "steps" that only name folders
UNITS = "layers even, norm"
needs_frameworks = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no environment for training: requirements/train.txt"
)


def folder(kind: str, step: int) -> str:
    prefix = "step-" if kind in TORCH_KINDS else "checkpoint-" if kind.startswith("hf") else "global_step"
    return f"{prefix}{step}"


def train(kind: str, out: Path) -> None:
    subprocess.run([PYTHON, HERE / "make_checkpoints.py", kind, out], check=True, capture_output=True, timeout=600)


def resume(kind: str, out: Path, *steps: int, ranks: int = 2, is_universal: bool = False) -> list[Mapping[str, Any]]:
    """What the framework loads from each checkpoint, the losses of its next steps, and the states after them."""
    environment = dict(SOURCE_ENVIRONMENT, MERGEPIPE_TEST_RANKS=str(ranks))
    if is_universal:
        environment["MERGEPIPE_TEST_UNIVERSAL"] = "1"
    command = [str(PYTHON), str(HERE / "resume.py"), kind, str(out), *map(str, steps)]
    subprocess.run(command, check=True, capture_output=True, timeout=900, env=environment)
    return [dict(np.load(out / f"resumed-{step}.npz")) for step in steps]


def compose_as(kind: str, out: Path, step: int, text: str, options: ComposeOptions = FULL) -> None:
    recipe = out / f"recipe-{step}.yml"
    recipe.write_text(text)
    compose(Location.local(recipe), Location.local(out / folder(kind, step)), options, lambda *_: None)


def mixed(kind: str) -> str:
    return f"default: {folder(kind, NEW)}\ntake: [{{from: {folder(kind, OLD)}, units: [{UNITS}]}}]\n"


def is_old(name: str) -> bool:
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) % 2 == 0 if layer else name.endswith("model.norm.weight")


def misplaced(loaded: Mapping[str, Any], out: Path, kind: str) -> tuple[list[str], int]:
    """States that are not those that the framework loads from their source, and how many were compared.

    DeepSpeed and the Trainer with it have one counter a flat group, which is the newest.
    """
    old, new = (np.load(out / f"truth-{step}.npz") for step in (OLD, NEW))
    keys = [k for k in loaded if "/" in k and not k.startswith(("after/", "loss/"))]
    wrong = [k for k in keys if not np.array_equal(loaded[k], (old if is_old(k.partition("/")[2]) else new)[k])]
    assert kind in ("hf", *TORCH_KINDS) or not any(k.startswith("step/") for k in keys)
    return wrong, len(keys)


@needs_frameworks
@pytest.mark.parametrize("kind", KINDS)
def test_composite__resumes_with_the_values_of_its_sources(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "run"
    train(kind, out)
    shutil.copytree(out / folder(kind, NEW), out / folder(kind, TWIN))
    itself = f"default: {folder(kind, NEW)}\ntake: [{{from: {folder(kind, TWIN)}, units: [{UNITS}]}}]\n"
    compose_as(kind, out, ITSELF, itself)
    compose_as(kind, out, MIXED, mixed(kind))
    original, same, mix = resume(kind, out, NEW, ITSELF, MIXED)

    different = [key for key in original if not np.array_equal(original[key], same[key])]
    assert (different, original.keys()) == ([], same.keys())
    assert sum(key.startswith("loss/") for key in original) == (1 if kind == "hf" else 2)

    wrong, compared = misplaced(mix, out, kind)
    assert (wrong, compared >= 87) == ([], True)
    assert not np.array_equal(mix["loss/0"], original["loss/0"])


def train_partially(kind: str, out: Path, *options: str) -> None:
    """A run saved in full at step 2 and in part at 4 and 6."""
    script = HERE / "saving" / "train_partially.py"
    command = [str(PYTHON), str(script), kind, str(out), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=SOURCE_ENVIRONMENT)


def compose_log(kind: str, run: Path, step: int, options: ComposeOptions = FULL) -> CompositionReport:
    """Compose what the log of partial saves says of step 4."""
    text = api.recipe(run, from_log=run / "partial-saves.jsonl", at=4, folder=run)
    (run / "recipe.yml").write_text(text)
    return compose(
        Location.local(run / "recipe.yml"), Location.local(run / folder(kind, step)), options, lambda *_: None
    )


@needs_frameworks
@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_composite__of_partial_checkpoints_resumes_at_their_step(tmp_path: Path, kind: str) -> None:
    """Every state is that of its source, and whatever is of no unit is that of the partial save."""
    train_partially(kind, tmp_path)
    run = tmp_path / "run"
    report = compose_log(kind, run, 99)
    newer = {unit.unit for unit in report.plan.staleness if unit.sources[0].age == 0}
    assert (0 < len(newer) < len(report.plan.staleness), report.plan.assignment.state.step) == (True, 4)

    (loaded,) = resume(kind, run, 99)
    truths = {step: np.load(tmp_path / f"truth-{step}.npz") for step in (2, 4)}
    units = report.plan.assignment.skeleton.units
    keys = [key for key in loaded if "/" in key and not key.startswith(("after/", "loss/"))]
    wrong = [
        key
        for key in keys
        if not np.array_equal(loaded[key], truths[4 if str(units.unit_of(key.partition("/")[2])) in newer else 2][key])
    ]
    assert (wrong, len(keys) >= 87) == ([], True)
    scheduled = 1e-2 / 5 if kind in TORCH_KINDS else 1e-2 * 2 / 6  # what each schedule gives after step 4 (of 6)
    assert loaded["lr"] == pytest.approx([scheduled, scheduled], rel=1e-6)
    counters = ("scheduled", "global_steps", "global_samples", "loss_scale")
    counted = {key: int(loaded[key]) for key in counters if key in loaded}
    assert counted == COUNTS[kind]
    if kind.startswith("hf-zero"):
        assert (
            (run / "checkpoint-99" / "latest").read_text(),
            [p.name for p in (run / "checkpoint-99").glob("gl*")],
        ) == ("global_step4", ["global_step4"])


@needs_frameworks
@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_composite__of_one_save_in_parts_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: str) -> None:
    """All units were saved at step 4: what comes after equals the run that was not interrupted, to the last bit."""
    train_partially(kind, tmp_path, "--strategy", "everything")
    run = tmp_path / "run"
    report = compose_log(kind, run, 99)
    assert (report.plan.assignment.skeleton.step, report.plan.assignment.state.step) == (2, 4)
    (loaded,) = resume(kind, run, 99)
    truth = np.load(tmp_path / "truth-6.npz")
    wrong = [key for key in truth.files if not np.array_equal(loaded[f"after/{key}"], truth[key])]
    assert (wrong, len(truth.files) >= 87) == ([], True)


@needs_frameworks
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("hf", "last"), ("zero2-bf16", "last"), ("zero3-bf16", "last"), ("hf-zero3", "last"), ("dcp", "last"),
        ("zero1", "average"), ("hf", "average"),
    ],
)  # fmt: skip
def test_average__resumes_with_averaged_weights_and_moments(tmp_path: Path, kind: str, optimizer: str) -> None:
    """A quarter of step 2 and three of step 4, in float64 of what the framework loads; or the newest moments."""
    out = tmp_path / "run"
    train(kind, out)
    sources = [out / folder(kind, step) for step in (OLD, NEW)]
    api.average(sources, out / folder(kind, OTHER), weights=(1, 3), optimizer=optimizer, self_check="full")
    (loaded,) = resume(kind, out, OTHER)
    old, new = (np.load(out / f"truth-{step}.npz") for step in (OLD, NEW))
    keys = [key for key in loaded if "/" in key and not key.startswith(("after/", "loss/"))]
    averaged = ("fp32", "weight", *(("exp_avg", "exp_avg_sq") if optimizer == "average" else ()))
    for key in keys:
        state, _, name = key.partition("/")
        if state not in averaged:
            assert np.array_equal(loaded[key], new[key]), key
            continue
        is_master = state in ("fp32", "weight") and f"fp32/{name}" in old.files
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
    command = [str(PYTHON), "-m", "deepspeed.checkpoint.ds_to_universal", f"--input_folder={folder}"]
    command += [f"--output_folder={out}", "--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
    environment = dict(os.environ, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=environment)
    return out


@needs_frameworks
@pytest.mark.parametrize("kind", ["zero1-bf16", "zero2-fp16", "zero3-fp16"])
def test_universal_checkpoint__is_exported_and_composed_as_deepspeed_converts_and_loads(
    tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "run"
    train(kind, out)
    old, new = (convert(out / folder(kind, step)) for step in (OLD, NEW))
    exported = replace(FULL, export="universal")
    compose_as(kind, out, ITSELF, f"default: {folder(kind, NEW)}\n", exported)
    command = [str(PYTHON), str(HERE / "compare_universal.py"), str(new), str(out / folder(kind, ITSELF))]
    compared = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert compared.stdout.split()[-2:] == ["equal", "91" if kind.startswith("zero3") else "121"]

    compose_as(kind, out, MIXED, mixed(kind), exported)
    compose_as(kind, out, OTHER, f"default: {new.name}\ntake: [{{from: {old.name}, units: [{UNITS}]}}]\n")
    for loaded in resume(kind, out, MIXED, OTHER, ranks=3, is_universal=True):
        wrong, compared_states = misplaced(loaded, out, kind)
        assert (wrong, compared_states >= 87, int(loaded["global_steps"])) == ([], True, NEW)
        assert all(np.isfinite(loaded[key]).all() for key in loaded if key.startswith("loss/"))


@needs_frameworks
def test_universal_checkpoint__of_the_trainer_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("hf-zero2", out)
    compose_as("hf-zero2", out, MIXED, mixed("hf-zero2"), replace(FULL, export="universal"))
    (loaded,) = resume("hf-zero2", out, MIXED, ranks=3, is_universal=True)
    wrong, compared = misplaced(loaded, out, "hf-zero2")
    assert (wrong, compared >= 87, int(loaded["global_steps"])) == ([], True, NEW)
