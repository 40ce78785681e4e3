"""Check an operator's requirements on the models it merges: base, number, parameters, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.operators.spec import BaseRole, OperatorSpec, Scope
from mergepipe.recipes.parse.fields import DocumentReader
from mergepipe.recipes.parse.parameters import global_values, is_constant, model_values
from mergepipe.recipes.parse.recipe import ModelInput, Setting
from mergepipe.recipes.parse.yaml_source import KeyPath, shortened

SMALLEST_WEIGHT_SUM = 1e-8


@dataclass(frozen=True, slots=True)
class Group:
    """Models that are merged together: the entries of `models`, or the sources of one slice.

    `at` is the place of the list, `base` the base_model in force. `shared` are the parameters around it, from the
    nearest to the top level's.
    """

    at: KeyPath
    models: tuple[ModelInput, ...]
    base: ModelInput | None
    shared: tuple[Mapping[str, Setting], ...]

    @property
    def is_slice(self) -> bool:
        return self.at[-1] == "sources"

    def holds(self, model: ModelInput) -> bool:
        """Whether a model is listed."""
        return any(listed.key == model.key for listed in self.models)

    def is_origin(self, model: ModelInput, operator: OperatorSpec) -> bool:
        """Whether a model is the base that deltas are taken against, and has no part in the merge itself."""
        has_origin = operator.base_role in (BaseRole.REQUIRED, BaseRole.ORIGIN)
        return has_origin and self.base is not None and model.key == self.base.key


def check_base(reader: DocumentReader, operator: OperatorSpec, *, is_given: bool) -> None:
    """Report a missing base model."""
    if not is_given and operator.base_role is BaseRole.REQUIRED:
        message, hint = f"{operator.name} needs base_model", "name the model the others were fine-tuned from"
        reader.refuse("recipe.base.missing", ("base_model",), message, hint)


def check_group(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report problems of a group of models and of the parameters that apply to it."""
    if operator.base_role is BaseRole.NONE and group.base and not group.is_slice and not group.holds(group.base):
        message, hint = f"{operator.name} has no base model", "remove base_model"
        reader.refuse("recipe.base.refused", ("base_model",), message, hint)
    if _has_its_base(reader, operator, group):
        _check_count(reader, operator, group)
        _note_base_parameters(reader, operator, group)
        _note_base_alone(reader, operator, group)
    for spec in operator.parameters:
        if spec.required and spec.scope is Scope.MODEL:
            _check_required_of_models(reader, operator, group, spec.name)
        elif spec.required and not any(spec.name in settings for settings in group.shared):
            hint = f"write '{spec.name}: ...' under the top-level parameters"
            message = f"{operator.name} needs the parameter {spec.name}"
            at = (*group.at[:-1], "parameters", spec.name)
            reader.refuse("recipe.parameter.missing", at, message, hint)
    if operator.base_role is BaseRole.OPTIONAL:
        _check_weight_sum(reader, operator, group)
    if operator.conflict is not None:
        _check_conflicts(reader, operator, group)


def _has_its_base(reader: DocumentReader, operator: OperatorSpec, group: Group) -> bool:
    """Report a slice that does not list the base of its deltas, whose layers are then unknown."""
    is_origin = operator.base_role in (BaseRole.REQUIRED, BaseRole.ORIGIN)
    if not group.is_slice or group.base is None or not is_origin or group.holds(group.base):
        return True
    message = f"base_model '{shortened(group.base.text)}' is not among the sources of this slice"
    hint = "list it with the layer_range that the others are compared with"
    reader.refuse("recipe.slice.base", group.at, message, hint)
    return False


def _note_base_parameters(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report parameters of a base that deltas are taken against."""
    for index, model in enumerate(group.models):
        if group.is_origin(model, operator) and model.parameters:
            message = f"{', '.join(model.parameters)} of the base: no effect, {operator.name} takes deltas against it"
            at = (*group.at, index, "parameters")
            reader.notice("recipe.ignored-base-parameters", at, message, "for another model they count")


def _note_base_alone(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report a base that nothing is merged into."""
    is_alone = all(group.is_origin(model, operator) for model in group.models)
    if is_alone and group.base is not None and group.base.adapter is None:
        message = f"'{shortened(group.base.text)}' is the base and the only model: it is copied"
        reader.warning("recipe.models.base-alone", group.at, message, "list the models that are merged into it")


def _check_required_of_models(reader: DocumentReader, operator: OperatorSpec, group: Group, name: str) -> None:
    for index, model in enumerate(group.models):
        is_set = name in model.parameters or any(name in settings for settings in group.shared)
        if is_set or group.is_origin(model, operator):
            continue
        context = "the ones of the slice" if group.is_slice else "the top-level ones"
        hint = f"write '{name}: ...' under its parameters, or under {context} for all models"
        message = f"{operator.name} needs the parameter {name}"
        reader.refuse("recipe.parameter.missing", (*group.at, index, "parameters", name), message, hint)


def _check_conflicts(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report contradicting parameters of a model; those that depend on the tensor are checked per tensor."""
    for index, model in enumerate(group.models):
        chain = (model.parameters, *group.shared)
        is_base = group.base is not None and model.key == group.base.key
        values = {} if is_base or not is_constant(chain) else model_values(operator, chain)
        is_refused = any(value != value for value in values.values())  # told already; see `REFUSED`
        conflict = operator.conflict_of(values) if values and not is_refused else ""
        if conflict:
            at = (*group.at, index, "parameters")
            reader.refuse("recipe.parameter.conflict", at, conflict, "change one of the two")


def _check_weight_sum(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    if not is_constant((*group.shared, *(model.parameters for model in group.models))):
        return
    values = [model_values(operator, (model.parameters, *group.shared)) for model in group.models]
    total = normalized_sum(global_values(operator, group.shared), values)
    if total is not None and abs(total) < SMALLEST_WEIGHT_SUM:
        message = f"the weights sum to {total:g} and cannot be normalized"
        reader.refuse("recipe.weights.sum", group.at, message, "change a weight, or set normalize: false")


def normalized_sum(shared: Mapping[str, float | bool], models: list[dict[str, float | bool]]) -> float | None:
    """Return the sum that weights are divided by; None if they are not normalized or not all known."""
    if not shared.get("normalize", False) or not all("weight" in values for values in models):
        return None
    return sum(float(values["weight"]) for values in models)


def _check_count(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report too few or too many models beside the anchor, or in all where a base is optional."""
    role, base = operator.base_role, group.base
    is_besides_base = role is BaseRole.REQUIRED or (role is BaseRole.ORIGIN and base is not None)
    is_base_used = base is not None and role is not BaseRole.NONE and (not group.is_slice or group.holds(base))
    if role is BaseRole.ORIGIN and base is None:
        n_experts, n_anchor = len(group.models), 0
    else:
        anchor = base.key if base is not None and is_base_used else group.models[0].key
        n_experts = sum(model.key != anchor for model in group.models)
        n_anchor = 0 if is_besides_base else 1
    low, high = operator.min_experts + n_anchor, operator.max_experts
    if n_experts >= operator.min_experts and (high is None or n_experts <= high):
        return
    bound = f"exactly {low}" if high is not None and high + n_anchor == low else f"at least {low}"
    if high is not None and n_experts > high and high + n_anchor != low:
        low, bound = high + n_anchor, f"at most {high + n_anchor}"
    noun = ("model" if low == 1 else "models") + (" besides base_model" if is_besides_base else "")
    message = f"{operator.name} takes {bound} {noun}, found {n_experts + n_anchor}"
    reader.refuse("recipe.models.count", group.at, message)
