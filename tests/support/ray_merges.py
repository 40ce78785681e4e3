"""Merges of tiny families, as a cluster and as one machine make them."""

from __future__ import annotations

import json
from pathlib import Path

from mergepipe.options import MergeOptions
from support.disk_families import DiskFamily
from support.model_folders import recipe_of

SHARD_BYTES = 30_000
PARAMETERS: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
}


def write_recipe(path: Path, family: DiskFamily, operator: str, experts: tuple[Path, ...] = ()) -> Path:
    """Write a recipe over a family, or over its base and other experts."""
    models = dict.fromkeys(experts or family.places[1:], PARAMETERS[operator])
    path.write_text(json.dumps(recipe_of(operator, models, family.places[0])))
    return path


def merge_options(executor: str, address: str | None = None) -> MergeOptions:
    """Return the options of a merge into small files that takes nothing from elsewhere."""
    return MergeOptions(
        executor=executor, address=address, catalog=False, shard_bytes=SHARD_BYTES, allow_dropped=("*",),
        block_elements=16384,
    )  # fmt: skip
