"""Write delta checkpoints for tests: safetensors files whose metadata mark them as differences from a base."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
from safetensors.numpy import load_file, save_file

from mergepipe.checkpoints.base_digest import base_digest
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.safetensors import BASE_KEY, DELTA_KIND, FULL_KEY, KIND_KEY, DeltaMark
from mergepipe.core.blocks import DTypeKind
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location


def metadata_of(mark: DeltaMark) -> dict[str, str]:
    """The entries of a safetensors file's metadata that say what `mark` says."""
    return {KIND_KEY: DELTA_KIND, BASE_KEY: mark.base, FULL_KEY: json.dumps(sorted(mark.full))}


def write_delta(base_path: Path, expert_path: Path, out: Path) -> Path:
    """Write the float32 differences of an expert from its base; equal tensors are left out, integers stored in full."""
    store = LocalStore()
    base = open_checkpoint(store, Location.local(base_path))
    anchors, own = (
        {name: array for file in sorted(path.glob("*.safetensors")) for name, array in load_file(file).items()}
        for path in (base_path, expert_path)
    )
    changed = {name: array for name, array in own.items() if array.tobytes() != anchors[name].tobytes()}
    full = frozenset(name for name in changed if base.tensors[name].dtype.kind is not DTypeKind.FLOAT)
    deltas = {
        name: array if name in full else array.astype(np.float32) - anchors[name].astype(np.float32)
        for name, array in changed.items()
    }
    out.mkdir()
    save_file(deltas, out / "delta.safetensors", metadata_of(DeltaMark(base_digest(store, base), full)))
    return out
