"""Merges of tiny families, as a cluster and as one machine make them."""

from __future__ import annotations

from pathlib import Path

import yaml

from mergepipe.options import MergeOptions
from support.disk_families import DiskFamily

SHARD_BYTES = 30_000
PARAMETERS: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
}


def write_recipe(path: Path, family: DiskFamily, operator: str, experts: tuple[Path, ...] = ()) -> Path:
    """Write a recipe over a family, or over its base and other experts."""
    models = [{"model": str(expert), "parameters": PARAMETERS[operator]} for expert in experts or family.places[1:]]
    path.write_text(yaml.safe_dump({"merge_method": operator, "base_model": str(family.places[0]), "models": models}))
    return path


def merge_options(executor: str, address: str | None = None) -> MergeOptions:
    """Return the options of a merge into small files that takes nothing from elsewhere."""
    return MergeOptions(
        executor=executor, address=address, catalog=False, shard_bytes=SHARD_BYTES, allow_dropped=("*",),
        block_elements=16384,
    )  # fmt: skip
