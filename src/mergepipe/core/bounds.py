"""Check what callers give against its allowed range."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.core.sizes import MAX_SIZE_BYTES
from mergepipe.errors import LimitError, RecipeError, did_you_mean

_MOST_DIGITS = 40


def positive(option: str, value: int, most: int = MAX_SIZE_BYTES) -> int:
    """Return `value` if it is above zero and at most `most` (default: the largest file size)."""
    if value < 1:
        raise LimitError.of(
            "option.out-of-range", option, f"{shown_number(value)} was given", "give a number above zero"
        )
    if value > most:
        raise RecipeError.of("option.invalid", option, f"{shown_number(value)} was given", f"give {most} at most")
    return value


def share(option: str, value: float) -> float:
    """Return `value` if it is in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise RecipeError.of("option.invalid", option, f"{value:g} was given", "give a share in (0, 1]")
    return value


def one_of(option: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise RecipeError.of("option.invalid", option, f"'{value}' was given", did_you_mean(value, choices))
    return value


def shown_number(value: int) -> str:
    """Format a number for an error; thousands of digits, which Python refuses to print, are described."""
    return str(value) if abs(value) < 10**_MOST_DIGITS else f"a number of more than {_MOST_DIGITS} digits"
