"""The recipes that are measured, in the YAML that mergekit reads too, and the models that some of them need."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml
from safetensors.numpy import save_file

from support.families import FamilyPaths
from support.family_shapes import FamilyShape

DENSITY = 0.2
RANK = 16
NEW_TOKENS = 64
PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
_TASK_WEIGHT = 0.3  # task vectors are added, not averaged: what most of the literature settles on for several experts


def recipe_text(
    method: str, base: Path | str | None, models: Sequence[Path | str], each: Mapping[str, float] = {}, **rest: object
) -> str:
    """Write the YAML of a merge of `models`, all with the parameters `each`; the base is the anchor."""
    content: dict[str, object] = {"merge_method": method}
    if base is not None:
        content["base_model"] = _address(base)
    if models:
        content["models"] = [_entry(model, parameters=dict(each)) for model in models]
    return yaml.safe_dump(content | {key: value for key, value in rest.items() if value}, sort_keys=False)


def _entry(model: Path | str, **more: object) -> dict[str, object]:
    return {"model": _address(model), **{key: value for key, value in more.items() if value}}


def _address(model: Path | str) -> str:
    return str(model.absolute()) if isinstance(model, Path) else model


@dataclass(frozen=True, slots=True)
class Operator:
    """One merge rule with its parameters."""

    name: str
    model_parameters: Mapping[str, float]

    def recipe(self, base: Path, experts: Sequence[Path], out_dtype: str) -> str:
        """The YAML of a merge of all `experts`; the base is the anchor and has no part in an average."""
        return recipe_text(self.name, base, experts, self.model_parameters, dtype="float32", out_dtype=out_dtype)


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("linear", {"weight": 1.0}),
        Operator("task_arithmetic", {"weight": _TASK_WEIGHT}),
        Operator("ties", {"weight": 1.0, "density": DENSITY}),
        Operator("dare_linear", {"weight": _TASK_WEIGHT, "density": DENSITY}),
        Operator("dare_ties", {"weight": _TASK_WEIGHT, "density": DENSITY}),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """One merge to time: `models` are all that it may read, the base first."""

    name: str
    models: tuple[Path, ...]
    recipe: str

    def files(self) -> list[Path]:
        """The weight files of its models."""
        return [file for model in self.models for file in sorted(model.glob("*.safetensors"))]


def method_cases(family: FamilyPaths) -> list[Case]:
    """Every method, of all experts that it takes; a linear merge averages the base too, so that all read the same."""
    weight = round(1 / len(family.experts), 6)
    sparse, half = {"weight": weight, "density": DENSITY}, {"weight": weight, "density": 0.5}
    one_expert = FamilyPaths(family.base, family.experts[:1])
    return [
        _method(family, "linear", {"weight": 1.0}),
        _method(family, "task_arithmetic", {"weight": weight}),
        _method(family, "ties", sparse),
        _method(family, "dare_linear", sparse),
        _method(family, "dare_ties", sparse),
        _method(family, "breadcrumbs", {**half, "gamma": 0.01}),
        _method(family, "breadcrumbs_ties", {**half, "gamma": 0.01}),
        _method(family, "della", {**half, "epsilon": 0.15}),
        _method(family, "della_linear", {**half, "epsilon": 0.15}),
        _method(family, "nuslerp", {"weight": weight}),
        _method(family, "multislerp", {"weight": weight}),
        _method(family, "karcher"),
        _method(family, "model_stock"),
        _method(family, "geometric_median"),
        _method(family, "magmax"),
        _method(family, "fisher", {"weight": weight}),
        _method(family, "sar", {"weight": weight}, {"density": 0.5}),
        _method(family, "consensus", {"weight": weight}),
        _method(family, "sce", parameters={"select_topk": 0.3}),
        _method(family, "ram"),
        _method(family, "ramplus_tl"),
        _method(one_expert, "slerp", parameters={"t": 0.3}),
        _method(one_expert, "nearswap", parameters={"t": 1e-4}),
        _method(one_expert, "arcee_fusion"),
    ]


def _method(
    family: FamilyPaths, method: str, each: Mapping[str, float] = {}, parameters: Mapping[str, float] = {}
) -> Case:
    named = family.models if method in ("linear", "karcher", "slerp") else family.experts
    base = None if method == "linear" else family.base
    text = recipe_text(method, base, named, each, parameters=dict(parameters), dtype="bfloat16")
    return Case(method, family.models, text)


def all_cases(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> list[Case]:
    """Every method, slices, adapters and a union of tokenizers, whose models are written under `scratch`."""
    cases = [*method_cases(family), *slice_cases(family, shape.layers), *_adapters(family, shape, scratch)]
    return [*cases, _union(family, shape, scratch)]


def slice_cases(family: FamilyPaths, n_layers: int) -> list[Case]:
    first, second = family.experts[:2]
    third, two_thirds = n_layers // 3, 2 * n_layers // 3
    stacked = [
        {"sources": [_entry(first, layer_range=[0, two_thirds])]},
        {"sources": [_entry(second, layer_range=[third, n_layers])]},
    ]
    both = [{"sources": [_entry(model, layer_range=[0, n_layers]) for model in (family.base, first)]}]
    t: list[Any] = [
        {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ]
    gradients = recipe_text("slerp", family.base, (), slices=both, parameters={"t": t})
    return [
        Case("passthrough slices", (first, second), recipe_text("passthrough", None, (), slices=stacked)),
        Case("slerp slices, gradients", (family.base, first), gradients),
    ]


def _adapters(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> list[Case]:
    adapters = tuple(_write_adapter(scratch / f"adapter-{seed}", shape, seed) for seed in range(3))
    return [
        Case(
            f"task_arithmetic, {len(chosen)} LoRA of rank {RANK}",
            (family.base, *chosen),
            recipe_text("task_arithmetic", family.base, chosen, {"weight": 0.5}),
        )
        for chosen in (adapters[:1], adapters)
    ]


def _write_adapter(folder: Path, shape: FamilyShape, seed: int) -> Path:
    """An adapter of all projections, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    factors = {}
    for tensor in shape.tensors():
        module = tensor.name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            rows, columns = tensor.shape
            for letter, size in (("A", (RANK, columns)), ("B", (rows, RANK))):
                values = (rng.standard_normal(size) * 0.01).astype(ml_dtypes.bfloat16)
                factors[f"base_model.model.{module}.lora_{letter}.weight"] = values
    options = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(PROJECTIONS)}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def _union(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> Case:
    """Two models that share all but the last tokens; the matrices have rows to spare, as such models' do."""
    common = [f"t{number}" for number in range(shape.vocab - 4 * NEW_TOKENS)]
    models = tuple(
        _with_tokenizer(model, scratch / f"tokens-{index}", [*common, *(f"m{index}x{n}" for n in range(NEW_TOKENS))])
        for index, model in enumerate((family.base, family.experts[0]))
    )
    text = recipe_text("linear", None, models, {"weight": 1.0}, tokenizer_source="union")
    return Case("linear, tokenizer union", models, text)


def _with_tokenizer(model: Path, folder: Path, tokens: Sequence[str]) -> Path:
    """The same weights (links to them) with another tokenizer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name.startswith("model") or file.name == "config.json":
            os.link(file, folder / file.name)
    content: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: n for n, token in enumerate(tokens)}, "unk_token": tokens[0]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
