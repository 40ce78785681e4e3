"""A configuration that decides how weights are read belongs to the key of a run, to plans and to parts.

Between an interruption and the same command, a plan and its run, one part and the next, the configuration of a
quantised model is corrected: the output is that of an undisturbed run, or the change is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mergepipe
from mergepipe.errors import ConflictError, MergePipeError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.runs.progress import MergeProgress
from mergepipe.snapshots import work_log
from support.disk_families import weights_digest
from support.faults import replaced
from support.model_folders import recipe_of, write_model

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


def test_merge__resumed_after_its_configuration_changed_is_an_undisturbed_run(
    tmp_path: Path, recipe: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
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
