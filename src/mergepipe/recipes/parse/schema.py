"""Generate the JSON schema of recipes, for editors, from the operators' specifications."""

from __future__ import annotations

import json
from typing import TypeAlias

from mergepipe.operators.registry import operator_specs
from mergepipe.operators.spec import OperatorSpec, ParameterSpec, Scope
from mergepipe.recipes.parse.entries import MODEL_KEYS, MODULE_KEYS, SLICE_KEYS, SOURCE_KEYS
from mergepipe.recipes.parse.names_elsewhere import CONTENT_KEYS, RECIPE_KEYS
from mergepipe.recipes.parse.recipe_files import DTYPE_NAMES
from mergepipe.recipes.parse.tokenizer_source import EMBEDDING_KINDS, MODEL_TOKEN_KEYS, TOKEN_KEYS, TOKENIZER_KEYS

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema: TypeAlias = dict[str, "Json"]
Json: TypeAlias = str | int | float | bool | list["Json"] | Schema | None

_TEXT: Schema = {"type": "string", "minLength": 1}
_REFERENCE: Schema = {"$ref": "#/$defs/model"}


def recipe_schema() -> Schema:
    """Generate the schema of one recipe document (draft 2020-12)."""
    definitions = {name: each for spec in operator_specs().values() for name, each in _definitions(spec).items()}
    return {
        "$schema": DIALECT,
        "title": "MergePipe recipe",
        "type": "object",
        "properties": dict(zip(RECIPE_KEYS, map(_top_level, RECIPE_KEYS), strict=True)),
        "required": ["merge_method"],
        "additionalProperties": False,
        "oneOf": [{"required": [key]} for key in CONTENT_KEYS],
        "not": {"required": ["tokenizer_source", "tokenizer"]},
        "allOf": [_when(spec) for spec in operator_specs().values()],
        "$defs": {"model": _model_reference(), "tokenizer": _tokenizer(), **definitions},
    }


def schema_text() -> str:
    """Format the schema as it is stored and printed."""
    return json.dumps(recipe_schema(), indent=1, allow_nan=False) + "\n"


def _top_level(key: str) -> Schema:
    if key == "merge_method":
        return {"description": "how models are merged", "enum": list(operator_specs())}
    if key in ("dtype", "out_dtype"):
        return {"enum": [*DTYPE_NAMES, None]}
    if key == "base_model":
        return {"anyOf": [_REFERENCE, {"type": "null"}]}
    if key == "tokenizer":
        return {"$ref": "#/$defs/tokenizer"}
    if key == "tokenizer_source":
        return {"anyOf": [{"enum": ["union", "base", None]}, _REFERENCE]}
    if key in ("chat_template", "name"):
        return _TEXT
    return {}  # its contents depend on the merge method


def _when(spec: OperatorSpec) -> Schema:
    """Generate the conditional schema of one merge method."""
    shared, own = _ref(f"{spec.name}.shared"), _ref(f"{spec.name}.own")
    models = _list(_record(MODEL_KEYS, {"model": _REFERENCE, "parameters": own}, ["model"]))
    pair: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
    source: Schema = {"model": _REFERENCE, "layer_range": pair, "parameters": own}
    sources = _list(_record(SOURCE_KEYS, source, ["model", "layer_range"]))
    piece: Schema = {"sources": sources, "base_model": _REFERENCE, "parameters": shared}
    slices = _list(_record(SLICE_KEYS, piece, ["sources"]))
    module = _record(MODULE_KEYS, {"models": models, "slices": slices, "parameters": shared}, [])
    modules: Schema = {"type": "object", "minProperties": 1, "additionalProperties": module}
    content: Schema = {"models": models, "slices": slices, "modules": modules, "parameters": shared}
    return {"if": {"properties": {"merge_method": {"const": spec.name}}}, "then": {"properties": content}}


def _definitions(spec: OperatorSpec) -> Schema:
    """Generate the definitions of one merge method: each parameter, a model's parameters, global parameters."""
    each: Schema = {f"{spec.name}.{parameter.name}": _setting(parameter) for parameter in spec.parameters}
    of_models = tuple(parameter for parameter in spec.parameters if parameter.scope is Scope.MODEL)
    context = _parameters(spec, spec.parameters)
    return {**each, f"{spec.name}.own": _parameters(spec, of_models), f"{spec.name}.shared": context}


def _parameters(spec: OperatorSpec, parameters: tuple[ParameterSpec, ...]) -> Schema:
    return {
        "type": ["object", "null"],
        "description": f"parameters of {spec.name}",
        "properties": {parameter.name: _ref(f"{spec.name}.{parameter.name}") for parameter in parameters},
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _setting(spec: ParameterSpec) -> Schema:
    """Generate the schema of a parameter: one value, values over the layers, or either by filters."""
    value = _value(spec)
    gradient: Schema = {"type": "array", "items": value, "minItems": 2}
    case: Schema = {
        "type": "object",
        "properties": {"filter": {"type": ["string", "null"]}, "value": {"anyOf": [value, gradient]}},
        "required": ["value"],
        "additionalProperties": False,
    }
    found: Schema = {"description": spec.help, "anyOf": [value, gradient, case, _list(case)]}
    return found if spec.default is None else {**found, "default": spec.default}


def _value(spec: ParameterSpec) -> Schema:
    if spec.is_flag:
        return {"enum": [spec.default] if spec.only_default else [True, False, 0, 1]}
    value: Schema = {"type": "integer" if spec.is_whole else "number"}
    if spec.low > float("-inf"):
        value["exclusiveMinimum" if spec.low_open else "minimum"] = spec.low
    if spec.high < float("inf"):
        value["maximum"] = spec.high
    return value


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def _record(keys: tuple[str, ...], known: Schema, required: list[Json]) -> Schema:
    properties: Schema = {key: known[key] for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _model_reference() -> Schema:
    inner: Schema = {"$ref": "#/$defs/model"}
    properties: Schema = {"path": _TEXT, "model": inner, "lora": {"anyOf": [inner, {"type": "null"}]}}
    properties["delta"] = {"type": ["boolean", "null"]}
    long: Schema = {
        "type": "object",
        "properties": {**properties, "revision": {"type": "null"}, "override_architecture": {"type": "null"}},
        "oneOf": [{"required": ["path"]}, {"required": ["model"]}],
        "additionalProperties": False,
    }
    return {"description": "a folder or a file; model+adapter applies an adapter", "anyOf": [_TEXT, long]}


def _tokenizer() -> Schema:
    kind: Schema = {"enum": list(EMBEDDING_KINDS)}
    known: Schema = {
        "kind": kind,
        "model": _REFERENCE,
        "token": {"type": "string"},
        "token_id": {"type": "integer", "minimum": 0},
    }
    special = _record(MODEL_TOKEN_KEYS, known, ["kind"])
    sources: Schema = {"anyOf": [special, _REFERENCE, {"type": "null"}]}
    token = _record(TOKEN_KEYS, {"source": sources, "force": {"type": "boolean"}}, [])
    properties: Schema = {
        "source": {"anyOf": [{"enum": ["union", "base"]}, _REFERENCE]},
        "tokens": {"type": ["object", "null"], "additionalProperties": {"anyOf": [token, {"type": "null"}]}},
        "pad_to_multiple_of": {"type": ["integer", "null"], "minimum": 1},
    }
    return {**_record(TOKENIZER_KEYS, properties, []), "type": ["object", "null"]}
