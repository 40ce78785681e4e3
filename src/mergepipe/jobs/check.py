"""Report what a merge would do, without reading tensor data."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.recipes.fields import USUAL, Strictness
from mergepipe.recipes.references import reference_text
from mergepipe.recipes.tasks import Action
from mergepipe.reports import CheckReport, CopiedTensor, ModelUse
from mergepipe.runs.inputs import Inputs, open_inputs
from mergepipe.runs.small_files import planned_sidecars
from mergepipe.runs.work import output_of
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.recipes.recipe import ModelInput
    from mergepipe.recipes.yaml_source import RecipeText
    from mergepipe.storage.location import Location


def check_recipe(
    recipe_place: Location | RecipeText,
    shard_bytes: int | None,
    allow_dropped: Sequence[str],
    strictness: Strictness = USUAL,
) -> CheckReport:
    """Open the inputs of a recipe and report what its merge would do; see `api.check`."""
    store = Stores()
    inputs = open_inputs(recipe_place, store, allow_dropped, strictness=strictness)
    recipe, resolution = inputs.recipe, inputs.resolution
    output = output_of(inputs, shard_bytes)
    return CheckReport(
        recipe=str(recipe.path),
        operator=recipe.operator.name,
        models=tuple(_use_of(inputs, index, _shown(model)) for index, model in enumerate(recipe.inputs())),
        merged_tensors=resolution.n_merged,
        copied=tuple(CopiedTensor(task.name, task.reason) for task in resolution.tasks if task.action is Action.COPY),
        dropped=resolution.dropped,
        base_bytes=resolution.base_bytes,
        expert_bytes=resolution.expert_bytes,
        output_bytes=resolution.output_bytes,
        disk_bytes=output.total_bytes + sum(map(len, planned_sidecars(inputs, store).values())),
        shards=len(output.shards),
        free_bytes=shutil.disk_usage(Path.cwd()).free,
        recipe_notices=inputs.notices,
    )


def _shown(model: ModelInput) -> str:
    """Return a model as the recipe names it, with where that is if it is on another machine."""
    return model.text if model.path.is_local else f"{model.text} ({reference_text(model)})"


def _use_of(inputs: Inputs, model: int, text: str) -> ModelUse:
    """Count the tensors of a model that are read, and their bytes."""
    tasks = inputs.resolution.tasks
    used = [task.base.nbytes for task in tasks if task.base_model == model]
    for task in tasks:
        used += [s.nbytes for m, s in zip(task.expert_models, task.experts, strict=True) if m == model and s.stored]
    return ModelUse(inputs.roles[model], text, len(used), sum(used))
