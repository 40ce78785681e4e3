"""Declare an operator before any tensor is read: its parameters and the models it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Scope(StrEnum):
    """The levels of a recipe that take a parameter. A model parameter may stand globally, as every model's default."""

    MODEL = "model"
    GLOBAL = "global"


class BaseRole(StrEnum):
    """The role of `base_model` for an operator."""

    REQUIRED = "required"  # deltas are taken against it
    OPTIONAL = "optional"  # the anchor is base_model, else the first model
    ORIGIN = "origin"  # if given, deltas are taken against it and it has no part; else the first model is the anchor
    NONE = "none"  # base_model means nothing and is refused


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: a flag if its default is one, else a number from `low` to `high`, inclusive unless open."""

    name: str
    scope: Scope
    help: str
    default: float | bool | None = None
    required: bool = False
    low: float = -inf
    high: float = inf
    low_open: bool = False
    clamps: bool = False  # values out of the range count as its nearest end, as in mergekit
    ignored: bool = False  # accepted for mergekit's sake, changes nothing
    is_whole: bool = False  # only whole numbers
    is_weight: bool = False  # of a delta: may be `nan`, the inverse of its norm, or a file of numbers

    @property
    def is_flag(self) -> bool:
        """Whether it is true or false."""
        return isinstance(self.default, bool)

    def range_text(self) -> str:
        """The allowed interval, for error messages and docs: `(0, 1]`."""
        left = "(" if self.low_open or self.low == -inf else "["
        right = ")" if self.high == inf else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"

    def clamped(self, value: float | bool) -> float | bool:
        """The value in force: the nearest end of the range for one beyond it, if the parameter is clamped."""
        return min(max(value, self.low), self.high) if self.clamps else value


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """An operator's name, its parameters and the number of experts (models other than the anchor) it takes.

    With `BaseRole.ORIGIN` the numbers are those of the models that take part, the first model included if there is no
    base. `conflict` says how the parameters of one model contradict each other; empty if they do not.
    """

    name: str
    title: str
    source: str
    base_role: BaseRole
    parameters: tuple[ParameterSpec, ...]
    min_experts: int = 1
    max_experts: int | None = None
    conflict: Callable[[Mapping[str, float | bool]], str] | None = None
    takes_numbers: bool = False  # a weight may be a file with a number for each element

    @property
    def is_weighted(self) -> bool:
        """Whether models have weights that may be `nan`."""
        return any(p.is_weight for p in self.parameters)

    def conflict_of(self, model: Mapping[str, float | bool]) -> str:
        """Return how the parameters of one model contradict each other; empty if they do not."""
        return self.conflict(model) if self.conflict is not None else ""

    def parameter(self, name: str) -> ParameterSpec | None:
        """The parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)


# --- parameters that several families of operators have in common ---


def shared(name: str, help: str, default: float | bool | None, *, ignored: bool = False) -> ParameterSpec:
    """Declare a parameter of the whole merge; without a default it is required."""
    return ParameterSpec(name, Scope.GLOBAL, help, default, required=default is None, ignored=ignored)


BY_NORM = True
"""The value of a weight that a recipe writes as `nan`, until norms are known; see `operators.base.RecipeRule`."""
WEIGHT = ParameterSpec("weight", Scope.MODEL, "coefficient of this model", required=True, is_weight=True)
DENSITY = ParameterSpec(
    "density", Scope.MODEL, "share of the delta's elements that is kept", default=1.0, low=0.0, high=1.0, clamps=True
)
INT8_MASK = shared("int8_mask", "in mergekit masks are stored in 8 bits, to save memory", False, ignored=True)
LAMBDA = shared("lambda", "scale of the merged delta", 1.0)
CHANGED = ParameterSpec("epsilon", Scope.GLOBAL, "a larger |delta| counts as a change", default=1e-5, low=0.0)


SVC, ISOTROPIC = "post.svc", "post.isotropic"
POST = OperatorSpec(
    "post",
    "spectral step on the merged delta of each matrix",
    "Li et al. 2026, arXiv 2602.05536; Marczak et al. 2025, arXiv 2502.04959",
    BaseRole.REQUIRED,
    (
        ParameterSpec("svc", Scope.GLOBAL, "least inflation that values are divided by", low=0.0, low_open=True),
        ParameterSpec("isotropic", Scope.GLOBAL, "replace all singular values by their mean", False),
    ),
)
"""What a recipe may have under `post`, after any rule; the parameters of a task have it as `SVC` and `ISOTROPIC`."""


def normalize_flag(default: bool) -> ParameterSpec:
    """The flag that divides by the sum of weights."""
    return shared("normalize", "divide by the sum of weights", default)


def rescale_to_magnitudes(default: bool) -> ParameterSpec:
    """The flag that keeps the sum of magnitudes when elements are dropped."""
    return shared("rescale", "rescale the kept elements so that the sum of magnitudes is unchanged", default)


def delta_spec(
    name: str,
    title: str,
    source: str,
    *special: ParameterSpec,
    normalize: bool,
    rescale: ParameterSpec,
    conflict: Callable[[Mapping[str, float | bool]], str] | None = None,
) -> OperatorSpec:
    """The spec of a rule that weighs and adds deltas: `special` parameters, and those that all such rules share."""
    parameters = (WEIGHT, *special, normalize_flag(normalize), rescale, LAMBDA, INT8_MASK)
    return OperatorSpec(name, title, source, BaseRole.REQUIRED, parameters, min_experts=0, conflict=conflict)
