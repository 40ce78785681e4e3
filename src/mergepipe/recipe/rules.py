"""What an operator asks of a recipe as a whole: its base, the number of its models, its weights."""

from __future__ import annotations

from mergepipe.operators.spec import BaseRole, OperatorSpec, Scope
from mergepipe.recipe.model import ModelInput, Recipe
from mergepipe.recipe.parameters import global_values, model_values
from mergepipe.recipe.reading import Reading

SMALLEST_WEIGHT_SUM = 1e-8


def check_base(reading: Reading, operator: OperatorSpec, *, is_given: bool) -> None:
    """Note a base model that is missing, or that the operator has no use for."""
    if is_given and operator.base_role is BaseRole.NONE:
        message, hint = f"{operator.name} has no base model", "remove base_model"
        reading.refuse("recipe.base.refused", ("base_model",), message, hint)
    if not is_given and operator.base_role is BaseRole.REQUIRED:
        message, hint = f"{operator.name} needs base_model", "name the model the others were fine-tuned from"
        reading.refuse("recipe.base.missing", ("base_model",), message, hint)


def check_recipe(reading: Reading, recipe: Recipe) -> None:
    """Note what is wrong with an otherwise well-formed recipe: required parameters, weights that cancel."""
    for spec in recipe.operator.parameters:
        if not spec.required:
            continue
        if spec.scope is Scope.MODEL:
            _check_required_of_models(reading, recipe, spec.name)
        elif spec.name not in recipe.parameters:
            hint = f"write '{spec.name}: ...' under the top-level parameters"
            message = f"{recipe.operator.name} needs the parameter {spec.name}"
            reading.refuse("recipe.parameter.missing", ("parameters", spec.name), message, hint)
    if recipe.operator.base_role is BaseRole.OPTIONAL:
        _check_weight_sum(reading, recipe)


def _check_required_of_models(reading: Reading, recipe: Recipe, name: str) -> None:
    base_path = recipe.base.path if recipe.base is not None else None
    for index, model in enumerate(recipe.models):
        is_mere_base = recipe.operator.base_role is BaseRole.REQUIRED and model.path == base_path
        if is_mere_base or name in model.parameters or name in recipe.parameters:
            continue
        hint = f"write '{name}: ...' under its parameters, or under the top-level ones for all models"
        message = f"{recipe.operator.name} needs the parameter {name}"
        reading.refuse("recipe.parameter.missing", ("models", index, "parameters", name), message, hint)


def _check_weight_sum(reading: Reading, recipe: Recipe) -> None:
    if not global_values(recipe.operator, recipe.parameters).get("normalize", False):
        return
    values = [model_values(recipe.operator, model.parameters, recipe.parameters) for model in recipe.models]
    if not all("weight" in value for value in values):
        return
    total = sum(float(value["weight"]) for value in values)
    if abs(total) < SMALLEST_WEIGHT_SUM:
        message = f"the weights sum to {total:g} and cannot be normalized"
        reading.refuse("recipe.weights.sum", ("models",), message, "change a weight, or set normalize: false")


def check_count(
    reading: Reading, operator: OperatorSpec, base: ModelInput | None, models: tuple[ModelInput, ...]
) -> None:
    """Note too few or too many models other than the anchor."""
    is_base_used = base is not None and operator.base_role is not BaseRole.NONE
    anchor_path = base.path if base is not None and is_base_used else models[0].path
    n_experts = sum(model.path != anchor_path for model in models)
    is_besides_base = operator.base_role is BaseRole.REQUIRED
    n_anchor = 0 if is_besides_base else 1
    low, high = operator.min_experts + n_anchor, operator.max_experts
    if n_experts >= operator.min_experts and (high is None or n_experts <= high):
        return
    bound = f"exactly {low}" if high is not None and high + n_anchor == low else f"at least {low}"
    noun = ("model" if low == 1 else "models") + (" besides base_model" if is_besides_base else "")
    message = f"{operator.name} takes {bound} {noun}, found {n_experts + n_anchor}"
    reading.refuse("recipe.models.count", ("models",), message)
