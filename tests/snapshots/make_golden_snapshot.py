"""Make the golden snapshot of the newest format again: `python tests/snapshots/make_golden_snapshot.py`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import mergepipe
from mergepipe.core.strict_json import digest_of
from mergepipe.snapshots.manifest import MANIFEST_VERSION
from support.public_names import MANIFEST_NAME

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SHARD_BYTES = 4200
RECIPE = """\
merge_method: ties
base_model: base
models:
- {model: expert-1, parameters: {weight: 0.6, density: 0.5}}
- {model: expert-2, parameters: {weight: 0.4, density: 0.5}}
"""


def write_model(folder: Path, seed: int) -> None:
    """A base (seed 0), or an expert that differs from it: three matrices, a scalar and integers that all share."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {"ids": np.arange(5), "scale": np.array(0.5, np.float32)}
    for number, shape in enumerate(((32, 64), (16, 64), (16, 64))):
        values = np.random.default_rng([0, number]).standard_normal(shape)
        tensors[f"layers.{number}.weight"] = (values + (0.01 * rng.standard_normal(shape) if seed else 0)).astype(
            ml_dtypes.bfloat16
        )
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "golden"}')
    save_file(tensors, folder / "model.safetensors")


def without_place(value: object, place: str) -> object:
    """The same JSON with `/nowhere` for the folder in which it was made."""
    if isinstance(value, dict):
        return {key: without_place(each, place) for key, each in value.items()}
    if isinstance(value, list):
        return [without_place(each, place) for each in value]
    return value.replace(place, "/nowhere") if isinstance(value, str) else value


def main() -> None:
    """Merge two experts under a budget, and store the snapshot as if it had been made in `/nowhere`."""
    target = GOLDEN / f"manifest-{MANIFEST_VERSION}"
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()
        for number, name in enumerate(("base", "expert-1", "expert-2")):
            write_model(root / name, number)
        (root / "recipe.yml").write_text(RECIPE)
        mergepipe.merge(
            root / "recipe.yml", root / "out", budget="100%", force=True, shard_bytes=SHARD_BYTES, catalog=False
        )
        content = without_place(json.loads((root / "out" / MANIFEST_NAME).read_bytes()), str(root))
        assert isinstance(content, dict)
        content["digest"] = digest_of({key: value for key, value in content.items() if key != "digest"})
        (root / "out" / MANIFEST_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(root / "out", target)


if __name__ == "__main__":
    main()
