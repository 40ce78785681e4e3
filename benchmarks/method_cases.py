"""The recipes of the benchmark of methods: every operator, slices, adapters, tokenizers; and the models they need."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import yaml
from safetensors.numpy import save_file

from support.families import FamilyPaths
from support.family_shapes import FamilyShape

RANK = 16
NEW_TOKENS = 64
PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
Recipe = dict[str, object]


@dataclass(frozen=True, slots=True)
class MethodCase:
    """One merge: `models` are all that it may read."""

    name: str
    recipe: Recipe
    models: tuple[Path, ...]

    def text(self) -> str:
        """The recipe as YAML."""
        return yaml.safe_dump(self.recipe, sort_keys=False)

    def files(self) -> list[Path]:
        """The weight files of its models."""
        return [file for model in self.models for file in sorted(model.glob("*.safetensors"))]


def all_cases(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> list[MethodCase]:
    """Every case; adapters and models with tokenizers of their own are written under `scratch`."""
    return [
        *_methods(family),
        *_slices(family, shape.layers),
        *_adapters(family, shape, scratch),
        _union(family, shape, scratch),
    ]


def _methods(family: FamilyPaths) -> list[MethodCase]:
    return [
        _merge(family, "linear", {"weight": 1.0}),
        _merge(family, "task_arithmetic", {"weight": 0.5}),
        _merge(family, "ties", {"weight": 0.5, "density": 0.2}),
        _merge(family, "dare_linear", {"weight": 0.5, "density": 0.2}),
        _merge(family, "dare_ties", {"weight": 0.5, "density": 0.2}),
        _merge(family, "breadcrumbs", {"weight": 0.5, "density": 0.5, "gamma": 0.01}),
        _merge(family, "breadcrumbs_ties", {"weight": 0.5, "density": 0.5, "gamma": 0.01}),
        _merge(family, "della", {"weight": 0.5, "density": 0.5, "epsilon": 0.15}),
        _merge(family, "della_linear", {"weight": 0.5, "density": 0.5, "epsilon": 0.15}),
        _merge(family, "nuslerp", {"weight": 0.5}),
        _merge(family, "multislerp", {"weight": 0.5}),
        _merge(family, "karcher", {}),
        _merge(family, "model_stock", {}),
        _merge(family, "sce", {}, {"select_topk": 0.3}),
        _merge(family, "ram", {}),
        _merge(family, "ramplus_tl", {}),
        _merge(family, "slerp", {}, {"t": 0.3}, n_experts=1),
        _merge(family, "nearswap", {}, {"t": 1e-4}, n_experts=1),
        _merge(family, "arcee_fusion", {}, n_experts=1),
    ]


def _merge(
    family: FamilyPaths, method: str, each: Mapping[str, float], shared: Mapping[str, float] = {}, *, n_experts: int = 2
) -> MethodCase:
    models = (family.base, *family.experts[:n_experts])
    named = models if method in ("linear", "karcher") else models[1:]
    recipe: Recipe = {"merge_method": method, "models": [_entry(model, parameters=dict(each)) for model in named]}
    recipe |= {"base_model": str(family.base.absolute()), "parameters": dict(shared)}
    return MethodCase(method, {key: value for key, value in recipe.items() if value}, models)


def _entry(model: Path, **more: object) -> Recipe:
    return {"model": str(model.absolute()), **{key: value for key, value in more.items() if value}}


def _slices(family: FamilyPaths, n_layers: int) -> list[MethodCase]:
    first, second = family.experts[:2]
    third, two_thirds = n_layers // 3, 2 * n_layers // 3
    stacked = [
        {"sources": [_entry(first, layer_range=[0, two_thirds])]},
        {"sources": [_entry(second, layer_range=[third, n_layers])]},
    ]
    both = [{"sources": [_entry(model, layer_range=[0, n_layers]) for model in (family.base, first)]}]
    t = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]}, {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]}]
    gradients = {"t": [*t, {"value": 0.5}]}
    return [
        MethodCase("passthrough slices", {"merge_method": "passthrough", "slices": stacked}, (first, second)),
        MethodCase(
            "slerp slices, gradients",
            {
                "merge_method": "slerp",
                "base_model": str(family.base.absolute()),
                "slices": both,
                "parameters": gradients,
            },
            (family.base, first),
        ),
    ]


def _adapters(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> list[MethodCase]:
    adapters = tuple(_write_adapter(scratch / f"adapter-{seed}", shape, seed) for seed in range(3))
    return [
        MethodCase(
            f"task_arithmetic, {len(chosen)} LoRA of rank {RANK}",
            {
                "merge_method": "task_arithmetic",
                "base_model": str(family.base.absolute()),
                "models": [_entry(adapter, parameters={"weight": 0.5}) for adapter in chosen],
            },
            (family.base, *chosen),
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


def _union(family: FamilyPaths, shape: FamilyShape, scratch: Path) -> MethodCase:
    """Two models that share all but the last tokens; the matrices have rows to spare, as such models' do."""
    common = [f"t{number}" for number in range(shape.vocab - 4 * NEW_TOKENS)]
    models = tuple(
        _with_tokenizer(model, scratch / f"tokens-{index}", [*common, *(f"m{index}x{n}" for n in range(NEW_TOKENS))])
        for index, model in enumerate((family.base, family.experts[0]))
    )
    recipe: Recipe = {
        "merge_method": "linear",
        "models": [_entry(model, parameters={"weight": 1.0}) for model in models],
    }
    return MethodCase("linear, tokenizer union", {**recipe, "tokenizer_source": "union"}, models)


def _with_tokenizer(model: Path, folder: Path, tokens: Sequence[str]) -> Path:
    """The same weights (links to them) with another tokenizer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name.startswith("model") or file.name == "config.json":
            os.link(file, folder / file.name)
    content: Recipe = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: n for n, token in enumerate(tokens)}, "unk_token": tokens[0]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
