"""Small checkpoints and adapters on disk for the tests of kinds of experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.runs.inputs import open_model
from mergepipe.snapshots.manifest import AverageRecord, ComposedCheckpoint, CompositeManifest, SelfCheck, Thoroughness
from mergepipe.storage.contract import Digested
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.named_models import named

Tensors = Mapping[str, NDArray[Any]]
PREFIX = "base_model.model."
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def write_model(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors", metadata)
    return folder


def write_adapter(folder: Path, tensors: Tensors, **options: object) -> Path:
    """`tensors` without peft's prefix; `options` on top of a plain LoRA of rank 4 and alpha 8."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, **options}))
    stored = {PREFIX + name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def write_recipe(folder: Path, method: str, *models: object, weight: float = 1.0, **more: object) -> Path:
    """A recipe of models of one weight, as JSON, which is YAML."""
    listed = [{"model": str(m) if isinstance(m, Path) else m, "parameters": {"weight": weight}} for m in models]
    path = folder / "recipe.yml"
    path.write_text(json.dumps({"merge_method": method, "models": listed, **more}))
    return path


def lora(module: str, rows: int, columns: int, rank: int = 4) -> dict[str, NDArray[np.float32]]:
    """Random factors of one module."""
    return {f"{module}.lora_A.weight": random(rank, columns), f"{module}.lora_B.weight": random(rows, rank, seed=1)}


def product(factors: Tensors, module: str) -> NDArray[np.float64]:
    """B @ A in float64."""
    up, down = factors[f"{module}.lora_B.weight"], factors[f"{module}.lora_A.weight"]
    made: NDArray[np.float64] = up.astype(np.float64) @ down.astype(np.float64)
    return made


def opened(path: Path, base: Checkpoint | None = None, adapter: Path | None = None) -> Checkpoint:
    return open_model(
        LocalStore(), named(Location.local(path), None if adapter is None else Location.local(adapter)), base
    )


def write_composite_manifest(path: Path, *, optimizer: str) -> None:
    """Write the manifest of an average of one checkpoint, with what became of the optimizer's state."""
    manifest = CompositeManifest(
        version="1",
        recipe="{}",
        checkpoint=ComposedCheckpoint("hf-trainer", "transformers", None, 1, 3, "skeleton"),
        inputs=(),
        units=(),
        files=(Digested.of("model.safetensors", (path / "model.safetensors").read_bytes()),),
        self_check=SelfCheck(Thoroughness.OFF, 0, 0, 0),
        realized={},
        run={},
        average=AverageRecord("uniform", (1.0,), optimizer),
    )
    (path / "mergepipe.json").write_bytes(manifest.to_json())
