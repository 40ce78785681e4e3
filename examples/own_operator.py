"""A merge rule of your own, in five lines. `python examples/own_operator.py [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from example_models import write_small_models
from numpy.typing import NDArray

import mergepipe
from mergepipe.operators.custom import Given, parameter


@mergepipe.operator("largest_change", parameters=[parameter("scale", "factor on the change", default=1.0)])
def largest_change(
    base_N: NDArray[np.float32], deltas_EN: NDArray[np.float32], parameters: Given
) -> NDArray[np.float32]:
    """Take the change of largest magnitude, element by element."""
    largest_N = np.take_along_axis(deltas_EN, np.abs(deltas_EN).argmax(axis=0)[None], axis=0)[0]
    return np.asarray(base_N + np.float32(parameters["scale"]) * largest_N)


def main(folder: Path) -> None:
    """Write small models into `folder`, and merge them by the rule above."""
    base, experts = write_small_models(folder)
    recipe = {
        "merge_method": "largest_change",
        "base_model": str(base),
        "models": [{"model": str(expert)} for expert in experts],
        "parameters": {"scale": 0.5},
    }
    report = mergepipe.merge(recipe, folder / "largest", force=True)
    print(f"{report.operator}: {report.merged_tensors} tensors merged to {report.out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "example"))
