"""Runs in the peer environment: merge every recipe `DIR/*.yml` with mergekit into `DIR/<stem>-mergekit`.

With `--tensors-only` neither configuration nor tokenizer is written: models without a tokenizer have none to copy,
and transformers refuses configurations of some architectures once mergekit has changed their number of layers.
`--lora-merge-cache=DIR` is where models with adapters are put.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from mergekit.scripts.run_yaml import main as mergekit_yaml  # type: ignore[import-not-found]

OPTIONS = ["--quiet", "--no-write-model-card"]

if __name__ == "__main__":
    if "--tensors-only" in sys.argv:
        transformers.PretrainedConfig.save_pretrained = lambda self, *args, **kwargs: None  # noqa: ARG005
        OPTIONS.append("--no-copy-tokenizer")
    OPTIONS += [argument for argument in sys.argv if argument.startswith("--lora-merge-cache=")]
    for recipe in sorted(Path(sys.argv[1]).glob("*.yml")):
        out = recipe.with_name(f"{recipe.stem}-mergekit")
        mergekit_yaml([str(recipe), str(out), *OPTIONS], standalone_mode=False)
