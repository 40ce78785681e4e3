"""The recipes that are timed: one per operator, in the YAML that mergekit and MergePipe both read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from support.families import FamilyPaths

DENSITY = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One merge to time: `inputs` are all the models it reads, the base (or anchor) first."""

    operator: str
    inputs: tuple[Path, ...]
    recipe: str

    def input_files(self) -> list[Path]:
        """The weight files that are read."""
        return [file for model in self.inputs for file in sorted(model.glob("*.safetensors"))]


def cases(family: FamilyPaths) -> dict[str, Case]:
    """All cases by operator, in the order of the table."""
    makers: tuple[Callable[[FamilyPaths], Case], ...] = (
        _linear,
        lambda f: _against_base(f, "task_arithmetic", {}),
        lambda f: _against_base(f, "ties", {"density": DENSITY}),
        lambda f: _against_base(f, "breadcrumbs", {"density": DENSITY, "gamma": 0.01}),
        lambda f: _against_base(f, "dare_ties", {"density": DENSITY}),
        lambda f: _against_base(f, "dare_linear", {"density": DENSITY}),
        _slerp,
    )
    made = [make(family) for make in makers]
    return {case.operator: case for case in made}


def _linear(family: FamilyPaths) -> Case:
    """The base is one of the averaged models, so that every operator but slerp reads the same bytes."""
    return Case("linear", family.models, _text("linear", _models(family.models, {"weight": 1.0}), {}))


def _against_base(family: FamilyPaths, operator: str, parameters: dict[str, float]) -> Case:
    weight = round(1 / len(family.experts), 6)
    models = _models(family.experts, {"weight": weight, **parameters})
    return Case(operator, family.models, _text(operator, models, {"base_model": str(family.base.absolute())}))


def _slerp(family: FamilyPaths) -> Case:
    models = _models((family.base, family.experts[0]), {})
    rest: dict[str, object] = {"base_model": str(family.base.absolute()), "parameters": {"t": 0.5}}
    return Case("slerp", (family.base, family.experts[0]), _text("slerp", models, rest))


def _models(paths: Sequence[Path], parameters: dict[str, float]) -> list[dict[str, object]]:
    entry = {"parameters": parameters} if parameters else {}
    return [{"model": str(path.absolute()), **entry} for path in paths]


def _text(operator: str, models: list[dict[str, object]], rest: dict[str, object]) -> str:
    content = {"merge_method": operator, "models": models, **rest, "dtype": "bfloat16"}
    return yaml.dump(content, sort_keys=False, Dumper=_NoAliases)


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True
