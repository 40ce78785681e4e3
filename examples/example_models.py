"""Writes a base model and models tuned from it, of some 100 kB each, for examples that need no download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

N_LAYERS, HIDDEN = 4, 64


def write_small_models(folder: Path, names: Sequence[str] = ("math", "code")) -> tuple[Path, list[Path]]:
    """Write `base` and the experts of these names below `folder`; return the base, and the experts."""
    rng = np.random.default_rng(0)
    tensors = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(N_LAYERS) for part in ("up", "down")]
    base = {name: rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) for name in tensors}
    experts = []
    for number, expert in enumerate(names):
        tuned = {
            name: base_N + np.float32(0.01) * rng.standard_normal(base_N.shape).astype(np.float32)
            if (index + number) % 2
            else base_N
            for index, (name, base_N) in enumerate(base.items())
        }
        experts.append(write_model(folder / expert, tuned))
    return write_model(folder / "base", base), experts


def write_model(folder: Path, tensors: dict[str, NDArray[np.float32]]) -> Path:
    """Write float32 tensors as a Hugging Face directory: a safetensors file and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    header, position = {}, 0
    for name, tensor_N in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor_N.shape),
            "data_offsets": [position, position + tensor_N.nbytes],
        }
        position += tensor_N.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(tensor_N.tobytes() for tensor_N in tensors.values())
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    return folder
