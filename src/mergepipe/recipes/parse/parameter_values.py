"""Parameter values of a recipe: one scalar, or values by tensor name and depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Scalar: TypeAlias = float | bool

EVERY_TENSOR = ("", "*")  # filters that hold for any name


@dataclass(frozen=True, slots=True)
class Case:
    """A parameter's value for tensors whose name contains `filter`: one value, or several spread over the layers."""

    filter: str
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a case needs a value")

    def holds_for(self, tensor: str) -> bool:
        """Whether the case applies to `tensor`."""
        return self.filter in EVERY_TENSOR or self.filter in tensor

    def at(self, depth: float) -> Scalar:
        """Return the value at `depth` in [0, 1]: numbers are interpolated, flags switch."""
        last = len(self.values) - 1
        position = depth * last
        below = int(position)
        lower, upper = self.values[below], self.values[min(last, below + 1)]
        if isinstance(lower, bool) or isinstance(upper, bool):
            return lower
        share = position - below
        return (1 - share) * lower + share * upper


@dataclass(frozen=True, slots=True)
class Cases:
    """A parameter that depends on the tensor: the first applicable case decides. `where` is its place in the recipe."""

    cases: tuple[Case, ...]
    where: str


Setting: TypeAlias = Scalar | Cases


def value_at(setting: Setting, tensor: str, depth: float) -> Scalar | None:
    """Return the value of `setting` for a tensor at `depth` in [0, 1]; None if no case applies."""
    if not isinstance(setting, Cases):
        return setting
    return next((case.at(depth) for case in setting.cases if case.holds_for(tensor)), None)
