"""For the tests of resolution: recipes and checkpoints that no file holds, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, TensorEntry
from mergepipe.core.blocks import DType, element_count
from mergepipe.errors import MergePipeError
from mergepipe.operators.registry import operator_specs
from mergepipe.recipes.recipe import ModelInput, Recipe, Setting
from mergepipe.recipes.resolution import resolve
from mergepipe.storage.location import Location

Tensors = Mapping[str, tuple[DType, tuple[int, ...]]]


def model(name: str, **parameters: Setting) -> ModelInput:
    return ModelInput(f"./{name}", Location.local(Path("/models") / name), parameters, f"recipe.yml:1 {name}")


def merging(
    operator: str,
    *models: ModelInput,
    base: ModelInput | None = None,
    parameters: Mapping[str, Setting] | None = None,
    dtype: DType | None = None,
    out_dtype: DType | None = None,
) -> Recipe:
    path = Location.local(Path("/recipe.yml"))
    return Recipe(path, "", operator_specs()[operator], base, models, parameters or {}, dtype, out_dtype)


def checkpoint(tensors: Tensors, kind: CheckpointKind = CheckpointKind.FULL) -> Checkpoint:
    entries, offset, is_delta = {}, 0, kind is CheckpointKind.DELTA
    for name, (dtype, shape) in tensors.items():
        nbytes = element_count(shape) * dtype.itemsize
        entries[name] = TensorEntry(name, dtype, shape, Location.local(Path("/f")), offset, nbytes, is_delta)
        offset += nbytes
    return Checkpoint(Location.local(Path("/m")), Location.local(Path("/m")), entries, (), (), kind)


def refusal(recipe: Recipe, *checkpoints: Checkpoint, allow: tuple[str, ...] = ()) -> MergePipeError:
    with pytest.raises(MergePipeError) as caught:
        resolve(recipe, checkpoints, allow)
    return caught.value


def problems(recipe: Recipe, *checkpoints: Checkpoint, allow: tuple[str, ...] = ()) -> list[str]:
    error = refusal(recipe, *checkpoints, allow=allow)
    return [f"{type(error).__name__} {p.code} | {p}" for p in error.problems]
