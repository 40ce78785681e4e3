"""Models of several libraries are merged with all their components, and load in these libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

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
