"""Models of several libraries are merged with all their components, and load in these libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import ml_dtypes  # noqa: F401 - names bfloat16 to numpy
import pytest
from safetensors.numpy import load_file

import mergepipe
from support.model_folders import recipe_of

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", HERE.parents[1] / ".venv-train" / "bin" / "python"))


def run(step: str, folder: Path) -> str:
    command = [str(PYTHON), str(HERE / "save_and_load_components.py"), step, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-frameworks` installs the libraries")
def test_merge__of_models_with_components_loads_in_their_libraries(tmp_path: Path) -> None:
    run("save", tmp_path)
    for name in ("sentences", "pipeline", "folders"):
        recipe = recipe_of("linear", {tmp_path / f"{name}-{which}": {"weight": 1} for which in (1, 2)})
        mergepipe.merge(recipe, tmp_path / name, catalog=False)
    assert all(float(difference) < 1e-7 for difference in run("load", tmp_path).split()[-3:])


# --- codes: the bits that bitsandbytes and compressed-tensors read of what they write


NAMES = ("nf4", "nf4-nested", "fp4", "fp4-nested", "bnb8", "int4", "int4-zeros", "int8", "nvfp4", "mxfp4", "mxfp8")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-frameworks` installs the libraries")
def test_merge__of_codes_has_the_bits_of_their_libraries(tmp_path: Path) -> None:
    subprocess.run([str(PYTHON), str(HERE / "write_codes.py"), str(tmp_path)], check=True, timeout=600)
    for name in NAMES:
        theirs = load_file(tmp_path / f"{name}.safetensors")["l.weight"]
        dtype = str(theirs.dtype)
        recipe = {"merge_method": "passthrough", "dtype": dtype, "models": [{"model": str(tmp_path / name)}]}
        mergepipe.merge(recipe, tmp_path / f"{name}-out", catalog=False)
        merged = load_file(tmp_path / f"{name}-out" / "model.safetensors")
        assert merged.keys() == {"l.weight"}, name
        assert merged["l.weight"].dtype == theirs.dtype, name
        zero = theirs.dtype.type(0)  # FP4's second zero: bitsandbytes gives it a sign with AVX-512 alone
        ours, theirs = (each + zero if "fp4" in name[:3] else each for each in (merged["l.weight"], theirs))
        assert ours.tobytes() == theirs.tobytes(), name
