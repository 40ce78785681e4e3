"""Runs in the peer environment: merge every recipe `DIR/*.yml` with mergekit into `DIR/<stem>-mergekit`."""

from __future__ import annotations

import sys
from pathlib import Path

from mergekit.scripts.run_yaml import main as mergekit_yaml  # type: ignore[import-not-found]

if __name__ == "__main__":
    for recipe in sorted(Path(sys.argv[1]).glob("*.yml")):
        out = recipe.with_name(f"{recipe.stem}-mergekit")
        mergekit_yaml([str(recipe), str(out), "--quiet", "--no-write-model-card"], standalone_mode=False)
