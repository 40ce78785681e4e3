"""The recipes that are measured, in the YAML that mergekit reads too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.families import FamilyPaths

DENSITY = 0.2


def recipe_text(
    method: str,
    base: Path | str | None,
    models: Mapping[Path, Mapping[str, Any]] | Mapping[str, Mapping[str, Any]],
    **rest: object,
) -> str:
    """Write the YAML of a merge of `models`, each with its parameters; the base is the anchor."""
    content: dict[str, object] = {"merge_method": method}
    if base is not None:
        content["base_model"] = _address(base)
    if models:
        content["models"] = [model_entry(model, parameters=dict(each)) for model, each in models.items()]
    return yaml.safe_dump(content | {key: value for key, value in rest.items() if value}, sort_keys=False)


def model_entry(model: Path | str, **more: object) -> dict[str, object]:
    return {"model": _address(model), **{key: value for key, value in more.items() if value}}


def _address(model: Path | str) -> str:
    return str(model.absolute()) if isinstance(model, Path) else model


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
    text = recipe_text(method, base, dict.fromkeys(named, each), parameters=dict(parameters), dtype="bfloat16")
    return Case(method, family.models, text)
