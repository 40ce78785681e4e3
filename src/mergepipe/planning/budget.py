"""Budgets and shares as users write them, and the choices of a plan beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

from mergepipe.core.units import LEAST_BARE_BYTES, MAX_SIZE_BYTES, SIZE_UNITS, split_quantity, unit_bytes
from mergepipe.errors import RecipeError, did_you_mean

# --- parse budgets and shares as users write them ---


_EXAMPLES = "write it as 25%, 0.25, 4GiB or 500MB"
_REPEATED_REQUEST_BYTES = 8 << 20  # a request for more is split


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """At most `nbytes` are read from expert files."""

    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.nbytes <= MAX_SIZE_BYTES:
            raise ValueError(f"not a budget: {self.nbytes} bytes")

    @property
    def is_zero(self) -> bool:
        """Whether the base is asked for."""
        return not self.nbytes

    def limit_bytes(self, full_cost_bytes: int) -> int:
        """Return the cap in bytes for a merge with this full cost."""
        return self.nbytes


@dataclass(frozen=True, slots=True)
class ShareBudget:
    """At most `fraction` of the full cost is read; 1 reads everything."""

    fraction: Fraction

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"not a share: {self.fraction}")

    @property
    def is_zero(self) -> bool:
        """Whether the base is asked for."""
        return not self.fraction

    def limit_bytes(self, full_cost_bytes: int) -> int:
        """Return the cap in bytes for a merge with this full cost; a fraction of a byte is cut off."""
        return int(self.fraction * full_cost_bytes)


BudgetRequest = ByteBudget | ShareBudget


def retry_reserve_bytes(budget_bytes: int, full_cost_bytes: int) -> int:
    """Return what a plan leaves unspent of a budget, so that failed requests to servers can be repeated within it.

    One request, but at most a tenth of the budget; or a fiftieth of the budget, if that is more. A budget that covers
    everything is spent on everything.

    Law: what is left to spend never shrinks as the budget grows.
    """
    reserve_bytes = max(budget_bytes // 50, min(_REPEATED_REQUEST_BYTES, budget_bytes // 10))
    return min(reserve_bytes, budget_bytes - full_cost_bytes) if budget_bytes >= full_cost_bytes else reserve_bytes


def parse_budget(value: str | float, where: str = "--budget") -> BudgetRequest:
    """Read `25%` or `0.25` as a share, `4GiB` or `500MB` as bytes, `0` as nothing; fractions of a byte are cut off.

    A bare whole number below 1 MiB is refused: nobody means 25 bytes. `25B` is taken at its word.
    """
    text = number_text(value)
    quantity = split_quantity(text)
    if quantity is None:
        raise RecipeError.of("option.invalid", where, f"'{text[:60]}' is not a budget", _EXAMPLES)
    number, unit = quantity
    if number < 0:
        raise RecipeError.of("option.invalid", where, f"'{text}' is negative", "0 reads nothing from the experts")
    if unit == "%" or (not unit and "." in text):
        share = number / 100 if unit else number
        if share > 1:
            hint = "100% reads everything" if unit else f"did you mean {text.strip()}%?"
            raise RecipeError.of("option.invalid", where, f"'{text}' is more than everything", hint)
        return ShareBudget(share)
    factor = unit_bytes(unit)
    if factor is None:
        message = f"'{text}': unknown unit '{unit}'"
        raise RecipeError.of("option.invalid", where, message, did_you_mean(unit, [*SIZE_UNITS, "%"]))
    nbytes = int(number * factor)
    if not unit and 0 < nbytes < LEAST_BARE_BYTES:
        hint = f"did you mean {nbytes}%?" if nbytes <= 100 else f"did you mean {nbytes}kB or {nbytes}MB?"
        message = f"'{text.strip()}' without a unit would be {nbytes} bytes"
        raise RecipeError.of("option.invalid", where, message, f"{hint} (bytes are written {nbytes}B)")
    if nbytes > MAX_SIZE_BYTES:
        raise RecipeError.of("option.invalid", where, f"'{text}' is more than {MAX_SIZE_BYTES} bytes", _EXAMPLES)
    return ByteBudget(nbytes)


def parse_fraction(value: str | float, where: str, code: str = "option.share") -> float:
    """Read `1%` or `0.01` as a share above 0 and up to 1."""
    text = number_text(value)
    quantity = split_quantity(text)
    if quantity is not None and quantity[1] in ("", "%"):
        share = quantity[0] / 100 if quantity[1] else quantity[0]
        if 0 < share <= 1:
            return float(share)
    raise RecipeError.of(code, where, f"'{text[:40]}' is not a share", "write it as 1% or 0.01, up to 100%")


def number_text(value: str | float) -> str:
    """Return what a user would have typed for a number; text is returned as it is."""
    is_number = not isinstance(value, str | bool) and math.isfinite(value)
    return format(Decimal(str(value)), "f") if is_number else str(value)


# --- the choices of the user that a planner takes beside the budget ---


class Policy(StrEnum):
    """The order in which blocks are chosen."""

    SAMPLE = "sample"  # block positions at random, of all experts, their merged delta divided by their probability
    NORM = "norm"
    PAPER = "paper"  # by the papers' score: the norm itself, not its square, of all of the delta
    CONFLICT = "conflict"
    RANDOM = "random"


class OnOmit(StrEnum):
    """The treatment of coefficients where an expert is omitted."""

    KEEP = "keep"  # an omitted delta is a zero
    RENORMALIZE = "renormalize"  # weights are divided by the sum of those that were read


@dataclass(frozen=True, slots=True)
class PlanningChoices:
    """Choices beside budget and policy. `selection_seed` is what the policies `sample` and `random` draw with.

    With a `min_density` densities fall under a tight budget, never below it; see `planner.adjust_densities`.
    """

    on_omit: OnOmit = OnOmit.KEEP
    min_density: float | None = None
    selection_seed: int = 0

    def __post_init__(self) -> None:
        if self.min_density is not None and not 0 < self.min_density <= 1:
            raise ValueError(f"not a density: {self.min_density}")
