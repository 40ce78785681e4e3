"""A configuration that decides how weights are read belongs to the key of a run, to plans and to parts.

Between an interruption and the same command, a plan and its run, one part and the next, the configuration of a
quantised model is corrected: the output is that of an undisturbed run, or the change is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import mergepipe
from mergepipe.errors import ConflictError, MergePipeError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.runs.progress import MergeProgress
from mergepipe.snapshots import work_log
from support.disk_families import weights_digest
from support.faults import replaced
from support.model_folders import recipe_of, write_adapter, write_model

LAYERS = 6
OPTIONS = MergeOptions(catalog=False, threads=1, shard_bytes=20_000)
OF_PARTS = OutputOptions(catalog=False, threads=1, shard_bytes=20_000)


def write_quantised(folder: Path) -> None:
    """Write a GPTQ model, whose configuration says whether its zero points are one less than they say."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.up_proj"
        tensors[f"{name}.qweight"] = random.integers(0, 2**31 - 1, (16, 64), dtype=np.int32)
        tensors[f"{name}.qzeros"] = random.integers(0, 2**31 - 1, (1, 8), dtype=np.int32)
        tensors[f"{name}.scales"] = np.full((1, 64), 0.01, np.float16)
        tensors[f"{name}.g_idx"] = np.zeros(128, np.int32)
    write_model(folder, tensors)


def configure(folder: Path, checkpoint_format: str) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": checkpoint_format}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": stated}))


@pytest.fixture(name="recipe")
def make_recipe(tmp_path: Path) -> dict[str, object]:
    write_quantised(tmp_path / "quantised")
    configure(tmp_path / "quantised", "gptq")
    zeros = {f"model.layers.{i}.mlp.up_proj.weight": np.zeros((64, 128), ml_dtypes.bfloat16) for i in range(LAYERS)}
    write_model(tmp_path / "plain", zeros)
    half = {"weight": 0.5}
    return recipe_of("linear", {tmp_path / "quantised": half, tmp_path / "plain": half})


def undisturbed(recipe: dict[str, object], tmp_path: Path) -> str:
    mergepipe.merge(recipe, tmp_path / "undisturbed", options=OPTIONS)
    return weights_digest(tmp_path / "undisturbed")


def interrupt(recipe: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the merge, and stop it behind its first durable tensors."""
    monkeypatch.setattr(work_log, "UNIT_SECONDS", 0.0)
    monkeypatch.setattr(work_log, "UNIT_BYTES", 1)
    log = tmp_path / ".out.mergepipe-staging" / "log"

    def stopping(note: Callable[..., object]) -> Callable[..., object]:
        def note_or_stop(*arguments: object) -> object:
            if b'"unit"' in log.read_bytes():
                raise KeyboardInterrupt
            return note(*arguments)

        return note_or_stop

    with replaced(MergeProgress, "note", stopping), pytest.raises(KeyboardInterrupt):
        mergepipe.merge(recipe, tmp_path / "out", options=OPTIONS)
    assert b'"unit"' in log.read_bytes()


def test_merge__resumed_after_its_configuration_changed_is_an_undisturbed_run(
    tmp_path: Path, recipe: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(recipe, tmp_path, monkeypatch)
    configure(tmp_path / "quantised", "gptq_v2")
    mergepipe.merge(recipe, tmp_path / "out", options=OPTIONS)
    assert weights_digest(tmp_path / "out") == undisturbed(recipe, tmp_path)


def test_run__refuses_a_plan_whose_configuration_changed(tmp_path: Path, recipe: dict[str, object]) -> None:
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    configure(tmp_path / "quantised", "gptq_v2")
    with pytest.raises(ConflictError, match="changed"):
        mergepipe.run(plan, tmp_path / "out", options=OPTIONS)
    assert not (tmp_path / "out").exists()


def test_run_part__refuses_a_second_part_after_the_configuration_changed(
    tmp_path: Path, recipe: dict[str, object]
) -> None:
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    mergepipe.run_part(plan, tmp_path / "out", (1, 2), options=OF_PARTS)
    configure(tmp_path / "quantised", "gptq_v2")
    with pytest.raises(MergePipeError, match="changed"):
        mergepipe.run_part(plan, tmp_path / "out", (2, 2), options=OF_PARTS)
    assert not (tmp_path / "out").exists()


UP = "model.layers.{}.mlp.up_proj"


def write_small_adapter(folder: Path, seed: int = 0, **options: object) -> None:
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = UP.format(layer)
        tensors[f"{name}.lora_A.weight"] = random.normal(size=(4, 128)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(64, 4)).astype(np.float32)
    write_adapter(folder, tensors, target_modules=["up_proj"], **options)


def write_fp8(folder: Path, block_rows: int) -> None:
    """Write weights with scales that two sizes of blocks explain alike by their shapes."""
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(LAYERS):
        codes = random.normal(size=(64, 128)).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{UP.format(layer)}.weight"] = codes
        tensors[f"{UP.format(layer)}.weight_scale_inv"] = random.uniform(1, 2, (2, 1)).astype(np.float32)
    stated = {"quant_method": "fp8", "weight_block_size": [block_rows, 128]}
    write_model(folder, tensors, {"model_type": "x", "quantization_config": stated})


CHANGED_FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "configuration of an adapter": (write_small_adapter, lambda folder: write_small_adapter(folder, lora_alpha=16)),
    "weights of an adapter": (write_small_adapter, lambda folder: write_small_adapter(folder, 1)),
    "blocks of FP8": (lambda folder: write_fp8(folder, 32), lambda folder: write_fp8(folder, 40)),
}


@pytest.mark.parametrize("kind", CHANGED_FILES)
@pytest.mark.parametrize("between", ["plan and run", "part and part", "kill and repeat"])
def test_merge__after_a_file_of_an_input_changed_is_an_undisturbed_run_or_refused(
    tmp_path: Path, recipe: dict[str, object], kind: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, change = CHANGED_FILES[kind]
    write(tmp_path / "changed")
    half = {"weight": 0.5}
    recipe = recipe_of("task_arithmetic", {tmp_path / "changed": half}, tmp_path / "plain")
    out = tmp_path / "out"
    if between == "kill and repeat":
        interrupt(recipe, tmp_path, monkeypatch)
        change(tmp_path / "changed")
        mergepipe.merge(recipe, out, options=OPTIONS)
        assert weights_digest(out) == undisturbed(recipe, tmp_path)
        return
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    if between == "part and part":
        mergepipe.run_part(plan, out, (1, 2), options=OF_PARTS)
    change(tmp_path / "changed")
    go_on: Callable[[], object] = partial(mergepipe.run, plan, out, options=OPTIONS)
    if between == "part and part":
        go_on = partial(mergepipe.run_part, plan, out, (2, 2), options=OF_PARTS)
    with pytest.raises(MergePipeError, match="changed"):
        go_on()
    assert not out.exists()
