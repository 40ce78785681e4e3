"""Parse what users state in bytes: a budget, as a number or a share of the full cost, and the speed of storage."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mergepipe.core.sizes import MAX_SIZE_BYTES, SIZE_UNITS, split_quantity, unit_bytes
from mergepipe.errors import RecipeError, did_you_mean

_SPEED_EXAMPLES = "write it as 200MB/s or 1.5GiB/s"
_EXAMPLES = "write it as 4GiB, 500MB, 25% or a number of bytes"


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """At most `nbytes` are read from expert files."""

    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.nbytes <= MAX_SIZE_BYTES:
            raise ValueError(f"not a budget: {self.nbytes} bytes")

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

    def limit_bytes(self, full_cost_bytes: int) -> int:
        """Return the cap in bytes for a merge with this full cost; a fraction of a byte is cut off."""
        return int(self.fraction * full_cost_bytes)


BudgetRequest = ByteBudget | ShareBudget


def parse_budget(text: str, where: str = "--budget") -> BudgetRequest:
    """Read `4GiB`, `500MB`, `25%`, `0`; fractions of a byte are cut off.

    Raises:
        RecipeError: `budget.malformed`, `budget.negative`, `budget.unit` or `budget.range`; it names `where`.
    """
    quantity = split_quantity(text)
    if quantity is None:
        raise RecipeError.of("budget.malformed", where, f"'{text[:60]}' is not a budget", _EXAMPLES)
    number, unit = quantity
    if number < 0:
        raise RecipeError.of("budget.negative", where, f"'{text}' is negative", "0 reads nothing from the experts")
    if unit == "%":
        if number > 100:
            raise RecipeError.of("budget.range", where, f"'{text}' is more than everything", "100% reads everything")
        return ShareBudget(number / 100)
    factor = unit_bytes(unit)
    if factor is None:
        message = f"'{text}': unknown unit '{unit}'"
        raise RecipeError.of("budget.unit", where, message, did_you_mean(unit, [*SIZE_UNITS, "%"]))
    nbytes = int(number * factor)
    if nbytes > MAX_SIZE_BYTES:
        raise RecipeError.of("budget.range", where, f"'{text}' is more than {MAX_SIZE_BYTES} bytes", _EXAMPLES)
    return ByteBudget(nbytes)


def parse_speed(text: str, where: str = "--storage-speed") -> float:
    """Read `200MB/s` as bytes a second; `/s` may be left out.

    Raises:
        RecipeError: `speed.malformed`; it names `where`.
    """
    quantity = split_quantity(text.strip().removesuffix("/s"))
    factor = None if quantity is None else unit_bytes(quantity[1])
    if quantity is None or factor is None or not 1 <= quantity[0] * factor <= MAX_SIZE_BYTES:
        message = f"'{text[:60]}' is not a number of bytes a second, 1 or more"
        raise RecipeError.of("speed.malformed", where, message, _SPEED_EXAMPLES)
    return float(quantity[0] * factor)
