"""The page of operators and parameters as recipes name them, from the operators' specs."""

from __future__ import annotations

from mergepipe.operators.registry import operator_specs
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec
from tools.reference import row, table

_BASE = {
    BaseRole.REQUIRED: "required",
    BaseRole.OPTIONAL: "optional",
    BaseRole.ORIGIN: "optional",
    BaseRole.NONE: "refused",
}
_HEAD = """# Operators and parameters in recipes

What each operator computes is in [operators](operators.md), how values are written in
[recipes](../guide/recipes.md#values).
"""
_BASE_NOTE = """
Where the base is optional, the first model takes the place of a `base_model` that is not given. For `linear`, a
`base_model` that is not listed among `models` has no part in the average: it lends the names, shapes and dtypes of its
tensors. With `slices`, any recipe may have a `base_model` that lends configuration and tokenizer.
"""
_SCOPE_NOTE = """
A parameter of scope `model` may stand anywhere, one of scope `global` anywhere but in a model's entry.
`int8_mask` is accepted and has no effect. With `normalize`, the weights of `linear` must not sum to zero.
"""


def parameter_page() -> str:
    """Return the page."""
    lines = [_HEAD, "## Operators", "", *table("operator", "what it does", "`base_model`", "models besides the base")]
    lines += [
        row(f"`{spec.name}`", spec.title, _BASE[spec.base_role], _models(spec)).replace("  ", " ")
        for spec in operator_specs().values()
    ]
    lines += [_BASE_NOTE, "## Parameters", _SCOPE_NOTE]
    lines += table("operator", "parameter", "scope", "default", "range", "meaning")
    lines += [
        row(f"`{spec.name}`", f"`{each.name}`", each.scope.value, _default(each), _range(each), _plain(each.help))
        for spec in operator_specs().values()
        for each in spec.parameters
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _models(spec: OperatorSpec) -> str:
    if spec.max_experts == 0:
        return "none: it takes one model"
    if spec.max_experts is not None:
        return f"exactly {spec.max_experts}"
    return f"at least {spec.min_experts}" if spec.min_experts else "any number"


def _default(parameter: ParameterSpec) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value:g}`"


def _range(parameter: ParameterSpec) -> str:
    if parameter.is_flag:
        return "`true`, `false`"
    return "any" if parameter.range_text() == "(-inf, inf)" else parameter.range_text()
