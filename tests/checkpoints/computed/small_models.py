"""For the tests of kinds of experts: random tensors, recipes, and models as they are opened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.runs.inputs import open_model
from mergepipe.snapshots.manifest import AverageRecord, ComposedCheckpoint, CompositeManifest, SelfCheck, Thoroughness
from mergepipe.storage.contract import Digested
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.model_folders import Tensors
from support.named_models import named


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


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
