"""Generate the JSON schema of recipes, for editors, from the operators' specifications."""

from __future__ import annotations

import json
from typing import TypeAlias

from mergepipe.checkpoints.routers import GATE_MODES
from mergepipe.core.blocks import DTYPES_BY_RECIPE_NAME
from mergepipe.operators.registry import operator_specs
from mergepipe.operators.spec import POST, OperatorSpec, ParameterSpec, Scope
from mergepipe.recipes.entries import MODEL_KEYS, MODULE_KEYS, NUMBERS_KEYS, SLICE_KEYS, SOURCE_KEYS
from mergepipe.recipes.fields import CONTENT_KEYS, RECIPE_KEYS
from mergepipe.recipes.parameters import BY_NORM_TEXT, FALSE_TEXTS, LINES_KEY, TRUE_TEXTS
from mergepipe.recipes.recipe_files import DTYPE_NAMES, EXPERT_KEYS, LIKE_BASE, MIXTURE_KEYS, MIXTURE_RECIPE_KEYS, TORCH
from mergepipe.recipes.tokenizer_source import (
    EMBEDDING_KINDS,
    MODEL_TOKEN_KEYS,
    OMP,
    SUBWORD,
    TOKEN_KEYS,
    TOKENIZER_KEYS,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema: TypeAlias = dict[str, "Json"]
Json: TypeAlias = str | int | float | bool | list["Json"] | Schema | None

_QUOTED_NUMBER = r"^\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*$"
_TEXT: Schema = {"type": "string", "minLength": 1}
_OR_NULL: Schema = {"type": ["string", "null"]}
_LINES: Schema = {
    "type": "object",
    "properties": {LINES_KEY: {"type": "array", "items": {"type": ["number", "string"]}, "minItems": 2, "maxItems": 2}},
    "required": [LINES_KEY],
    "additionalProperties": False,
}
_REFERENCE: Schema = {"$ref": "#/$defs/model"}


def recipe_schema() -> Schema:
    """Generate the schema of one recipe document (draft 2020-12)."""
    definitions = {
        name: definition
        for spec in (*operator_specs().values(), POST)
        for name, definition in _definitions(spec).items()
    }
    merge: Schema = {
        "properties": dict(zip(RECIPE_KEYS, map(_top_level, RECIPE_KEYS), strict=True)),
        "required": ["merge_method"],
        "additionalProperties": False,
        "oneOf": [_has_content(key) for key in CONTENT_KEYS],
        "not": {"required": ["tokenizer_source", "tokenizer"]},
        "allOf": [_when(spec) for spec in operator_specs().values()],
    }
    return {
        "$schema": DIALECT,
        "title": "MergePipe recipe",
        "type": "object",
        "if": {"not": {"required": ["merge_method"]}, "anyOf": [{"required": [key]} for key in MIXTURE_KEYS]},
        "then": _mixture(),
        "else": merge,
        "$defs": {
            "model": _model_reference(),
            "quoted-number": {"type": "string", "pattern": _QUOTED_NUMBER},
            "tokenizer": _tokenizer(),
            **definitions,
        },
    }


def _mixture() -> Schema:
    """Generate the schema of a mixture of experts that is built, or of experts that one is left with."""
    number: Schema = {"type": "integer", "minimum": 0}
    prompts: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
    scale: Schema = {"type": ["number", "null"]}
    expert = _record(
        EXPERT_KEYS, dict(zip(EXPERT_KEYS, (_REFERENCE, prompts, prompts, scale, scale), strict=True)), ["source_model"]
    )
    chosen: Schema = {"description": "experts of base_model, itself a mixture; one number alone makes a dense model"}
    properties: Schema = {
        "base_model": _REFERENCE,
        "gate_mode": {"enum": [*GATE_MODES, None]},
        "experts": {"anyOf": [_list(expert), {**chosen, "anyOf": [number, _list(number)]}]},
        "shared_experts": _or_nothing(_list(expert)),
        "experts_per_token": {"type": ["integer", "null"], "minimum": 1},
        "architecture": _OR_NULL,
        "dtype": _top_level("dtype"),
        "seed": {"type": ["integer", "null"], "minimum": 0},
        "name": _TEXT,
    }
    return _record(MIXTURE_RECIPE_KEYS, properties, ["base_model", "experts"])


def schema_text() -> str:
    """Format the schema as it is stored and printed."""
    return json.dumps(recipe_schema(), indent=1, allow_nan=False) + "\n"


def _top_level(key: str) -> Schema:
    if key == "merge_method":
        return {"description": "how models are merged", "enum": list(operator_specs())}
    if key in ("dtype", "out_dtype"):
        named = (*DTYPE_NAMES, LIKE_BASE) if key == "out_dtype" else DTYPE_NAMES
        return {"enum": [*named, *(f"{TORCH}{name}" for name in DTYPES_BY_RECIPE_NAME), "", None]}
    if key == "base_model":
        return {"anyOf": [_REFERENCE, {"type": "null"}]}
    if key == "tokenizer":
        return {"$ref": "#/$defs/tokenizer"}
    if key == "tokenizer_source":
        return {"anyOf": [{"enum": ["union", "base", None]}, _REFERENCE]}
    if key in ("chat_template", "name"):
        return _TEXT
    if key == "post":
        return _ref("post.shared")
    return {}  # its contents depend on the merge method


def _has_content(key: str) -> Schema:
    return {"required": [key], "properties": {key: {"type": ["array", "object"], "minItems": 1, "minProperties": 1}}}


def _or_nothing(content: Schema) -> Schema:
    """Return the schema of content that may also be empty, beside content of another kind."""
    return {"anyOf": [content, {"enum": [None, [], {}]}]}


def _when(spec: OperatorSpec) -> Schema:
    """Generate the conditional schema of one merge method."""
    shared, of_model = _ref(f"{spec.name}.shared"), _ref(f"{spec.name}.own")
    models = _list(_record(MODEL_KEYS, {"model": _REFERENCE, "parameters": of_model}, ["model"]))
    number: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]+(\.0+)?$"}]}
    pair: Schema = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    source: Schema = {"model": _REFERENCE, "layer_range": pair, "parameters": of_model}
    sources = _list(_record(SOURCE_KEYS, source, ["model", "layer_range"]))
    piece: Schema = {"sources": sources, "base_model": _REFERENCE, "parameters": shared}
    slices = _list(_record(SLICE_KEYS, piece, ["sources"]))
    module = _record(MODULE_KEYS, {"models": models, "slices": slices, "parameters": shared}, [])
    modules: Schema = {"type": "object", "minProperties": 1, "additionalProperties": module}
    content: Schema = dict(zip(CONTENT_KEYS, map(_or_nothing, (models, slices, modules)), strict=True))
    content["parameters"] = shared
    return {"if": {"properties": {"merge_method": {"const": spec.name}}}, "then": {"properties": content}}


def _definitions(spec: OperatorSpec) -> Schema:
    """Generate the definitions of one merge method: each parameter, a model's parameters, global parameters."""
    definitions: Schema = {}
    for parameter in spec.parameters:
        definitions |= _setting(parameter, f"{spec.name}.{parameter.name}")
    of_models = tuple(parameter for parameter in spec.parameters if parameter.scope is Scope.MODEL)
    context = _parameters(spec, spec.parameters)
    return {**definitions, f"{spec.name}.own": _parameters(spec, of_models), f"{spec.name}.shared": context}


def _parameters(spec: OperatorSpec, parameters: tuple[ParameterSpec, ...]) -> Schema:
    return {
        "type": ["object", "null"],
        "description": f"parameters of {spec.name}",
        "properties": {parameter.name: _ref(f"{spec.name}.{parameter.name}") for parameter in parameters},
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _setting(spec: ParameterSpec, name: str) -> Schema:
    """Generate the definitions of a parameter: one value, values over the layers, or either by filters."""
    value, values, case = (f"{name}.{kind}" for kind in ("value", "values", "case"))
    kinds: list[Json] = [_ref(values), _ref(case), _list(_ref(case))]
    if spec.is_weight:
        kinds.append(_record(NUMBERS_KEYS, {"file": _REFERENCE, "value": _ref(value)}, ["file"]))
    setting: Schema = {"description": spec.help, "anyOf": kinds}
    by_filter: Schema = {
        "type": "object",
        "properties": {"filter": _OR_NULL, "value": _ref(values)},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {
        name: setting if spec.default is None else {**setting, "default": spec.default},
        value: _value(spec),
        values: {"anyOf": [_ref(value), _list(_ref(value)), *([] if spec.is_flag else [_LINES])]},
        case: by_filter,
    }


def _value(spec: ParameterSpec) -> Schema:
    if spec.is_flag:
        return {"enum": [spec.default] if spec.only_default else [True, False, 0, 1, *TRUE_TEXTS, *FALSE_TEXTS]}
    value: Schema = {"type": "integer" if spec.is_whole else "number"}
    if spec.low > float("-inf"):
        value["exclusiveMinimum" if spec.low_open else "minimum"] = spec.low
    if spec.high < float("inf"):
        value["maximum"] = spec.high
    words: list[Json] = [{"const": BY_NORM_TEXT}] if spec.is_weight else []
    return {"anyOf": [value, _ref("quoted-number"), *words]}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def _record(keys: tuple[str, ...], schemas: Schema, required: list[Json]) -> Schema:
    properties: Schema = {key: schemas[key] for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _model_reference() -> Schema:
    inner: Schema = {"$ref": "#/$defs/model"}
    properties: Schema = {"path": _TEXT, "model": inner, "lora": {"anyOf": [inner, {"type": "null"}]}}
    properties["delta"] = {"type": ["boolean", "null"]}
    long: Schema = {
        "type": "object",
        "properties": {**properties, "revision": {"type": "null"}, "override_architecture": _OR_NULL},
        "oneOf": [{"required": ["path"]}, {"required": ["model"]}],
        "additionalProperties": False,
    }
    return {"description": "a folder or a file; model+adapter applies an adapter", "anyOf": [_TEXT, long]}


def _tokenizer() -> Schema:
    kind: Schema = {"enum": list(EMBEDDING_KINDS)}
    schemas: Schema = {
        "kind": kind,
        "model": _REFERENCE,
        "token": {"type": "string"},
        "token_id": {"type": "integer", "minimum": 0},
    }
    special = _record(MODEL_TOKEN_KEYS, schemas, ["kind"])
    sources: Schema = {"anyOf": [special, _REFERENCE, {"type": "null"}]}
    token = _record(TOKEN_KEYS, {"source": sources, "force": {"type": "boolean"}}, [])
    properties: Schema = {
        "source": {"anyOf": [{"enum": ["union", "base"]}, _REFERENCE]},
        "tokens": {"type": ["object", "null"], "additionalProperties": {"anyOf": [token, {"type": "null"}]}},
        "pad_to_multiple_of": {"type": ["integer", "null"], "minimum": 1},
        "new_tokens": {"enum": [SUBWORD, OMP, None]},
        "k": {"type": ["integer", "null"], "minimum": 1},
    }
    return {**_record(TOKENIZER_KEYS, properties, []), "type": ["object", "null"]}
