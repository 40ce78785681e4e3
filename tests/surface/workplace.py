"""The directory in which the tests of the surface run commands: a family, recipes, and training checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.families import FamilyShape, write_family
from support.training_trees import decay_groups, decoder_shapes, known_states, write_hf, write_zero3

SHAPE = FamilyShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=96, vocab=2048, tied=True)
RECIPES = {
    "linear.yml": ("linear", "weight: 0.6", "weight: 0.4"),
    "ties.yml": ("ties", "weight: 0.6, density: 0.3", "weight: 0.4, density: 0.5"),
    "dare.yml": ("dare_ties", "weight: 0.6, density: 0.3", "weight: 0.4, density: 0.5"),
}
BLOCK_ELEMENTS = 16384


def recipe_text(operator: str, *parameters: str, folder: str = "family") -> str:
    """A recipe of the first experts, one for each text of parameters."""
    models = [f"  - {{model: {folder}/expert-{i}, parameters: {{{text}}}}}" for i, text in enumerate(parameters, 1)]
    return "\n".join(
        [f"merge_method: {operator}", "base_model: family/base", "models:", *models, "dtype: bfloat16", ""]
    )


@contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """Write the models and recipes under `root`, and make it the working directory, with a home of its own."""
    write_family(root / "family", SHAPE, 2)
    for name, parts in RECIPES.items():
        (root / name).write_text(recipe_text(*parts))
    models = "[{model: family/expert-1, parameters: {weight: {search: [1, 2, 3]}}}]"
    searched = f"merge_method: task_arithmetic\nbase_model: family/base\nmodels: {models}\n"
    (root / "search.yml").write_text(searched)
    experts = "[{source_model: family/expert-1}, {source_model: family/expert-2}]"
    (root / "mixture.yml").write_text(f"base_model: family/base\ngate_mode: random\nexperts: {experts}\n")
    for step in (7, 9):
        known = known_states(decoder_shapes(), seed=step, step=step)
        write_zero3(root / f"global_step{step}", known, decay_groups(known.shapes), 2)
        write_hf(root / f"checkpoint-{step}", known)
    text = "default: global_step9\ntake: [{from: global_step7, units: [layers even, embed]}]\n"
    (root / "compose.yml").write_text(text)
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MERGEPIPE_HOME", str(root / "home"))
        os.chdir(root)
        try:
            yield root
        finally:
            os.chdir(before)
