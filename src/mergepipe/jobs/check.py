"""Report what a merge would do, without reading tensor data."""

from __future__ import annotations

from mergepipe.engine.execute import OutputPlan
from mergepipe.recipes.resolve.tasks import Action
from mergepipe.reports import CheckReport, ModelUse
from mergepipe.runs.inputs import Inputs
from mergepipe.runs.sidecars import sidecar_bytes


def check_report(inputs: Inputs, output: OutputPlan) -> CheckReport:
    """Report what a merge of these inputs would do."""
    recipe, resolution = inputs.recipe, inputs.resolution
    return CheckReport(
        recipe=str(recipe.path),
        operator=recipe.operator.name,
        models=tuple(_use_of(inputs, index, model.text) for index, model in enumerate(recipe.inputs())),
        merged_tensors=resolution.n_merged,
        copied=tuple((task.name, task.reason) for task in resolution.tasks if task.action is Action.COPY),
        dropped=resolution.dropped,
        base_bytes=resolution.base_bytes,
        expert_bytes=resolution.expert_bytes,
        output_bytes=resolution.output_bytes,
        disk_bytes=output.total_bytes + sidecar_bytes(inputs),
        shards=len(output.shards),
        notices=inputs.notices,
        recipe_notices=inputs.recipe_notices,
    )


def _use_of(inputs: Inputs, model: int, text: str) -> ModelUse:
    """Count the tensors of a model that are read, and their bytes."""
    tasks = inputs.resolution.tasks
    used = [task.base.nbytes for task in tasks if task.base_model == model]
    for task in tasks:
        used += [s.nbytes for m, s in zip(task.expert_models, task.experts, strict=True) if m == model and s.stored]
    return ModelUse(inputs.role(model), text, len(used), sum(used))
