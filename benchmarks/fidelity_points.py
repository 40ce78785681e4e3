"""What the fidelity benchmark measures: recipes, and the (operator, policy, budget, seed) points to merge at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

POLICIES = ("norm", "conflict", "random")
BUDGET_PERCENTS = (5, 10, 25, 50, 75, 100)
_DENSITY = 0.2
_TASK_WEIGHT = 0.3  # task vectors are added, not averaged: what most of the literature settles on for several experts


@dataclass(frozen=True, slots=True)
class Operator:
    """One merge rule with its parameters; `is_random` if its result depends on the seed."""

    name: str
    model_parameters: Mapping[str, float]
    is_random: bool = False

    def recipe(self, base: Path, experts: Sequence[Path], out_dtype: str) -> str:
        """The YAML of a merge of all `experts`; the base is the anchor and has no part in an average."""
        content = {
            "merge_method": self.name,
            "base_model": str(base.absolute()),
            "models": [{"model": str(e.absolute()), "parameters": dict(self.model_parameters)} for e in experts],
            "dtype": "float32",
            "out_dtype": out_dtype,
        }
        return yaml.safe_dump(content, sort_keys=False)


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("linear", {"weight": 1.0}),
        Operator("task_arithmetic", {"weight": _TASK_WEIGHT}),
        Operator("ties", {"weight": 1.0, "density": _DENSITY}),
        Operator("dare_linear", {"weight": _TASK_WEIGHT, "density": _DENSITY}, is_random=True),
        Operator("dare_ties", {"weight": _TASK_WEIGHT, "density": _DENSITY}, is_random=True),
    )
}


@dataclass(frozen=True, slots=True)
class Point:
    """One budgeted merge. `seed` drives the operator and the policy alike."""

    operator: str
    policy: str
    budget_percent: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.budget_percent <= 100:
            raise ValueError(f"a budget of {self.budget_percent} % of the expert bytes")


def points(
    operators: Iterable[str], policies: Sequence[str], budget_percents: Iterable[int], seeds: Sequence[int]
) -> Iterator[Point]:
    """Every combination that can differ: one seed where nothing is random, one policy where everything is read."""
    for name in operators:
        for percent in budget_percents:
            for policy in policies if percent < 100 else policies[:1]:
                is_random = OPERATORS[name].is_random or (policy == "random" and percent < 100)
                for seed in seeds if is_random else seeds[:1]:
                    yield Point(name, policy, percent, seed)


def reference_seed(point: Point, seeds: Sequence[int]) -> int:
    """The seed of the full merge that `point` is compared with."""
    return point.seed if OPERATORS[point.operator].is_random else seeds[0]
