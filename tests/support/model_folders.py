"""Models and adapters as folders of one file, written by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = Mapping[str, NDArray[Any]]
Models = Mapping[Any, Mapping[str, object]]
PREFIX = "base_model.model."


def write_model(folder: Path, tensors: Tensors, config: Mapping[str, object] | None = None) -> Path:
    """Write a model, with a configuration if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, tensors: Tensors, **options: object) -> Path:
    """Write `tensors` under peft's prefix; `options` come on top of a plain LoRA of rank 4 and alpha 8."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {PREFIX + name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def recipe_of(method: str, models: Models, base: object = None, **more: object) -> dict[str, object]:
    """A recipe as a mapping: models with their own parameters, the base if there is one, and other keys."""
    listed = [{"model": str(model), "parameters": dict(own)} for model, own in models.items()]
    anchor = {} if base is None else {"base_model": str(base)}
    return {"merge_method": method, **anchor, "models": listed, **more}
