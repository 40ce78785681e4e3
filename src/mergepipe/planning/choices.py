"""The choices of the user that a planner takes beside the budget."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """The order in which blocks are chosen; see `planner.policies`."""

    SAMPLE = "sample"  # block positions at random, of all experts, their merged delta divided by their probability
    NORM = "norm"
    CONFLICT = "conflict"
    RANDOM = "random"


class OnOmit(StrEnum):
    """The treatment of coefficients where an expert is omitted."""

    KEEP = "keep"  # an omitted delta is a zero
    RENORMALIZE = "renormalize"  # weights are divided by the sum of those that were read


@dataclass(frozen=True, slots=True)
class AdjustPolicy:
    """Allows densities to fall under a tight budget, never below `min_density`; see `planner.adjust`."""

    min_density: float

    def __post_init__(self) -> None:
        if not 0 < self.min_density <= 1:
            raise ValueError(f"not a density: {self.min_density}")


@dataclass(frozen=True, slots=True)
class PlanningChoices:
    """Choices beside budget and policy. `selection_seed` is what the policies `sample` and `random` draw with."""

    on_omit: OnOmit = OnOmit.KEEP
    adjust: AdjustPolicy | None = None
    selection_seed: int = 0
