"""Merges of a small family on disk, and recipes by operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mergepipe
from mergepipe.reports import MergeReport
from support.disk_families import weights_digest
from support.model_folders import write_model

BLOCK = 262_144
SHAPES = {
    "embed.weight": (521, 1100),  # three blocks, the last one broken
    "layers.0.weight": (130, 300),
    "layers.1.weight": (130, 300),
    "norm.weight": (77,),
}
N_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """An operator with its settings, and the weights of the experts that take part."""

    operator: str
    shared: Mapping[str, object] = field(default_factory=dict)
    own: Mapping[str, object] = field(default_factory=dict)
    experts: tuple[int, ...] = (1, 2)
    weights: tuple[object, ...] = (0.6, 0.3, 0.2, 0.1)
    takes_weights: bool = True
    out_dtype: str | None = None

    def text(self) -> str:
        """As JSON, which is YAML."""
        models = []
        for i, expert in enumerate(self.experts):
            weight = {"weight": self.weights[i]} if self.takes_weights else {}
            models.append({"model": f"expert{expert}", "parameters": {**weight, **self.own}})
        content: dict[str, object] = {
            "merge_method": self.operator, "base_model": "base", "models": models, "parameters": dict(self.shared),
        }  # fmt: skip
        if self.out_dtype is not None:
            content["out_dtype"] = self.out_dtype
        return json.dumps(content)


RECIPES = {
    "linear": Recipe("linear"),
    "linear_sum": Recipe("linear", {"normalize": False}),
    "task_arithmetic": Recipe("task_arithmetic", {"lambda": 0.9}),
    "ties": Recipe("ties", {"lambda": 0.9}, {"density": 0.3}),
    "ties_rescaled": Recipe("ties", {"rescale": True}, {"density": 0.3}),
    "dare_linear": Recipe("dare_linear", {"lambda": 0.9}, {"density": 0.5}),
    "dare_ties": Recipe("dare_ties", {}, {"density": 0.5}),
    "breadcrumbs": Recipe("breadcrumbs", {}, {"density": 0.5, "gamma": 0.01}),
    "della": Recipe("della", {}, {"density": 0.5, "epsilon": 0.1}),
    "nuslerp": Recipe("nuslerp"),
    "multislerp": Recipe("multislerp"),
    "model_stock": Recipe("model_stock", takes_weights=False),
    "sce": Recipe("sce", {"select_topk": 0.5}, takes_weights=False),
    "ram": Recipe("ram", takes_weights=False),
    "slerp": Recipe("slerp", {"t": 0.4}, experts=(1,), takes_weights=False),
    "nearswap": Recipe("nearswap", {"t": 0.001}, experts=(1,), takes_weights=False),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with models; merges share the catalog in `home`."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def merge(self, recipe: Recipe, name: str, **options: Any) -> MergeReport:
        """Merge into `name`, with what the catalog knows."""
        return mergepipe.merge(
            self.write(recipe), self.folder / name, **{"home": self.home, "threads": 2, "seed": 3, **options}
        )

    def scratch(self, recipe: Recipe, name: str, **options: Any) -> MergeReport:
        """The same, with nothing to start from."""
        return self.merge(recipe, name, **{"catalog": False, **options})

    def write(self, recipe: Recipe) -> Path:
        """The recipe as a file."""
        path = self.folder / "recipe.yml"
        path.write_text(recipe.text())
        return path

    def digest(self, name: str) -> str:
        """Of all tensors of an output."""
        return weights_digest(self.folder / name)

    def only_file(self, name: str) -> Path:
        """The weights of a model of one file."""
        (path,) = (self.folder / name).glob("*.safetensors")
        return path


def make_bench(
    folder: Path, seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES, n_experts: int = N_EXPERTS
) -> Bench:
    """A base and experts of float16."""
    rng = np.random.default_rng(seed)
    base = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    for i in range(n_experts + 1):
        scale = 0.05 if i else 0.0
        tensors: dict[str, Any] = {
            n: (a + scale * rng.standard_normal(a.shape)).astype(np.float16) for n, a in base.items()
        }
        tensors["ids"] = np.arange(5)
        place = folder / (f"expert{i}" if i else "base")
        write_model(place, tensors, {"model_type": "test"})
    return Bench(folder)
