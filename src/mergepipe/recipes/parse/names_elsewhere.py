"""Say what a key or a parameter that has no effect where it stands means elsewhere."""

from __future__ import annotations

from mergepipe.operators.registry import operator_specs

CONTENT_KEYS = ("models", "slices", "modules")  # a recipe has exactly one of them
RECIPE_KEYS = (
    "merge_method", "base_model", *CONTENT_KEYS, "parameters", "dtype", "out_dtype",
    "tokenizer_source", "tokenizer", "chat_template", "name",
)  # fmt: skip
_PAST = "mergekit does not use it either: an option of its past, or of a fork"
_OTHER_KEYS = {
    "revision": "a version of a Hub model is written `model: NAME@REVISION`",
    "merge_method": "the one at the top level holds for the whole recipe",
    "layer_range": "layers are chosen under 'slices:'",
    "residual_weight": _PAST,
    "allow_negative_weights": _PAST,
    "embed_slerp": _PAST,
}


def key_elsewhere(key: str) -> str:
    """Return what a key means at another place of a recipe; empty for a key of no meaning."""
    if key in _OTHER_KEYS:
        return _OTHER_KEYS[key]
    return "it counts at the top level of the recipe" if key in RECIPE_KEYS else ""


def parameter_elsewhere(name: str) -> str:
    """Return what a parameter means to other merge methods; empty for one that no method has."""
    methods = [spec.name for spec in operator_specs().values() if spec.parameter(name)]
    if not methods:
        return ""
    parameter = operator_specs()[methods[0]].parameter(name)
    more = f" and {len(methods) - 1} more" if len(methods) > 1 else ""
    return f"to {methods[0]}{more} it is: {parameter.help if parameter else ''}"


def parameter_names() -> tuple[str, ...]:
    """List the names of the parameters of all merge methods, each once."""
    return tuple(dict.fromkeys(p.name for spec in operator_specs().values() for p in spec.parameters))
