"""For the tests of recipes: how they are loaded, and recipes and checkpoints that no file holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, TensorEntry
from mergepipe.core.blocks import DType, element_count
from mergepipe.errors import MergePipeError
from mergepipe.operators.registry import operator_specs
from mergepipe.recipes.fields import Strictness
from mergepipe.recipes.recipe import ModelInput, Recipe, Setting
from mergepipe.recipes.recipe_files import load_recipes
from mergepipe.recipes.resolution import resolve
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores
from support import refusals
from support.published_forms import MODELS

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
    return refusals.refusal(lambda: resolve(recipe, checkpoints, allow))


def problems(recipe: Recipe, *checkpoints: Checkpoint, allow: tuple[str, ...] = ()) -> list[str]:
    error = refusal(recipe, *checkpoints, allow=allow)
    return [f"{type(error).__name__} {p.code} | {p}" for p in error.problems]


def make_models(folder: Path) -> Path:
    """Make empty models in a folder in which recipes are written."""
    for name in (*MODELS, "a", "b", "c", "org/with+plus", "2024"):
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to("a")
    (folder / "one.safetensors").touch()
    return folder


def load_all(folder: Path, text: str, **strictness: bool) -> tuple[Recipe, ...]:
    """Load the documents of a recipe in a folder."""
    (folder / "recipe.yml").write_bytes(text.encode())
    return load_recipes(Location.local(folder / "recipe.yml"), Stores(), Strictness(**strictness))


def load(folder: Path, text: str, **strictness: bool) -> Recipe:
    (recipe,) = load_all(folder, text, **strictness)
    return recipe


def load_refusal(folder: Path, text: str) -> MergePipeError:
    return refusals.refusal(lambda: load_all(folder, text))


def said(folder: Path, text: str) -> list[str]:
    """What is wrong with a recipe: of each problem the code, without `recipe.`, and the line without the file."""
    told = (f"{p.code.removeprefix('recipe.')} {p}" for p in load_refusal(folder, text).problems)
    return [line.replace(" recipe.yml:", " ", 1).replace(str(folder), "{folder}") for line in told]
